"""Changes that take the dispatch of decode steps off the host: a static cache, the compiled step, a CUDA graph."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from profiler.device.machine import Machine, machine_for
from profiler.engines.caches import moving_window, static_cache, unwindowed
from profiler.errors import RequestError
from profiler.patching import patched
from profiler.units import duration
from profiler.why_slow.call_settings import is_spread
from profiler.why_slow.findings import GROWING_CACHES, DecodeFloor
from profiler.why_slow.observations import Call
from profiler.why_slow.plain_models import is_plain
from profiler.why_slow.repeat_call import CallsToChange, Candidate

# Fewer tokens show no decode loop: the third step is captured.
_LEAST_TOKENS = 8
_WARM_STEPS = 2
# About the seconds to compile a decode step for the first time, and those per layer.
_COMPILE_S, _COMPILE_LAYER_S = 10.0, 1.0


def is_bound_by_host(calls: CallsToChange) -> bool:
    """Whether the steps of these calls on a GPU take the host longer than the GPU, as far as is known."""
    known = calls.decode
    bound = known is None or known.dispatch_s >= known.device_s
    return bound and not is_plain(calls.model) and _grows_a_cache(calls.call) and not is_spread(calls.model)


def _host_words(floor: DecodeFloor | None) -> str:
    if floor is None:
        return "the host dispatches every step kernel by kernel"
    needs = f"needs at least {duration(floor.dispatch_s)} to dispatch a step"
    return f"the host {needs}, and the GPU {duration(floor.device_s)} at its roofs"


def static_cache_change(calls: CallsToChange) -> Candidate:
    """A change to a static cache, whose steps the host dispatches as before."""
    return calls.candidate(
        "growing-cache", f"{_host_words(calls.decode)}; the cache grows at every token",
        'pass cache_implementation="static", disable_compile=True',
        calls.with_options(**_static(calls), disable_compile=True),
    )  # fmt: skip


def compiled_step(calls: CallsToChange) -> Candidate | None:
    """A change to the compiled step; None if transformers would not compile it.

    `generate` compiles its decode step if the cache is static (generation/utils.py of transformers 5.23:
    `_valid_auto_compile_criteria`), and the compiled step is replayed as a CUDA graph (`CompileConfig.mode`). The step
    is captured without torch.compile first, which takes no time to compile.
    """
    if not _compiles(calls.model):
        return None
    compiled = calls.candidate(
        "uncompiled", _host_words(calls.decode),
        'pass cache_implementation="static": generate then compiles the step, and replays it as a CUDA graph',
        calls.with_options(**_static(calls)), once_s=_COMPILE_S + _COMPILE_LAYER_S * _layers(calls.model),
        about=max(0.0, 1 - calls.decode.device_s / calls.decode.dispatch_s) if calls.decode else 0.0,
    )  # fmt: skip
    return _captured(compiled, calls.call, calls.model)


def _grows_a_cache(call: Call) -> bool:
    """Whether a call on a GPU makes a cache that grows, in steps that a static one could take: no beams, no drafts."""
    settings = call.settings
    return bool(
        call.kind == "generate"
        and settings.device.startswith("cuda")
        and settings.cache
        and settings.cache_class in GROWING_CACHES
        and settings.beams == 1
        and not settings.assistant
        and not call.context_len
        and call.new_tokens >= _LEAST_TOKENS
    )


def captured_forward(calls: CallsToChange) -> Candidate | None:
    """The calls of a plain model as replays of one CUDA graph, which is captured before the trial's clock starts.

    None if they are few, or a graph could not replay them.
    """
    settings, model, unchanged = calls.settings, calls.model, calls.with_options()
    alike = len(calls.group.like(calls.call))
    if not settings.device.startswith("cuda") or settings.gradients or settings.compiled or alike < _LEAST_TOKENS:
        return None
    step = GraphOfStep(model.forward, machine_for(torch.device(settings.device)))

    @contextlib.contextmanager
    def within() -> Iterator[None]:
        with patched(model, forward=step):
            for _ in range(0 if step.is_captured else _WARM_STEPS + 1):
                unchanged()
            if not step.is_captured:
                raise RequestError("its calls do not run its `forward`, so they cannot be captured")
            yield

    return calls.candidate(
        "uncompiled", f"the host dispatches each of {alike} calls of one shape kernel by kernel",
        'torch.compile(model, mode="reduce-overhead"); pass what changes between calls as tensors of one shape',
        within=within, shape=f"{calls.call.words}, as a CUDA graph without torch.compile",
    )  # fmt: skip


def _static(calls: CallsToChange) -> dict[str, object]:
    """Options for a static cache with room for the whole answer, also for a shorter one, if transformers has that."""
    sized = hasattr(calls.model.generation_config, "max_cache_len")
    size = {"max_cache_len": calls.call.prompt_len + calls.call.new_tokens} if sized else {}
    return {"cache_implementation": "static", **size}


def _compiles(model: Any) -> bool:
    """Whether `generate` would compile this model's steps on a static cache."""
    quantizer = getattr(model, "hf_quantizer", None)
    return not model.config.is_encoder_decoder and (quantizer is None or bool(quantizer.is_compileable))


