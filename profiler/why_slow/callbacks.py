"""What `generate` calls at every token: logits processors, stopping criteria and a streamer, each of them timed."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from profiler.device.clock import now_s
from profiler.why_slow.call_record import CallRecord, users_file

_REPEATED = ("MaxLengthCriteria", "EosTokenCriteria")
"""Stopping criteria that trials have, too."""


@dataclass
class Callback:
    """A logits processor, a stopping criterion or a streamer. Its seconds, without forwards, are added to the call."""

    item: Any
    run: Any
    """What is called: the item itself, or its method."""
    noted: CallRecord
    is_left_out: bool = False
    """Whether trials leave out what is neither the length's nor the end's criterion."""

    def __post_init__(self) -> None:
        vars(self)["__call__"] = self.run.__call__  # transformers looks at its signature

    @property
    def name(self) -> str:
        inner = _unwrapped(self.item)
        return str(getattr(inner, "__name__", type(inner).__name__))

    @property
    def own_function(self) -> tuple[str, str]:
        """The script's function in it, and the line where that begins: of its class, or one that it was made from."""
        method = getattr(self.run, "__func__", type(self.run).__call__)
        parts = (self.item, method, *getattr(self.item, "__dict__", {}).values())
        codes = (getattr(_unwrapped(part), "__code__", None) for part in parts)
        own = ((code, file) for code in codes if code and (file := users_file(code.co_filename)))
        return next(((code.co_qualname, f"{file}:{code.co_firstlineno}") for code, file in own), ("", ""))

    def __call__(self, *args: Any, **named: Any) -> Any:
        start_s, forward_s = now_s(), self.noted.forward_s  # as calls are timed: waits for a core stretch both alike
        try:
            return self.run(*args, **named)
        finally:
            spent_s = max(0.0, now_s() - start_s - (self.noted.forward_s - forward_s))
            is_own = not str(_unwrapped(self.item).__module__).startswith("transformers.")
            times, name = self.noted.callbacks if is_own else self.noted.processors, self.name
            times[name] = times.get(name, 0.0) + spent_s
            if self.is_left_out and name not in _REPEATED:
                self.noted.left_out_s += spent_s


def _unwrapped(item: Any) -> Any:
    return _unwrapped(item.func) if isinstance(item, functools.partial) else item
