"""Compare runs of one model in several precisions with the first run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from profiler.facts.run_facts import ModelFacts
from profiler.grid.cells import CellKey, Phase
from profiler.judge.cells import CellResult
from profiler.stats import CLAIM_VISITS, SAME, change_verdict
from profiler.units import percent

# The most rows that fit a screen next to the sentences.
_MOST_ROWS = 16
# The number of fastest and of slowest rows per precision and phase that are shown if there are more.
_ENDS = 2


class PrecisionRun(Protocol):
    """The part of a run that the comparison uses."""

    @property
    def model(self) -> ModelFacts:
        """The model that was run."""

    @property
    def measured(self) -> Sequence[CellResult]:
        """The measured cells."""


@dataclass(frozen=True)
class PrecisionDifference:
    """One cell in one precision, compared with the same cell in the first precision."""

    precision: str
    key: CellKey
    time_s: float
    speed_up: float
    """Time of the first precision over this one's: above 1 it is faster."""
    low: float
    high: float
    visits: int | None
    """Visits of the run with fewer; None if a run did not record them."""

    @property
    def is_claim(self) -> bool:
        """Whether both have enough visits and the whole interval is on one side of 1."""
        return not self.visited_once and (self.low > 1 or self.high < 1)

    @property
    def visited_once(self) -> bool:
        """Whether a run has a single visit, which does not show how much visits of one cell differ."""
        return self.visits is not None and self.visits < CLAIM_VISITS


def compare_with_first(runs: Sequence[PrecisionRun]) -> list[PrecisionDifference]:
    """Every cell of the further runs, compared with the same cell of the first, with the interval of the ratio.

    Cells are matched by their requested sizes, since the context of a decode depends on the number of new tokens.
    """
    first = {_request(row): row for row in runs[0].measured}
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
        if (base := first.get(_request(row))) is not None
    ]


def clear_differences(items: Sequence[PrecisionDifference]) -> list[PrecisionDifference]:
    """The differences that fit a screen, in their original order.

    If there are too many, these are the fastest and the slowest claims of each precision and phase, or its fastest and
    slowest cells if it has no claims.
    """
    if len(items) <= _MOST_ROWS:
        return list(items)
    shown: set[PrecisionDifference] = set()
    for phase, precision in {(item.key.phase, item.precision) for item in items}:
        cells = [item for item in items if (item.key.phase, item.precision) == (phase, precision)]
        ranked = sorted([item for item in cells if item.is_claim] or cells, key=lambda item: item.speed_up)
        shown |= {*ranked[:_ENDS], *ranked[-_ENDS:]}
    return [item for item in items if item in shown]


def _request(row: CellResult) -> tuple[Phase, int, int, int, str]:
    cell = row.key.cell
    return row.phase, cell.batch_size, cell.prompt_len, cell.context_len, cell.engine


def precision_sentences(runs: Sequence[PrecisionRun]) -> list[str]:
    """One sentence per further precision: its memory, and its speed in each phase compared with the first."""
    base = runs[0].model
    sentences = []
    for run in runs[1:]:
        model = run.model
        smaller = base.storage_bytes / model.storage_bytes
        parts = [f"{model.quant} takes {smaller:.2g}x less memory than {base.precision}"]
        cells = [item for item in compare_with_first(runs) if item.precision == model.quant]
        for phase in ("decode", "prefill"):
            of_phase = [item for item in cells if item.key.phase == phase]
            if of_phase:
                parts.append(f"{phase} {_phase_words(of_phase)}")
        sentences.append("; ".join(parts) + ".")
    return sentences


def _phase_words(cells: Sequence[PrecisionDifference]) -> str:
    """The speed of a precision in one phase, from the cells that were visited more than once."""
    repeated = [item for item in cells if not item.visited_once]
    if not repeated:
        ratios = sorted(item.speed_up for item in cells)
        speeds = " to ".join(dict.fromkeys(f"{ratio:.2g}x" for ratio in (ratios[0], ratios[-1])))
        return f"was visited once ({speeds} as fast then): no claim"
    cells_words = f", as far as it was visited twice ({len(repeated)} of {len(cells)} cells)"
    return _claim_words(repeated) + (cells_words if len(repeated) < len(cells) else "")


def _claim_words(cells: Sequence[PrecisionDifference]) -> str:
    claims = [item for item in cells if item.is_claim]
    wins, losses = [item for item in claims if item.low > 1], [item for item in claims if item.high < 1]
    if not claims:
        same = all(change_verdict(1 / item.high - 1, 1 / item.low - 1) == "same" for item in cells)
        return f"is the same within {percent(SAME)}" if same else "cannot be distinguished"
    best, worst = max(claims, key=lambda item: item.speed_up), min(claims, key=lambda item: item.speed_up)
    if not (wins and losses):
        word, bound, end = ("faster", "up", best) if wins else ("slower", "down", worst)
        where, rest = "throughout", ""
        if len(claims) < len(cells):
            where, rest = f"in {len(claims)} of {len(cells)} cells", ", the rest cannot be distinguished"
        return f"is {word} {where} ({bound} to {end.speed_up:.2g}x at batch {end.key.cell.name}){rest}"
    first = min(losses, key=lambda item: item.key.tokens)
    return (
        f"gains up to {best.speed_up:.2g}x and loses in {len(losses)} of {len(cells)} cells, first at batch"
        f" {first.key.cell.name}"
    )
