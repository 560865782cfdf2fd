"""Compare two runs cell by cell: the change, its interval, and the term that moved."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from typing import Literal

from profiler.comparison.side import (
    CellId,
    MachineState,
    SettingDifference,
    Side,
    Timed,
    aligned,
    differences,
    in_order,
)
from profiler.judge.breakdown import TERMS
from profiler.stats import CLAIM_VISITS, MOST_FOREIGN_CORES, ChangeVerdict, change_verdict, estimate

Resource = Literal["memory", "compute"]

# A term that gained less of a change than this is not what moved, however surely it is known.
_LEAST_MOVED = 0.25
# Which terms of a split a slower memory, and slower cores, stretch.
_MEMORY_TERMS = ("weights_s", "kv_s", "avoidable_s")
_COMPUTE_TERMS = ("compute_s", "kernel_s", "dequantise_s")
# Settings that move the roofs themselves: with one of them changed, a roof that fell is no fault of the machine's.
_PRECISION = "precision"
_SETTINGS_OF_ROOFS = ("threads", "torch_threads", "allowed_cores", "cgroup_cpu_quota", "clock", _PRECISION)


@dataclass(frozen=True)
class Shift:
    """How much longer the same work took on the machine itself, by what bounds it."""

    resource: Resource
    ratio: float
    """Time after over time before, by the sentinel where both runs have one, else by the roofs."""
    half_width: float
    """Of its logarithm, 95 %."""
    roof_ratio: float | None
    """The shift by the measured roofs; None where both runs share one measurement of them."""
    told_by: Literal["sentinel", "roofs"] = "sentinel"

    @property
    def is_claim(self) -> bool:
        """Whether it lies beyond its own spread, and the roofs, where they were measured anew, say the same."""
        moved = math.log(self.ratio)
        agree = self.roof_ratio is None or math.log(self.roof_ratio) * moved > 0
        return abs(moved) > self.half_width and agree


@dataclass(frozen=True, slots=True)
class Change:
    """One cell of the one side against the same cell of the other."""

    asked: CellId
    before: Timed
    after: Timed
    change: float
    """after / before - 1 with the machine's own change divided out; 0.07 is 7 % slower."""
    low: float
    high: float
    """Its 95 % interval."""
    machine: float
    """The part that was divided out: 0.04 where the machine itself was 4 % slower."""
    machine_half_width: float
    """How far that may be off; all cells of a comparison share this error."""
    verdict: ChangeVerdict
    moved: str | None = None
    """The term that moved most; None where nothing is claimed, no split is known, or no term stands out."""
    terms: Mapping[str, float] = field(default_factory=dict)
    """What each term gained in seconds; they add up to `after - before`."""

    @property
    def visits(self) -> int:
        """Of the side that has fewer."""
        return min(self.before.visits, self.after.visits)

    @property
    def disturbed(self) -> bool:
        """Whether others kept the cores busy on one of the sides."""
        return self.foreign_cores > MOST_FOREIGN_CORES

    @property
    def because(self) -> str:
        """Why two times prove nothing against each other, however far apart they are; empty where they may."""
        return _because(self.before, self.after)

    @property
    def foreign_cores(self) -> float:
        """Cores that others kept busy, on the side that was disturbed more."""
        return _foreign_cores(self.before, self.after)

    @property
    def gained_s(self) -> float:
        return self.after.median_s - self.before.median_s


