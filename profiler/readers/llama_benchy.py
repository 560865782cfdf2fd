"""llama-benchy (github.com/eugr/llama-benchy, results.py): its table, JSON and CSV.

Its table has llama-bench's test names with another meaning: `pp2048 @ d32768` is a prompt of 34,816 tokens, unless
prefix caching is on, when a row `ctx_pp` fills the cache first. Rates count the tokens that were prefilled, which tells
the two apart. Standard deviations divide by n. At several requests at a time (`c4`), a prefill's time is that of all of
them, by the total rate.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace

from profiler.errors import RequestError
from profiler.readers.figures import Figure
from profiler.readers.formats import Format
from profiler.readers.sources import Source
from profiler.readers.values import Measured, Record, measured, whole_of

_TEST = re.compile(r"(?P<context>ctx_)?(?P<kind>pp|tg)(?P<size>\d*)(?: @ d(?P<depth>\d+))?(?: \(c(?P<many>\d+)\))?")
_TOTAL, _EACH, _WAIT = ("t/s (total)", "t/s"), ("t/s (req)",), ("est_ppt (ms)", "ttfr (ms)")
_OWN = ("ttfr (ms)", "est_ppt (ms)", "e2e_ttft (ms)", "peak t/s", "t/s (req)", "t/s (total)")
_CSV = {
    "t_s": "t/s",
    "t_s_req": "t/s (req)",
    "est_ppt": "est_ppt (ms)",
    "ttfr": "ttfr (ms)",
}
_HTTP = "measured over HTTP, less a measured latency"


def _as_table(source: Source) -> list[Record]:
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


def _tests(rows: Sequence[Record], *, is_cached: bool) -> list[Record]:
    """The rows with their shape and time. A decode does not name its prompt, which is that of the row before it."""
    tests: list[Record] = []
    prompts: dict[tuple[object, ...], tuple[int, int]] = {}
    for row in rows:
        found = _TEST.fullmatch(str(row["test"]).strip())
        if found is None:
            raise RequestError(f"a row of llama-benchy cannot be read: {row['test']!r}.")
        size, depth = (whole_of(found[name] or 0, "test") for name in ("size", "depth"))
        many, is_prefill = whole_of(found["many"] or 1, "test", 1), found["kind"] == "pp"
        total, wait = _cell(row, _TOTAL), _cell(row, _WAIT)
        each = _cell(row, _EACH) or (total if many == 1 else None)
        key = (depth, many, found["context"])
        if is_prefill and (found["context"] or not depth):
            prompts[key] = (depth or size, 0)
        elif is_prefill:
            if each and wait and many == 1:  # the rate times its time are the tokens that the tool counted
                tokens = each.value * wait.value / 1e3
                is_cached = abs(math.log(tokens / size)) < abs(math.log(tokens / (size + depth)))
            prompts[key] = (size, depth) if is_cached else (size + depth, 0)
        prompt, context = prompts.get(key, (0, depth))
        by_rate = total.of(many * prompt) if many > 1 and total else None
        to_first = by_rate or (wait.times(1e-3) if wait else None)
        per_step = each.of(1) if each else total.of(many) if total else None
        shape = (many, prompt or None, context if context or not prompt else None)
        notes = (_HTTP, "until the last first token") if is_prefill and many > 1 else (_HTTP,)
        if is_prefill and to_first:
            tests.append({**row, "figure": Figure("prefill", to_first, *shape, notes=notes)})
        elif per_step and not is_prefill:
            figure = Figure("decode", per_step, *shape, size or None, step_tokens=None, notes=notes)
            tests.append({**row, "figure": figure})
    return tests


def _cell(row: Record, names: Sequence[str]) -> Measured | None:
    """A cell such as `8521.08 ± 69.61`, the two columns of CSV, or a metric of the JSON; None without a number."""
    for name in names:
        value = row.get(name)
        metric = value if isinstance(value, dict) else {"mean": value, "std": row.get(f"{name} std")}
        if re.search("[1-9]", str(metric.get("mean"))):
            return measured(metric["mean"], name, values=metric.get("values"), spread=metric.get("std"))
    return None


_TABLE = Format(
    tool="llama-benchy",
    has=("test", " | ".join(_OWN)),
    columns={"test_name": "test"}
    | {f"{short}_mean": name for short, name in _CSV.items()}
    | {f"{short}_std": f"{name} std" for short, name in _CSV.items()},
    known="|".join(map(re.escape, (*_OWN, "t/s")))
    + r"|model|test|peak t/s \(req\)|(peak_ts(_req)?|e2e_ttft)_(mean|std)",
    records=lambda source: _tests(source.records, is_cached="ctx_" in str([row["test"] for row in source.records])),
    figures=lambda test: [test["figure"]],
    settings={"model's name": "model"},
)
LLAMA_BENCHY = (
    _TABLE,
    replace(
        _TABLE,
        has=("latency_mode", "benchmarks"),
        known="",
        records=_as_table,
        settings={"model's name": "model", "llama-benchy": "version"},
        created="timestamp",
    ),
)
