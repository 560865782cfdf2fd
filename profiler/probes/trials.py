"""Changes that were tried: the same architecture with fewer layers, held and stepped in another form.

A trial steps a short model as it is and in the other form in turn, at a cell's own shape. Each step is cut at the entry
and the exit of the layers that repeat, so that what a layer takes and what lies beside the layers are known for both.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib import util
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from profiler.diagnosis.facts import COMPILED, PADDING_MASK, UNQUANTISED, Stepped, Trial
from profiler.engines.registry import ENGINES
from profiler.errors import ModelError, RequestError
from profiler.grid import CellKey
from profiler.loading.load import load
from profiler.loading.quantise import TORCHAO, Quant
from profiler.loading.request import DTYPES, LoadedModel, ModelRequest, resolve_dtype
from profiler.machine.clock import no_gc, undisturbed
from profiler.machine.device import compute_capability
from profiler.machine.machine import Machine
from profiler.probes.subject import Subject
from profiler.roofs.values import Ceilings
from profiler.timing.visit import seeded_prompts
from profiler.work.footprint import model_storage_bytes
from profiler.work.walk import collapse_numbers

_DECODE_STEPS = 5
_PREFILLS = 1
_TURNS = 2
"""How often the model as it is and the other form are stepped in turn."""
_WARM = 1
# Loading a form takes as long as so many forms' steps.
_LOADING = 4
# More than this share of the layers tells nothing more.
_MOST_SHARE = 0.5
# A short model may take this share of the memory that is free.
_MEMORY_SHARE = 0.3
_FLOAT32_BYTES = 4
# Kept for torch.compile of a budget that has room for it: g++ takes ten seconds for the kernels of three layers of
# SmolLM2-135M on two cores of a Xeon. What a cache on the disk has of an earlier run takes two or three.
_COMPILING_S = 25.0


@dataclass(frozen=True)
class Form:
    """One way to hold and step a model; what is None stays as the run has it."""

    name: str
    """What a reader would change, as a sentence names it."""
    dtype: torch.dtype | None = None
    quant: Quant | None = None
    experts: str | None = None
    kernel: SDPBackend | None = None
    """What `scaled_dot_product_attention` may call."""
    masked: bool = False
    """Whether a padding mask is handed over, as for prompts of unequal lengths."""
    engine: str | None = None
    threads: int | None = None

    @property
    def holds_alike(self) -> bool:
        """Whether the model is held as it is, and only stepped in another way."""
        return (self.dtype, self.quant, self.experts) == (None, None, None)


def forms_of(subject: Subject) -> list[Form]:
    """Every other form that this machine has, the most promising first; what is left out for time stands last."""
    config = subject.loaded.config.get_text_config()
    dtypes, quants = _dtypes(subject), _quants(subject)
    # Whoever quantised has a reason, mostly memory: another format comes before none at all.
    found = [*dtypes[:1], *quants[:3]] if subject.request.quant == "none" else [*quants[:3], *dtypes[:1]]
    if next(iter(subject.engines)) == "eager":
        found.append(Form("a static cache", engine="static"))
    others = [name for name in ("grouped_mm", "batched_mm", "eager") if name != subject.experts]
    found += [Form(f"{name} experts", experts=name) for name in others if subject.experts]
    kernels = _kernels(subject) if getattr(config, "_attn_implementation", None) == "sdpa" else {}
    found += [Form(f"{name} attention", kernel=kernel) for name, kernel in kernels.items()]
    found.append(Form(PADDING_MASK, masked=True))
    found += [
        Form(f"{PADDING_MASK} and {name} attention", kernel=kernel, masked=True)
        for name, kernel in kernels.items()
        if kernel is not SDPBackend.FLASH_ATTENTION or not subject.machine.is_cuda  # which takes no mask there
    ]
    threads = torch.get_num_threads()
    if not subject.machine.is_cuda and threads > 1:
        found.append(Form(f"{threads // 2} of {threads} threads", threads=threads // 2))
    return [*found, *dtypes[1:], *quants[3:]]


def _dtypes(subject: Subject) -> list[Form]:
    request = subject.request
    dense = "" if request.quant == "none" else UNQUANTISED
    plain = [Form(dense + name, dtype, "none") for name, dtype in DTYPES.items() if _multiplies(dtype, subject.machine)]
    found = [form for form in plain if (form.dtype, form.quant) != (request.dtype, request.quant)]
    return sorted(found, key=lambda form: form.dtype is not torch.bfloat16)


def _quants(subject: Subject) -> list[Form]:
    request = subject.request
    quants: list[Quant] = ["int4wo", "nf4", "int8wo", "int8"]
    return [Form(quant, _dtype_of(quant, request), quant) for quant in quants if _has(quant) and quant != request.quant]


def _kernels(subject: Subject) -> dict[str, SDPBackend]:
    """Attention kernels behind `scaled_dot_product_attention` that this device has, but for those of the run."""
    names = {"math": SDPBackend.MATH, "flash": SDPBackend.FLASH_ATTENTION}
    if subject.machine.is_cuda:
        names |= {"memory-efficient": SDPBackend.EFFICIENT_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    ran = {path.kernel for path in subject.paths.values()}
    return {name: kernel for name, kernel in names.items() if name not in ran}


def _multiplies(dtype: torch.dtype, machine: Machine) -> bool:
    """Whether a dtype is worth a trial on a device: every one on a CPU, 16 bits that it has units for on CUDA."""
    if not machine.is_cuda:
        return True
    return dtype is torch.float16 or (dtype is torch.bfloat16 and compute_capability(machine.device) >= (8, 0))


def _has(quant: Quant) -> bool:
    return util.find_spec("torchao" if quant in TORCHAO else "bitsandbytes") is not None


def _dtype_of(quant: Quant, request: ModelRequest) -> torch.dtype:
    return resolve_dtype("auto", quant, request.device, None) if request.dtype is torch.float32 else request.dtype


@dataclass(frozen=True)
class Pattern:
    """How a model's layers repeat: `first` of their own kind, then the same `period` again and again."""

    layers: int
    first: int
    period: int

    @property
    def short(self) -> int:
        """The least number of layers that holds each kind."""
        return min(self.layers, self.first + self.period)

    def long(self, layers: float) -> int:
        """The nearest whole number of periods below so many layers, one more than `short` at least."""
        periods = max(2, int((layers - self.first) / self.period))
        return min(self.layers, self.first + periods * self.period)


