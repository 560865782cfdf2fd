"""Overhead, measured on the overhead model: a model of the same layers with almost no width."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import nn

from profiler.counting.walk import walk
from profiler.device.clock import no_gc
from profiler.device.device import processor
from profiler.device.machine import Machine
from profiler.engines.base import Engine
from profiler.engines.registry import ENGINES
from profiler.engines.transformers import EagerEngine
from profiler.errors import OutOfTimeError, tolerate_errors
from profiler.facts.ceilings import AGREE
from profiler.facts.overhead import Calls, OverheadSamples
from profiler.facts.step import Step
from profiler.grid.cells import PHASES, Phase
from profiler.loading.load import load
from profiler.loading.request import LoadedModel
from profiler.measure.captured_calls import ReusedCache, callable_modules, caught_calls
from profiler.measure.kernels import conversions, replay_calls, replayable_linears
from profiler.patching import patched
from profiler.quant.bitsandbytes import dense_copies
from profiler.quant.registry import FORMATS, Quant
from profiler.quant.storage import is_linear, stored
from profiler.roofs.measure import circumstances
from profiler.roofs.sampler import is_known
from profiler.stats import undisturbed
from profiler.units import duration
from profiler.user_cache import cache_path, read_recent, write_cache

OVERHEAD_MODEL_STEPS = 24
_LOOP_STEPS = 12
"""Steps of a loop of the overhead model by itself; few: each new KV length costs an H100 more than two steps."""
_IN_A_ROW = 4
_LOOPS, _LEAST_LOOPS = 5, 2
_PROMPT = 8
_SLOTS = _PROMPT + OVERHEAD_MODEL_STEPS
_REPLAY_S = 0.05
_ALONE_SHARE, _AMONG_SHARE = 0.2, 0.6
"""Shares of an engine's time on a CPU: for the overhead model by itself, and for its steps among the weights."""
_LEAST_S = 1.0
"""Time of an engine in which its steps may begin, however short its budget is."""
_METHOD = 1
"""To be increased whenever overhead is measured in another way: kept samples are then ignored."""
_KEPT = TypeAdapter(list[OverheadSamples])


def measure_overhead(
    loaded: LoadedModel,
    config: Any,
    machine: Machine,
    batch_sizes: Sequence[int],
    engines: Sequence[str],
    budget_s: float,
    guard: Callable[[], AbstractContextManager[None]] = tolerate_errors,
    *,
    fresh: bool = True,
) -> list[OverheadSamples]:
    """Return the overhead of a prefill and a decode step with each engine; `budget_s` is for all of them.

    Batch sizes that are not begun within the time of all are left out, except the first. At twice its time, an engine
    keeps what is complete; it is left out if the prefill or the first decode step has no complete sample. Samples are
    kept. Unless `fresh`, those of the last day are used, if four steps still take as long.

    It is measured on the overhead model. Decode steps of a compiling engine are left out: the overhead model's compiled
    code would differ from the model's, and take as long to compile. `guard` suppresses the errors of an engine that is
    left out, and of an overhead model that cannot be built. Raises DeviceError if the device is lost.

    On a CPU, a step's weights stream through the caches between its operators, so that Python and the dispatcher run
    cold. An overhead model that steps by itself is too fast: 6.2 instead of 10.6 ms for SmolLM2-135M on two cores. Each
    of the model's own linears therefore runs inside the overhead model's step, just before the overhead model's, and
    its time is subtracted at once. The time of all linears, measured minutes apart, would leave a small difference.

    On CUDA the host's caches do not see the weights, and the overhead model steps by itself.
    """
    request = loaded.request
    names = [name for name in engines if name in ENGINES and ENGINES[name].eager_phases]
    samples: list[OverheadSamples] = []
    with guard():
        overhead_model = load(replace(request, weights="random"), overhead_model_config(config, request.quant))
        for name in names:
            phases = ENGINES[name].eager_phases
            engine_class = ENGINES[name] if "decode" in phases else ReusedCache  # like compiled code's
            with guard():  # such as a capture, which other engines do not need
                engine = engine_class(overhead_model.module, machine)
                bench = _Bench(loaded, overhead_model, engine, machine, budget_s / len(names), machine.now_s())
                path = kept_in("overhead", loaded, config, machine, name, *batch_sizes)
                found = None if fresh else read_recent(path, _KEPT.validate_json)
                if found is None or not _still_hold(found, bench):
                    found = [replace(item, engine=name) for item in _engine_samples(bench, batch_sizes, phases)]
                    is_whole = len(found) == len(phases) * len(batch_sizes) and machine.now_s() <= bench.end_s
                    if bench.budget_s >= _LEAST_S and is_whole:
                        write_cache(path, _KEPT.dump_json(found))
                samples += found
    return samples


