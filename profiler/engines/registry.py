"""The engines by name, and the checks of whether one works here."""

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
"""Engines that load the model themselves, and own it and its cache."""


def engine_names() -> tuple[str, ...]:
    """Engines that a user can name; prompts of unequal lengths bring the padded one with them."""
    return (*(name for name, engine in ENGINES.items() if not engine.pads), *OWNING)


def with_own_loop(names: Sequence[str]) -> list[str]:
    """The engines to run: one that times whole calls is held against our own loop, the plain engine, in turn."""
    whole = any(name in ENGINES and ENGINES[name].whole_calls for name in names)
    return [DEFAULT_ENGINE, *names] if whole and DEFAULT_ENGINE not in names else list(names)


def check_engine(
    name: str, *, on_cuda: bool, config: Any, longest_context: int, deepened: bool = False, ragged: bool = False
) -> None:
    """Refuse an engine that cannot work here, before anything is loaded; `deepened`: some caches are filled directly;
    `ragged`: prompts are of unequal lengths. Raises RequestError.
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
            f"--engine {name}: a window of {window} tokens moves within {longest_context}, steered by the host,"
            " which no graph can hold; use static or compile, or shorter prompts."
        )