def pattern_of(model: nn.Module, config: Any) -> Pattern | None:
    """The pattern of a model's layers by the shapes of their weights and their type; None where none is found."""
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
    """The list of decoder layers: the first of as many modules as the config has layers."""
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
    return next((several for several in lists if len(several) == config.num_hidden_layers), None)


def shortened(config: Any, layers: int) -> Any:
    """A copy of a config with its first `layers` layers."""
    short = copy.deepcopy(config)
    part = short.get_text_config()
    count = part.num_hidden_layers
    for name, value in list(vars(part).items()):
        if isinstance(value, list) and len(value) == count:
            setattr(part, name, value[:layers])
    part.num_hidden_layers = layers
    return short


def try_forms(
    subject: Subject,
    config: Any,
    ceilings: Ceilings,
    latencies_s: Mapping[CellKey, float],
    budget_s: float,
    compiling: bool = False,
) -> Iterator[Trial]:
    """Steps in every form that this machine has, at the corners of the grid, as far as the budget goes.

    `latencies_s` are the times of the cells that were measured: they tell how many layers can be afforded. A form that
    does not load or run here is left out. With `compiling` the budget has room for torch.compile on a CPU, too.
    """
    forms, engine = forms_of(subject), next(iter(subject.engines))
    pattern = pattern_of(subject.loaded.module, config.get_text_config())
    if pattern is None or "decode" not in subject.engines[engine].eager_phases or subject.loaded.offloaded or not forms:
        return
    compiling = compiling and engine == "eager" and "compile" not in subject.engines and not subject.machine.is_cuda
    budget_s -= _COMPILING_S if compiling else 0.0
    deadline_s = subject.machine.now_s() + budget_s
    corners = _corners(latencies_s, engine)
    keys, layers = _afforded(corners, latencies_s, pattern, budget_s / (_LOADING + len(forms)))
    layers = min(layers, _fitting(subject, pattern))
    if not keys:
        return
    short = shortened(config, layers)
    held = load(replace(subject.request, weights="random"), short)
    plain = _Bench(Form("as it is", engine=engine), held, subject, ceilings)
    if compiling and (decodes := [key for key in keys if key.phase == "decode"]):
        with contextlib.suppress(RuntimeError):
            compiled = _Bench(Form(COMPILED, engine="compile"), held, subject, ceilings)
            before, after = _in_turn(plain, compiled, decodes[0], pattern.first)
            inside, of_inside = layers - pattern.first, pattern.layers - pattern.first
            yield Trial(decodes[0], COMPILED, inside, of_inside, before, _cut_like(before, after))
        deadline_s = subject.machine.now_s() + budget_s
    for form in forms:
        if subject.machine.now_s() > deadline_s:
            return
        try:
            loaded = held if form.holds_alike else _loaded(form, subject.request, short)
            other = _Bench(replace(form, engine=form.engine or engine), loaded, subject, ceilings)
            for key in keys:
                if subject.machine.now_s() > deadline_s:
                    break
                before, after = _in_turn(plain, other, key, pattern.first)
                inside, of_inside = layers - pattern.first, pattern.layers - pattern.first
                yield Trial(key, form.name, inside, of_inside, before, after)
        except (RequestError, ModelError, RuntimeError, TypeError, ValueError, ImportError):
            subject.machine.release()


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
    steps = _PREFILLS if key.phase == "prefill" else _DECODE_STEPS
    return 2 * _TURNS * (steps + _WARM) * latencies_s[key]


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


