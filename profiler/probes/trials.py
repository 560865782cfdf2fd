"""Changes that were tried: the same architecture with fewer layers, held and stepped in another form.

A trial steps a short model as it is and in the other form in turn, at a cell's own shape, once with more layers and
once with fewer, so that what a layer takes and what lies beside the layers are known for both.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib import util
from typing import Any

import torch
from torch import nn

from profiler.diagnosis.facts import Stepped, Trial
from profiler.engines.registry import ENGINES
from profiler.errors import ModelError, RequestError
from profiler.grid import Cell, CellKey
from profiler.loading.load import load
from profiler.loading.quantise import TORCHAO, Quant
from profiler.loading.request import DTYPES, LoadedModel, ModelRequest, resolve_dtype
from profiler.machine.clock import no_gc
from profiler.machine.device import compute_capability
from profiler.machine.machine import Machine
from profiler.probes.subject import Subject
from profiler.timing.visit import seeded_prompts
from profiler.work.footprint import model_storage_bytes
from profiler.work.walk import collapse_numbers

_DECODE_STEPS = 7
_PREFILLS = 2
_WARM = 1
# Both models are stepped with more and with fewer layers.
_SIDES = 2
# A short model may take this share of the memory that is free.
_MEMORY_SHARE = 0.3
_FLOAT32_BYTES = 4


@dataclass(frozen=True)
class Form:
    """One way to hold and step a model; what is None stays as the run has it."""

    name: str
    """What a reader would change, as a sentence names it."""
    dtype: torch.dtype | None = None
    quant: Quant | None = None
    attn: str | None = None
    experts: str | None = None
    engine: str | None = None
    threads: int | None = None


def forms_of(subject: Subject) -> list[Form]:
    """Every other form that this machine has, the most promising first."""
    request, machine = subject.request, subject.machine
    plain = [Form(name, dtype, "none") for name, dtype in DTYPES.items() if _multiplies(dtype, machine)]
    quants: list[Quant] = ["int8wo", "nf4", "int4wo", "int8"]
    packed = [Form(quant, _dtype_of(quant, request), quant) for quant in quants if _has(quant)]
    found = [*packed, *sorted(plain, key=lambda form: form.name != "bfloat16")]
    found = [form for form in found if (form.dtype, form.quant) != (request.dtype, request.quant)]
    config = subject.loaded.config.get_text_config()
    engine = next(iter(subject.engines))
    if engine == "eager":
        found.append(Form("a static cache", engine="static"))
        found += [Form("CUDA graphs", engine="graph")] if machine.captures else []
    threads = torch.get_num_threads()
    if not machine.is_cuda and threads > 1:
        found.append(Form(f"{threads // 2} of {threads} threads", threads=threads // 2))
    if getattr(config, "_attn_implementation", None) == "sdpa":
        found.append(Form("eager attention", attn="eager"))
    current = getattr(config, "_experts_implementation", None)
    others = [name for name in ("grouped_mm", "batched_mm", "eager") if name != current]
    found += [Form(f"{name} experts", experts=name) for name in others if current]
    return found


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


def try_forms(subject: Subject, config: Any, latencies_s: Mapping[CellKey, float], budget_s: float) -> Iterator[Trial]:
    """Steps in every form that this machine has, at the corners of the grid, as far as the budget goes.

    `latencies_s` are the times of the cells that were measured: they tell how many layers can be afforded. A form that
    does not load or run here is left out.
    """
    forms, engine = forms_of(subject), next(iter(subject.engines))
    pattern = pattern_of(subject.loaded.module, config.get_text_config())
    if pattern is None or not subject.engines[engine].has_twin or subject.loaded.offloaded or not forms:
        return
    deadline_s = subject.machine.now_s() + budget_s
    cells, layers = _afforded(_corners(latencies_s, engine), latencies_s, pattern, budget_s / len(forms))
    layers = min(layers, _fitting(subject, pattern))
    if not cells:
        return
    short = shortened(config, layers)
    plain = _Bench(Form("as it is", engine=engine), load(replace(subject.request, weights="random"), short), subject)
    for form in forms:
        if subject.machine.now_s() > deadline_s:
            return
        try:
            other = _Bench(replace(form, engine=form.engine or engine), _loaded(form, subject.request, short), subject)
            for cell in cells:
                if subject.machine.now_s() > deadline_s:
                    break
                yield from _trials(form, cell, plain, other, pattern, layers)
        except (RequestError, ModelError, RuntimeError, TypeError, ValueError, ImportError):
            subject.machine.release()


def _corners(latencies_s: Mapping[CellKey, float], engine: str) -> list[Cell]:
    """The smallest and the largest batch at the shortest and the longest prompt, the cheapest first."""
    cells = {key.cell for key in latencies_s if key.cell.engine == engine and key.cell.prompt_len}
    if not cells:
        return []
    batches, prompts = {cell.batch_size for cell in cells}, {cell.prompt_len for cell in cells}
    corners = {(batch, prompt) for batch in (min(batches), max(batches)) for prompt in (min(prompts), max(prompts))}
    found = [cell for cell in cells if (cell.batch_size, cell.prompt_len) in corners]
    return sorted(found, key=lambda cell: cell.batch_size * cell.prompt_len)


def _afforded(
    corners: Sequence[Cell], latencies_s: Mapping[CellKey, float], pattern: Pattern, budget_s: float
) -> tuple[list[Cell], int]:
    """The corners that a form's share of the budget is enough for, and how many layers it is enough for then."""

    def cost_s(cell: Cell) -> float:
        """Seconds of a trial of all layers."""
        steps = {"prefill": _PREFILLS + _WARM, "decode": _DECODE_STEPS + _WARM}
        return _SIDES * sum(steps[key.phase] * latencies_s.get(key, 0.0) for key in cell.keys)

    least = (pattern.short + pattern.long(0)) / pattern.layers
    cells: list[Cell] = []
    total_s = 0.0
    for cell in corners:
        if (total_s + cost_s(cell)) * least <= budget_s:
            cells.append(cell)
            total_s += cost_s(cell)
    return cells, pattern.long(budget_s / total_s * pattern.layers - pattern.short) if cells else 0


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
        attn=form.attn or request.attn,
    )
    config = copy.deepcopy(config)
    if form.experts:
        config.get_text_config()._experts_implementation = form.experts
    return load(wanted, config)


