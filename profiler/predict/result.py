"""Forecast results: predicted cells, and their cross-validated error."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from profiler.grid.cells import Phase
from profiler.json_document import Document
from profiler.predict.cross_validation import HeldOut, TrainedModel
from profiler.predict.operator_arrays import Array
from profiler.predict.predict import Forecast, predicted_regimes
from profiler.stats import NORMAL_90, NORMAL_95

BETWEEN_CELLS = "between measured cells"
_ASSUMED = (
    "kernels keep the share of their ceiling that they had at the nearest batch measured",
    "attention keeps the share of its ceiling that it had at the nearest length measured",
)
"""What a forecast of a batch, and of a length, beyond the measured ones assumes."""
# The middle half and the middle 90 % of a normal distribution, in half widths of its middle 95 %.
_HALF, _NINE_TENTHS = 0.674 / NORMAL_95, NORMAL_90 / NORMAL_95


@dataclass(frozen=True)
class ForecastCell:
    """The forecast of one cell."""

    phase: Phase
    """`prefill` or `decode`."""
    batch_size: int
    """Sequences per batch."""
    prompt_len: int
    """Prompt tokens per sequence."""
    context_len: int
    """Cached tokens before the step; for a prefill, those of `--prefix`."""
    latency_s: float
    """Forecast time of the whole prompt, or of one decode step."""
    low_s: float
    """Lower end of the 90 % interval."""
    high_s: float
    """Upper end of the same interval."""
    tokens_per_s: float
    """Tokens of all sequences over the time."""
    regime: str
    """The limit of the cell."""
    basis: str
    """`between measured cells`, or the assumptions of a forecast beyond them."""
    fits: bool = True
    """Whether the tensors of the cell fit the device's memory, by the memory model."""
    tight: bool = False
    """Whether they fit, but the cell runs out of memory if free memory is in pieces."""
    terms: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each term of the time breakdown, including the unexplained rest."""
    new_tokens: int = 0
    """Tokens after each prompt or filled cache; a decode is the middle step of them."""

    @property
    def name(self) -> str:
        """Such as `decode 1 x 64`, with the tokens of the prompt, or of a filled cache before the first new one."""
        return f"{self.phase} {self.batch_size} x {self.prompt_len or self.context_len - self.new_tokens // 2}"


@dataclass(frozen=True)
class ForecastError:
    """Expected error of forecasts, as |forecast / later measurement - 1|; None if there are too few cells.

    It is that of cells that were left out, with the machine's drift and the interval of a measured cell.
    """

    median: float | None
    p90: float | None
    cells: int
    how: str
    """Which cells were left out."""


@dataclass(frozen=True)
class ForecastDocument(Document):
    """`roofscope forecast --format json`."""

    source: str
    model: str
    precision: str
    on: str
    how: str
    error: ForecastError
    beyond: ForecastError | None
    """The error outside the range of the measured cells; null if unknown."""
    cells: Sequence[ForecastCell]
    notes: Sequence[str]


def cross_validated_error(held: HeldOut, repeat_width: float, how: str) -> ForecastError:
    """The error of held-out cells if they are measured once more, without figures if there are too few of them.

    `repeat_width` is the half width (95 %) of what such a measurement adds, as a share.
    """
    if not held.is_enough:
        return ForecastError(None, None, len(held.errors), how)
    median, p90 = math.hypot(held.median, _HALF * repeat_width), math.hypot(held.p90, _NINE_TENTHS * repeat_width)
    return ForecastError(median, p90, len(held.errors), how)


def cells_of(
    trained: TrainedModel, forecast: Forecast, half_width: Array, factor: Array, room_bytes: int
) -> tuple[ForecastCell, ...]:
    """Forecast cells on a device with `room_bytes` for a model.

    `half_width` [n] is that of the log of each, and `factor` [n] scales the times for a change.
    """
    latency_s, spread = forecast.latency_s * factor, np.exp(half_width)
    basis = [
        "; ".join(text for text, octaves in zip(_ASSUMED, beyond, strict=True) if octaves) or BETWEEN_CELLS
        for beyond in trained.beyond(forecast.demanded.steps)
    ]
    return forecast_cells(forecast, latency_s, (latency_s / spread, latency_s * spread), basis, room_bytes)


def forecast_cells(
    forecast: Forecast, latency_s: Array, bounds_s: tuple[Array, Array], basis: Sequence[str], room_bytes: int
) -> tuple[ForecastCell, ...]:
    """Forecast cells from arrays [n]: latencies, ends of intervals, the basis of each; and a device's free bytes."""
    steps, need = forecast.demanded.steps, forecast.demanded.need
    fits, tight = need.fits(room_bytes), need.is_tight(room_bytes)
    terms = {
        item.name: getattr(forecast.terms, item.name) for item in fields(forecast.terms) if item.name != "padding_s"
    }
    prompts = np.where(steps.prompt_len > 0, steps.prompt_len + steps.prefix, 0)
    sizes = np.stack([steps.batch, prompts, steps.context, steps.new_tokens]).T.tolist()
    times = np.stack([latency_s, *bounds_s, steps.tokens / latency_s]).T.tolist()
    cells = []
    for index, regime in enumerate(predicted_regimes(forecast.terms)):
        (batch, prompt, context, new), (own_s, low_s, high_s, per_s) = sizes[index], times[index]
        seconds = {name: float(values[index]) for name, values in terms.items()}
        seconds["unexplained_s"] = own_s - sum(seconds.values())
        shape, memory = (steps.phase(index), batch, prompt, context), (bool(fits[index]), bool(tight[index]))
        cells.append(ForecastCell(*shape, own_s, low_s, high_s, per_s, regime, basis[index], *memory, seconds, new))
    return tuple(cells)
