"""Compare two runs cell by cell: the change, its interval, and the term that moved."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from profiler.comparison.side import (
    CellTime,
    MatchKey,
    Resource,
    SettingDifference,
    Side,
    aligned,
    differences,
    in_order,
)
from profiler.json_document import HIDDEN, view
from profiler.judge.breakdown import TERMS
from profiler.judge.difference import ChangeVerdict, Difference, difference, has_claim_repetitions
from profiler.stats import MOST_FOREIGN_CORES, estimate

# A term that gained a smaller share of a change than this did not move it, however precisely it is known.
_LEAST_MOVED = 0.25
# Terms of the time breakdown that grow with slower memory, and with slower cores.
_MEMORY_TERMS = ("weights_s", "kv_s", "redundant_s")
_COMPUTE_TERMS = ("compute_s", "kernel_s", "dequantise_s")
# Settings that move the ceilings: if one of them changed, a lower ceiling does not mean a slower machine.
_PRECISION = "precision"
_SETTINGS_OF_CEILINGS = (
    "threads", "torch_threads", "allowed_cores", "cgroup_cpu_quota", "clock", _PRECISION, "instructions",
    "ONEDNN_MAX_CPU_ISA", "NVIDIA_TF32_OVERRIDE",
)  # fmt: skip


@dataclass(frozen=True)
class Shift:
    """How much longer the same memory-bound or compute-bound work took on the machine itself."""

    resource: Resource
    ratio: float
    """Time after / time before, from the drift probe if both runs have one, else from the ceilings."""
    half_width: float
    """Half width of the 95 % interval of the ratio's logarithm."""
    roof_ratio: float | None
    """Time ratio from the measured ceilings; None if both runs share one measurement of them."""
    told_by: Literal["sentinel", "roofs"]
    """What measured it: the drift probe (`sentinel`) or the ceilings."""
    claimed: bool
    """Whether it exceeds its interval, and ceilings that were measured again moved in the same direction."""


@dataclass(frozen=True, kw_only=True)
class Change(MatchKey):
    """One cell on both sides."""

    before_s: float
    """Median time on the first side."""
    after_s: float
    """Median time on the second side."""
    change: float
    """after / before - 1 with the machine's own change divided out; 0.07 is 7 % slower."""
    low: float
    """Lower end of the 95 % interval of the change."""
    high: float
    """Upper end of the same interval."""
    verdict: ChangeVerdict
    """Whether the change is certain, and in which direction."""
    because: str
    """Why a verdict is inconclusive; empty otherwise."""
    moved: str | None
    """The term that moved most; null without a claimed change, without time breakdowns, or if none stands out."""
    terms: Mapping[str, float]
    """Seconds that each term gained; they add up to `after - before`."""
    machine: float
    """The part that was divided out: 0.04 if the machine itself was 4 % slower."""
    before_repetitions: int
    """Repetitions of the cell, or another tool's runs: 2 if only their spread is known, 0 if neither is."""
    after_repetitions: int
    """The same of the second side."""
    difference: Annotated[Difference, HIDDEN]
    before: Annotated[CellTime, HIDDEN]
    after: Annotated[CellTime, HIDDEN]
    machine_half_width: Annotated[float, HIDDEN]
    """Half width of the 95 % interval of `machine`, as a logarithm; all cells of a comparison share this error."""

    @property
    def repetitions(self) -> int:
        """Repetitions of the side with fewer."""
        return min(self.before_repetitions, self.after_repetitions)

    @property
    def disturbed(self) -> bool:
        """Whether other processes kept cores busy on one of the sides."""
        return self.foreign_cores > MOST_FOREIGN_CORES

    @property
    def foreign_cores(self) -> float:
        """Cores that other processes kept busy, on the side that was disturbed more."""
        return max(self.before.foreign_cores, self.after.foreign_cores)


