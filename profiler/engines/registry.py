"""The engines by name, and which of them can work here."""

from __future__ import annotations

from typing import Any

from profiler.engines.transformers import CompileEngine, EagerEngine, GraphEngine, StaticEngine
from profiler.engines.vllm import VllmEngine
from profiler.errors import RequestError

ENGINES: dict[str, type[EagerEngine]] = {
    engine.name: engine for engine in (EagerEngine, StaticEngine, CompileEngine, GraphEngine)
}

OWNING: dict[str, type[VllmEngine]] = {VllmEngine.name: VllmEngine}
"""Engines that load the model themselves, and own it and its cache."""


def check_engine(name: str, *, on_cuda: bool, config: Any, longest_context: int) -> None:
    """Refuse an engine that cannot work here, before anything is loaded. Raises RequestError."""
    if name in OWNING:
        return
    if name not in ENGINES:
        raise RequestError(
            f"--engine {name!r} is unknown; use {', '.join((*ENGINES, *OWNING))}, or several: eager,static."
        )
    if not ENGINES[name].replays_as_graph:
        return
    others = [other for other, kind in ENGINES.items() if not kind.replays_as_graph]
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
