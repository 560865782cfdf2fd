"""The engines by name, and checks of whether one works for a request."""

from collections.abc import Sequence
from typing import Any

from profiler.engines.caches import quantized_cache
from profiler.engines.names import ANY_QUANTIZED, CACHES, ENGINE_NAMES
from profiler.engines.transformers import (
    CompileEngine,
    EagerEngine,
    GenerateEngine,
    GraphEngine,
    PaddedEngine,
    QuantizedEngine,
    StaticEngine,
)
from profiler.engines.vllm import VllmEngine
from profiler.errors import RequestError
from profiler.facts.cache_format import CACHE_FORMATS
from profiler.grid.cells import DEFAULT_ENGINE, Grid

_STEPPING: tuple[type[EagerEngine], ...] = (
    *(EagerEngine, StaticEngine, CompileEngine, GraphEngine, GenerateEngine, PaddedEngine),
    *(
        type("QuantizedEngine", (QuantizedEngine,), {"name": CACHES[name], "cache_format": stored})
        for name, stored in CACHE_FORMATS.items()
    ),
)
ENGINES = {engine.name: engine for engine in _STEPPING}

OWNING: dict[str, type[VllmEngine]] = {VllmEngine.name: VllmEngine}
"""Engines that load the model themselves and own its cache."""


def engines_of_caches(engines: Sequence[str], caches: Sequence[str], config: Any) -> list[str]:
    """Return the engines of `--cache`. Raises RequestError next to another engine, or if no backend works."""
    if not caches:
        return list(engines)
    if list(engines) != [DEFAULT_ENGINE]:
        raise RequestError(f"--cache works only with --engine {DEFAULT_ENGINE}, not {','.join(engines)}.")
    return [CACHES[_installed_backend(config) if name == ANY_QUANTIZED else name] for name in caches]


def _installed_backend(config: Any) -> str:
    errors: list[RequestError] = []
    for backend, stored in CACHE_FORMATS.items():
        try:
            quantized_cache(config, stored)
            return backend
        except RequestError as error:
            errors.append(error)
    raise errors[0]


def with_own_loop(names: Sequence[str]) -> list[str]:
    """Return the engines to run: with one that times whole calls, the eager engine runs for comparison."""
    compares = any(name in ENGINES and ENGINES[name].whole_calls for name in names)
    return [DEFAULT_ENGINE, *names] if compares and DEFAULT_ENGINE not in names else list(names)


def check_engine(name: str, grid: Grid, config: Any, *, on_cuda: bool) -> None:
    """Raise RequestError if an engine cannot run the cells of a grid, before anything is loaded."""
    engine = {**ENGINES, **OWNING}[name]
    if engine.whole_calls and grid.context_lens:
        raise RequestError(f"--engine {name} times whole calls, which begin with a prompt: use --prompt-lens.")
    if engine.pads and grid.ragged is None:
        raise RequestError(f"--engine {name} steps prompts of unequal lengths: use --prompt-lens ragged:32..512.")
    if engine.cache_format is not None:
        quantized_cache(config, engine.cache_format)
    if not engine.replays_as_graph:
        return
    if not on_cuda:
        *others, last = (other for other in ENGINE_NAMES if other in ENGINES and not ENGINES[other].replays_as_graph)
        raise RequestError(
            f"--engine {name} captures CUDA graphs, and this device is a CPU; use {', '.join(others)} or {last}."
        )
    window = getattr(config.get_text_config(), "sliding_window", None)
    if window is not None and window < grid.longest_context and getattr(config, "use_sliding_window", True):
        raise RequestError(
            f"--engine {name}: the host moves a window of {window} tokens within {grid.longest_context}, which a CUDA"
            " graph cannot replay; use static or compile, or shorter prompts."
        )
