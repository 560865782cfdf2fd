"""roofscope: load a Hugging Face causal LM, time it, count its work, and report what limits each cell.

import profiler
run = profiler.profile("smollm2-135m", prompt_lens=[64], batch_sizes=[1, 2])
run.cells  # a pandas DataFrame with one row per phase and cell
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from profiler.comparison.command import compare
    from profiler.report.plots import draw
    from profiler.run.pipeline import profile
    from profiler.store.folder import Run, read_run
    from profiler.why_slow.command import why

__version__ = "0.5.0"
__all__ = ["Run", "__version__", "compare", "draw", "profile", "read_run", "why"]

_HOMES = {
    "compare": "profiler.comparison.command",
    "draw": "profiler.report.plots",
    "profile": "profiler.run.pipeline",
    "Run": "profiler.store.folder",
    "read_run": "profiler.store.folder",
    "why": "profiler.why_slow.command",
}


def load_ipython_extension(shell: Any) -> None:
    """Register `%%why`; IPython calls this at `%load_ext profiler`."""
    from profiler.why_slow.command import register

    register(shell)


def __getattr__(name: str) -> Any:
    """Import on first use, so that `roofscope --help` does not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'profiler' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