class _Bench:
    """A short model in one form, and how it is stepped."""

    def __init__(self, form: Form, loaded: LoadedModel, subject: Subject) -> None:
        self._form = form
        self._machine = subject.machine
        self._vocab_size = subject.vocab_size
        self._module = loaded.module
        self._layers = stack_of(loaded.module, loaded.config.get_text_config())
        self._engine = ENGINES[form.engine or "eager"](loaded.module, subject.machine)

    def stepped(self, cell: Cell, layers: int) -> Stepped:
        """Seconds of prefills of this cell and of decode steps behind one, with so many layers."""
        machine, clock, engine = self._machine, self._machine.clock, self._engine
        slots = cell.prompt_len + _DECODE_STEPS + _WARM + 1
        ids = seeded_prompts(cell, self._vocab_size).to(machine.device)
        prefills = []
        with torch.inference_mode(), no_gc(), self._cut_to(layers), _threads(self._form.threads):
            engine.prepare(cell.batch_size, slots)
            for _ in range(_WARM + _PREFILLS):
                clock.synchronize()
                marks = [clock.mark()]
                state = engine.prefill(ids, slots)
                marks.append(clock.mark())
                clock.synchronize()
                prefills += clock.seconds(marks)
            marks = [clock.mark()]
            for _ in range(_WARM + _DECODE_STEPS):
                state = engine.decode(state)
                marks.append(clock.mark())
            clock.synchronize()
        return Stepped(layers, tuple(prefills[_WARM:]), tuple(clock.seconds(marks)[_WARM:]))

    @contextmanager
    def _cut_to(self, layers: int) -> Iterator[None]:
        """Within, the model has its first `layers` layers alone."""
        assert self._layers is not None
        whole = dict(self._layers._modules)
        kept = dict(list(whole.items())[:layers])
        self._layers._modules = kept
        config = self._module.config.get_text_config()
        count, config.num_hidden_layers = config.num_hidden_layers, layers
        try:
            yield
        finally:
            self._layers._modules = whole
            config.num_hidden_layers = count


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Within, torch runs on so many threads."""
    with ExitStack() as after:
        if count is not None:
            after.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(count)
        yield


def _trials(form: Form, cell: Cell, plain: _Bench, other: _Bench, pattern: Pattern, layers: int) -> Iterator[Trial]:
    """Both models stepped in turn, with more layers and with fewer."""
    counts = [layers] if layers == pattern.layers else [layers, pattern.short]
    pairs = [(plain.stepped(cell, count), other.stepped(cell, count)) for count in counts]
    yield Trial(
        cell=cell,
        form=form.name,
        of_layers=pattern.layers,
        before=tuple(before for before, _ in pairs),
        after=tuple(after for _, after in pairs),
    )
