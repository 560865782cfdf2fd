"""Subjects for tests of probes: a small model on this CPU."""

from typing import Any

from machines import HOST

from profiler.counting.walk import walk
from profiler.loading.load import load
from profiler.measure.subject import Subject, execution_paths
from profiler.run.options import Options
from profiler.run.setup import make_engines
from profiler.run.validate import prepare


def subject_of(model: str, **options: Any) -> tuple[Subject, Any]:
    """Load the model of a folder. Returns (the subject, ready to step over its grid; the model's config)."""
    defaults = {"prompt_lens": [6], "batch_sizes": [2], "new_tokens": 4}
    prepared = prepare(Options(model=model, device="cpu", **defaults | options))
    loaded = load(prepared.request, prepared.config)
    work, grid = walk(loaded.module), prepared.grid
    engines = make_engines(prepared, loaded, work, HOST)
    paths = execution_paths(loaded, work, engines, grid, prepared.prompts)
    return Subject(HOST, loaded, work, engines, paths, grid, prepared.prompts), prepared.config
