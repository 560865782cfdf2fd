"""Forecast a model on a GPU that was not measured, as ranges from its datasheet and published results."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from profiler.counting.preset_counts import CountedModel
from profiler.data.datasheets import Datasheet
from profiler.data.published_results import ENGINE_WORDS, EngineKind, coverage_sentences
from profiler.grid.cells import PHASES
from profiler.judge.breakdown import StepTerms
from profiler.predict.operator_arrays import StepArrays
from profiler.predict.predict import Forecast, Terms
from profiler.predict.published_efficiency import CardSteps, Range, form_of, steps_by_datasheet
from profiler.predict.result import ForecastCell, ForecastDocument, ForecastError, forecast_cells
from profiler.quant.registry import Quant, published_as
from profiler.quant.stored_formats import stored_format


@dataclass(frozen=True)
class UnmeasuredModel:
    """A model that never ran, counted from its config."""

    name: str
    quant: Quant
    counted: CountedModel

    @property
    def precision(self) -> str:
        """The dtype and the packed format of the weights, for the screen."""
        packed = self.quant if self.quant != "none" else self.counted.published
        return self.counted.dtype if packed is None else f"{self.counted.dtype}, {packed}"


def in_range(
    model: UnmeasuredModel, sheet: Datasheet, steps: StepArrays, engine: EngineKind = "eager"
) -> ForecastDocument:
    """The range of each step on a GPU in an engine kind.

    Raises RequestError without a published figure of format and engine kind, or a GPU without their kernels or dtype.
    """
    found = steps_by_datasheet(model.counted, model.quant, sheet, steps, engine)
    times = found.times
    forecast = Forecast(found.needed, _terms(found.on_gpu, times), times.typical_s, np.zeros(len(steps)))
    basis = ["published figures of other GPUs"] * len(steps)
    cells = forecast_cells(forecast, times.typical_s, (times.low_s, times.high_s), basis, sheet.room_bytes)
    return ForecastDocument(
        source=model.name,
        model=model.name,
        precision=model.precision,
        on=f"{sheet.gpu}, by its datasheet",
        how=f"a range for {ENGINE_WORDS[engine]}, by published figures",
        error=ForecastError(None, None, 0, "no run on this GPU"),
        beyond=None,
        cells=cells,
        notes=(*coverage_sentences(engine, form_of(model.counted, model.quant)), *_too_wide(cells), *_notes(model)),
    )


def _terms(gpu_steps: CardSteps, times: Range) -> Terms:
    """The time breakdown of each step: its floor by the datasheet, and the rest.

    The rest is overhead where the host is slower than the device, else kernels below their ceiling.
    """
    floor_s = gpu_steps.floor_s()
    zeros = np.zeros(len(floor_s))
    memory_s = (gpu_steps.weight_bytes + gpu_steps.other_bytes) / gpu_steps.bandwidth
    by_compute = gpu_steps.flops / gpu_steps.peak > memory_s
    lost_s = times.typical_s - floor_s
    return StepTerms(
        weights_s=np.where(by_compute, 0.0, floor_s), kv_s=zeros, compute_s=np.where(by_compute, floor_s, 0.0),
        dequantise_s=zeros, kernel_s=np.where(times.is_host, 0.0, lost_s), redundant_s=zeros, padding_s=zeros,
        link_s=zeros, overhead_s=np.where(times.is_host, lost_s, 0.0),
    )  # fmt: skip


DECIDING_WIDTH = 2.0
"""The upper end of a range over its lower end, up to which it distinguishes GPUs.

Bandwidth grows by 1.6 to 2.3 from a generation of GPUs to the next (V100, A100, H100, B200: gpus.csv)."""


def _too_wide(cells: Sequence[ForecastCell]) -> list[str]:
    """A sentence if the ranges of a phase are mostly too wide to decide by."""
    wide = []
    for phase in PHASES:
        widths = [cell.high_s / cell.low_s for cell in cells if cell.phase == phase]
        if widths and (width := statistics.median(widths)) > DECIDING_WIDTH:
            wide.append(f"{width:.1f} times for {phase}")
    if not wide:
        return []
    return [
        f"The upper end of the range is {' and '.join(wide)} the lower: too wide to choose between GPUs that differ by"
        " less. A run on the GPU narrows it."
    ]


def _notes(model: UnmeasuredModel) -> tuple[str, ...]:
    """Caveats of the ranges, as sentences."""
    notes = []
    if stored_format(model.quant):
        notes.append(
            f"No figure of {model.quant} is in these ranges: those of {published_as(model.quant)} stand in, whose"
            " kernels differ."
        )
    if model.counted.dtype == "float32":
        notes.append("No published figure is in float32: its share of the peak is assumed to be that of 16 bits.")
    return tuple(notes)
