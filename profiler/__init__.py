"""roofscope: load a real Hugging Face causal LM, time it, count its work, and say what bounds every cell.

import profiler
run = profiler.profile("smollm2-135m", prompt_lens=[64], batch_sizes=[1, 2])
run.cells  # a pandas DataFrame, one row a phase and cell
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from profiler._version import __version__

if TYPE_CHECKING:
    from profiler.job.comparing import compare
    from profiler.job.run import profile
    from profiler.job.why import why
    from profiler.record.run import Run, read_run

__all__ = ["Run", "__version__", "compare", "profile", "read_run", "why"]

_HOMES = {
    "compare": "profiler.job.comparing",
    "profile": "profiler.job.run",
    "Run": "profiler.record.run",
    "read_run": "profiler.record.run",
    "why": "profiler.job.why",
}


def __getattr__(name: str) -> Any:
    """Import on first use, so that `roofscope --help` need not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'profiler' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
