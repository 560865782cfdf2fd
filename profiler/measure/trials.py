"""Try a variant: steps of a short model, as it is and changed, in interleaved pairs."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.attention import sdpa_kernel

from profiler.device.clock import no_gc
from profiler.engines.base import Engine
from profiler.engines.registry import ENGINES
from profiler.errors import RoofscopeError, tolerate_errors
from profiler.facts.measurements import Stepped, Trial
from profiler.facts.roofs import Ceilings
from profiler.grid.cells import CellKey, Phase
from profiler.loading.load import load
from profiler.loading.request import LoadedModel, ModelRequest
from profiler.measure.short_model import Pattern, pattern_of, shortened, stack_of
from profiler.measure.subject import Subject
from profiler.measure.variants import Variant, variants_of
from profiler.measure.visit import refuse_impossible_times, seeded_prompts
from profiler.quant.storage import model_storage_bytes
from profiler.roofs.host_dispatch import torch_threads
from profiler.stats import undisturbed

_DECODE_STEPS = 5
_PREFILLS = 1
_WARM = 1
_TURNS = 2
"""How often the model as it is and the other form are stepped in turn."""


@dataclass(frozen=True)
class _Copy:
    """One copy of a short model, with the engine that steps it."""

    module: Any
    stack: nn.ModuleList
    engine: Engine


class ShortModelBench:
    """A short model in one form, and how it is stepped.

    A few layers would stay in a cache from step to step where the whole model's do not: as many copies are stepped in
    turn as hold what the whole one touches in a step.
    """

    def __init__(self, form: Variant, loaded: LoadedModel, subject: Subject, ceilings: Ceilings) -> None:
        self._form = form
        self.cuts = not form.compiled
        """Whether a step can be cut at its layers: a mark inside of compiled code would break it into pieces."""
        self._machine = subject.machine
        self._loaded, self._subject = loaded, subject
        self._past_caches_bytes = ceilings.past_caches_bytes
        self._held: list[_Copy] = []

    def _copies(self, key: CellKey) -> list[_Copy]:
        """As many copies as a cell's step asks for, the first of them the model that was handed over."""
        count = copies_of(self._loaded, self._subject, key, self._past_caches_bytes)
        while len(self._held) < count:
            module = copy.deepcopy(self._loaded.module) if self._held else self._loaded.module
            engine = ENGINES[self._form.engine or "eager"](module, self._machine)
            self._held.append(_Copy(module, _stack(module, self._loaded.config), engine))
        return self._held[:count]

    def stepped(self, key: CellKey, first: int) -> Stepped:
        """Steps of a cell, each cut where the layer `first` begins and the last one ends; those that cannot be cut are
        given as layers and nothing beside."""
        clock, cell, decode = self._machine.clock, key.cell, key.phase == "decode"
        copies = self._copies(key)
        marks: list[Any] = []

        def mark(*_: object) -> None:
            marks.append(clock.mark())

        with torch.inference_mode(), no_gc(), ExitStack() as hooks:
            if self._form.threads is not None:
                hooks.enter_context(torch_threads(self._form.threads))
            if self._form.kernel is not None:
                hooks.enter_context(sdpa_kernel(self._form.kernel))
            ids = seeded_prompts(cell, self._subject.vocab_size).to(self._machine.device)
            slots = key.context_len + _WARM + _DECODE_STEPS + 1
            for each in copies:
                each.engine.prepare(cell.batch_size, slots)
            states = [each.engine.fill(cell.batch_size, key.context_len, slots) for each in copies if decode]
            for each in copies:
                if self._form.masked:
                    hook = _padding(itertools.count(key.context_len) if decode else itertools.repeat(0))
                    hooks.callback(each.module.register_forward_pre_hook(hook, with_kwargs=True).remove)
                if self.cuts:
                    hooks.callback(each.stack[first].register_forward_pre_hook(mark).remove)
                    hooks.callback(each.stack[-1].register_forward_hook(mark).remove)
            for step in range(_steps(key.phase)):
                turn = step % len(copies)
                clock.synchronize()
                mark()
                if decode:
                    states[turn] = copies[turn].engine.decode(states[turn])
                else:
                    copies[turn].engine.prefill(ids, cell.prompt_len)
                mark()
            clock.synchronize()
        pieces = clock.seconds(marks)
        if not self.cuts:
            whole = tuple(pieces[2 * _WARM :: 2])
            refuse_impossible_times(whole)
            return Stepped(whole, (0.0,) * len(whole))
        steps = range(4 * _WARM, len(marks), 4)
        layers_s = tuple(pieces[start + 1] for start in steps)
        refuse_impossible_times(layers_s)
        return Stepped(layers_s, beside_s=tuple(pieces[start] + pieces[start + 2] for start in steps))


