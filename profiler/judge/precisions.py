"""Runs of one model in several precisions, compared with the first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from profiler.facts.run_facts import ModelFacts
from profiler.grid.cells import CellKey, Phase
from profiler.judge.cells import CellResult
from profiler.stats import CLAIM_VISITS, SAME, change_verdict
from profiler.units import percent

# As many rows as a screen has room for beside the sentences; of more the ends of each precision and phase are shown.
_ROOM = 16
_ENDS = 2


class PrecisionRun(Protocol):
    """A run, as far as comparing it needs."""

    @property
    def model(self) -> ModelFacts:
        """What ran."""

    @property
    def measured(self) -> Sequence[CellResult]:
        """The cells that have a number."""


@dataclass(frozen=True)
class PrecisionDifference:
    """One cell of one precision against the same cell of the first."""

    precision: str
    key: CellKey
    time_s: float
    speed_up: float
    """Time of the first precision over this one's: above 1 it is faster."""
    low: float
    high: float
    visits: int | None
    """Of the one that has fewer; None where a run did not keep them."""

    @property
    def is_claim(self) -> bool:
        """Whether both were visited often enough to tell, and the whole interval lies on one side."""
        return not self.visited_once and (self.low > 1 or self.high < 1)

    @property
    def visited_once(self) -> bool:
        """Whether a side rests on one visit, which does not tell what visits of the same cell differ by."""
        return self.visits is not None and self.visits < CLAIM_VISITS


def compare_with_first(runs: Sequence[PrecisionRun]) -> list[PrecisionDifference]:
    """Every cell of the further runs beside the first one's, with the interval of the ratio.

    Cells are the same when the same was asked for: a decode's context depends on how many tokens were to follow.
    """
    first = {_asked(row): row for row in runs[0].measured}
    return [
        PrecisionDifference(
            precision=run.model.quant,
            key=row.key,
            time_s=row.latency_s,
            speed_up=base.latency_s / row.latency_s,
            low=base.latency_low_s / row.latency_high_s,
            high=base.latency_high_s / row.latency_low_s,
            visits=None if base.visits is None or row.visits is None else min(base.visits, row.visits),
        )
        for run in runs[1:]
        for row in run.measured
        if (base := first.get(_asked(row))) is not None
    ]


def clear_differences(items: Sequence[PrecisionDifference]) -> list[PrecisionDifference]:
    """Of more cells than a screen has room for, what tells most of each precision and phase: the fastest and the
    slowest of its claims, or of all of its cells where none is a claim. In the order in which they came."""
    if len(items) <= _ROOM:
        return list(items)
    kept: set[PrecisionDifference] = set()
    for phase, precision in {(item.key.phase, item.precision) for item in items}:
        cells = [item for item in items if (item.key.phase, item.precision) == (phase, precision)]
        ranked = sorted([item for item in cells if item.is_claim] or cells, key=lambda item: item.speed_up)
        kept |= {*ranked[:_ENDS], *ranked[-_ENDS:]}
    return [item for item in items if item in kept]


def _asked(row: CellResult) -> tuple[Phase, int, int, int, str]:
    cell = row.key.cell
    return row.phase, cell.batch_size, cell.prompt_len, cell.context_len, cell.engine


def precision_sentences(runs: Sequence[PrecisionRun]) -> list[str]:
    """What each precision saves in memory, and where it wins and loses against the first."""
    base = runs[0].model
    found = []
    for run in runs[1:]:
        model = run.model
        smaller = base.storage_bytes / model.storage_bytes
        parts = [f"{model.quant} takes {smaller:.2g}x less memory than {base.quant} in {base.dtype}"]
        cells = [item for item in compare_with_first(runs) if item.precision == model.quant]
        for phase in ("decode", "prefill"):
            of_phase = [item for item in cells if item.key.phase == phase]
            if of_phase:
                parts.append(f"{phase} {_fate(of_phase)}")
        found.append("; ".join(parts) + ".")
    return found


def _fate(cells: Sequence[PrecisionDifference]) -> str:
    """Where a precision wins and loses in one phase; only cells whose whole interval says so count."""
    told = [item for item in cells if not item.visited_once]
    if not told:
        seen = sorted(item.speed_up for item in cells)
        return f"was visited once ({seen[0]:.2g}x to {seen[-1]:.2g}x as fast then): no claim"
    far = f", as far as it was visited twice ({len(told)} of {len(cells)} cells)" if len(told) < len(cells) else ""
    return _claimed(told) + far


def _claimed(told: Sequence[PrecisionDifference]) -> str:
    claims = [item for item in told if item.is_claim]
    wins, losses = [item for item in claims if item.low > 1], [item for item in claims if item.high < 1]
    if not claims:
        same = all(change_verdict(1 / item.high - 1, 1 / item.low - 1) == "same" for item in told)
        return f"is the same within {percent(SAME)}" if same else "cannot be told apart"
    best, worst = max(claims, key=lambda item: item.speed_up), min(claims, key=lambda item: item.speed_up)
    if not (wins and losses):
        word, bound, end = ("faster", "up", best) if wins else ("slower", "down", worst)
        where, rest = "throughout", ""
        if len(claims) < len(told):
            where, rest = f"in {len(claims)} of {len(told)} cells", ", the others cannot be told apart"
        return f"is {word} {where} ({bound} to {end.speed_up:.2g}x at batch {end.key.cell.name}){rest}"
    first = min(losses, key=lambda item: item.key.tokens)
    return (
        f"gains up to {best.speed_up:.2g}x and loses in {len(losses)} of {len(told)} cells, first at batch"
        f" {first.key.cell.name}"
    )