def kept_in(kind: str, loaded: LoadedModel, config: Any, machine: Machine, *settings: Any) -> Path:
    """Return the file of a day's times of this model's steps here, by its shape, not its name, and by `settings`."""
    request, unnamed = loaded.request, copy.deepcopy(config)
    unnamed.name_or_path = ""
    shape = unnamed.to_json_string(use_diff=False), request.dtype, request.quant, request.quant_options, request.attn
    of_model = [*map(str, shape), bool(loaded.offloaded_bytes), *settings, torch.get_num_threads(), processor()]
    return cache_path(kind, {**circumstances(machine), "model": of_model, "method": _METHOD})


def _still_hold(kept: Sequence[OverheadSamples], bench: _Bench) -> bool:
    """Whether four steps of the overhead model still take as long, within 10 % or the samples' interval."""
    now_s = undisturbed(bench.by_itself(0.0)["decode"]).quartile_s
    decodes = [undisturbed(item.alone_s) for item in kept if item.phase == "decode"]  # some with dense copies
    return any(abs(now_s - then.quartile_s) <= max(2 * AGREE * now_s, then.half_width_s) for then in decodes)


@contextlib.contextmanager
def _kept_if(is_complete: Callable[[], bool]) -> Iterator[None]:
    """Context manager that a step after twice the time ends; it raises OutOfTimeError unless the samples suffice."""
    try:
        yield
    except OutOfTimeError:
        if not is_complete():
            raise


@dataclass(frozen=True)
class _Bench:
    loaded: LoadedModel
    overhead_model: LoadedModel
    engine: Engine
    machine: Machine
    budget_s: float
    since_s: float

    @property
    def end_s(self) -> float:
        """When twice the time is over, after which no timed step begins."""
        return self.since_s + max(2 * self.budget_s, _LEAST_S)

    def in_time(self) -> AbstractContextManager[None]:
        """Context manager in which a step that begins after `end_s` raises OutOfTimeError."""
        end_s = self.end_s

        def step(run: Callable[..., object], *arguments: Any) -> object:
            if self.machine.now_s() > end_s:
                raise OutOfTimeError(f"its steps did not end within {duration(end_s - self.since_s)}")
            return run(*arguments)

        names = ("prefill", "decode")
        return patched(self.engine, **{name: partial(step, getattr(self.engine, name)) for name in names})

    def by_itself(self, budget_s: float) -> dict[Phase, tuple[float, ...]]:
        with self.in_time():
            return overhead_model_by_itself(self.engine, self.machine, budget_s)

    def step(self, phase: Phase, batch: int = 1) -> Callable[[], object]:
        """Return a prefill of the overhead model, or a decode step after one."""
        ids = torch.zeros(batch, _PROMPT, dtype=torch.long, device=self.machine.device)
        if phase == "prefill":
            return partial(self.engine.prefill, ids, _SLOTS)
        with torch.inference_mode():
            return partial(self.engine.decode, self.engine.prefill(ids, _SLOTS))


def _engine_samples(bench: _Bench, batch_sizes: Sequence[int], phases: Sequence[Phase]) -> list[OverheadSamples]:
    if not bench.machine.is_cuda and not bench.loaded.offloaded_bytes:
        return _among_weights(bench, batch_sizes, phases)
    alone_s = _alone_with_dense_copies_s(bench, batch_sizes)
    can_wait = [phase for phase in phases if phase == "prefill" or not bench.engine.replays_as_graph]
    with torch.inference_mode():
        waits = {phase: phase in can_wait and bench.machine.waits(bench.step(phase)) for phase in phases}
    return [
        OverheadSamples(bench.engine.name, phase, batch, alone_s[phase, batch], waits=waits[phase])
        for phase in phases
        for batch in batch_sizes
    ]