@dataclass(frozen=True)
class Comparison:
    """Two sides with their differences, the machine's own shifts, and the change of every common cell."""

    before: Side
    after: Side
    differences: tuple[SettingDifference, ...]
    shifts: tuple[Shift, ...]
    changes: tuple[Change, ...]
    """One change per common cell, in the order of table rows."""
    only_before: int
    only_after: int
    """Number of cells that only one side contains."""

    @property
    def refusal(self) -> str:
        """The differences that forbid a verdict: `model A -> B; device C -> D`; empty if there are none."""
        return "; ".join(item.words for item in self.differences if item.refuses)

    @property
    def comparable(self) -> bool:
        return not self.refusal


def compare_sides(before: Side, after: Side) -> Comparison:
    """Compare two sides cell by cell. If they are not comparable, every verdict is `inconclusive`."""
    found = differences(before, after)
    comparable = not any(item.refuses for item in found)
    ceiling_settings = {item.name for item in found if item.name in _SETTINGS_OF_CEILINGS}
    shifts: tuple[Shift, ...] = ()
    ceiling_factors: dict[str, float] = {}
    if comparable and before.ceilings and after.ceilings:
        shifts = tuple(_shifts(before, after, ceiling_settings))
        ceiling_factors = _ceiling_factors(before, after, shifts, ceiling_settings)
    divided_out = [shift for shift in shifts if shift.claimed and not ceiling_settings]
    lefts, rights = aligned(before, after)

    def change(key: MatchKey) -> Change:
        first, second = lefts[key], rights[key]
        machine, half_width = _machine_part(first, divided_out, before.is_cpu)
        found = difference(
            first.time,
            second.time,
            min(first.repetitions, second.repetitions),
            machine=machine,
            machine_half_width=half_width,
            because=_because(first, second) if comparable else "not comparable",
        )
        terms = _gained(first.terms, second.terms, ceiling_factors)
        return view(
            Change,
            found,
            **vars(key),
            before_s=first.time.median_s,
            after_s=second.time.median_s,
            moved=_moved(first, second, terms, found),
            terms=terms,
            machine=math.expm1(machine),
            before_repetitions=first.repetitions,
            after_repetitions=second.repetitions,
            difference=found,
            before=first,
            after=second,
            machine_half_width=half_width,
        )

    return Comparison(
        before=before,
        after=after,
        differences=found,
        shifts=shifts,
        changes=tuple(map(change, in_order([key for key in lefts if key in rights]))),
        only_before=len(lefts.keys() - rights.keys()),
        only_after=len(rights.keys() - lefts.keys()),
    )


def _because(before: CellTime, after: CellTime) -> str:
    if not (before.repetitions and after.repetitions):
        return "spread unknown"
    if not has_claim_repetitions(min(before.repetitions, after.repetitions)):
        both = not has_claim_repetitions(max(before.repetitions, after.repetitions))
        once = "one run" if before.is_foreign and after.is_foreign else "one repetition"
        return f"{once} each" if both else f"{once} on one side"
    cores = max(before.foreign_cores, after.foreign_cores)
    return f"others kept {cores:.1f} cores busy" if cores > MOST_FOREIGN_CORES else ""


def _shifts(before: Side, after: Side, ceiling_settings: set[str]) -> Iterator[Shift]:
    """How the machine itself shifted between two runs, by its drift probe and its ceilings."""
    has_probes = len(before.drift_readings) > 1 and len(after.drift_readings) > 1
    for resource in get_args(Resource):
        # The compute ceilings of two precisions say nothing about the machine.
        same_ceiling = resource == "memory" or _PRECISION not in ceiling_settings
        sides = before, after
        first, second = (side.ceilings[resource] for side in sides)
        half_widths = [first.half_width, second.half_width]
        new_ceilings = before.ceilings_at_unix_s != after.ceilings_at_unix_s and same_ceiling
        ratio = roof_ratio = first.per_s / second.per_s if new_ceilings else None
        if has_probes:
            probes = [estimate([[getattr(each, resource)] for each in side.drift_readings]) for side in sides]
            ratio, half_widths = probes[1].median_s / probes[0].median_s, [each.half_width for each in probes]
        if ratio is not None:
            moved, half_width = math.log(ratio), math.hypot(*half_widths)
            agrees = roof_ratio is None or math.log(roof_ratio) * moved > 0
            yield Shift(
                resource,
                ratio,
                half_width,
                roof_ratio,
                told_by="sentinel" if has_probes else "roofs",
                claimed=abs(moved) > half_width and agrees,
            )


