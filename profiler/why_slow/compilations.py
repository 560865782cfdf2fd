"""Compilations of torch.compile in this process, and its graph breaks."""

import re
import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any

from profiler.why_slow.observations import GraphBreak, Recompilation

_LONGEST_REASON = 80
_LONGEST_BREAK = 120


def recompilations(before: Iterable[Any]) -> tuple[Recompilation, ...]:
    """Code that torch.compile has compiled again since the compilations `before`."""
    known = set(map(id, before))
    return tuple(
        Recompilation((each.duration_us or 0) / 1e6, _first_line(each.recompile_reason)[:_LONGEST_REASON])
        for each in compilations_so_far()
        if each.recompile_reason and id(each) not in known
    )


def graph_breaks(before: Counter[str]) -> tuple[GraphBreak, ...]:
    """Graph breaks since those `before`, by reason, the most frequent first."""
    found = []
    for reason, count in (breaks_so_far() - before).most_common():
        # torch writes a paragraph: `Failed to trace ...`, then `Explanation: ...`.
        explanation = re.search(r"^\s*Explanation: (.+)$", reason, re.MULTILINE)
        line = explanation[1] if explanation else _first_line(reason)
        found.append(GraphBreak(count, line.strip().rstrip(".")[:_LONGEST_BREAK]))
    return tuple(found)


def _first_line(reason: object) -> str:
    return str(reason).strip().splitlines()[0]


def breaks_so_far() -> Counter[str]:
    """How often torch.compile in this process has broken code into pieces, by reason."""
    utils = sys.modules.get("torch._dynamo.utils")
    return Counter(utils.counters["graph_break"]) if utils is not None else Counter()


def compilations_so_far() -> list[Any]:
    """Metrics of all compilations of torch.compile in this process."""
    utils = sys.modules.get("torch._dynamo.utils")
    return list(utils.get_compilation_metrics()) if utils is not None else []
