"""A model on a GPU without a profile: from the floor of its datasheet to what published results attain."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from profiler.counting.attention import AttentionCore
from profiler.counting.operators import Experts, ModelWork
from profiler.data.datasheets import Datasheet
from profiler.data.links import Link
from profiler.errors import RequestError
from profiler.facts.step import Attention
from profiler.grid.cells import PHASES, Phase
from profiler.judge.breakdown import StepTerms
from profiler.predict.operator_arrays import StepArrays, operator_arrays, path_of
from profiler.predict.predict import Forecast
from profiler.predict.published_efficiency import (
    NO_MIXTURE,
    attained,
    basis_for,
    card_steps,
    executed,
    family_of,
    host_index_of,
    peak_of,
)
from profiler.predict.result import Answer, ForecastError, forecast_cells
from profiler.quant.registry import Quant


@dataclass(frozen=True)
class UnmeasuredModel:
    """A model counted from its config, that never ran."""

    name: str
    precision: str
    """In words: its dtype, and the form that its weights are packed in."""
    dtype: str
    quant: Quant
    work: ModelWork
    weight_bytes: int
    attention: Attention
    """That of plain transformers."""


def in_range(model: UnmeasuredModel, sheet: Datasheet, steps: StepArrays, link: Link | None) -> Answer:
    """Each step's range on a card. Raises RequestError where nothing tells of the format or of the dtype there."""
    format_ = "dense" if model.quant == "none" else model.quant
    engine = basis_for(format_, "eager")
    if engine is None:
        raise RequestError(f"--quant {model.quant}: no published figure tells what it attains on {sheet.gpu}.")
    paths = dict.fromkeys(PHASES, path_of(engine, model.attention))
    needed = operator_arrays(model.work, steps, paths, model.weight_bytes, link)
    layers = sum(op.count for op in model.work.operators if isinstance(op, AttentionCore))
    done, peak = executed(needed, engine), peak_of(sheet, format_, model.dtype)
    host_index = host_index_of(sheet.gpu)
    work = card_steps(sheet, done, steps.batch, peak=peak, layers=layers, host_index=host_index)
    low_s, typical_s, high_s = (np.zeros(len(steps)) for _ in range(3))
    for index in range(len(steps)):
        phase: Phase = "prefill" if steps.prefill[index] else "decode"
        at = np.array([index])
        one = card_steps(sheet, done.at(at), steps.batch[at], peak=peak, layers=layers, host_index=host_index)
        told = attained(engine, family_of(format_, int(steps.batch[index]), int(steps.query[index]))).range_s(
            one, phase
        )
        low_s[index], typical_s[index], high_s[index] = (
            float(values[0]) + needed.exchanged_s[index] for values in (told.low_s, told.typical_s, told.high_s)
        )
    zeros, floor = np.zeros(len(steps)), work.floor_s()
    by_compute = work.flops / work.peak > (work.weight_bytes + work.kv_bytes) / work.bandwidth
    terms = StepTerms(
        weights_s=np.where(by_compute, 0.0, floor), kv_s=zeros, compute_s=np.where(by_compute, floor, 0.0),
        dequantise_s=zeros, kernel_s=zeros, avoidable_s=zeros, padding_s=zeros, link_s=needed.exchanged_s,
        dispatch_s=np.maximum(0.0, typical_s - floor - needed.exchanged_s),
    )  # fmt: skip
    found = Forecast(needed, terms, typical_s, zeros)
    return Answer(
        source=model.name,
        model=model.name,
        precision=model.precision,
        on=f"{sheet.gpu}, by its datasheet",
        how=f"a range: from its floor to what {engine} engines attain on other cards (published figures)",
        error=ForecastError(None, None, 0, "no run and no profile of this card"),
        beyond=None,
        cells=forecast_cells(
            found, typical_s, (low_s, high_s), ["published figures of other cards"] * len(steps),
            found.fits(sheet.memory_bytes),
        ),
        notes=_notes(model),
    )  # fmt: skip


def _notes(model: UnmeasuredModel) -> tuple[str, ...]:
    """How far such ranges can be trusted."""
    notes = ["The ranges hold nine in ten of the figures that they have not seen; a profile narrows them."]
    if model.dtype == "float32":
        notes.append("No published figure in float32 is behind them: what 16 bits attain is taken of its own peak.")
    if any(isinstance(operator, Experts) for operator in model.work.operators):
        notes.append(NO_MIXTURE)
    return tuple(notes)