def _layers(model: Any) -> int:
    return int(getattr(model.config.get_text_config(), "num_hidden_layers", 1))


def _captured(compiled: Candidate, call: Call, model: Any) -> Candidate:
    """The same change, tried with the step captured as it is; then compiled, if time is left, and never computed."""

    @functools.cache
    def made() -> Mapping[str, Callable[..., Any]]:
        return _replacements(model, machine_for(model.device), call.prompt_len + call.new_tokens)

    return replace(
        compiled, within=lambda: patched(model, **made()), once_s=0.0, closer=replace(compiled, about=0.0),
        shape=f"{call.words}, its step as a CUDA graph without torch.compile",
    )  # fmt: skip


def _replacements(model: Any, machine: Machine, slots: int) -> dict[str, Callable[..., Any]]:
    """Methods of a model with which `generate` on a static cache replays a captured step instead of compiling it.

    Raises RequestError if the model has no static cache, or one that a graph cannot replay.
    """
    cache = unwindowed(static_cache(model, slots), slots)
    if moving_window(cache):
        raise RequestError("the host moves this model's window, which a CUDA graph cannot replay")
    step = GraphOfStep(model, machine)

    def emptied(**_: object) -> Any:
        cache.reset()
        return cache

    return {"_prepare_static_cache": emptied, "get_compiled_call": lambda _config: step}


@dataclass
class GraphOfStep:
    """A step that becomes a CUDA graph at its third call; all calls have the same shapes."""

    run: Callable[..., Any]
    machine: Machine
    _calls: int = 0
    _inputs: dict[str, Any] = field(default_factory=dict)
    """The arguments whose tensors the graph reads."""
    _output: Any = None
    """The output that it writes."""
    _replay: Callable[[], object] | None = None

    @property
    def is_captured(self) -> bool:
        return self._replay is not None

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Run the step with the arguments of the model's `forward`; the next call overwrites the output."""
        self._calls += 1
        if self._calls <= _WARM_STEPS:
            with self.machine.on_side_stream():
                return self.run(*args, **named)
        inputs = {"args": dict(enumerate(args)), "named": named}
        if self._replay is None:
            self._inputs = _copied(inputs)
            self._replay = self.machine.capture(self._step)
        for memory, tensor in zip(_tensors(self._inputs), _tensors(inputs), strict=True):
            memory.copy_(tensor)
        self._replay()
        return self._output

    def _step(self) -> None:
        self._output = self.run(*self._inputs["args"].values(), **self._inputs["named"])


def _copied(arguments: Mapping[Any, Any]) -> dict[Any, Any]:
    """The arguments with copies of their tensors, also of those in dictionaries (masks by the kind of layer)."""

    def copied(value: Any) -> Any:
        if isinstance(value, dict):
            return _copied(value)
        return value.clone() if isinstance(value, torch.Tensor) else value

    return {name: copied(value) for name, value in arguments.items()}


def _tensors(arguments: Mapping[Any, Any]) -> Iterator[torch.Tensor]:
    """The tensors among arguments, in their order."""
    for value in arguments.values():
        if isinstance(value, dict):
            yield from _tensors(value)
        elif isinstance(value, torch.Tensor):
            yield value
