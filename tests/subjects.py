"""Subjects for tests of probes: a small model on this CPU, and ceilings with a cache of known size."""

from __future__ import annotations

from typing import Any

from machines import HOST, ceiling

from profiler.counting.walk import walk
from profiler.facts.ceilings import READ, Ceilings, CurvePoint
from profiler.loading.load import load
from profiler.measure.subject import Subject, execution_paths
from profiler.run.options import Options
from profiler.run.setup import make_engines
from profiler.run.validate import prepare

PLANTED = ceiling(1e10)
MEMORY = Ceilings({}, {READ: PLANTED}, 1 << 20, beyond_cache=True)


def subject_of(model: str, **options: Any) -> tuple[Subject, Any]:
    """Load the model of a folder. Returns (the subject, ready to step over its grid; the model's config)."""
    defaults = {"prompt_lens": [6], "batch_sizes": [2], "new_tokens": 4}
    prepared = prepare(Options(model=model, device="cpu", **defaults | options))
    loaded = load(prepared.request, prepared.config)
    work, grid = walk(loaded.module), prepared.grid
    engines = make_engines(prepared, loaded, work, HOST)
    paths = execution_paths(loaded, work, engines, grid, prepared.prompts)
    return Subject(HOST, loaded, work, engines, paths, grid, prepared.prompts), prepared.config


def of_caches(first_slow: int) -> Ceilings:
    """Ceilings of a memory that reads sizes from `first_slow` bytes up to 8 MiB ten times slower than smaller ones."""
    sizes = [1 << power for power in range(16, 24)]
    curve = tuple(CurvePoint(size, 1e10 if size >= first_slow else 1e11) for size in sizes)
    return Ceilings({}, {READ: PLANTED}, sizes[-1], beyond_cache=True, curve=curve)
