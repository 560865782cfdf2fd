"""Repeat a recorded call, as it was or with some arguments changed."""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from profiler.loading.cache_argument import argument_name, cache_of
from profiler.why_slow.call_record import CallRecord
from profiler.why_slow.observations import Call, steady_s

# Arguments that act on their own, or that hold the length: a trial has the length that the call came to.
_NOT_AGAIN = ("streamer", "stopping_criteria", "max_length", "min_length", "max_time", "stop_strings")

RepeatedRun = Callable[[], Any]
Mode = Callable[[], contextlib.AbstractContextManager[object]]


@dataclass(frozen=True)
class Candidate:
    """One thing that may be changed about some calls."""

    id: str
    evidence: str
    change: str
    where: str
    as_is: RepeatedRun
    changed: RepeatedRun
    own_s: tuple[float, ...]
    """What it took in the script, each time that it had this shape."""
    within: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    """What holds while `changed` runs; entering and leaving it is not timed."""
    shape: str = ""
    alone: bool = False
    """Whether it cannot be run as it was: what the script's own objects do is done once."""

    @property
    def seconds(self) -> float:
        return statistics.median(self.own_s)


@dataclass
class CallGroup:
    """Calls of one kind from one line with one model and the same settings."""

    calls: list[Call]
    notes: list[CallRecord]
    model: Any
    loaded_at: str

    @property
    def middle(self) -> tuple[Call, CallRecord]:
        """The call that took the median time, of those that can be repeated."""
        pairs = [pair for pair in zip(self.calls, self.notes, strict=True) if pair[1].arguments is not None]
        pairs.sort(key=lambda pair: pair[0].steady_s)
        return pairs[len(pairs) // 2]

    @property
    def seconds(self) -> float:
        return steady_s(self.calls)

    @property
    def firsts(self) -> list[tuple[Call, CallRecord]]:
        """The first call of each shape, the dearest first."""
        found: dict[str, tuple[Call, CallRecord]] = {}
        for call, noted in sorted(zip(self.calls, self.notes, strict=True), key=lambda pair: pair[1].began_s):
            found.setdefault(call.words, (call, noted))
        return sorted(found.values(), key=lambda pair: -pair[0].seconds)

    def beside(self, first: Call) -> list[Call]:
        """A first call, and those of its shape that began before it had ended."""
        like = (call for call in self.calls if call.words == first.words and call.began_s is not None)
        ended_s = (first.began_s or 0.0) + first.seconds
        return [first, *(call for call in like if call is not first and (call.began_s or 0.0) < ended_s)]

    def like(self, call: Call) -> tuple[float, ...]:
        """Seconds of all its calls of one shape, the first once warm."""
        return tuple(other.steady_s for other in self.calls if other.words == call.words)


def repeat(
    noted: CallRecord,
    call: Call,
    model: Any,
    options: Mapping[str, object] | None = None,
    *,
    inference: bool = False,
    ids: Any = None,
) -> RepeatedRun:
    """Repeat a call at the same length, with some of its arguments changed."""
    args, named = noted.arguments or ((), {})
    named = {name: value for name, value in named.items() if name not in _NOT_AGAIN}
    if call.kind == "generate":
        named |= {"max_new_tokens": call.new_tokens, "min_new_tokens": call.new_tokens}
    named |= options or {}
    if named.get("assistant_model", True) is None:
        del named["assistant_model"]
    # What is advised is tried: inference_mode() leaves out more than no_grad() does.
    as_it_was = functools.partial(torch.set_grad_enabled, call.settings["gradients"] == "on")
    mode: Mode = torch.inference_mode if inference else as_it_was
    entry = model.generate if call.kind == "generate" else model
    if call.context_len and ids is None:
        return _behind(model, call, args, named, mode)

    def run() -> object:
        with mode():
            return entry(*args, **named)

    return run


def _behind(model: Any, call: Call, args: tuple[Any, ...], named: dict[str, Any], mode: Mode) -> RepeatedRun:
    """A forward behind a cache, which is filled before the first run and cut back before each other."""
    filled: list[Any] = []
    name = argument_name(model)

    def run() -> object:
        with mode():
            if not filled:
                ids = torch.zeros(call.batch_size, call.context_len, dtype=torch.long, device=model.device)
                filled.append(cache_of(model(ids, use_cache=True)))
            else:
                filled[0].crop(-call.prompt_len)
            return model(*args, **named, **{name: filled[0]})

    return run