def _alone_with_dense_copies_s(bench: _Bench, batch_sizes: Sequence[int]) -> dict[tuple[Phase, int], tuple[float, ...]]:
    """Seconds of the overhead model's steps by itself, with the launches of as many dense copies as the model writes.

    Whether a 4-bit matmul writes its weight as a dense copy first depends on rows and shape, and the overhead model has
    neither. So it steps with no copy, and with one in every linear. At each batch size, the model's share of linears
    that write one adds that share of the difference; in a prefill all do.
    """
    modules = (module for module in bench.loaded.module.modules() if is_linear(module))
    packed = [weight for weight in map(stored, modules) if FORMATS.get(weight.format, FORMATS["none"]).has_options]
    if not packed:
        alone_s = bench.by_itself(bench.budget_s)
        return {(phase, batch): alone_s[phase] for phase in PHASES for batch in batch_sizes}
    try:
        with dense_copies(False):
            alone_s = bench.by_itself(bench.budget_s / 2)
        with dense_copies(True):
            copying_s = bench.by_itself(bench.budget_s / 2)
    except ImportError:  # without bitsandbytes' table, there is one path
        alone_s = copying_s = bench.by_itself(bench.budget_s)
    found = {}
    for phase, batch in itertools.product(PHASES, batch_sizes):
        more_s = undisturbed(copying_s[phase]).quartile_s - undisturbed(alone_s[phase]).quartile_s
        writes = [phase == "prefill" or bool(weight.writes_dense_copy(batch)) for weight in packed]
        share = sum(writes) / len(writes)
        found[phase, batch] = tuple(seconds + share * max(0.0, more_s) for seconds in alone_s[phase])
    return found


def least_overhead_s(model: Any, machine: Machine) -> tuple[float, float]:
    """Return the least seconds of an eager (prefill, decode step), which are those of the overhead model by itself."""
    narrow = type(model)(overhead_model_config(model.config)).to(device=machine.device, dtype=model.dtype).eval()
    alone_s = overhead_model_by_itself(EagerEngine(narrow, machine), machine)
    return undisturbed(alone_s["prefill"]).quartile_s, undisturbed(alone_s["decode"]).quartile_s


def overhead_model_by_itself(
    engine: Engine, machine: Machine, budget_s: float = math.inf
) -> dict[Phase, tuple[float, ...]]:
    """Return the seconds of the overhead model's prefills and steps: of a loop, or in `budget_s` until they agree.

    A loop before them is not timed. It creates the cache, and cuDNN builds an attention plan at each new KV length:
    on an H100 with torch 2.11, such a step took 52 ms, and 16 ms after that. Raises OutOfTimeError if a step does so
    before a timed loop has ended; later, the complete loops are returned.
    """
    deadline_s = machine.now_s() + budget_s
    clock = machine.clock
    ids = torch.zeros(1, _PROMPT, dtype=torch.long, device=machine.device)
    prefills, decodes = list[float](), list[float]()
    with torch.inference_mode(), no_gc(), _kept_if(lambda: bool(prefills)):
        engine.prepare(1, _SLOTS)
        for loop in range(_LOOPS):
            is_enough = machine.now_s() > deadline_s or (len(prefills) > 1 and is_known(decodes, 0.01))
            if loop >= _LEAST_LOOPS and is_enough:
                break
            marks = [clock.mark()]
            state = engine.prefill(ids, _SLOTS)
            marks.append(clock.mark())
            for step in range(_LOOP_STEPS):
                if step > _IN_A_ROW and machine.now_s() > deadline_s:
                    break
                state = engine.decode(state)
                marks.append(clock.mark())
            clock.synchronize()
            prefill_s, *decode_s = clock.seconds(marks)
            if loop:
                prefills.append(prefill_s)
                decodes += decode_s[1:]
    return {"prefill": tuple(prefills), "decode": tuple(decodes)}