def copies_of(loaded: LoadedModel, subject: Subject, key: CellKey, past_caches_bytes: int) -> int:
    """How many copies of a short model touch in a cell's step what the whole one in its form does, weights and KV
    cache, or what no cache holds; no more than are stepped."""
    short, whole = (_stack(each.module, each.config) for each in (loaded, subject.loaded))
    times = len(whole) / len(short)
    weight_bytes = model_storage_bytes(loaded.module)
    whole_bytes = weight_bytes + (times - 1) * model_storage_bytes(short)
    cache_bytes = subject.touched_cache_bytes(key) * loaded.request.dtype.itemsize / subject.request.dtype.itemsize
    touched_bytes = min(whole_bytes + cache_bytes, past_caches_bytes)
    count: int = math.ceil(touched_bytes / (weight_bytes + cache_bytes / times))
    return min(_steps(key.phase), count)


def _stack(module: nn.Module, config: Any) -> nn.ModuleList:
    found = stack_of(module, config.get_text_config())
    assert found is not None, "no trial without the pattern of its layers"
    return found


def _padding(contexts: Iterator[int]) -> Callable[..., tuple[Any, dict[str, Any]]]:
    """A hook that hands each forward the mask of a batch whose first sequence is one token shorter than the others.

    `contexts` are the cached tokens that each forward finds: the first of them is the one that is hidden, or the last
    new one where there are none, so that every query sees some key.
    """

    def hook(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        context, ids = next(contexts), named["input_ids"]
        mask = ids.new_ones(ids.shape[0], context + ids.shape[1])
        mask[0, 0 if context else -1] = 0
        return args, named | {"attention_mask": mask}

    return hook


def interleaved_steps(
    plain: ShortModelBench, other: ShortModelBench, key: CellKey, first: int
) -> tuple[Stepped, Stepped]:
    """Both models stepped in turn, so that a machine that changes changes for both."""
    turns = [(plain.stepped(key, first), other.stepped(key, first)) for _ in range(_TURNS)]
    before, after = (_together(of_one) for of_one in zip(*turns, strict=True))
    return before, after if other.cuts else _cut_like(before, after)


def steps_per_turn(phase: Phase) -> int:
    """Steps that both models make in their turns, together."""
    return 2 * _TURNS * _steps(phase)


def _steps(phase: Phase) -> int:
    return _WARM + (_PREFILLS if phase == "prefill" else _DECODE_STEPS)


def _cut_like(before: Stepped, whole: Stepped) -> Stepped:
    """Steps that could not be cut, as if what lies beside the layers (the head's product, mostly) took as long as in
    those `before`: compiling makes that no faster."""
    beside_s = min(undisturbed(before.beside_s).quartile_s, min(whole.layers_s))
    return Stepped(tuple(step_s - beside_s for step_s in whole.layers_s), (beside_s,) * len(whole.layers_s))


def _together(turns: Sequence[Stepped]) -> Stepped:
    return Stepped(
        layers_s=tuple(seconds for turn in turns for seconds in turn.layers_s),
        beside_s=tuple(seconds for turn in turns for seconds in turn.beside_s),
    )


# Loading a form takes as long as so many forms' steps.
_LOADING = 4
# More than this share of the layers tells nothing more.
_MOST_SHARE = 0.5
# Periods of a short model at least, and where that takes too long.
_PERIODS = (4, 2)
# A short model may take this share of the memory that is free.
_MEMORY_SHARE = 0.3
_FLOAT32_BYTES = 4


def try_variants(
    subject: Subject,
    config: Any,
    ceilings: Ceilings,
    latencies_s: Mapping[CellKey, float],
    budget_s: float,
    compiling: bool = False,
    on_failure: Callable[[str, Exception], object] = lambda form, error: None,
    known: Collection[tuple[CellKey, str]] = (),
) -> Iterator[Trial]:
    """Steps in every form that this machine has, at the corners of the grid, as far as the budget goes.

    `latencies_s` are the times of the cells that were measured: they tell how many layers can be afforded. A form that
    does not load or run here is left out, after a call of `on_failure` where that is no wrong request but an error; so
    is one whose preparing would not fit into what is left. With
    `compiling` the budget has room for torch.compile on a CPU, too: a compiler that takes longer than is expected of it
    takes that from the forms behind it, and from no others' time unless it outlasts the budget. `known` trials, by cell
    and form, are not repeated.
    """
    forms, engine = variants_of(subject, compiling), next(iter(subject.engines))
    pattern = pattern_of(subject.loaded.module, config.get_text_config())
    if pattern is None or not subject.engines[engine].hookable or subject.loaded.offloaded or not forms:
        return
    deadline_s = subject.machine.now_s() + budget_s
    stepping_s = budget_s - sum(form.preparing_s for form in forms)
    corners = _corners(latencies_s, engine)
    keys, layers = _afforded(corners, latencies_s, pattern, stepping_s / (_LOADING + len(forms)))
    layers = min(layers, _fitting(subject, pattern))
    if all((key, form.name) in known for form in forms for key in form.corners(keys)):
        return
    short = shortened(config, layers)
    held = load(replace(subject.request, weights="random"), short)
    plain = ShortModelBench(Variant("as it is", engine=engine), held, subject, ceilings)
    for form in forms:
        if subject.machine.now_s() + form.preparing_s > deadline_s:
            continue
        if all((key, form.name) in known for key in form.corners(keys)):
            continue
        with tolerate_errors(partial(_left_out, subject, form, on_failure)):
            loaded = held if form.holds_alike else _loaded(form, subject.request, short)
            other = ShortModelBench(replace(form, engine=form.engine or engine), loaded, subject, ceilings)
            for key in form.corners(keys):
                if (key, form.name) in known:
                    continue
                if subject.machine.now_s() + _cost_s(key, latencies_s) * layers / pattern.layers > deadline_s:
                    break
                first = pattern.cold(layers) if other.cuts else pattern.first
                before, after = interleaved_steps(plain, other, key, first)
                yield Trial(key, form.name, layers - first, pattern.layers - first, before, after)


def _left_out(
    subject: Subject, form: Variant, on_failure: Callable[[str, Exception], object], error: Exception
) -> None:
    subject.machine.recover(form.name)
    if not isinstance(error, (RoofscopeError, ImportError, NotImplementedError)):
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
    return steps_per_turn(key.phase) * latencies_s[key]


def _afforded(
    corners: Sequence[CellKey], latencies_s: Mapping[CellKey, float], pattern: Pattern, budget_s: float
) -> tuple[list[CellKey], int]:
    """The corners that a form's share of the budget is enough for, and how many layers it is enough for then."""
    keys: list[CellKey] = []
    total_s = 0.0
    for periods in _PERIODS:
        for key in [] if keys else corners:
            more_s = total_s + _cost_s(key, latencies_s)
            if more_s * pattern.long(0, periods) / pattern.layers <= budget_s:
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


def _loaded(form: Variant, request: ModelRequest, config: Any) -> LoadedModel:
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
