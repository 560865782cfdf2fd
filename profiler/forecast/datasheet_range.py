"""Forecast a model on a GPU that was not measured, as ranges from its datasheet and published results."""

import statistics
from collections.abc import Iterator, Sequence

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
from profiler.quant.registry import Quant, published_as, stored_format


def in_range(
    name: str, counted: CountedModel, quant: Quant, sheet: Datasheet, steps: StepArrays, engine: EngineKind
) -> ForecastDocument:
    """Return the range of each step of a model that is counted from its config, on a GPU in an engine kind.

    Raises RequestError without a published figure of format and engine kind, or a GPU without their kernels or dtype.
    """
    found = steps_by_datasheet(counted, quant, sheet, steps, engine)
    times = found.times
    forecast = Forecast(found.needed, _terms(found.on_gpu, times), times.typical_s, np.zeros(len(steps)))
    packed = counted.published if quant == "none" else quant
    basis = ["published figures of other GPUs"] * len(steps)
    cells = forecast_cells(forecast, times.typical_s, (times.low_s, times.high_s), basis, sheet.room_bytes)
    return ForecastDocument(
        source=name,
        model=name,
        precision=counted.dtype if packed is None else f"{counted.dtype}, {packed}",
        on=f"{sheet.gpu}, by its datasheet",
        how=f"a range for {ENGINE_WORDS[engine]}, by published figures",
        error=ForecastError(None, None, 0, "no run on this GPU"),
        beyond=None,
        cells=cells,
        notes=(*coverage_sentences(engine, form_of(counted, quant)), *_too_wide(cells), *_notes(counted, quant)),
    )


def _terms(gpu_steps: CardSteps, times: Range) -> Terms:
    """The floor of each step, and the rest: overhead where the host is slower than the device, else slow kernels."""
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


def _too_wide(cells: Sequence[ForecastCell]) -> Iterator[str]:
    wide = []
    for phase in PHASES:
        widths = [cell.high_s / cell.low_s for cell in cells if cell.phase == phase]
        if widths and (width := statistics.median(widths)) > DECIDING_WIDTH:
            wide.append(f"{width:.1f} times for {phase}")
    if wide:
        yield (
            f"The upper end of the range is {' and '.join(wide)} the lower: too wide to choose between GPUs that differ"
            " by less. A run on the GPU narrows it."
        )


def _notes(counted: CountedModel, quant: Quant) -> Iterator[str]:
    if stored_format(quant):
        near = published_as(quant)
        yield f"No figure of {quant} is in these ranges: those of {near} stand in, whose kernels differ."
    if counted.dtype == "float32":
        yield "No published figure is in float32: its share of the peak is assumed to be that of 16 bits."