class _Bench:
    """A short model in one form, and how it is stepped.

    A few layers would stay in a cache from step to step where the whole model's weights come from memory: then as many
    copies as no cache holds are stepped in turn.
    """

    def __init__(self, form: Form, loaded: LoadedModel, subject: Subject, ceilings: Ceilings) -> None:
        self._form = form
        self._cut = form.engine != "compile"
        """Whether a step can be cut at its layers: a mark inside of compiled code would break it into pieces."""
        self._machine = subject.machine
        self._vocab_size = subject.vocab_size
        count = _copies(loaded, stack_of(subject.loaded.module, subject.loaded.config.get_text_config()), ceilings)
        self._modules = [loaded.module, *(copy.deepcopy(loaded.module) for _ in range(count - 1))]
        self._stacks = [stack_of(module, loaded.config.get_text_config()) for module in self._modules]
        self._engines = [ENGINES[form.engine or "eager"](module, subject.machine) for module in self._modules]

    def stepped(self, key: CellKey, first: int) -> Stepped:
        """Steps of a cell, each cut where the layer `first` begins and the last one ends; those that cannot be cut are
        given as layers and nothing beside."""
        clock, cell, decode = self._machine.clock, key.cell, key.phase == "decode"
        marks: list[Any] = []

        def mark(*_: object) -> None:
            marks.append(clock.mark())

        with torch.inference_mode(), no_gc(), _threads(self._form.threads), ExitStack() as hooks:
            if self._form.kernel is not None:
                hooks.enter_context(sdpa_kernel(self._form.kernel))
            ids = seeded_prompts(cell, self._vocab_size).to(self._machine.device)
            slots = key.context_len + _WARM + _DECODE_STEPS + 1
            for engine in self._engines:
                engine.prepare(cell.batch_size, slots)
            states = [engine.fill(cell.batch_size, key.context_len, slots) for engine in self._engines if decode]
            for module, stack in zip(self._modules, self._stacks, strict=True):
                assert stack is not None, "the whole model has one"
                if self._form.masked:
                    hook = _padding(itertools.count(key.context_len) if decode else itertools.repeat(0))
                    hooks.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
                if self._cut:
                    hooks.callback(stack[first].register_forward_pre_hook(mark).remove)
                    hooks.callback(stack[-1].register_forward_hook(mark).remove)
            for step in range(_WARM + (_DECODE_STEPS if decode else _PREFILLS)):
                turn = step % len(self._engines)
                clock.synchronize()
                mark()
                if decode:
                    states[turn] = self._engines[turn].decode(states[turn])
                else:
                    self._engines[turn].prefill(ids, cell.prompt_len)
                mark()
            clock.synchronize()
        pieces = clock.seconds(marks)
        if not self._cut:
            whole = tuple(pieces[2 * _WARM :: 2])
            return Stepped(whole, (0.0,) * len(whole))
        steps = range(4 * _WARM, len(marks), 4)
        return Stepped(
            layers_s=tuple(pieces[start + 1] for start in steps),
            beside_s=tuple(pieces[start] + pieces[start + 2] for start in steps),
        )


def _copies(loaded: LoadedModel, whole: nn.ModuleList | None, ceilings: Ceilings) -> int:
    """How many copies of a short model leave the caches as the model with all its layers would: no more than are
    stepped."""
    short = stack_of(loaded.module, loaded.config.get_text_config())
    assert short is not None
    assert whole is not None
    nbytes, of_layers = model_storage_bytes(loaded.module), model_storage_bytes(short)
    if ceilings.cache_resident(nbytes + of_layers * (len(whole) / len(short) - 1)):
        return 1
    return min(_WARM + _DECODE_STEPS, math.ceil(ceilings.past_caches_bytes / nbytes))


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


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Within, torch runs on so many threads."""
    with ExitStack() as after:
        if count is not None:
            after.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(count)
        yield


def _cut_like(before: Stepped, whole: Stepped) -> Stepped:
    """Steps that could not be cut, as if what lies beside the layers (the head's product, mostly) took as long as in
    those `before`: compiling makes that no faster."""
    beside_s = min(undisturbed(before.beside_s).median_s, min(whole.layers_s))
    return Stepped(tuple(step_s - beside_s for step_s in whole.layers_s), (beside_s,) * len(whole.layers_s))


def _in_turn(plain: _Bench, other: _Bench, key: CellKey, first: int) -> tuple[Stepped, Stepped]:
    """Both models stepped in turn, so that a machine that changes changes for both."""
    turns = [(plain.stepped(key, first), other.stepped(key, first)) for _ in range(_TURNS)]
    return _together([before for before, _ in turns]), _together([after for _, after in turns])


def _together(turns: Sequence[Stepped]) -> Stepped:
    return Stepped(
        layers_s=tuple(seconds for turn in turns for seconds in turn.layers_s),
        beside_s=tuple(seconds for turn in turns for seconds in turn.beside_s),
    )
