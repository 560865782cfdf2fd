"""Sample which lines of the script run while no model's call does: the main thread, about 100 times a second."""

from __future__ import annotations

import random
import sys
import threading
from collections import defaultdict
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
from profiler.why_slow.recorder import Recorder

# The mean of the times between samples, which differ: a loop whose steps take as long would always be seen at one line.
_EVERY_S = 0.01
# Python lets another thread in after so long. Otherwise that would be in a kernel, where Python's lock is free.
_SWITCH_S = 2e-4
_ONLY_THREADS = 2
"""The main thread and the sampler's: others of the script keep their usual turns."""
_OTHER_TIME = {each.__code__ for each in (Recorder.call, Recorder.load, Recorder.text, Reads._read)}
"""Code whose time has another name."""
_PACKAGE = str(Path(__file__).parents[1])


class _Place(NamedTuple):
    """Where the main thread is, as in `OwnLine`."""

    where: str
    function: str
    calls: str


@dataclass
class LineSampler:
    """Adds the seconds between samples to the place of the later one, outside of calls."""

    recorder: Recorder
    _gap: int = 0
    """Calls that ended before the latest samples."""
    _in_gap: dict[_Place, float] = field(default_factory=lambda: defaultdict(float))
    _seconds: dict[tuple[str, str, str], dict[str, float]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(float))
    )
    """Of earlier gaps, by line, function and loop, and by what the line calls."""
    _ended: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Sample until the end."""
        main, timer, draw, usual_s = (
            threading.main_thread().ident or 0,
            OwnTime(),
            random.Random(0),
            sys.getswitchinterval(),
        )
        last_s = now_s()
        while not self._ended.wait(draw.uniform(0.5, 1.5) * _EVERY_S):
            if self.recorder.calling:
                self.recorder.idle.wait()
                last_s = now_s()
                continue
            sys.setswitchinterval(_SWITCH_S if threading.active_count() == _ONLY_THREADS else usual_s)
            spent_s, last_s = now_s() - last_s, now_s()
            place = _place(sys._current_frames().get(main))
            self._settle()
            if place is not None:
                self._in_gap[place] += spent_s
        sys.setswitchinterval(usual_s)
        self._settle(at_end=True)
        self.recorder.noting_s += timer.core_seconds()

    def end(self) -> None:
        self._ended.set()
        self.recorder.idle.set()

    def _settle(self, *, at_end: bool = False) -> None:
        """If the gap between two calls is over, add its samples to those of its loop."""
        ended = len(self.recorder.notes)
        if ended == self._gap and not at_end:
            return
        loop = self.recorder.loop_before(self._gap)
        for (where, function, calls), seconds in self._in_gap.items():
            self._seconds[where, function, loop][calls] += seconds
        self._gap = ended
        self._in_gap.clear()

    @property
    def lines(self) -> tuple[OwnLine, ...]:
        """The sampled lines, the longest first, each with what it calls for longest."""
        lines = [
            OwnLine(where, function, max(calls, key=lambda name: calls[name]), loop, sum(calls.values()))
            for (where, function, loop), calls in self._seconds.items()
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
    """The innermost line of the user's code; None in an import, and where the time has another name."""
    found, library = None, ""
    while frame is not None:
        code = frame.f_code
        if code in _OTHER_TIME:
            return None
        if found is None:
            if file := users_file(code.co_filename):
                function = code.co_qualname.partition(".<locals>.<")[0]
                found = _Place(f"{file}:{frame.f_lineno}", "" if function[:1] == "<" else function, library)
            elif code.co_filename.startswith("<frozen importlib"):
                return None
            elif not code.co_filename.startswith(_PACKAGE):
                library = f"{frame.f_globals.get('__name__')}.{code.co_qualname}"
        frame = frame.f_back
    return found
