"""Several precisions of one model on one grid, run one after the other and compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from profiler.errors import RequestError
from profiler.job.options import Options
from profiler.job.request import prepare
from profiler.job.run import Listener, execute
from profiler.record.run import Run
from profiler.report.page import write_comparison


def run_precisions(options: Options, precisions: Sequence[str], listener: Listener) -> list[Run]:
    """Profile the model once in each precision: one folder, with a run folder for each and a report that compares them.

    All are checked before the first begins.

    Raises RequestError for a precision that is named twice or does not exist, before anything is loaded.
    """
    if len(set(precisions)) < len(precisions):
        raise RequestError(f"--quant {','.join(precisions)}: a precision is named twice.")
    base = Path(options.out) if options.out is not None else prepare(replace(options, quant=precisions[0])).out
    prepared = [prepare(replace(options, quant=name, out=base / name)) for name in precisions]
    runs = [execute(one, listener) for one in prepared]
    write_comparison(runs, base)
    return runs