@dataclass(frozen=True)
class Comparison:
    """All that two sides have to say to each other."""

    before: Side
    after: Side
    differences: tuple[SettingDifference, ...]
    shifts: tuple[Shift, ...]
    """What the machine itself did."""
    changes: tuple[Change, ...]
    """A cell that both have each, in the order of a table's rows."""
    only_before: int
    only_after: int
    """Cells that one side alone has."""

    @property
    def refusal(self) -> str:
        """What forbids a verdict, in words: `model A -> B; device C -> D`; empty where nothing does."""
        return "; ".join(item.words for item in self.differences if item.weight == "refuses")

    @property
    def comparable(self) -> bool:
        return not self.refusal

    @property
    def machine(self) -> float:
        """By how much the machine itself was slower in the median cell, as a share."""
        shares = sorted(item.machine for item in self.changes)
        return shares[len(shares) // 2] if shares else 0.0


@dataclass(frozen=True)
class _Pair:
    """What holds for every cell of two sides."""

    differences: tuple[SettingDifference, ...]
    comparable: bool
    shifts: tuple[Shift, ...]
    divided: tuple[Shift, ...]
    """The shifts that are divided out of a cell's change."""
    restate: Mapping[str, float]
    on_cpu: bool

    def change(self, key: CellId, before: Timed, after: Timed) -> Change:
        found = _change(key, before, after, *_divided(before, self.divided, self.on_cpu))
        if not self.comparable:
            found = replace(found, verdict="inconclusive")
        return _with_terms(found, self.restate)


def _pair(before: Side, after: Side) -> _Pair:
    found = differences(before, after)
    comparable = not any(item.weight == "refuses" for item in found)
    changed = {item.name for item in found if item.name in _SETTINGS_OF_ROOFS}
    shifts = _shifts(before.witness, after.witness) if comparable else ()
    restate = _restating(before.witness, after.witness, shifts, changed) if comparable else {}
    divided = tuple(shift for shift in shifts if shift.is_claim and not changed)
    return _Pair(found, comparable, shifts, divided, restate, before.is_cpu)


def compare_sides(before: Side, after: Side) -> Comparison:
    """Hold two sides against each other. Where they are not comparable, no cell gets a verdict."""
    pair = _pair(before, after)
    lefts, rights = aligned([before, after])
    return Comparison(
        before=before,
        after=after,
        differences=pair.differences,
        shifts=pair.shifts,
        changes=tuple(
            pair.change(key, lefts[key], rights[key]) for key in in_order([key for key in lefts if key in rights])
        ),
        only_before=len(lefts.keys() - rights.keys()),
        only_after=len(rights.keys() - lefts.keys()),
    )


def _change(key: CellId, before: Timed, after: Timed, machine: float, machine_half_width: float) -> Change:
    """A cell's change. Independent errors add in quadrature, in logarithms, since a change is a ratio."""
    middle = math.log(after.median_s / before.median_s) - machine
    down = math.hypot(math.log(after.median_s / after.low_s), math.log(before.high_s / before.median_s))
    up = math.hypot(math.log(after.high_s / after.median_s), math.log(before.median_s / before.low_s))
    low, high = (
        math.expm1(middle - math.hypot(down, machine_half_width)),
        math.expm1(middle + math.hypot(up, machine_half_width)),
    )
    return Change(
        asked=key,
        before=before,
        after=after,
        change=math.expm1(middle),
        low=low,
        high=high,
        machine=math.expm1(machine),
        machine_half_width=machine_half_width,
        verdict="inconclusive" if _because(before, after) else change_verdict(low, high),
    )


def _because(before: Timed, after: Timed) -> str:
    """Why two times prove nothing against each other; empty where they may."""
    if not (before.visits and after.visits):
        return "spread not told"
    if before.visits < CLAIM_VISITS or after.visits < CLAIM_VISITS:
        both = max(before.visits, after.visits) < CLAIM_VISITS
        return "one visit each" if both else "one visit on one side"
    cores = _foreign_cores(before, after)
    return f"others kept {cores:.1f} cores busy" if cores > MOST_FOREIGN_CORES else ""


def _foreign_cores(before: Timed, after: Timed) -> float:
    """Cores that others kept busy, on the side that was disturbed more."""
    return max(before.foreign_cores, after.foreign_cores)


def _shifts(before: MachineState | None, after: MachineState | None) -> tuple[Shift, ...]:
    """What the machine itself did between two runs: the sentinel's and the roofs' word."""
    if before is None or after is None:
        return ()
    found = []
    for resource in ("memory", "compute"):
        roof_ratio, roof_half_width = _roof_ratio(resource, before, after)
        anew = before.roofs_at_unix_s != after.roofs_at_unix_s
        if len(before.looks) > 1 and len(after.looks) > 1:
            looks = [tuple(getattr(look, resource) for look in side.looks) for side in (before, after)]
            (first, first_half), (second, second_half) = (_middle(values) for values in looks)
            found.append(
                Shift(resource, second / first, math.hypot(first_half, second_half), roof_ratio if anew else None)
            )
        elif anew:
            found.append(Shift(resource, roof_ratio, roof_half_width, roof_ratio, "roofs"))
    return tuple(found)


def _roof_ratio(resource: Resource, before: MachineState, after: MachineState) -> tuple[float, float]:
    """How much longer work at the roof takes after than before, and how far that may be off."""
    if resource == "memory":
        ratio = before.memory_bytes_per_s / after.memory_bytes_per_s
        return ratio, math.hypot(before.memory_half_width, after.memory_half_width)
    ratio = before.compute_flops_per_s / after.compute_flops_per_s
    return ratio, math.hypot(before.compute_half_width, after.compute_half_width)


@cache
def _middle(values: tuple[float, ...]) -> tuple[float, float]:
    """The median of a sentinel's looks, each a visit of its own, and half of its interval as a share."""
    found = estimate([[value] for value in values])
    return found.median_s, (found.high_s - found.low_s) / 2 / found.median_s


def _divided(before: Timed, shifts: Sequence[Shift], is_cpu: bool) -> tuple[float, float]:
    """The logarithm of what the machine's own shifts make of a cell, by its split, and half its interval's width."""
    if not before.terms:
        return 0.0, 0.0
    total = sum(before.terms.values())
    memory = min(1.0, max(0.0, sum(before.terms[name] for name in _MEMORY_TERMS) / total))
    # On a CPU all that is not memory's runs on the cores; dispatch to a card does not run on the card.
    on_cores = 1.0 - memory if is_cpu else sum(before.terms[name] for name in _COMPUTE_TERMS) / total
    shares = {"memory": memory, "compute": min(1.0, max(0.0, on_cores))}
    moved = sum(shares[shift.resource] * math.log(shift.ratio) for shift in shifts)
    return moved, math.hypot(*(shares[shift.resource] * shift.half_width for shift in shifts))


def _restating(
    before: MachineState | None, after: MachineState | None, shifts: Sequence[Shift], changed: set[str]
) -> dict[str, float]:
    """By what to multiply terms of the later split, so that both stand under the same roofs; by term.

    Two measurements of one roof differ by some percent, which would move time between the terms of a split. Where a
    roof has really moved, the terms that stand under it have as well, and are left alone; and so they are where a
    setting `changed` that moves roofs (a precision moves that of the arithmetic alone).
    """
    if before is None or after is None or changed - {_PRECISION}:
        return {}
    moved = {shift.resource for shift in shifts if shift.is_claim}
    memory = 1.0 if "memory" in moved else after.memory_bytes_per_s / before.memory_bytes_per_s
    compute = after.compute_flops_per_s / before.compute_flops_per_s
    if "compute" in moved or _PRECISION in changed:
        compute = 1.0
    return {**dict.fromkeys(_MEMORY_TERMS, memory), "compute_s": compute}


def _with_terms(change: Change, restate: Mapping[str, float]) -> Change:
    """With what each term gained, and which of them moved."""
    before, after = change.before.terms, change.after.terms
    if not before or not after:
        return change
    stated = {name: after[name] * restate.get(name, 1.0) for name in TERMS}
    # What the roofs gave or took was measured as a part of the kernels where those were replayed.
    taken = sum(after[name] - stated[name] for name in ("weights_s", "kv_s", "compute_s"))
    stated["kernel_s" if after["kernel_s"] else "unexplained_s"] += taken
    stated["unexplained_s"] += after["avoidable_s"] - stated["avoidable_s"]
    gained = {name: stated[name] - before[name] for name in TERMS}
    return replace(change, terms=gained, moved=_moved(change, gained))


def _moved(change: Change, gained: Mapping[str, float]) -> str | None:
    """The term that gained most in the direction of a claimed change, beyond how far it may be off, where that is a
    good part of the change."""
    if change.verdict not in ("slower", "faster"):
        return None
    sign = 1.0 if change.verdict == "slower" else -1.0
    beyond = {name: sign * seconds for name, seconds in gained.items() if abs(seconds) > _half_width_s(change, name)}
    most = max(beyond, key=lambda name: beyond[name], default=None)
    return most if most is not None and beyond[most] > _LEAST_MOVED * abs(change.gained_s) else None


def _half_width_s(change: Change, term: str) -> float:
    return math.hypot(*(timed.half_widths_s.get(term, 0.0) for timed in (change.before, change.after)))


@dataclass(frozen=True)
class ChangePoint:
    """Where the time of a cell changed in a row of runs."""

    at: int
    """The run, counted from 0."""
    change: Change
    """Against the run at which it last changed, or the first."""


@dataclass(frozen=True)
class CellHistory:
    """One cell over several runs."""

    asked: CellId
    times: tuple[Timed | None, ...]
    """A run each; None where it has no such cell."""
    steps: tuple[ChangePoint, ...]


@dataclass(frozen=True)
class History:
    """Several runs, oldest first."""

    sides: tuple[Side, ...]
    differences: tuple[tuple[SettingDifference, ...], ...]
    """Of each run against the one before it; none for the first."""
    cells: tuple[CellHistory, ...]


def history(sides: Sequence[Side]) -> History:
    """Several runs, oldest first, with the steps at which each cell changed.

    A run is held against the one at which the cell last changed, so that what creeps is found when it has added up.
    """
    ordered = sorted(sides, key=lambda side: side.created)
    cells = aligned(ordered)
    pairs: dict[tuple[int, int], _Pair] = {}

    def between(first: int, second: int) -> _Pair:
        if (first, second) not in pairs:
            pairs[first, second] = _pair(ordered[first], ordered[second])
        return pairs[first, second]

    rows = []
    for asked in in_order(list(dict.fromkeys(key for side in cells for key in side))):
        level: int | None = None
        steps = []
        for number, side in enumerate(cells):
            if asked not in side:
                continue
            if level is None:
                level = number
                continue
            change = between(level, number).change(asked, cells[level][asked], side[asked])
            if change.verdict in ("slower", "faster"):
                steps.append(ChangePoint(number, change))
                level = number
        rows.append(CellHistory(asked, tuple(side.get(asked) for side in cells), tuple(steps)))
    return History(tuple(ordered), ((), *(differences(*neighbours) for neighbours in pairwise(ordered))), tuple(rows))
