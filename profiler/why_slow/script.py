"""Run a script as the interpreter does: with its arguments, streams, `__main__` and exit code."""

import builtins
import contextlib
import functools
import importlib.machinery
import pkgutil
import runpy
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.thread import _threads_queues
from pathlib import Path

from profiler.errors import RequestError

_PACKAGE = Path(__file__).parents[1]


@contextlib.contextmanager
def scripts_own_profiler(folder: Path) -> Iterator[None]:
    """While in this context, `import profiler` finds a file of that name in the script's folder, as under `python`.

    Modules of this package find each other by their full names. Raises RequestError for a folder with such modules.
    """
    name = _PACKAGE.name
    spec = importlib.machinery.PathFinder.find_spec(name, [str(folder)])
    if spec is None or spec.origin is None or Path(spec.origin).resolve().parent == _PACKAGE.resolve():
        yield
        return
    if spec.submodule_search_locations is not None:
        raise RequestError(f"{Path(spec.origin).parent} has the name of roofscope's own package: rename that folder.")
    for each in pkgutil.iter_modules([str(_PACKAGE)]):
        if not each.name.startswith("_"):
            importlib.import_module(f"{name}.{each.name}")
    ours = sys.modules.pop(name)
    try:
        yield
    finally:
        sys.modules[name] = ours


def run_script(path: Path, arguments: Sequence[str]) -> int:
    """Run a file like `python FILE ARGUMENTS`, and return its exit code; an exception is printed as a traceback.

    Raises RequestError if the file cannot be read, is a notebook or is not Python.
    """
    if path.suffix == ".ipynb":
        raise RequestError(
            f"{path} is a notebook, not a script: convert it with `jupyter nbconvert --to script {path}`, or run"
            " `%load_ext profiler` in it and begin a cell with `%%why`."
        )
    try:
        code = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}.") from None
    except (SyntaxError, ValueError) as error:
        raise RequestError(f"{path} is not a Python script: {error}.") from None
    main = types.ModuleType("__main__")
    main.__file__ = str(path)
    main.__builtins__ = builtins  # type: ignore[attr-defined]
    sys.argv = [str(path), *arguments]
    sys.path[0:1] = [str(path.resolve().parent)]
    sys.modules["__main__"] = main
    return _exit_code_of(lambda: exec(code, main.__dict__))


def run_module(name: str, arguments: Sequence[str]) -> int:
    """Run a module like `python -m NAME ARGUMENTS`, and return its exit code."""
    sys.argv = [name, *arguments]
    sys.path[0:1] = [""]
    return _exit_code_of(lambda: runpy.run_module(name, run_name="__main__", alter_sys=True))


def _exit_code_of(run: Callable[[], object]) -> int:
    """Run a function, wait for its threads, and return the exit code that the interpreter would end with.

    Workers of concurrent.futures end only at the interpreter's exit, so they are not waited for.
    """
    before = set(threading.enumerate())
    try:
        run()
        code = 0
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            code = end.code or 0
        else:
            print(end.code, file=sys.stderr)
            code = 1
    except KeyboardInterrupt:
        return 130  # as of a shell: 128 and the number of SIGINT
    except BaseException as error:
        frames, own = error.__traceback__, (str(_PACKAGE), "<frozen runpy")
        while frames is not None and frames.tb_frame.f_code.co_filename.startswith(own):
            frames = frames.tb_next  # the traceback begins with the script
        hook, sys.excepthook = sys.excepthook, sys.__excepthook__  # the script's own may fail or exit
        code = _exit_code_of(functools.partial(hook, type(error), error.with_traceback(frames), frames)) or 1
    for thread in set(threading.enumerate()) - before:
        if not thread.daemon and thread not in _threads_queues:
            thread.join()
    return code
