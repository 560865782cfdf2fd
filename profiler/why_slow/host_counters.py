"""Counters of a call: values that the host reads from the device, and compilations."""

from __future__ import annotations

import functools
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from profiler.device.clock import now_s
from profiler.why_slow.call_record import RepeatableCall, Thread, users_line
from profiler.why_slow.observations import GraphBreak, Read, Recompilation

_READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "__repr__")
"""Methods of a tensor that hand its values to the host."""


@dataclass
class Reads:
    """Notes what reads a tensor's values, once it is told to watch."""

    here: Thread
    undo: list[Callable[[], None]]
    """Gives back the tensor's methods."""
    touched: int = 0
    """How often a wrapper was entered."""
    watched: bool = False
    _found: dict[tuple[str, str], RepeatableCall] = field(default_factory=dict)
    """By the line that read and the line of the call before it."""

    def watch(self) -> None:
        """From now on, note what reads a tensor's values on the host: from the first model on that lies elsewhere."""
        import torch

        self.watched = True
        for name in _READS:
            original, own = getattr(torch.Tensor, name), name in vars(torch.Tensor)

            def read(tensor: Any, *args: Any, _original: Any = original, **named: Any) -> Any:
                # Compiled code is not to have this in it.
                if torch.compiler.is_compiling():
                    return _original(tensor, *args, **named)
                return self._read(functools.partial(_original, tensor), tensor, args, named)

            setattr(torch.Tensor, name, functools.wraps(original)(read))
            self.undo.append(
                functools.partial(setattr, torch.Tensor, name, original)
                if own
                else functools.partial(delattr, torch.Tensor, name)
            )

    def _read(self, run: Callable[..., Any], tensor: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Run what reads a tensor; outside of a model's calls, where its values lie elsewhere, add it to its line."""
        self.touched += 1
        here = self.here
        if here.depth or here.reading or tensor.device.type == "cpu":
            return run(*args, **named)
        here.reading = True
        start_s = now_s()
        try:
            return run(*args, **named)
        finally:
            here.reading = False
            self._found.setdefault((users_line(), here.last), RepeatableCall()).add(now_s() - start_s)

    def by_line(self, behind: str | None = None) -> tuple[Read, ...]:
        """The lines that read values of a device; of those alone that did so behind a call of the line `behind`."""
        found: dict[str, RepeatableCall] = {}
        for (where, last), item in self._found.items():
            if behind in (None, last):
                whole = found.setdefault(where, RepeatableCall())
                whole.count += item.count
                whole.seconds += item.seconds
        ordered = sorted(found.items(), key=lambda pair: -pair[1].seconds)
        return tuple(Read(where, item.count, item.seconds) for where, item in ordered)


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
