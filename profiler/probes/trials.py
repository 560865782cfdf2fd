"""Changes that were tried: the same architecture with fewer layers, held and stepped in another form.

A trial steps a short model as it is and in the other form in turn, at a cell's own shape. Each step is cut at the entry
and the exit of the layers that repeat, so that what a layer takes and what lies beside the layers are known for both.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from profiler.diagnosis.facts import Trial
from profiler.errors import RoofscopeError, contained
from profiler.grid import CellKey
from profiler.loading.load import load
from profiler.loading.request import LoadedModel, ModelRequest
from profiler.probes.bench import Bench, in_turn, steps_in_turn
from profiler.probes.forms import Form, forms_of
from profiler.probes.shortened import Pattern, pattern_of, shortened, stack_of
from profiler.probes.subject import Subject
from profiler.roofs.values import Ceilings
from profiler.work.formats import model_storage_bytes

# Loading a form takes as long as so many forms' steps.
_LOADING = 4
# More than this share of the layers tells nothing more.
_MOST_SHARE = 0.5
# A short model may take this share of the memory that is free.
_MEMORY_SHARE = 0.3
_FLOAT32_BYTES = 4


def try_forms(
    subject: Subject,
    config: Any,
    ceilings: Ceilings,
    latencies_s: Mapping[CellKey, float],
    budget_s: float,
    compiling: bool = False,
    on_failure: Callable[[str, Exception], object] = lambda form, error: None,
) -> Iterator[Trial]:
    """Steps in every form that this machine has, at the corners of the grid, as far as the budget goes.

    `latencies_s` are the times of the cells that were measured: they tell how many layers can be afforded. A form that
    does not load or run here is left out, after a call of `on_failure` where that is no wrong request but an error; so
    is one whose preparing would not fit into what is left. With
    `compiling` the budget has room for torch.compile on a CPU, too: a compiler that takes longer than is expected of it
    takes that from the forms behind it, and from no others' time unless it outlasts the budget.
    """
    forms, engine = forms_of(subject, compiling), next(iter(subject.engines))
    pattern = pattern_of(subject.loaded.module, config.get_text_config())
    if pattern is None or not subject.engines[engine].hookable or subject.loaded.offloaded or not forms:
        return
    deadline_s = subject.machine.now_s() + budget_s
    stepping_s = budget_s - sum(form.preparing_s for form in forms)
    corners = _corners(latencies_s, engine)
    keys, layers = _afforded(corners, latencies_s, pattern, stepping_s / (_LOADING + len(forms)))
    layers = min(layers, _fitting(subject, pattern))
    if not keys:
        return
    inside, of_inside = layers - pattern.first, pattern.layers - pattern.first
    short = shortened(config, layers)
    held = load(replace(subject.request, weights="random"), short)
    plain = Bench(Form("as it is", engine=engine), held, subject, ceilings)
    for form in forms:
        if subject.machine.now_s() + form.preparing_s > deadline_s:
            continue
        with contained(partial(_left_out, subject, form, on_failure)):
            loaded = held if form.holds_alike else _loaded(form, subject.request, short)
            other = Bench(replace(form, engine=form.engine or engine), loaded, subject, ceilings)
            for key in form.corners(keys):
                if subject.machine.now_s() + _cost_s(key, latencies_s) * layers / pattern.layers > deadline_s:
                    break
                before, after = in_turn(plain, other, key, pattern.first)
                yield Trial(key, form.name, inside, of_inside, before, after)


def _left_out(subject: Subject, form: Form, on_failure: Callable[[str, Exception], object], error: Exception) -> None:
    subject.machine.recover(form.name)
    if not isinstance(error, (RoofscopeError, ImportError, NotImplementedError, torch.OutOfMemoryError)):
        on_failure(form.name, error)


def _corners(latencies_s: Mapping[CellKey, float], engine: str) -> list[CellKey]:
    """Steps at the smallest and the largest batch, the shortest and the longest prompt; the cheapest first."""
    keys = [key for key in latencies_s if key.cell.engine == engine]
    if not keys:
        return []
    batches, depths = {key.cell.batch_size for key in keys}, {key.cell.depth for key in keys}
    corners = {(batch, depth) for batch in (min(batches), max(batches)) for depth in (min(depths), max(depths))}
    found = [key for key in keys if (key.cell.batch_size, key.cell.depth) in corners]
    return sorted(found, key=lambda key: _cost_s(key, latencies_s))


def _cost_s(key: CellKey, latencies_s: Mapping[CellKey, float]) -> float:
    """Seconds of a trial of all layers."""
    return steps_in_turn(key.phase) * latencies_s[key]


def _afforded(
    corners: Sequence[CellKey], latencies_s: Mapping[CellKey, float], pattern: Pattern, budget_s: float
) -> tuple[list[CellKey], int]:
    """The corners that a form's share of the budget is enough for, and how many layers it is enough for then."""
    keys: list[CellKey] = []
    total_s = 0.0
    for key in corners:
        more_s = total_s + _cost_s(key, latencies_s)
        if more_s * pattern.long(0) / pattern.layers <= budget_s:
            keys.append(key)
            total_s = more_s
    return keys, pattern.long(min(_MOST_SHARE, budget_s / total_s) * pattern.layers) if keys else 0


def _fitting(subject: Subject, pattern: Pattern) -> int:
    """Layers that memory has room for, in the widest form, twice."""
    stack = stack_of(subject.loaded.module, subject.loaded.config.get_text_config())
    assert stack is not None
    layer_bytes = sum(part.numel() for part in stack.parameters()) * _FLOAT32_BYTES / len(stack)
    beside_bytes = model_storage_bytes(subject.loaded.module) - model_storage_bytes(stack)
    room = _MEMORY_SHARE * subject.machine.available_bytes() - 2 * beside_bytes
    return pattern.long(room / (2 * max(layer_bytes, 1.0)))


def _loaded(form: Form, request: ModelRequest, config: Any) -> LoadedModel:
    """The short model in another form, with random weights."""
    wanted = replace(
        request,
        weights="random",
        dtype=form.dtype or request.dtype,
        quant=form.quant or request.quant,
    )
    config = copy.deepcopy(config)
    if form.experts:
        config.get_text_config()._experts_implementation = form.experts
    return load(wanted, config)