def _among_weights(bench: _Bench, batch_sizes: Sequence[int], phases: Sequence[Phase]) -> list[OverheadSamples]:
    """The overhead model's steps among the model's weights: a prefill for all batch sizes, a decode step for each.

    They take turns, so that a disturbance affects all of them. The prefill and the first batch size have at least one
    turn each. After the time is over, no further batch size begins: on a busy machine, a turn may take half a minute.
    After twice the time, no step is timed. The cores of the prefill and the first batch size still need three steps.
    """
    alone_s = bench.by_itself(_ALONE_SHARE * bench.budget_s)
    real = dict(bench.loaded.module.named_modules())
    pairs = [(narrow, real[name]) for name, narrow in bench.overhead_model.module.named_modules() if is_linear(narrow)]
    prefill = _Among(bench, pairs, Step(1, _PROMPT, 0))
    decode_sizes = batch_sizes if "decode" in phases else ()
    all_steps = [prefill, *(_Among(bench, pairs, Step(batch, 1, _PROMPT)) for batch in decode_sizes)]
    deadline_s = bench.machine.now_s() + _AMONG_SHARE * bench.budget_s
    needed, further = all_steps[:2], all_steps[2:]
    with bench.in_time(), _kept_if(lambda: all(each.calls for each in needed)):
        for among in itertools.cycle(all_steps):
            is_late = bench.machine.now_s() >= deadline_s and all(each.calls for each in needed)
            if is_late or len(among.steps) >= OVERHEAD_MODEL_STEPS:
                break
            among.turn(deadline_s)
    prefills, *steps = (among.samples(alone_s) for among in needed)
    steps += (among.samples(alone_s) for among in further if among.calls and bench.machine.now_s() <= bench.end_s)
    return [*(replace(prefills, batch_size=batch) for batch in batch_sizes), *steps]


class _Among:
    """Steps of the overhead model among streaming weights, and the bare calls of its linears between them."""

    def __init__(self, bench: _Bench, pairs: Sequence[tuple[nn.Module, nn.Module]], step: Step) -> None:
        self._bench, self._pairs, self._step = bench, pairs, step
        device, dtype = bench.loaded.request.device, bench.loaded.request.dtype
        widths = {stored(linear).in_features for pair in pairs for linear in pair}
        batch, query = int(step.batch), int(step.query)
        inputs = {width: torch.randn(batch, query, width, device=device, dtype=dtype) for width in widths}
        self._bare, self._streams = (
            [partial(linear, inputs[stored(linear).in_features]) for linear in side]
            for side in zip(*pairs, strict=True)
        )
        self._ids = torch.zeros(batch, _PROMPT, dtype=torch.long, device=device)
        self.steps: list[float] = []
        self.calls: list[float] = []
        """One of each turn that has run to its end."""

    def turn(self, deadline_s: float) -> None:
        """Run steps in a row, as in a decode loop: after other work, the first one finds Python colder still."""
        engine, machine, decodes = self._bench.engine, self._bench.machine, self._step.query == 1
        with torch.inference_mode(), no_gc():
            with _streaming([narrow for narrow, _ in self._pairs], self._streams, machine) as streamed_s:
                state = engine.prefill(self._ids, _SLOTS)
                for step in range(_IN_A_ROW):
                    streamed_s.clear()
                    start_s = machine.now_s()
                    state = engine.decode(state) if decodes else engine.prefill(self._ids, _SLOTS)
                    if step > 0:
                        self.steps.append(machine.now_s() - start_s - sum(streamed_s))
                        if machine.now_s() > deadline_s:
                            break
            calls_s = 0.0
            for stream, bare in zip(self._streams, self._bare, strict=True):
                stream()
                start_s = machine.now_s()
                bare()
                calls_s += machine.now_s() - start_s
        self.calls.append(calls_s)

    def samples(self, alone_s: Mapping[Phase, tuple[float, ...]]) -> OverheadSamples:
        """Return the measured samples, with the overhead model's own calls in isolation: almost only overhead."""
        phase: Phase = "decode" if self._step.query == 1 else "prefill"
        overhead_model, machine, batch = self._bench.overhead_model, self._bench.machine, int(self._step.batch)
        work, rows = walk(overhead_model.module), batch * int(self._step.query)
        modules = callable_modules(overhead_model.module, work, machine.available_bytes(), self._step)
        cores = replay_calls(caught_calls(modules, self._bench.step(phase, batch)), machine, budget_s=_REPLAY_S)
        # The overhead model's own conversions between formats have almost nothing to convert.
        linears = replayable_linears(work, overhead_model.module)
        converting = conversions(linears, dict.fromkeys(linears, rows), overhead_model.request)
        converted = replay_calls(converting, machine, budget_s=_REPLAY_S)
        return OverheadSamples(
            engine=self._bench.engine.name,
            phase=phase,
            batch_size=batch,
            alone_s=alone_s[phase],
            among_s=tuple(self.steps),
            bare_s=tuple(self.calls),
            cores=tuple(Calls(op.count, seconds) for op, seconds in cores.items()),
            conversions=tuple(Calls(op.count, seconds) for op, seconds in converted.items()),
        )


