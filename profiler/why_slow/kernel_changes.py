"""Changes to the kernels of a step and their overhead: a static cache, the compiled step, a CUDA graph."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from profiler.device.machine import Machine, machine_for
from profiler.engines.caches import moving_window, static_cache, unwindowed
from profiler.errors import RequestError
from profiler.patching import patched
from profiler.units import duration
from profiler.why_slow.repeat_call import CallGroup, Candidate, passed
from profiler.why_slow.watched_calls import is_spread

# Fewer tokens show no decode loop: the third step is captured.
_LEAST_TOKENS = 8
_WARM_STEPS = 2
# About the seconds to compile a decode step for the first time, and those per layer.
_COMPILE_S, _COMPILE_LAYER_S = 10.0, 1.0


def is_bound_by_host(group: CallGroup) -> bool:
    """Whether the steps of these calls on a GPU take the host longer than the GPU, as far as is known.

    Their cache grows, and a static one could take them: no beams, no drafts.
    """
    call, (gpu_s, host_s) = group.call, group.last_step_s or (0.0, 0.0)
    could = call.settings.beams == 1 and not call.settings.assistant and not call.context_len
    decodes = call.grows_a_cache and call.new_tokens >= _LEAST_TOKENS
    return could and decodes and host_s >= gpu_s and not is_spread(group.model)


def compiled_step(group: CallGroup) -> Candidate | None:
    """A change to the compiled step; None if transformers would not compile it.

    `generate` compiles its decode step if the cache is static (generation/utils.py of transformers 5.23:
    `_valid_auto_compile_criteria`), and the compiled step is replayed as a CUDA graph (`CompileConfig.mode`). The step
    is captured without torch.compile first, which takes no time to compile, and whose saving is never computed.
    """
    call, model, about = group.call, group.model, 0.0
    quantizer = getattr(model, "hf_quantizer", None)
    if model.config.is_encoder_decoder or not (quantizer is None or quantizer.is_compileable):
        return None
    words = "the host launches every step kernel by kernel"
    if known := group.last_step_s:
        gpu_s, host_s = known
        words = f"the host needs at least {duration(host_s)} to launch a step"
        words += f", and the GPU {duration(gpu_s)} at its ceilings"
        about = max(0.0, 1 - gpu_s / host_s)
    layers = getattr(model.config.get_text_config(), "num_hidden_layers", 1)
    # A static cache for the whole answer, also for a shorter one, if transformers has that.
    sized = hasattr(model.generation_config, "max_cache_len")
    size = {"max_cache_len": call.prompt_len + call.new_tokens} if sized else {}
    static: dict[str, object] = {"cache_implementation": "static", **size}
    compiled = group.candidate(
        "uncompiled", words, f"{passed(static)}: generate then compiles the step, and replays it as a CUDA graph",
        group.repeated(**static), once_s=_COMPILE_S + _COMPILE_LAYER_S * layers, about=about,
    )  # fmt: skip
    made = functools.cache(lambda: _replacements(model, machine_for(model.device), call.prompt_len + call.new_tokens))
    return replace(
        compiled, within=lambda: patched(model, **made()), release=made.cache_clear, once_s=0.0,
        closer=(replace(compiled, about=0.0),), stand_in="its step as a CUDA graph without torch.compile",
    )  # fmt: skip


def _replacements(model: Any, machine: Machine, slots: int) -> dict[str, Callable[..., Any]]:
    """Methods with which `generate` on a static cache replays a captured step. Raises RequestError if no graph can."""
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
    _inputs: Any = None
    """The (positional, named) arguments whose tensors the graph reads."""
    _output: Any = None
    _replay: Callable[[], object] | None = None
    """Replays the graph; None until it is captured."""

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Run the step with the arguments of the model's `forward`; the next call overwrites the output."""
        self._calls += 1
        if self._calls <= _WARM_STEPS:
            with self.machine.on_side_stream():
                return self.run(*args, **named)
        inputs = (args, named)
        if self._replay is None:
            self._inputs = tree_map_only(torch.Tensor, torch.clone, inputs)
            self._replay = self.machine.capture(self._step)
        for memory, value in zip(tree_leaves(self._inputs), tree_leaves(inputs), strict=True):
            if isinstance(value, torch.Tensor):
                memory.copy_(value)
        self._replay()
        return self._output

    def _step(self) -> None:
        args, named = self._inputs
        self._output = self.run(*args, **named)


@contextlib.contextmanager
def with_implementation(model: Any, part: str, name: str) -> Iterator[None]:
    """A context in which a model's `attn` or `experts` have another implementation; its towers get back their own."""
    attribute = f"_{part}_implementation"
    parts = [each for each in model.modules() if hasattr(getattr(each, "config", None), attribute)]
    before = {id(each.config): (each.config, getattr(each.config, attribute)) for each in parts}
    try:
        getattr(model, f"set{attribute}")(name)
        yield
    finally:
        for config, own in before.values():  # an outer one first, as it also sets those within
            setattr(config, attribute, own)
