"""Run a script as the interpreter would: its arguments, streams, `__main__` and exit code."""

from __future__ import annotations

import runpy
import sys
import threading
import traceback
import types
from collections.abc import Sequence
from concurrent.futures.thread import _threads_queues
from pathlib import Path

from profiler.errors import RequestError

_INTERRUPTED = 130


def run_script(path: Path, arguments: Sequence[str]) -> int:
    """Run a file as `python FILE ARGUMENTS` would, and give its exit code; what it raises is printed as there.

    Raises RequestError where there is no such file, or it is no Python.
    """
    if path.suffix == ".ipynb":
        raise RequestError(
            f"{path} is a notebook, no script: make it one with `jupyter nbconvert --to script {path}`, or put"
            " `with profiler.why() as watching:` around a cell's calls and print(watching.answer)."
        )
    try:
        source = path.read_bytes()
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}.") from None
    try:
        code = compile(source, str(path), "exec")
    except (SyntaxError, ValueError) as error:
        raise RequestError(f"{path} is no Python script: {error}.") from None
    main = types.ModuleType("__main__")
    main.__file__ = str(path)
    main.__builtins__ = __builtins__  # type: ignore[attr-defined]
    sys.argv = [str(path), *arguments]
    sys.path[0:1] = [str(path.resolve().parent)]
    sys.modules["__main__"] = main
    return _ended(lambda: exec(code, main.__dict__))


def run_module(name: str, arguments: Sequence[str]) -> int:
    """Run a module as `python -m NAME ARGUMENTS` would, and give its exit code."""
    sys.argv = [name, *arguments]
    sys.path[0:1] = [""]
    return _ended(lambda: runpy.run_module(name, run_name="__main__", alter_sys=True))


def _ended(run: object) -> int:
    """The exit code of what runs, told as the interpreter tells it; waits for its threads as that does.

    A pool's workers (concurrent.futures) end at the interpreter's own exit alone and are not waited for here.
    """
    before = set(threading.enumerate())
    try:
        run()  # type: ignore[operator]
        code = 0
    except SystemExit as ended:
        code = _exit_code(ended.code)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BaseException as error:
        # The frames of this package are no part of what the script raised.
        traceback.print_exception(type(error), error, _own_frames(error.__traceback__))
        code = 1
    for thread in set(threading.enumerate()) - before:
        if not thread.daemon and thread not in _threads_queues:
            thread.join()
    return code


def _exit_code(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code
    print(code, file=sys.stderr)
    return 1


def _own_frames(frames: types.TracebackType | None) -> types.TracebackType | None:
    own = str(Path(__file__).parents[1])
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith((own, "<frozen runpy")):
        frames = frames.tb_next
    return frames
