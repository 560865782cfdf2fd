"""Counters of a script: values that the host reads from the device, compilations and graph breaks."""

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from profiler.device.clock import now_s
from profiler.why_slow.call_record import Thread, users_line
from profiler.why_slow.observations import GraphBreak, LineTime, Recompilation, by_line

_READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "__repr__")
"""Methods of a tensor that return its values to the host."""


@dataclass
class Reads:
    """Records which lines read tensors of a device on the host, after `watch` was called."""

    touched: int = 0
    watched: bool = False
    _waits_s: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    """By (line that read, line of the model's call before it)."""

    def watch(self, here: Thread, around: Callable[[object, str, Callable[[partial[Any]], Any]], None]) -> None:
        """Wrap methods of torch.Tensor by `around`; called at the first model on another device than the CPU."""
        import torch

        def read(run: partial[Any]) -> Any:
            if torch.compiler.is_compiling():  # compiled code must not contain the wrapper
                return run()
            self.touched += 1
            if here.within or run.args[0].device.type == "cpu":
                return run()
            start_s = now_s()
            try:
                with here.inside("read"):
                    return run()
            finally:
                self._waits_s[users_line(), here.last].append(now_s() - start_s)

        self.watched = True
        for name in _READS:
            around(torch.Tensor, name, read)

    def after(self, call: str) -> tuple[LineTime, ...]:
        """Reads that follow calls of this line, by their own line, the longest waits first."""
        return by_line({where: seconds for (where, last), seconds in self._waits_s.items() if last == call})


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
