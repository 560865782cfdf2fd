"""Try a variant: steps with and without the change, in interleaved pairs, of the loaded model or of a short one."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.nn.attention import sdpa_kernel
from transformers.integrations import sdpa_attention

from profiler.counting.walk import collapse_numbers
from profiler.device.clock import no_gc
from profiler.engines.base import Engine
from profiler.engines.registry import ENGINES
from profiler.errors import RoofscopeError, tolerate_errors
from profiler.facts.measurements import StepSamples, Trial
from profiler.facts.roofs import Ceilings
from profiler.grid.cells import CellKey, Phase
from profiler.loading.load import load
from profiler.loading.request import LoadedModel, ModelRequest
from profiler.measure.subject import Subject
from profiler.measure.sweep import refuse_impossible_times
from profiler.measure.variants import Variant, variants_of
from profiler.patching import patched
from profiler.quant.storage import model_storage_bytes
from profiler.roofs.fixed_work import torch_threads
from profiler.stats import undisturbed

_DECODE_STEPS = 5
_PREFILLS = 1
_WARM = 1
_TURNS = 2
"""Number of turns in which the model is stepped without and with the change."""


@dataclass(frozen=True)
class _Copy:
    """One copy of a short model, with the engine that steps it."""

    module: Any
    stack: nn.ModuleList | None
    """Its layers; None for a model without a list of them, whose steps are not cut."""
    engine: Engine


class Bench:
    """Steps a model in one variant: the loaded one, or a short one of a few layers.

    A few layers would stay in a cache from step to step, which the whole model's do not. Several copies are therefore
    stepped in turn, as many as touch what the whole model touches in a step.
    """

    def __init__(self, variant: Variant, loaded: LoadedModel, subject: Subject, ceilings: Ceilings) -> None:
        self._variant = variant
        self.cuts = variant.hookable and loaded is not subject.loaded
        """Whether a step is cut at its layers. The whole model's need no cut, and compiled or captured ones allow none:
        a mark inside compiled code would split that code."""
        self.on_gpu = subject.machine.is_cuda
        self._machine = subject.machine
        self.loaded, self._subject = loaded, subject
        self._past_caches_bytes = ceilings.past_caches_bytes
        self._made: list[_Copy] = []

    def _copies(self, key: CellKey) -> list[_Copy]:
        """As many copies as a cell's step needs; the first is the loaded model itself."""
        is_whole = self.loaded is self._subject.loaded
        count = 1 if is_whole else copies_of(self.loaded, self._subject, key, self._past_caches_bytes)
        while len(self._made) < count:
            module = copy.deepcopy(self.loaded.module) if self._made else self.loaded.module
            engine = ENGINES[self._variant.engine or "eager"](module, self._machine)
            self._made.append(_Copy(module, stack_of(module, self.loaded.config.get_text_config()), engine))
        return self._made[:count]

    def stepped(self, key: CellKey, first: int) -> StepSamples:
        """Return steps of a cell, cut where layer `first` begins and the last one ends; uncut steps count as layers."""
        clock, cell, decode = self._machine.clock, key.cell, key.phase == "decode"
        copies = self._copies(key)
        marks: list[Any] = []

        def mark(*_: object) -> None:
            marks.append(clock.mark())

        with torch.inference_mode(), no_gc(), ExitStack() as hooks:
            if self._variant.threads is not None:
                hooks.enter_context(torch_threads(self._variant.threads))
            if self._variant.kernels:
                hooks.enter_context(sdpa_kernel(list(self._variant.kernels)))
            if self._variant.repeated_heads:
                hooks.enter_context(patched(sdpa_attention, use_gqa_in_sdpa=lambda *_, **__: False))
            ids = self._subject.prompts.of(cell).to(self._machine.device)
            # No step goes beyond the cell's own last token, at which a table of positions may end.
            context = max(1, min(key.context_len, cell.slots - _steps(key.phase))) if decode else key.context_len
            slots = context + _WARM + _DECODE_STEPS + 1
            for each in copies:
                each.engine.prepare(cell.batch_size, slots)
            states = [each.engine.fill(cell.batch_size, context, slots) for each in copies if decode]
            for each in copies:
                if self._variant.masked:
                    hook = _padding(itertools.count(context) if decode else itertools.repeat(0))
                    hooks.callback(each.module.register_forward_pre_hook(hook, with_kwargs=True).remove)
                if self.cuts and each.stack is not None:
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
            return StepSamples(whole, (0.0,) * len(whole))
        steps = range(4 * _WARM, len(marks), 4)
        layers_s = tuple(pieces[start + 1] for start in steps)
        refuse_impossible_times(layers_s)
        return StepSamples(layers_s, beside_s=tuple(pieces[start] + pieces[start + 2] for start in steps))


