"""Doubling the batch ends at a named limit, and predicted peaks are right; last, a nearly full card."""

from collections.abc import Iterator

import torch

from profiler.grid import ranges
from profiler.report.progress import Listener
from profiler.run.options import Options
from profiler.run.pipeline import execute
from profiler.run.validate import prepare_batch_test

from .bench import Attempt, Bench, Check, NotRunError, free

_FREE_BYTES = 6e9
"""Free bytes of a nearly full card: the small model with one sequence of 512 tokens fits, 256 of them do not."""


def attempts(bench: Bench) -> Iterator[Attempt]:
    yield Attempt("doubling", _doubling, least_s=45.0, cuda=False)
    yield Attempt("out of memory is a row", _out_of_memory, least_s=25.0)


def _doubling(bench: Bench) -> Iterator[Check]:
    budget_s = min(60.0, max(10.0, 0.4 * bench.left_s)) if bench.cuda else 10.0
    options = Options(
        model=bench.small, new_tokens=16, weights="random", device=str(bench.device), out=bench.folder / "doubling",
        budget_s=budget_s,
    )  # fmt: skip
    free_bytes = bench.machine.available_bytes()
    with bench.watched("doubling"):
        run = execute(prepare_batch_test(options, "decode", 512 if bench.cuda else 16), Listener())
    cells = run.cells[(run.cells["status"] == "ok") & (run.cells["phase"] == "prefill")].sort_values("batch_size")
    peaks = dict(zip(cells["batch_size"].astype(int), cells["peak_memory_bytes"].astype(float), strict=True))
    largest = max(peaks)
    evidence = {(item.phase, item.batch_size): item.predicted_peak_memory_bytes for item in run.document.evidence}
    ratio = evidence["prefill", largest] / peaks[largest]
    yield bench.on_a_card("predicted / measured peak memory", 0.9 < ratio < 1.1, ratio, "within 10 %")
    series = [item for item in run.document.scaling if item.axis == "batch" and item.fixed["phase"] == "decode"]
    if not series:
        raise NotRunError(f"the budget of {budget_s:.0f} s measured one batch size")
    [decode] = series
    following = peaks[largest] + 2 * (peaks[largest] - peaks.get(largest // 2, 0.0))
    limits = {
        "memory": following > 0.8 * free_bytes,
        "the knee": decode.knee_predicted is not None and 2 * largest > 2 * decode.knee_predicted,
        "a budget": run.document.grid.larger is not None and run.document.grid.larger.budget_s is not None,
        "the most sequences": 2 * largest > ranges.MOST_SEQUENCES,
        "a cell that did not end": not set(run.cells["status"]) <= {"ok"},
    }
    value = {"largest": largest, "peaks": peaks, "the next one's peak": following, "free": free_bytes, **limits}
    yield bench.on_a_card("doubling ends at a limit", any(limits.values()), value, f"one of {', '.join(limits)}")


def _out_of_memory(bench: Bench) -> Iterator[Check]:
    """A cell that does not fit is a row; the bench checks of each run that its memory is given back."""
    free()  # torch can reuse the memory that it reserved in the previous run, but the driver counts it as used
    available, _total = torch.cuda.mem_get_info(bench.device)
    if available < _FREE_BYTES:
        raise NotRunError(f"{available / 1e9:.1f} GB are free, {_FREE_BYTES / 1e9:.0f} are needed")
    ballast = torch.empty(int(available - _FREE_BYTES), dtype=torch.uint8, device=bench.device)
    try:
        run = bench.run("full", bench.small, prompt_lens=[512], batch_sizes=[1, 256], new_tokens=8)
    finally:
        del ballast
        free()
    status = run.cells.groupby("batch_size")["status"].first().to_dict()
    passed = status[1] == "ok" and status[256] in ("oom", "skipped")
    yield Check("out of memory is a row", passed, status, "ok at 1, oom or skipped at 256")
