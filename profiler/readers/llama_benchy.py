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
from profiler.readers.values import Record, half_a_unit, inner, number_of, samples_of, texts, whole_of

_OWN = {"ttfr (ms)", "est_ppt (ms)", "e2e_ttft (ms)", "peak t/s", "t/s (req)", "t/s (total)"}
_CSV = {
    "test_name": "test",
    "t_s_mean": "t/s",
    "t_s_req_mean": "t/s (req)",
    "est_ppt_mean": "est_ppt (ms)",
    "ttfr_mean": "ttfr (ms)",
}
_TEST = re.compile(r"(?P<context>ctx_)?(?P<kind>pp|tg)(?P<size>\d*)(?: @ d(?P<depth>\d+))?(?: \(c(?P<many>\d+)\))?")
_NUMBER = re.compile(r"(?P<mean>[\d,]*\.?\d+)(?:\s*(?:±|\+/?-)\s*(?P<spread>[\d,]*\.?\d+))?")
_COVERAGE = 2.0
_HTTP = "measured over HTTP, less a measured latency"


@dataclass(frozen=True)
class _Mean:
    """The mean of a metric over repetitions."""

    value: float
    spread: float = 0.0
    """Standard deviation."""
    rounding: float = 0.0
    """Half a unit of the last digit."""
    values: tuple[float, ...] = ()


@dataclass(frozen=True)
class _Test:
    """One row: a prefill (pp) or a decode (tg) of `many` requests at a time, each after a context of `depth`."""

    kind: str
    size: int
    depth: int
    many: int
    is_context: bool
    """Whether it fills the context for the tests after it."""
    total_per_s: _Mean | None
    per_s: _Mean | None
    """Of one request."""
    wait_ms: _Mean | None
    """Until the first response, less the latency."""


def read_llama_benchy(source: Source) -> ForeignFile | None:
    """The figures of a file of llama-benchy; None for another tool's file. Raises RequestError for a broken file."""
    first = source.records[0]
    if inner(first, "latency_mode") and isinstance(first.get("benchmarks"), list):
        tests = [_of_run(run, kind) for run in first["benchmarks"] for kind in ("pp", "tg")]
        figures = _figures(tests, is_cached=bool(first.get("prefix_caching_enabled")))
        settings = texts({"model's name": first.get("model"), "llama-benchy": first.get("version")})
        return ForeignFile("", "llama-benchy", figures, str(first.get("timestamp") or ""), settings)
    rows = [{_CSV.get(name, name): value for name, value in record.items()} for record in source.records]
    if "test" not in rows[0] or not rows[0].keys() & _OWN:
        return None
    tests = [_of_row(row) for row in rows]
    models = {str(row["model"]) for row in rows if row.get("model")}
    figures = _figures(tests, is_cached=any(test.is_context for test in tests))
    return ForeignFile("", "llama-benchy", figures, settings=texts({"model's name": ", ".join(sorted(models))}))


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


def _metric(run: Record, name: str) -> _Mean | None:
    if not (mean := inner(run, name, "mean")):
        return None
    values = samples_of(inner(run, name, "values"), name)
    return _Mean(number_of(mean, name), float(inner(run, name, "std") or 0), values=values)


def _of_row(row: Record) -> _Test:
    test = _TEST.fullmatch(str(row["test"]).strip())
    if test is None:
        raise RequestError(f"a row of llama-benchy cannot be read: {row['test']!r}.")
    total = _mean(row, "t/s (total)") or _mean(row, "t/s")
    return _Test(
        kind=test["kind"],
        size=whole_of(test["size"] or 0, "test"),
        depth=whole_of(test["depth"] or 0, "test"),
        many=whole_of(test["many"] or 1, "test", 1),
        is_context=bool(test["context"]),
        total_per_s=total,
        per_s=_mean(row, "t/s (req)") or (total if (test["many"] or "1") == "1" else None),
        wait_ms=_mean(row, "est_ppt (ms)") or _mean(row, "ttfr (ms)"),
    )


def _mean(row: Record, name: str) -> _Mean | None:
    """A cell such as `8521.08 ± 69.61`; None if it has no number above 0."""
    found = _NUMBER.fullmatch(str(row.get(name) or "").strip())
    if found is None or not float(found["mean"].replace(",", "")):
        return None
    spread = float((found["spread"] or "0").replace(",", ""))
    return _Mean(number_of(found["mean"], name), spread, half_a_unit(found["mean"]))


def _figures(tests: Iterable[_Test], *, is_cached: bool) -> list[Figure]:
    figures = []
    shapes: dict[tuple[int, int, bool], tuple[int, int]] = {}
    for test in tests:
        key = (test.depth, test.many, test.is_context)
        if test.kind == "pp":
            shapes[key] = _shape(test, is_cached)
        # A decode row does not name its prompt, which is that of the row before it.
        prompt, context = shapes.get(key, (0, test.depth))
        seconds = _prefill_s(test, prompt) if test.kind == "pp" else _step_s(test)
        if seconds is None:
            continue
        figures.append(
            Figure(
                covers="prefill" if test.kind == "pp" else "decode",
                seconds=seconds.value,
                batch_size=test.many,
                prompt_len=prompt or None,
                context_len=context if context or not prompt else None,
                new_tokens=test.size or None if test.kind == "tg" else None,
                samples_s=seconds.values,
                half_width_s=0.0 if seconds.values else _COVERAGE * seconds.spread,
                rounding_s=seconds.rounding,
                repeats=len(seconds.values),
                may_speculate=test.kind == "tg",
                notes=(_HTTP,) if test.kind == "tg" or test.many == 1 else (_HTTP, "until the last first token"),
            )
        )
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


def _prefill_s(test: _Test, prompt: int) -> _Mean | None:
    """Seconds of the prefill of all requests of a test."""
    if test.many > 1 and test.total_per_s:
        return _inverse(test.total_per_s, test.many * prompt)
    wait = test.wait_ms
    if wait is None:
        return None
    values = tuple(value / 1e3 for value in wait.values)
    return _Mean(wait.value / 1e3, wait.spread / 1e3, wait.rounding / 1e3, values)


def _step_s(test: _Test) -> _Mean | None:
    """Seconds of one decode step of all requests of a test."""
    if test.per_s:
        return _inverse(test.per_s, 1)
    return _inverse(test.total_per_s, test.many) if test.total_per_s else None


def _inverse(rate: _Mean, tokens: int) -> _Mean:
    seconds = tokens / rate.value
    values = tuple(tokens / value for value in rate.values)
    return _Mean(seconds, seconds * rate.spread / rate.value, seconds * rate.rounding / rate.value, values)