@contextlib.contextmanager
def _streaming(
    narrow: Sequence[nn.Module], streams: Sequence[Callable[[], object]], machine: Machine
) -> Iterator[list[float]]:
    """Context manager in which each narrow linear runs after its stream of weights; yields the streams' seconds."""
    seconds: list[float] = []

    def run(stream: Callable[[], object], own: Callable[..., torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
        start_s = machine.now_s()
        stream()
        seconds.append(machine.now_s() - start_s)
        return own(hidden)

    with contextlib.ExitStack() as patches:
        for linear, stream in zip(narrow, streams, strict=True):
            patches.enter_context(patched(linear, forward=partial(run, stream, linear.forward)))
        yield seconds


# The smallest head that fused attention kernels accept on every device (multiples of 8).
_HEAD_DIM = 8
# bitsandbytes stores 4-bit weights in blocks of 64 inputs; narrower layers would take another kernel.
_QUANTISED_HEAD_DIM = 32
_WIDTH = 64
_VOCAB = 256
_EXPERT_WIDTH = 8
_WIDTHS = {
    "intermediate_size": _WIDTH,
    "shared_expert_intermediate_size": _WIDTH,
    "ffn_dim": _WIDTH,
    "n_inner": _WIDTH,
    "moe_intermediate_size": _EXPERT_WIDTH,
}
_WIDTH_NAMES = re.compile(r"_(dim|size|rank)$|^num_attention_heads$")
_EXTRA_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")


def overhead_model_config(config: Any, quant: Quant = "none") -> Any:
    """Return a config with almost no width, but with all that decides which operators are launched."""
    narrow = copy.deepcopy(config)
    text = narrow.get_text_config()
    for part in (narrow,) if text is narrow else (narrow, text):
        differs = getattr(part, "is_heterogeneous", False)
        layers = part.to_dict()["per_layer_config"] if differs else {}
        if differs:
            part.per_layer_config = None
        heads = int(getattr(part, "num_attention_heads", None) or 1)
        _shrink(part, _HEAD_DIM if quant == "none" else _QUANTISED_HEAD_DIM)
        if own := {index: _narrow_layer(values, heads, part) for index, values in layers.items()}:
            part.per_layer_config = own
    return narrow


def _narrow_layer(values: Mapping[str, Any], heads: int, narrow: Any) -> dict[str, Any]:
    """A layer's own values without widths, and with its queries per key, as far as the overhead model has heads."""
    kept = {name: value for name, value in values.items() if not _WIDTH_NAMES.search(name)}
    if kv_heads := values.get("num_key_value_heads"):
        whole = values.get("num_attention_heads", heads)
        kept["num_key_value_heads"] = max(1, narrow.num_attention_heads * kv_heads // whole)
    return kept


def _shrink(config: Any, head_dim: int) -> None:
    heads = getattr(config, "num_attention_heads", None)
    if not heads:
        return
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    new_kv = min(kv_heads, 2)
    new_heads = new_kv * (heads // kv_heads)
    _set(config, "num_attention_heads", new_heads)
    sizes = {"num_key_value_heads": new_kv, "head_dim": head_dim, **_WIDTHS, **dict.fromkeys(_EXTRA_TOKENS, 0)}
    if getattr(config, "kv_lora_rank", None):
        config.qk_nope_head_dim = config.qk_rope_head_dim = config.v_head_dim = head_dim
        sizes |= {"kv_lora_rank": _WIDTH, "q_lora_rank": _WIDTH, "qk_head_dim": 2 * head_dim}
    for name, size in sizes.items():
        if getattr(config, name, None):
            setattr(config, name, size)
    _set(config, "hidden_size", new_heads * head_dim)
    _set(config, "vocab_size", _VOCAB)


def _set(config: Any, name: str, value: int) -> None:
    """Set a value under the name by which this config class stores it (GPT-2: n_embd for hidden_size)."""
    setattr(config, config.attribute_map.get(name, name), value)
