"""Repeat a recorded call, unchanged or with some arguments changed."""

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

# Not repeated: objects of the script with side effects, and limits of the length, which a trial takes from the call.
_DROPPED_ARGUMENTS = ("streamer", "stopping_criteria", "max_length", "min_length", "max_time", "stop_strings")

RepeatedRun = Callable[[], Any]
Mode = Callable[[], contextlib.AbstractContextManager[object]]


@dataclass(frozen=True)
class Candidate:
    """One change to try on some calls."""

    id: str
    evidence: str
    change: str
    where: str
    as_is: RepeatedRun
    changed: RepeatedRun
    own_s: tuple[float, ...]
    """Seconds of the script's own calls of this shape."""
    within: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    """The context in which `changed` runs; entering and leaving it is not timed."""
    shape: str = ""
    alone: bool = False
    """Whether only `changed` can be run, because objects of the script must not be called again."""

    @property
    def seconds(self) -> float:
        return statistics.median(self.own_s)


@dataclass
class CallGroup:
    """Calls of one kind, from one line, with one model and the same settings."""

    calls: list[Call]
    notes: list[CallRecord]
    model: Any
    loaded_at: str

    @property
    def middle(self) -> tuple[Call, CallRecord]:
        """The call with the median time, among those that can be repeated, and its record."""
        pairs = [pair for pair in zip(self.calls, self.notes, strict=True) if pair[1].arguments is not None]
        pairs.sort(key=lambda pair: pair[0].steady_s)
        return pairs[len(pairs) // 2]

    @property
    def seconds(self) -> float:
        return steady_s(self.calls)

    @property
    def firsts(self) -> list[tuple[Call, CallRecord]]:
        """The first call of each shape and its record, the slowest first."""
        by_shape: dict[str, tuple[Call, CallRecord]] = {}
        for call, noted in sorted(zip(self.calls, self.notes, strict=True), key=lambda pair: pair[1].began_s):
            by_shape.setdefault(call.words, (call, noted))
        return sorted(by_shape.values(), key=lambda pair: -pair[0].seconds)

    def others(self, first: Call) -> list[Call]:
        """A first call, and the calls of its shape that began before it ended."""
        same_shape = (call for call in self.calls if call.words == first.words and call.began_s is not None)
        ended_s = (first.began_s or 0.0) + first.seconds
        return [first, *(call for call in same_shape if call is not first and (call.began_s or 0.0) < ended_s)]

    def like(self, call: Call) -> tuple[float, ...]:
        """Steady-state seconds of all calls with the shape of `call`."""
        return tuple(other.steady_s for other in self.calls if other.words == call.words)


def repeat(
    noted: CallRecord,
    call: Call,
    model: Any,
    options: Mapping[str, object] | None = None,
    *,
    inference: bool = False,
) -> RepeatedRun:
    """A function that repeats a call at the same length, with `options` in place of its arguments.

    With `inference`, it runs under torch.inference_mode(), else with the gradient mode of the call.
    """
    args, named = noted.arguments or ((), {})
    named = {name: value for name, value in named.items() if name not in _DROPPED_ARGUMENTS}
    if call.kind == "generate":
        named |= {"max_new_tokens": call.new_tokens, "min_new_tokens": call.new_tokens}
    named |= options or {}
    if named.get("assistant_model", True) is None:
        del named["assistant_model"]
    # The advice is inference_mode(), which saves more than no_grad().
    grad_mode = functools.partial(torch.set_grad_enabled, call.settings["gradients"] == "on")
    mode: Mode = torch.inference_mode if inference else grad_mode
    entry = model.generate if call.kind == "generate" else model
    if call.context_len:
        return _after_context(model, call, args, named, mode)

    def run() -> object:
        with mode():
            return entry(*args, **named)

    return run


def _after_context(model: Any, call: Call, args: tuple[Any, ...], named: dict[str, Any], mode: Mode) -> RepeatedRun:
    """A forward with a cache, which is filled at the first run and cropped to its context before every later one."""
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
