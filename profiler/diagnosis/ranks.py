"""Is a second card worth it: the same steps on one card and on each of several that share a model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from profiler.diagnosis.foretold import ForecastCell, Told
from profiler.grid import Phase

_SECONDS_AN_HOUR = 3600
_WORDS = {2: "Two", 3: "Three", 4: "Four", 6: "Six", 8: "Eight"}
WORTH = 1.01
"""A step that gets faster by less than this is not faster."""


@dataclass(frozen=True)
class RankTime:
    """A step on so many cards."""

    ranks: int
    latency_s: float
    low_s: float
    high_s: float
    link_s: float
    """Of it, what the cards exchange results in."""
    tokens_per_s: float
    regime: str
    fits: bool
    usd_per_million: float | None
    """USD for a million tokens at this load; None without a price."""

    @property
    def card_s_per_million(self) -> float:
        """Seconds of a card that a million tokens take, all cards together."""
        return 1e6 * self.ranks / self.tokens_per_s


@dataclass(frozen=True)
class RankCell:
    """One step over the numbers of cards, from one upwards."""

    phase: Phase
    batch_size: int
    prompt_len: int
    context_len: int
    times: tuple[RankTime, ...]

    @property
    def base(self) -> RankTime | None:
        """The fewest cards that hold it; None: none of these numbers does."""
        return next((time for time in self.times if time.fits), None)

    def gain(self, time: RankTime) -> float:
        """How many times as fast as on the fewest cards that hold it; NaN where it does not fit."""
        return self.base.latency_s / time.latency_s if self.base and time.fits else math.nan

    @property
    def worse_from(self) -> int | None:
        """The fewest cards on which the step takes no less time than on the number before; None: it always gains."""
        fitting = [time for time in self.times if time.fits]
        for before, after in itertools.pairwise(fitting):
            if after.latency_s * WORTH > before.latency_s:
                return after.ranks
        return None


@dataclass(frozen=True)
class RanksAnswer:
    """A forecast over the number of cards, with its basis and its error."""

    source: str
    model: str
    precision: str
    on: str
    how: str
    links: tuple[str, ...]
    """What the cards are linked by, a line for each number of them."""
    link: str
    """By name."""
    price: str
    """Of a card, with its source; empty without one."""
    error: Told
    cells: tuple[RankCell, ...]
    notes: tuple[str, ...] = ()

    def sentence(self, card: str) -> str:
        """`Two H100 SXM over pcie5x16 give 1.04x at batch 1 and 1.7x at batch 64.`; of decode where there is one."""
        phase = "decode" if any(cell.phase == "decode" for cell in self.cells) else "prefill"
        cells = [cell for cell in self.cells if cell.phase == phase]
        # The longest context of the smallest and the largest batch that fit: where a second card matters most.
        fitting = [cell for cell in cells if cell.base is not None]
        if not fitting:
            return f"No {phase} fits so many cards."
        depth = max(cell.prompt_len or cell.context_len for cell in fitting)
        of = sorted(
            (cell for cell in fitting if (cell.prompt_len or cell.context_len) == depth),
            key=lambda cell: cell.batch_size,
        )
        first, last = of[0], of[-1]
        lines = []
        for position, time in enumerate(first.times):
            if time.ranks == 1:
                continue
            words = [
                f"{_gain(cell, cell.times[position])} at batch {cell.batch_size}"
                for cell in ([first, last] if last is not first else [first])
            ]
            number = _WORDS.get(time.ranks, str(time.ranks))
            lines.append(f"{number} {card} over {self.link} give {' and '.join(words)}.")
        return " ".join(lines)


def _gain(cell: RankCell, time: RankTime) -> str:
    gain = cell.gain(time)
    if math.isnan(gain):
        return "no room"
    if cell.base is time:
        return "room for it"
    return f"{gain:.2f}x" if gain < 1.995 else f"{gain:.1f}x"


def across(found: Sequence[tuple[int, Sequence[ForecastCell]]], usd_per_h: float | None) -> tuple[RankCell, ...]:
    """The same cells of several forecasts, one for each number of cards, ascending; `usd_per_h` is one card's price."""
    cells = []
    for index, first in enumerate(found[0][1]):
        times = []
        for ranks, forecast in found:
            cell = forecast[index]
            usd = None
            if usd_per_h is not None:
                usd = 1e6 * ranks * usd_per_h / _SECONDS_AN_HOUR / cell.tokens_per_s
            times.append(
                RankTime(
                    ranks, cell.latency_s, cell.low_s, cell.high_s, cell.terms.get("link_s", 0.0), cell.tokens_per_s,
                    cell.regime, cell.fits, usd,
                )
            )  # fmt: skip
        cells.append(RankCell(first.phase, first.batch_size, first.prompt_len, first.context_len, tuple(times)))
    return tuple(cells)
