"""The engines by name, and checks of whether one works for a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from profiler.engines.padded import PaddedEngine
from profiler.engines.transformers import CompileEngine, EagerEngine, GenerateEngine, GraphEngine, StaticEngine
from profiler.engines.vllm import VllmEngine
from profiler.errors import RequestError
from profiler.grid.cells import DEFAULT_ENGINE

ENGINES: dict[str, type[EagerEngine]] = {
    engine.name: engine
    for engine in (EagerEngine, StaticEngine, CompileEngine, GraphEngine, GenerateEngine, PaddedEngine)
}

OWNING: dict[str, type[VllmEngine]] = {VllmEngine.name: VllmEngine}
"""Engines that load the model themselves and own its cache."""


def engine_names() -> tuple[str, ...]:
    """Return the engines for `--engine`; the padded one is used implicitly for prompts of unequal lengths."""
    return (*(name for name, engine in ENGINES.items() if not engine.pads), *OWNING)


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
    if name in OWNING:
        return
    if name not in ENGINES:
        raise RequestError(f"--engine {name!r} is unknown; use {', '.join(engine_names())}, or several: eager,static.")
    if ENGINES[name].pads and not ragged:
        raise RequestError(f"--engine {name} steps prompts of unequal lengths: use --prompt-lens ragged:32..512.")
    if ENGINES[name].whole_calls and deepened:
        raise RequestError(f"--engine {name} times whole calls, which begin with a prompt: use --prompt-lens.")
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