def copies_of(loaded: LoadedModel, subject: Subject, key: CellKey, past_caches_bytes: int) -> int:
    """Return how many copies of a short model touch as much in a cell's step as the whole model, at most one per step.

    Weights and KV cache count, up to what no cache holds.
    """
    short, whole = (_stack(each.module, each.config) for each in (loaded, subject.loaded))
    times = len(whole) / len(short)
    weight_bytes = model_storage_bytes(loaded.module)
    whole_bytes = weight_bytes + (times - 1) * model_storage_bytes(short)
    cache_bytes = subject.touched_cache_bytes(key) * loaded.request.dtype.itemsize / subject.request.dtype.itemsize
    touched_bytes = min(whole_bytes + cache_bytes, past_caches_bytes)
    count: int = math.ceil(touched_bytes / (weight_bytes + cache_bytes / times))
    return min(_steps(key.phase), count)


def _stack(module: nn.Module, config: Any) -> nn.ModuleList:
    stack = stack_of(module, config.get_text_config())
    assert stack is not None, "no trial without the pattern of its layers"
    return stack


def _padding(contexts: Iterator[int]) -> Callable[..., tuple[Any, dict[str, Any]]]:
    """A forward hook that passes the mask of a batch whose first sequence is one token shorter than the others.

    `contexts` are the numbers of cached tokens before each forward. The first cached token is masked, or the last new
    one if there are none, so that every query sees some key.
    """

    def hook(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        context, ids = next(contexts), named["input_ids"]
        mask = ids.new_ones(ids.shape[0], context + ids.shape[1])
        mask[0, 0 if context else -1] = 0
        return args, named | {"attention_mask": mask}

    return hook


def interleaved_steps(plain: Bench, other: Bench, key: CellKey, first: int) -> tuple[StepSamples, StepSamples]:
    """Return the steps of both models, run in turn so that a change in the machine's speed affects both.

    On a GPU a turn goes first that is not timed: a library may build a plan at the first use of each KV length.
    """
    if plain.on_gpu:
        plain.stepped(key, first)
        other.stepped(key, first)
    turns = [(plain.stepped(key, first), other.stepped(key, first)) for _ in range(_TURNS)]
    before, after = (_together(steps) for steps in zip(*turns, strict=True))
    if plain.cuts and not other.cuts:
        # Cut as if the time outside the layers (mostly the head's product, which compiling makes no faster) were that
        # of the steps before.
        beside_s = min(undisturbed(before.beside_s).quartile_s, min(after.layers_s))
        layers_s = tuple(step_s - beside_s for step_s in after.layers_s)
        after = StepSamples(layers_s, (beside_s,) * len(layers_s))
    return before, after


def _steps(phase: Phase) -> int:
    return _WARM + (_PREFILLS if phase == "prefill" else _DECODE_STEPS)


def _together(turns: Sequence[StepSamples]) -> StepSamples:
    return StepSamples(
        layers_s=tuple(seconds for turn in turns for seconds in turn.layers_s),
        beside_s=tuple(seconds for turn in turns for seconds in turn.beside_s),
    )


# Loading takes as long as the steps of this many variants.
_LOADING_SHARES = 4
# A larger share of the layers adds no information.
_MOST_SHARE = 0.5
# Least number of periods in a short model, and the number if that takes too long.
_PERIODS = (4, 2)
# A short model may take this share of the free memory.
_MEMORY_SHARE = 0.3
_FLOAT32_BYTES = 4
_AS_IT_IS = Variant("as it is")
_NO_KERNEL = "No available kernel"
"""torch's words where the chosen kernel of attention takes no such tensors (aten/src/ATen/native/transformers)."""


def try_variants(
    subject: Subject,
    config: Any,
    ceilings: Ceilings,
    latencies_s: Mapping[CellKey, float],
    budget_s: float,
    compiling: bool = False,
    on_failure: Callable[[str, Exception], object] = lambda variant, error: None,
    known: Collection[tuple[CellKey, str]] = (),
    savings_s: Mapping[str, float] = MappingProxyType({}),
) -> Iterator[Trial]:
    """Yield trials of every variant that this machine has, at the corners of the grid, within the budget.

    `latencies_s` are the measured cells, from which the affordable number of layers follows. `known` trials, by cell
    and variant, are not repeated. `savings_s` are computed savings by variant: what promises most per second of trial
    comes first, and what is compiled last.

    Variants that keep the weights run on the loaded model itself where a GPU has them: its whole steps cost little, and
    nothing is extrapolated. The others run on a few layers.

    A variant that does not load or run here is left out, after a call of `on_failure` if that is an error and not an
    unsupported request. So is a variant whose preparation does not fit into the time left.

    With `compiling`, the budget also has time for torch.compile. A compiler that takes longer than expected takes that
    time from the variants after it, and from other parts only if it outlasts the budget.
    """
    variants, engine = variants_of(subject, compiling), next(iter(subject.engines))
    if not subject.engines[engine].hookable or subject.loaded.offloaded or not variants:
        return
    deadline_s = subject.machine.now_s() + budget_s
    corners = _corners(latencies_s, engine)
    if not corners:
        return
    pattern = pattern_of(subject.loaded.module, config.get_text_config())
    short_variants = [variant for variant in variants if not _on_loaded(variant, subject)]
    short_keys: list[CellKey] = []
    layers, of_layers = 0, 1  # without a pattern the whole model counts as one layer
    if pattern is not None:
        stepping_s = budget_s - sum(variant.preparing_s for variant in short_variants)
        share_s = stepping_s / (_LOADING_SHARES + len(short_variants))
        short_keys, layers = _affordable(corners, latencies_s, pattern, share_s)
        layers, of_layers = min(layers, _fitting_layers(subject, pattern)), pattern.layers - pattern.first

    def bench(variant: Variant, loaded: LoadedModel) -> Bench:
        return Bench(replace(variant, engine=variant.engine or engine), loaded, subject, ceilings)

    whole = bench(_AS_IT_IS, subject.loaded)

    @cache
    def short() -> Bench:
        return bench(_AS_IT_IS, _load_variant(_AS_IT_IS, subject.request, shortened(config, layers)))

    def sides(variant: Variant) -> tuple[Bench, Bench]:
        """The loaded model as it is and in a variant, or a short one, which is loaded when it is first needed."""
        if _on_loaded(variant, subject):
            return whole, bench(variant, subject.loaded)
        if variant.holds_alike:
            return short(), bench(variant, short().loaded)
        return short(), bench(variant, _load_variant(variant, subject.request, shortened(config, layers)))

    def cost_s(variant: Variant, key: CellKey) -> float:
        share = 1.0 if _on_loaded(variant, subject) or pattern is None else layers / pattern.layers
        return _cost_s(key, latencies_s) * share

    def tried(variant: Variant, keys: Sequence[CellKey]) -> Iterator[Trial]:
        untried = [key for key in variant.corners(keys) if (key, variant.name) not in known]
        if not untried or subject.machine.now_s() + variant.preparing_s > deadline_s:
            return

        def failed(error: Exception) -> None:
            subject.machine.recover(variant.name)
            unavailable = isinstance(error, (RoofscopeError, ImportError, NotImplementedError))
            if not unavailable and _NO_KERNEL not in str(error):
                on_failure(variant.name, error)

        with tolerate_errors(failed):
            on_loaded, (plain, other) = _on_loaded(variant, subject), sides(variant)
            first = 0 if on_loaded or pattern is None else pattern.cold(layers) if other.cuts else pattern.first
            for key in untried:
                if subject.machine.now_s() + cost_s(variant, key) > deadline_s:
                    break
                before, after = interleaved_steps(plain, other, key, first)
                yield Trial(key, variant.name, of_layers if on_loaded else layers - first, of_layers, before, after)
        if variant.compiled:
            torch._dynamo.reset()  # it holds the memory of its graphs

    def worth(variant: Variant) -> float:
        return savings_s.get(variant.name, 0.0) / (variant.preparing_s + cost_s(variant, corners[0]))

    affordable = variants if short_keys else [variant for variant in variants if _on_loaded(variant, subject)]
    # A compiler may take longer than expected, and nothing interrupts it.
    ranked = sorted(affordable, key=lambda variant: (variant.compiled, -worth(variant)))
    for variant in ranked:
        yield from tried(variant, corners[:1] if _on_loaded(variant, subject) else short_keys)
    for variant in ranked:
        if _on_loaded(variant, subject) and variant.hookable:
            yield from tried(variant, corners[1:])


def _on_loaded(variant: Variant, subject: Subject) -> bool:
    """Whether a variant is tried on the loaded model: on a GPU, if it keeps the weights.

    A compiled step of a few layers takes as long as its host: 1.4 ms for four layers of Mistral-7B on an H100, whose
    kernels take 0.9. So it says nothing about 32 layers, which take 6.7 ms.
    """
    return subject.machine.is_cuda and variant.holds_alike


def _corners(latencies_s: Mapping[CellKey, float], engine: str) -> list[CellKey]:
    """Steps at the smallest and the largest batch, with the shortest and the longest prompt.

    The decode step with which the answer begins comes first, then the other decode steps, then the prefills, the
    cheapest first.
    """
    keys = [key for key in latencies_s if key.cell.engine == engine]
    if not keys:
        return []
    batches, depths = {key.cell.batch_size for key in keys}, {key.cell.depth for key in keys}
    corners = {(batch, depth) for batch in (min(batches), max(batches)) for depth in (min(depths), max(depths))}
    corner_keys = [key for key in keys if (key.cell.batch_size, key.cell.depth) in corners]
    decodes = [key for key in corner_keys if key.phase == "decode"]
    first = min(decodes, key=lambda key: (key.cell.batch_size, key.cell.depth), default=None)
    return sorted(corner_keys, key=lambda key: (key != first, key.phase == "prefill", _cost_s(key, latencies_s)))


def _cost_s(key: CellKey, latencies_s: Mapping[CellKey, float]) -> float:
    """Seconds of a trial with all layers."""
    return 2 * _TURNS * _steps(key.phase) * latencies_s[key]


def _affordable(
    corners: Sequence[CellKey], latencies_s: Mapping[CellKey, float], pattern: Pattern, budget_s: float
) -> tuple[list[CellKey], int]:
    """The corners that fit into a variant's share of the budget, and the number of layers that then fit.

    Fewer layers come before fewer decode steps, and a decode step of a larger batch comes before a cheap prefill: what
    a change saves at one batch says little about another.
    """

    def fitting(periods: int) -> list[CellKey]:
        share = pattern.long(0, periods) / pattern.layers
        spent_s = itertools.accumulate(_cost_s(key, latencies_s) * share for key in corners)
        return [key for key, until_s in zip(corners, spent_s, strict=True) if until_s <= budget_s]

    def worth(keys: Sequence[CellKey]) -> tuple[int, bool]:
        return sum(key.phase == "decode" for key in keys), bool(keys)

    keys = max((fitting(periods) for periods in _PERIODS), key=worth)
    total_s = sum(_cost_s(key, latencies_s) for key in keys)
    return keys, pattern.long(min(_MOST_SHARE, budget_s / total_s) * pattern.layers) if keys else 0


def _fitting_layers(subject: Subject, pattern: Pattern) -> int:
    """Number of layers for which memory has room twice in float32."""
    stack = _stack(subject.loaded.module, subject.loaded.config)
    layer_bytes = sum(part.numel() for part in stack.parameters()) * _FLOAT32_BYTES / len(stack)
    other_bytes = model_storage_bytes(subject.loaded.module) - model_storage_bytes(stack)
    room_bytes = _MEMORY_SHARE * subject.machine.available_bytes() - 2 * other_bytes
    return pattern.long(room_bytes / (2 * max(layer_bytes, 1.0)))


def _load_variant(variant: Variant, request: ModelRequest, config: Any) -> LoadedModel:
    """The short model in a variant, with random weights."""
    config, dtype, quant = copy.deepcopy(config), variant.dtype or request.dtype, variant.quant or request.quant
    if variant.experts:
        config.get_text_config()._experts_implementation = variant.experts
    return load(replace(request, weights="random", dtype=dtype, quant=quant), config)


_COLD_PERIODS = 2


@dataclass(frozen=True)
class Pattern:
    """How a model's layers repeat: `first` layers of other kinds, then the same `period` again and again."""

    layers: int
    first: int
    period: int

    @property
    def short(self) -> int:
        """The smallest number of layers that contains each kind."""
        return min(self.layers, self.first + self.period)

    def long(self, layers: float, periods: int = 2) -> int:
        """Return the number of layers in the whole periods that fit into `layers`, with at least `periods`."""
        whole = max(periods, int((layers - self.first) / self.period))
        return min(self.layers, self.first + whole * self.period)

    def cold(self, layers: int) -> int:
        """Return how many of the first `layers` run colder than the later ones.

        The head's product evicts everything else from the caches, including Python's own data. In bfloat16 the first
        two layers of SmolLM2-135M then take 1.25 and 1.20 ms, and every later one 1.04 (two cores of a Xeon).
        """
        periods = (layers - self.first) // self.period
        return self.first + min(_COLD_PERIODS, periods // 2) * self.period


def pattern_of(model: nn.Module, config: Any) -> Pattern | None:
    """Return the pattern of a model's layers, by their types and the shapes of their weights; None if there is none."""
    layers = stack_of(model, config)
    if layers is None:
        return None
    types = getattr(config, "layer_types", None) or [""] * len(layers)
    kinds = [
        (kind, *((collapse_numbers(name), tuple(part.shape)) for name, part in layer.named_parameters()))
        for layer, kind in zip(layers, types, strict=True)
    ]
    count = len(kinds)
    for total in range(1, count):
        for period in range(1, total + 1):
            first = total - period
            if all(kinds[i] == kinds[i + period] for i in range(first, count - period)):
                return Pattern(count, first, period)
    return None


def stack_of(model: nn.Module, config: Any) -> nn.ModuleList | None:
    """Return the list of decoder layers: the first with as many modules as the config has layers."""
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
    return next((modules for modules in lists if len(modules) == config.num_hidden_layers), None)


def shortened(config: Any, layers: int) -> Any:
    """Return a copy of a config with its first `layers` layers."""
    short = copy.deepcopy(config)
    part = short.get_text_config()
    count = part.num_hidden_layers
    for name, value in list(vars(part).items()):
        if isinstance(value, list) and len(value) == count:
            setattr(part, name, value[:layers])
    part.num_hidden_layers = layers
    return short
