"""llama-benchy (github.com/eugr/llama-benchy, results.py): its table and its JSON.

Its table has llama-bench's test names with another meaning: `pp2048 @ d32768` is a prompt of 34,816 tokens, unless
prefix caching is on, when a row `ctx_pp` fills the cache first. Rates count the tokens that were prefilled, which tells
the two apart in a table that lacks such rows. Standard deviations divide by n. At several requests at a time (`c4`), a
prefill's time is that of all of them, by the total rate.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from profiler.errors import RequestError
from profiler.readers.figures import Figure, Shape, Tokens
from profiler.readers.formats import Format
from profiler.readers.sources import Source
from profiler.readers.values import Measured, Record, measured, whole_of

_TEST = re.compile(r"(?P<context>ctx_)?(?P<kind>pp|tg)(?P<size>\d*)(?: @ d(?P<depth>\d+))?(?: \(c(?P<many>\d+)\))?")
_HTTP = "measured over HTTP, less a measured latency"


def _as_table(source: Source) -> Iterator[Record]:
    """The rows of the table for the runs of the JSON: each has a prefill and a decode."""
    rows = []
    for run in source.only["benchmarks"]:
        context = "ctx_" if run.get("is_context_prefill_phase") else ""
        after = f" @ d{run.get('context_size') or 0} (c{run.get('concurrency') or 1})"
        for kind, size in (("pp", "prompt_size"), ("tg", "response_size")):
            row = {"test": f"{context}{kind}{run[size]}{after}", "t/s": run.get(f"{kind}_throughput")}
            row |= {"t/s (req)": run.get(f"{kind}_req_throughput")}
            rows.append({**source.only, **row, "est_ppt (ms)": run.get("est_ppt"), "ttfr (ms)": run.get("ttfr")})
    return _tests(rows, is_cached=bool(source.only.get("prefix_caching_enabled")))


def _tests(rows: Sequence[Record], *, is_cached: bool) -> Iterator[Record]:
    """The rows with their shape and time. A decode does not name its prompt, which is that of the row before it."""
    prompts: dict[tuple[object, ...], tuple[int, int]] = {}
    for row in rows:
        found = _TEST.fullmatch(str(row["test"]).strip())
        if found is None:
            raise RequestError(f"a row of llama-benchy cannot be read: {row['test']!r}.")
        size, depth = (whole_of(found[name] or 0, "test") for name in ("size", "depth"))
        many, is_prefill = whole_of(found["many"] or 1, "test", 1), found["kind"] == "pp"
        total, wait = _cell(row, "t/s (total)", "t/s"), _cell(row, "est_ppt (ms)", "ttfr (ms)")
        each = _cell(row, "t/s (req)") or (total if many == 1 else None)
        key = (depth, many, found["context"])
        if is_prefill and (found["context"] or not depth):
            prompts[key] = (depth or size, 0)
        elif is_prefill:
            if each and wait and many == 1:  # the rate times its time are the tokens that the tool counted
                tokens = each.value * wait.value / 1e3
                is_cached = abs(math.log(tokens / size)) < abs(math.log(tokens / (size + depth)))
            prompts[key] = (size, depth) if is_cached else (size + depth, 0)
        prompt, context = prompts.get(key, (0, depth))
        after, new = context if context or not prompt else None, None if is_prefill else size or None
        shape = Shape(many, prompt or None, after, new)
        if is_prefill:
            time_s = total.of(many * prompt) if many > 1 and total else wait and wait.times(1e-3)
            notes = (_HTTP, "until the last first token") if many > 1 else (_HTTP,)
            figure = time_s and Figure("prefill", shape, time_s, notes=notes)
        else:
            time_s = each.of(1) if each else total and total.of(many)
            figure = time_s and Figure("decode", shape, time_s, Tokens(None), notes=(_HTTP,))
        if figure:
            yield {**row, "figure": figure}


def _cell(row: Record, *names: str) -> Measured | None:
    """A cell such as `8521.08 ± 69.61`, or a metric of the JSON; None without a number."""
    for name in names:
        value = row.get(name)
        metric = value if isinstance(value, dict) else {"mean": value}
        if re.search("[1-9]", str(metric.get("mean"))):
            return measured(metric["mean"], name, values=metric.get("values"), spread=metric.get("std"))
    return None


_TABLE = Format(
    tool="llama-benchy",
    has=("test", "ttfr (ms) | est_ppt (ms) | t/s (total)"),
    records=lambda source: _tests(source.records, is_cached="ctx_" in str([row["test"] for row in source.records])),
    settings={"model's name": "model"},
)
LLAMA_BENCHY = (_TABLE, replace(_TABLE, has=("latency_mode", "benchmarks"), records=_as_table))
