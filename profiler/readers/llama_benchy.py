"""Read llama-benchy (github.com/eugr/llama-benchy, results.py): its table, JSON and CSV.

Its table has llama-bench's test names with another meaning: `pp2048 @ d32768` is a prompt of 34,816 tokens, unless
prefix caching is on, when a row `ctx_pp` fills the cache first. Rates count the tokens that were prefilled, which tells
the two apart. Standard deviations divide by n. At several requests at a time (`c4`), a prefill's time is that of all of
them, by the total rate.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from profiler.errors import RequestError
from profiler.readers.figures import Figure, ForeignFile
from profiler.readers.sources import Source
from profiler.readers.values import Measured, Record, first_of, inner, measured, not_read, texts, whole_of

_OWN = {"ttfr (ms)", "est_ppt (ms)", "e2e_ttft (ms)", "peak t/s", "t/s (req)", "t/s (total)"}
_KNOWN = _OWN | {"model", "test", "t/s", "peak t/s (req)"}
_CSV = {
    "test_name": "test",
    "t_s": "t/s",
    "t_s_req": "t/s (req)",
    "peak_ts": "peak t/s",
    "peak_ts_req": "peak t/s (req)",
    "est_ppt": "est_ppt (ms)",
    "ttfr": "ttfr (ms)",
    "e2e_ttft": "e2e_ttft (ms)",
}
_TEST = re.compile(r"(?P<context>ctx_)?(?P<kind>pp|tg)(?P<size>\d*)(?: @ d(?P<depth>\d+))?(?: \(c(?P<many>\d+)\))?")
_HTTP = "measured over HTTP, less a measured latency"


@dataclass(frozen=True)
class _Test:
    """One row: a prefill (pp) or a decode (tg) of `many` requests at a time, each after a context of `depth`."""

    kind: str
    size: int
    depth: int
    many: int
    is_context: bool
    """Whether it fills the context for the tests after it."""
    total_per_s: Measured | None
    per_s: Measured | None
    """Of one request."""
    wait_ms: Measured | None
    """Until the first response, less the latency."""


def read_llama_benchy(source: Source) -> ForeignFile | None:
    """The figures of a file of llama-benchy; None for another tool's file. Raises RequestError for a broken file."""
    first = source.records[0]
    if inner(first, "latency_mode") and isinstance(first.get("benchmarks"), list):
        tests = [_of_run(run, kind) for run in source.only["benchmarks"] for kind in ("pp", "tg")]
        figures = _figures(tests, is_cached=bool(first.get("prefix_caching_enabled")))
        settings = texts({"model's name": first.get("model"), "llama-benchy": first.get("version")})
        return ForeignFile("llama-benchy", figures, str(first.get("timestamp") or ""), settings)
    rows = [_as_in_table(record) for record in source.records]
    if "test" not in rows[0] or not rows[0].keys() & _OWN:
        return None
    tests = [_of_row(row) for row in rows]
    models = ", ".join(sorted({str(row["model"]) for row in rows if row.get("model")}))
    figures = _figures(tests, is_cached=any(test.is_context for test in tests))
    return ForeignFile(
        "llama-benchy", figures, settings=texts({"model's name": models}), remarks=not_read(rows[0], _KNOWN)
    )


def _as_in_table(record: Record) -> Record:
    """A row by the table's names; CSV has a mean and a standard deviation in two columns."""
    row = {}
    for name, value in record.items():
        spread = record.get(name.replace("_mean", "_std"))
        if not name.endswith("_std"):
            text = f"{value} ± {spread}" if name.endswith("_mean") and value and spread else value
            row[_CSV.get(name.removesuffix("_mean"), name)] = text
    return row


def _of_run(run: Record, kind: str) -> _Test:
    return _Test(
        kind=kind,
        size=whole_of(run["prompt_size" if kind == "pp" else "response_size"], "a size"),
        depth=whole_of(run.get("context_size") or 0, "context_size"),
        many=whole_of(run.get("concurrency") or 1, "concurrency", 1),
        is_context=bool(run.get("is_context_prefill_phase")),
        total_per_s=_metric(run, f"{kind}_throughput"),
        per_s=_metric(run, f"{kind}_req_throughput"),
        wait_ms=_metric(run, "est_ppt") or _metric(run, "ttfr"),
    )


def _metric(run: Record, name: str) -> Measured | None:
    found = run.get(name) or {}
    return measured(found["mean"], name, values=found.get("values")) if found.get("mean") else None


def _of_row(row: Record) -> _Test:
    test = _TEST.fullmatch(str(row["test"]).strip())
    if test is None:
        raise RequestError(f"a row of llama-benchy cannot be read: {row['test']!r}.")
    total = _cell(row, "t/s (total)", "t/s")
    return _Test(
        kind=test["kind"],
        size=whole_of(test["size"] or 0, "test"),
        depth=whole_of(test["depth"] or 0, "test"),
        many=whole_of(test["many"] or 1, "test", 1),
        is_context=bool(test["context"]),
        total_per_s=total,
        per_s=_cell(row, "t/s (req)") or (total if (test["many"] or "1") == "1" else None),
        wait_ms=_cell(row, "est_ppt (ms)", "ttfr (ms)"),
    )


def _cell(row: Record, *names: str) -> Measured | None:
    """A cell such as `8521.08 ± 69.61`; None if it has no number above 0."""
    value = first_of(row, *names)
    return measured(value, names[0]) if value and any(digit in str(value) for digit in "123456789") else None


def _figures(tests: Iterable[_Test], *, is_cached: bool) -> list[Figure]:
    figures = []
    shapes: dict[tuple[int, int, bool], tuple[int, int]] = {}
    for test in tests:
        key = (test.depth, test.many, test.is_context)
        if test.kind == "pp":
            shapes[key] = _shape(test, is_cached)
        # A decode row does not name its prompt, which is that of the row before it.
        prompt, context = shapes.get(key, (0, test.depth))
        if test.kind == "pp":
            by_rate = test.total_per_s.of(test.many * prompt) if test.many > 1 and test.total_per_s else None
            time_s = by_rate or (test.wait_ms.times(1e-3) if test.wait_ms else None)
        else:
            per_s = test.per_s or test.total_per_s
            time_s = per_s.of(1 if test.per_s else test.many) if per_s else None
        if time_s is None:
            continue
        figure = Figure(
            covers="prefill" if test.kind == "pp" else "decode",
            batch_size=test.many,
            prompt_len=prompt or None,
            context_len=context if context or not prompt else None,
            new_tokens=test.size or None if test.kind == "tg" else None,
            may_speculate=test.kind == "tg",
            notes=(_HTTP,) if test.kind == "tg" or test.many == 1 else (_HTTP, "until the last first token"),
        )
        figures.append(figure.timed(time_s))
    return figures


def _shape(test: _Test, is_cached: bool) -> tuple[int, int]:
    """(tokens that are prefilled, tokens that are cached before) of a prompt.

    The rate times its time are the tokens that the tool counted.
    """
    if test.is_context or not test.depth:
        return test.depth or test.size, 0
    if test.per_s and test.wait_ms and test.many == 1:
        tokens = test.per_s.value * test.wait_ms.value / 1e3
        is_cached = abs(math.log(tokens / test.size)) < abs(math.log(tokens / (test.size + test.depth)))
    return (test.size, test.depth) if is_cached else (test.size + test.depth, 0)
