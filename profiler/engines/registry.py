"""The engines by name, and which of them can work here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from profiler.engines.base import Engine
from profiler.engines.transformers import CompileEngine, EagerEngine, GraphEngine, StaticEngine
from profiler.errors import RequestError

ENGINES: dict[str, Callable[[Any], Engine]] = {
    engine.name: engine for engine in (EagerEngine, StaticEngine, CompileEngine, GraphEngine)
}


def check_engine(name: str, device: torch.device, config: Any, longest_context: int) -> None:
    """Refuse an engine that cannot work here, before anything is loaded. Raises RequestError."""
    if name not in ENGINES:
        raise RequestError(f"--engine {name!r} is unknown; use {', '.join(ENGINES)}, or several: eager,static.")
    if name != GraphEngine.name:
        return
    if device.type != "cuda":
        raise RequestError(
            "--engine graph captures CUDA graphs, and this device is a CPU; use eager, static or compile."
        )
    window = getattr(config.get_text_config(), "sliding_window", None)
    if window is not None and window < longest_context and getattr(config, "use_sliding_window", True):
        raise RequestError(
            f"--engine graph: a window of {window} tokens moves within {longest_context}, steered by the host,"
            " which no graph can hold; use static or compile, or shorter prompts."
        )
