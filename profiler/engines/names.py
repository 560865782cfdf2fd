"""The names of engines and of KV caches, which options are checked against without importing torch."""

from profiler.facts.cache_format import CACHE_FORMATS
from profiler.grid.cells import DEFAULT_ENGINE
from profiler.grid.ragged import PADDED_ENGINE
from profiler.options import one_of

ENGINE_NAMES: tuple[str, ...] = (DEFAULT_ENGINE, "static", "compile", "graph", "generate", "vllm")
"""The engines of `--engine`; `--cache` and prompts of unequal lengths select further ones."""
CACHES = {"dynamic": DEFAULT_ENGINE, "static": "static", **{name: f"{name}-cache" for name in CACHE_FORMATS}}
"""The caches of `--cache`, each with the engine that steps eagerly on it."""
ANY_QUANTIZED = "quantized"
"""The cache that is the first quantised one that works."""


def check_engine_name(name: str) -> None:
    """Raise RequestError for an engine that does not exist, with those of `--engine`."""
    if name not in (PADDED_ENGINE, *CACHES.values()):
        one_of(name, "--engine", ENGINE_NAMES)
