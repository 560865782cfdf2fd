"""Sample which lines of the script run while no model's call does: the main thread, about 50 times a second."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from profiler.device.clock import OwnTime
from profiler.device.contention import own_s
from profiler.why_slow.call_record import users_file
from profiler.why_slow.observations import OwnLine
from profiler.why_slow.recorder import Recorder

# The mean of the times between samples, which differ: a loop whose steps take as long would always be seen at one line.
_EVERY_S = 0.02
# A line is known from about three samples on.
_LEAST_S = 3 * _EVERY_S
# Python lets the sampler in after so long. Otherwise that would be in a kernel, where Python's lock is free.
_SWITCH_S = 2e-4
_PACKAGE = str(Path(__file__).parents[1])


@contextmanager
def sampled(recorder: Recorder) -> Iterator[None]:
    """While in this context, `recorder.own_lines` is sampled."""
    seconds: dict[tuple[str, str], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    going = [True]  # no event: a child may be forked while the sampler holds its lock
    thread = threading.Thread(target=_sample, args=(recorder, seconds, going), name="roofscope", daemon=True)
    thread.start()
    try:
        yield
    finally:
        going.clear()
        thread.join()
        lines = (OwnLine(where, function, max(calls, key=lambda name: calls[name]), sum(calls.values()))
                 for (where, function), calls in seconds.items())  # fmt: skip
        known = (line for line in lines if line.seconds >= _LEAST_S)
        recorder.own_lines = tuple(sorted(known, key=lambda line: -line.seconds))


def _sample(recorder: Recorder, seconds: Any, going: Sequence[bool]) -> None:
    """While `going`, add the time since the last sample to the place of each sample outside of calls and loads.

    Samples do not wait for a call's end: code that runs for less than the time between two of them is seen as often as
    its share of the time. `seconds` has them by (line, function), and by what the line calls.
    """
    main, timer, draw = threading.main_thread().ident or 0, OwnTime(), random.Random(0)
    usual_s, last_s = sys.getswitchinterval(), own_s()
    while going:
        time.sleep(draw.uniform(0.5, 1.5) * _EVERY_S)
        if recorder.here.busy:
            last_s = own_s()
            continue
        # Else threads of the script keep their usual turns. Daemons, such as the monitor of tqdm's bars, sleep.
        alone = all(thread.daemon or thread.ident == main for thread in threading.enumerate())
        sys.setswitchinterval(_SWITCH_S if alone else usual_s)
        spent_s, last_s = own_s() - last_s, own_s()
        if (place := _place(sys._current_frames().get(main))) is not None:
            where, function, calls = place
            seconds[where, function][calls] += spent_s
    sys.setswitchinterval(usual_s)
    recorder.noting_s += timer.core_seconds()


def _place(frame: FrameType | None) -> tuple[str, str, str] | None:
    """(innermost line of the user's code, its function, what it calls in a library).

    None in an import, and in code of this package: the time of calls, loads and recording has another name.
    """
    library = ""
    while frame is not None:
        code = frame.f_code
        if file := users_file(code.co_filename):
            function = code.co_qualname.partition(".<locals>.<")[0]
            return f"{file}:{frame.f_lineno}", "" if function[:1] == "<" else function, library
        if code.co_filename.startswith(("<frozen importlib", _PACKAGE)):
            return None
        library = f"{str(frame.f_globals.get('__name__')).partition('.')[0]}.{code.co_qualname}"
        frame = frame.f_back
    return None