def _machine_part(before: CellTime, shifts: Sequence[Shift], is_cpu: bool) -> tuple[float, float]:
    """(logarithm of the machine's own part of a cell's change, by its time breakdown; half width of its interval)."""
    if not before.terms:
        return 0.0, 0.0
    total = sum(before.terms.values())
    memory = min(1.0, max(0.0, sum(before.terms[name] for name in _MEMORY_TERMS) / total))
    # On a CPU everything but memory traffic runs on the cores; the host's overhead does not run on the GPU.
    on_cores = 1.0 - memory if is_cpu else sum(before.terms[name] for name in _COMPUTE_TERMS) / total
    shares = {"memory": memory, "compute": min(1.0, max(0.0, on_cores))}
    moved = sum(shares[shift.resource] * math.log(shift.ratio) for shift in shifts)
    return moved, math.hypot(*(shares[shift.resource] * shift.half_width for shift in shifts))


def _ceiling_factors(
    before: Side, after: Side, shifts: Sequence[Shift], ceiling_settings: set[str]
) -> dict[str, float]:
    """Factor per term that restates the later time breakdown under the ceilings of the earlier one.

    Two measurements of one ceiling differ by some percent, which would move time between terms. If a ceiling has really
    moved, so have the terms under it, and they keep their seconds. They also keep them if one of `ceiling_settings`
    changed; a changed precision moves only the compute ceiling.
    """
    if ceiling_settings - {_PRECISION}:
        return {}
    moved = {shift.resource for shift in shifts if shift.claimed}
    memory = 1.0 if "memory" in moved else after.ceilings["memory"].per_s / before.ceilings["memory"].per_s
    keeps = "compute" in moved or _PRECISION in ceiling_settings
    compute = 1.0 if keeps else after.ceilings["compute"].per_s / before.ceilings["compute"].per_s
    return {**dict.fromkeys(_MEMORY_TERMS, memory), "compute_s": compute}


def _gained(before: Mapping[str, float], after: Mapping[str, float], factors: Mapping[str, float]) -> dict[str, float]:
    if not before or not after:
        return {}
    restated = {name: after[name] * factors.get(name, 1.0) for name in TERMS}
    # Replayed kernels were timed as a whole, so a ceiling's part moves to or from the kernel term.
    moved_s = sum(after[name] - restated[name] for name in ("weights_s", "kv_s", "compute_s"))
    restated["kernel_s" if after["kernel_s"] else "unexplained_s"] += moved_s
    restated["unexplained_s"] += after["redundant_s"] - restated["redundant_s"]
    return {name: restated[name] - before[name] for name in TERMS}


def _moved(before: CellTime, after: CellTime, gained: Mapping[str, float], found: Difference) -> str | None:
    """The term that gained most in the direction of a claimed change; None if none stands out."""
    if not found.is_claim:
        return None
    sign = 1.0 if found.verdict == "slower" else -1.0
    certain = {
        name: sign * seconds
        for name, seconds in gained.items()
        if abs(seconds) > math.hypot(*(timed.half_widths_s.get(name, 0.0) for timed in (before, after)))
    }
    most = max(certain, key=lambda name: certain[name], default=None)
    least = _LEAST_MOVED * abs(after.time.median_s - before.time.median_s)
    return most if most is not None and certain[most] > least else None
