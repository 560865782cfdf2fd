"""Sample which lines of the script run while none of its models computes: the main thread, 100 times a second."""

from __future__ import annotations

import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from profiler.device.clock import OwnTime, now_s
from profiler.why_slow.call_record import users_file
from profiler.why_slow.host_counters import Reads
from profiler.why_slow.observations import OwnLine
from profiler.why_slow.recorder import Callback, Recorder

_EVERY_S = 0.01
# Python lets another thread in after so long. Otherwise it would be in a kernel, where Python's lock is free.
_SWITCH_S = 2e-4
_ONLY_THREADS = 2
"""The main thread and the sampler's: others of the script keep their usual turns."""
_PLACES = {each.__code__ for each in (Recorder.call, Recorder.load, Recorder.text, Reads._read)}
"""Code within which the script runs no code of its own, but callbacks."""
_CALLBACK = Callback.__call__.__code__
_OWN = str(Path(__file__).parents[1])


class _Place(NamedTuple):
    """Where the main thread is, as in `OwnLine`."""

    where: str
    function: str
    calls: str
    callback: str = ""


@dataclass
class LineSampler:
    """Adds the seconds between samples to the place of the later one, while its thread runs."""

    recorder: Recorder
    _gap: int = 0
    """Calls that ended before the latest samples."""
    _in_gap: Counter[_Place] = field(default_factory=Counter)
    """Their seconds, by place."""
    _seconds: dict[tuple[str, str, str, str], Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """Of earlier gaps, by line, function, callback and loop, and by what the line calls."""
    _ended: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Sample until the end."""
        main, last_s, timer = threading.main_thread().ident or 0, now_s(), OwnTime()
        usual_s = sys.getswitchinterval()
        while not self._ended.wait(_EVERY_S):
            sys.setswitchinterval(_SWITCH_S if threading.active_count() == _ONLY_THREADS else usual_s)
            spent_s, last_s = now_s() - last_s, now_s()
            others = self.recorder.calling - {main}
            place = None if others else _place(sys._current_frames().get(main))
            self._settle()
            if place is not None:
                self._in_gap[place] += spent_s  # type: ignore[assignment]
        sys.setswitchinterval(usual_s)
        self._settle(at_end=True)
        self.recorder.noting_s += timer.core_seconds()

    def end(self) -> None:
        self._ended.set()

    def _settle(self, *, at_end: bool = False) -> None:
        """If the gap between two calls is over, add its samples to those of its loop."""
        ended = len(self.recorder.notes)
        if ended == self._gap and not at_end:
            return
        loop = self.recorder.loop_before(self._gap)
        for (where, function, calls, callback), seconds in self._in_gap.items():
            self._seconds[where, function, callback, "" if callback else loop][calls] += seconds
        self._gap = ended
        self._in_gap.clear()

    @property
    def lines(self) -> tuple[OwnLine, ...]:
        """The sampled lines, the longest first, each with what it calls for longest."""
        lines = [
            OwnLine(where, function, max(calls, key=lambda name: calls[name]), callback, loop, calls.total())
            for (where, function, callback, loop), calls in self._seconds.items()
        ]
        return tuple(sorted(lines, key=lambda line: -line.seconds))


@contextmanager
def sampled(recorder: Recorder) -> Iterator[None]:
    """While in this context, `recorder.own_lines` is sampled."""
    sampler = LineSampler(recorder)
    thread = threading.Thread(target=sampler.run, name="roofscope", daemon=True)
    thread.start()
    try:
        yield
    finally:
        sampler.end()
        thread.join()
        recorder.own_lines = sampler.lines


def _place(frame: FrameType | None) -> _Place | None:
    """The innermost line of the user's code; None in a model's call, except for callbacks, and in an import."""
    found, library = None, ""
    while frame is not None:
        code = frame.f_code
        if code is _CALLBACK:
            return (found or _Place("", "", ""))._replace(callback=frame.f_locals["self"].name)
        if code in _PLACES:
            return None
        if found is None:
            if file := users_file(code.co_filename):
                function = code.co_qualname.partition(".<locals>.<")[0]
                found = _Place(f"{file}:{frame.f_lineno}", "" if function[:1] == "<" else function, library)
            elif code.co_filename.startswith("<frozen importlib"):
                return None
            elif not code.co_filename.startswith(_OWN):
                library = f"{frame.f_globals.get('__name__')}.{code.co_qualname}"
        frame = frame.f_back
    return found
