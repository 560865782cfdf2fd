"""Sample which lines of the script run while no model's call does: the main thread, about 50 times a second."""

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

from profiler.device.clock import core_timer, now_s
from profiler.why_slow.call_record import users_file
from profiler.why_slow.observations import OwnLine
from profiler.why_slow.recorder import Recorder

# The mean of the times between samples, which differ: a loop whose steps take as long would always be seen at one line.
_EVERY_S = 0.02
# A line is known from about three samples on.
_LEAST_S = 3 * _EVERY_S
# Python lets the sampler in after so long. Otherwise that would be in a kernel, where Python's lock is free.
_SWITCH_S = 2e-4
_MAKING = "", "making models"
_PACKAGE = str(Path(__file__).parents[1])


@contextmanager
def sampled(recorder: Recorder) -> Iterator[None]:
    """While in this context, `recorder.own_lines` is sampled."""
    seconds: dict[tuple[str, str], dict[tuple[str, str], float]] = defaultdict(lambda: defaultdict(float))
    going = [True]  # no event: a child may be forked while the sampler holds its lock
    thread = threading.Thread(target=_sample, args=(recorder, seconds, going), name="roofscope", daemon=True)
    thread.start()
    try:
        yield
    finally:
        going.clear()
        thread.join()
        recorder.making_s = sum(seconds.pop(_MAKING, {}).values())
        known = [OwnLine(where, function, calls, sum(lines.values()))
                 for (_, function), lines in seconds.items() if sum(lines.values()) >= _LEAST_S
                 for where, calls in [max(lines, key=lambda line: lines[line])]]  # fmt: skip
        recorder.own_lines = tuple(sorted(known, key=lambda line: -line.seconds))


def _sample(recorder: Recorder, seconds: Any, going: Sequence[bool]) -> None:
    """While `going`, add the time since the last sample to the place of each sample outside of calls and loads.

    Samples do not wait for a call's end: code that runs for less than the time between two of them is seen as often as
    its share of the time. `seconds` has them by the place, and by (line, what it calls).
    """
    main, timer, draw = threading.main_thread().ident or 0, core_timer(), random.Random(0)
    usual_s, last_s = sys.getswitchinterval(), now_s()
    while going:
        time.sleep(draw.uniform(0.5, 1.5) * _EVERY_S)
        if recorder.here.busy:
            last_s = now_s()
            continue
        # Else threads of the script keep their usual turns. Daemons, such as the monitor of tqdm's bars, sleep.
        alone = all(thread.daemon or thread.ident == main for thread in threading.enumerate())
        sys.setswitchinterval(_SWITCH_S if alone else usual_s)
        spent_s, last_s = now_s() - last_s, now_s()
        recorder.sampled_s += spent_s
        if (place := _place(sys._current_frames().get(main))) is not None:
            seconds[place[:2]][place[2:]] += spent_s
    sys.setswitchinterval(usual_s)
    recorder.noting_s += timer()


def _place(frame: FrameType | None) -> tuple[str, str, str, str] | None:
    """(file, function) of the innermost code of the user, its line, and what that calls in a library.

    Lines of one function have one place; outside of functions, each has its own. `_MAKING` is where a model is made.
    None in an import, and in code of this package: the time of calls, loads and recording has another name.
    """
    library, found, kind = "", None, getattr(sys.modules.get("torch.nn"), "Module", ())
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__init__" and isinstance(frame.f_locals.get("self"), kind):
            return *_MAKING, "", ""
        if found is None and (file := users_file(code.co_filename)):
            function = code.co_qualname.partition(".<locals>.<")[0]
            line, function = f"{file}:{frame.f_lineno}", "" if function[:1] == "<" else function
            found = file if function else line, function, line, library
        if not found and code.co_filename.startswith(("<frozen importlib", _PACKAGE)):
            return None
        library = f"{str(frame.f_globals.get('__name__')).partition('.')[0]}.{code.co_qualname}"
        frame = frame.f_back
    return found
