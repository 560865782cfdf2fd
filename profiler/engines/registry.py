"""The engines by name, and checks of whether one works for a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from profiler.engines.caches import quantized_cache
from profiler.engines.transformers import (
    CompileEngine,
    EagerEngine,
    GenerateEngine,
    GraphEngine,
    PaddedEngine,
    StaticEngine,
    quantized_engine,
)
from profiler.engines.vllm import VllmEngine
from profiler.errors import RequestError
from profiler.facts.cache_format import CACHE_FORMATS
from profiler.grid.cells import DEFAULT_ENGINE

_STEPPING: tuple[type[EagerEngine], ...] = (
    *(EagerEngine, StaticEngine, CompileEngine, GraphEngine, GenerateEngine, PaddedEngine),
    *map(quantized_engine, CACHE_FORMATS.values()),
)
ENGINES = {engine.name: engine for engine in _STEPPING}

OWNING: dict[str, type[VllmEngine]] = {VllmEngine.name: VllmEngine}
"""Engines that load the model themselves and own its cache."""


def engine_names() -> tuple[str, ...]:
    """Return the engines for `--engine`, without those that `--cache` and prompts of unequal lengths select."""
    return (*(name for name, one in ENGINES.items() if not one.pads and one.cache_format is None), *OWNING)


def quantized_engines() -> dict[str, str]:
    """Return the engines that step eagerly on a quantised cache, by the backend of that cache."""
    return {item.cache_format.backend: name for name, item in ENGINES.items() if item.cache_format is not None}


def engines_of_caches(engines: Sequence[str], caches: Sequence[str], config: Any) -> list[str]:
    """Return the engines that `--cache` requests in place of eager steps; `quantized` is the first that works here.

    Raises RequestError for an unknown cache, next to another engine, or if no backend works.
    """
    if not caches:
        return list(engines)
    by_cache = {"dynamic": DEFAULT_ENGINE, "static": StaticEngine.name, **quantized_engines()}
    if list(engines) != [DEFAULT_ENGINE]:
        raise RequestError(f"--cache works only with --engine {DEFAULT_ENGINE}, not {','.join(engines)}.")
    if unknown := [name for name in caches if name not in by_cache and name != _ANY_QUANTIZED]:
        raise RequestError(f"--cache {unknown[0]!r} is unknown; use {_ANY_QUANTIZED}, {', '.join(by_cache)}.")
    return [by_cache[_installed_backend(config) if name == _ANY_QUANTIZED else name] for name in caches]


_ANY_QUANTIZED = "quantized"


def _installed_backend(config: Any) -> str:
    """The first backend of a quantised cache that is installed and fits the model. Raises RequestError without one."""
    errors: list[RequestError] = []
    for backend, stored in CACHE_FORMATS.items():
        try:
            quantized_cache(config, stored)
        except RequestError as error:
            errors.append(error)
        else:
            return backend
    raise errors[0]


def with_own_loop(names: Sequence[str]) -> list[str]:
    """Return the engines to run: with one that times whole calls, the eager engine runs for comparison."""
    compares = any(name in ENGINES and ENGINES[name].whole_calls for name in names)
    return [DEFAULT_ENGINE, *names] if compares and DEFAULT_ENGINE not in names else list(names)


def check_engine(
    name: str, *, on_cuda: bool, config: Any, longest_context: int, deepened: bool = False, ragged: bool = False
) -> None:
    """Raise RequestError if an engine cannot work for this request, before anything is loaded.

    `deepened`: some caches are filled directly; `ragged`: prompts are of unequal lengths.
    """
    engine = {**ENGINES, **OWNING}.get(name)
    if engine is None:
        raise RequestError(f"--engine {name!r} is unknown; use {', '.join(engine_names())}, or several: eager,static.")
    if engine.whole_calls and deepened:
        raise RequestError(f"--engine {name} times whole calls, which begin with a prompt: use --prompt-lens.")
    if name in OWNING:
        return
    if ENGINES[name].pads and not ragged:
        raise RequestError(f"--engine {name} steps prompts of unequal lengths: use --prompt-lens ragged:32..512.")
    if (stored := ENGINES[name].cache_format) is not None:
        quantized_cache(config, stored)
    if not ENGINES[name].replays_as_graph:
        return
    others = [other for other in engine_names() if other in ENGINES and not ENGINES[other].replays_as_graph]
    if not on_cuda:
        raise RequestError(
            f"--engine {name} captures CUDA graphs, and this device is a CPU;"
            f" use {', '.join(others[:-1])} or {others[-1]}."
        )
    window = getattr(config.get_text_config(), "sliding_window", None)
    if window is not None and window < longest_context and getattr(config, "use_sliding_window", True):
        raise RequestError(
            f"--engine {name}: the host moves a window of {window} tokens within {longest_context}, which a CUDA"
            " graph cannot replay; use static or compile, or shorter prompts."
        )
