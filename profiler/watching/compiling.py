"""What torch.compile did since a watch began; torch itself keeps account of it."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from profiler.diagnosis.seen import GraphBreak, Recompilation

_LONGEST_REASON = 80
_LONGEST_BREAK = 120


@dataclass(frozen=True)
class Compiling:
    """torch.compile's account as it stood when a watch began."""

    _breaks: Counter[str] = field(default_factory=lambda: _breaks_so_far())
    _compilations: list[Any] = field(default_factory=lambda: _compilations_so_far())

    def recompilations(self) -> Iterator[Recompilation]:
        """What torch.compile has compiled again since the watch began."""
        before = {id(metrics) for metrics in self._compilations}
        for metrics in _compilations_so_far():
            if metrics.recompile_reason and id(metrics) not in before:
                reason = str(metrics.recompile_reason).strip().splitlines()[0][:_LONGEST_REASON]
                yield Recompilation((metrics.duration_us or 0) / 1e6, reason)

    def graph_breaks(self) -> Iterator[GraphBreak]:
        """What torch.compile broke its graphs for since the watch began."""
        found = _breaks_so_far()
        found.subtract(self._breaks)
        for reason, count in found.most_common():
            if count > 0:
                yield GraphBreak(count, _shortest(reason))


def _breaks_so_far() -> Counter[str]:
    """How often torch.compile broke a graph, by the reason that it gives."""
    utils = sys.modules.get("torch._dynamo.utils")
    return Counter(utils.counters["graph_break"]) if utils is not None else Counter()


def _shortest(reason: str) -> str:
    """What torch says in a paragraph (`Failed to trace ...`, then `Explanation: ...`) in a line."""
    told = re.search(r"^\s*Explanation: (.+)$", reason, re.MULTILINE)
    return (told[1] if told else reason.strip().splitlines()[0]).strip().rstrip(".")[:_LONGEST_BREAK]


def _compilations_so_far() -> list[Any]:
    """What torch.compile has compiled so far."""
    utils = sys.modules.get("torch._dynamo.utils")
    return list(utils.get_compilation_metrics()) if utils is not None else []
