"""The record of one call of a model and of what it calls at every token, and each thread's state and line."""

from __future__ import annotations

import contextlib
import functools
import sys
import sysconfig
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

from profiler.device.clock import Clock
from profiler.device.contention import own_s
from profiler.why_slow.observations import CallKind, CallSettings
from profiler.why_slow.plain_models import SeenAttention
from profiler.why_slow.watched_calls import Watched

if TYPE_CHECKING:
    from profiler.why_slow.read_logits import LogitsRead
    from profiler.why_slow.torch_context import TorchContext

_LIBRARY_PREFIXES = (
    *(str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    str(Path(__file__).parents[1]),
)
_NO_LINE = "a library's own code"
_STARTED_AT: weakref.WeakKeyDictionary[object, str] = weakref.WeakKeyDictionary()
"""By thread or task of a pool: the user's line that started it."""


@dataclass
class CallRecord:
    """One recorded call: marks of the device's clock, and what a trial needs to repeat it.

    Fields that `Call` has, too, mean the same.
    """

    watched: Watched
    model: weakref.ref[Any]
    where: str
    settings: CallSettings
    shape: tuple[int, int, int]
    """(sequences computed, tokens passed per sequence, tokens in the cache)."""
    clock: Clock
    context: TorchContext
    start: Any = None
    end: Any = None
    forwards: int = 0
    new_tokens: int = 0
    arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    """(positional, named) arguments; None if they were not stored."""
    visible: Any = None
    """Share of the tokens that its mask shows, a tensor of its device; None without a mask."""
    name: str = ""
    architecture: tuple[str, int] = ("", 0)
    """The class of its model and the number of parameters; models of one architecture take as long."""
    callbacks_s: dict[str, float] = field(default_factory=dict)
    processors_s: dict[str, float] = field(default_factory=dict)
    left_out_s: float = 0.0
    began_s: float = 0.0
    """On the host's clock, without waiting for the device."""
    forward_s: float = 0.0
    prompt_s: float = 0.0
    failed: str = ""
    read: LogitsRead | None = None
    autocast: tuple[int, str] = (0, "")
    """How many autocasts its thread had entered outside of calls, and the line of the latest."""
    attention: SeenAttention | None = None

    @property
    def kind(self) -> CallKind:
        return self.watched.kind

    @property
    def named(self) -> dict[str, Any]:
        """Its named arguments; empty if they were not kept."""
        return self.arguments[1] if self.arguments else {}

    @property
    def mask(self) -> Any:
        """Its mask [batch, tokens]; None if it has another one or none, or its arguments were not kept."""
        mask = self.named.get("attention_mask")
        return mask if getattr(mask, "dim", lambda: 0)() == 2 else None


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
        start_s, forward_s = own_s(), self.noted.forward_s
        try:
            return self.run(*args, **named)
        finally:
            spent_s = max(0.0, own_s() - start_s - (self.noted.forward_s - forward_s))
            is_own = not str(_unwrapped(self.item).__module__).startswith("transformers.")
            times, name = self.noted.callbacks_s if is_own else self.noted.processors_s, self.name
            times[name] = times.get(name, 0.0) + spent_s
            if self.is_left_out and name not in _REPEATED:
                self.noted.left_out_s += spent_s


def _unwrapped(item: Any) -> Any:
    return _unwrapped(item.func) if isinstance(item, functools.partial) else item


Part = Literal["call", "forward", "tokenizer", "load", "read"]


@dataclass
class Thread(threading.local):
    """What the current thread is inside of."""

    busy: set[int]
    """All threads that are inside of any part."""
    within: tuple[Part, ...] = ()
    """The parts, the innermost last: a model's call, a forward within it, a tokenizer, a load, a read of a tensor."""
    noted: CallRecord | None = None
    autocast: tuple[int, str] = (0, "")
    last: str = ""
    """The line of the latest call of a model."""

    @property
    def in_call(self) -> bool:
        """Whether it is in a call; a thread of transformers is in its forward only."""
        return "call" in self.within or "forward" in self.within

    @contextlib.contextmanager
    def inside(self, part: Part) -> Iterator[None]:
        """A context in which this thread is inside of one more part."""
        outer, number = self.within, threading.get_ident()
        self.within = (*outer, part)
        self.busy.add(number)
        try:
            yield
        finally:
            self.within = outer
            if not outer:
                self.busy.discard(number)


def models_of(notes: Sequence[CallRecord]) -> dict[str, Any]:
    """By its name, each model of some calls; for one that no longer exists, another of its architecture."""
    alive = {noted.name: model for noted in notes if (model := noted.model()) is not None}
    instead = {noted.architecture: alive[noted.name] for noted in notes if noted.name in alive}
    found = {noted.name: alive.get(noted.name, instead.get(noted.architecture)) for noted in notes}
    return {name: model for name, model in found.items() if model is not None}


def users_line() -> str:
    """Return the nearest line of the user's code that called this, such as `script.py:31`, or started this thread.

    Without such a line it is `a library's own code`.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if file := users_file(frame.f_code.co_filename):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return _STARTED_AT.get(threading.current_thread(), _NO_LINE)


@functools.cache
def users_file(path: str) -> str:
    """The name of a file of the user's code, `cell` for a notebook's cell; empty for a library and made code."""
    if "ipykernel_" in path or "<ipython-input" in path:
        return "cell"  # its file name means nothing to its user
    is_librarys = path.startswith((*_LIBRARY_PREFIXES, "<")) or "site-packages" in path
    return "" if is_librarys else Path(path).name


def starts_here(started: object, *_: object) -> None:
    """Note the user's line at which a thread, or a task of a pool, is started."""
    _STARTED_AT[started] = users_line()


def runs_here(task: object, *_: object) -> None:
    """Note that the current thread runs a task of a pool, whose threads run tasks from several lines."""
    _STARTED_AT[threading.current_thread()] = _STARTED_AT.get(task, _NO_LINE)
