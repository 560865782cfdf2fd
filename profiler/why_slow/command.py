"""`why`: run a script, a block or a cell, record its calls, repeat them with changes, and write the answer."""

from __future__ import annotations

import builtins
import contextlib
import functools
import importlib.machinery
import os
import pkgutil
import re
import runpy
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.thread import _threads_queues
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profiler.device.clock import now_s
from profiler.errors import RequestError, RoofscopeError, describe_error
from profiler.fallbacks import fallback_sentences
from profiler.json_document import json_text
from profiler.patching import patched
from profiler.store.folder import replace_file
from profiler.why_slow.findings import Why, judge_calls
from profiler.why_slow.patches import watched
from profiler.why_slow.recorder import Recorder
from profiler.why_slow.render import CALL_COLUMNS, call_rows, html_why, why_document, why_sentences

if TYPE_CHECKING:
    import pandas as pd

_PACKAGE = Path(__file__).parents[1]
# Without a language model, the lines of a script with torch are an answer from so many seconds on.
_LEAST_OWN_S = 1.0


def why_script(
    script: Path | None,
    module: str,
    arguments: Sequence[str],
    out: Path | None,
    streams: contextlib.AbstractContextManager[object],
    report: Callable[[Why | None, Path | None, tuple[str, ...]], object],
    budget_s: float | None = None,
) -> int:
    """Run a script or a module unmodified within `streams`, call `report` with the answer, and return the exit code.

    `report` gets the answer, or None if no model ran; the folder with its files, or None if none were written; and
    sentences that say why not, or, without an answer, where models may have run. `budget_s` is as in `explained`.
    Raises RequestError if the script cannot be read.
    """
    recorder, name, process = Recorder(), module or Path(str(script)).name, os.getpid()
    here = Path.cwd()  # the script may change it
    with contextlib.ExitStack() as around:

        def end(code: int) -> None:
            around.close()
            found = explained(recorder, name, budget_s, interrupted=code == 130)
            folder, hints = None, () if found and found.seen.calls else _hints(recorder)
            if found is not None:
                stem = re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(name).stem)
                folder = out or Path("runs") / f"why-{stem}-{datetime.now(UTC).strftime('%Y%m%d-%H%M%S')}"
                try:
                    write(found, here / folder)
                except RoofscopeError as error:
                    folder, hints = None, (str(error),)
            report(found, folder, hints)

        around.enter_context(scripts_own_profiler(here if script is None else script.resolve().parent))
        around.enter_context(streams)
        around.enter_context(watched(recorder))
        around.enter_context(_before_immediate_exit(end))
        code = run_module(module, arguments) if script is None else run_script(script, arguments)
        if os.getpid() != process:
            raise SystemExit(code)  # the end of a child that the script forked, which gets no answer
        end(code)
    return code


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


def _hints(recorder: Recorder) -> tuple[str, ...]:
    """What is known of models that did not run in the script's own process as modules of torch."""
    own = "vLLM runs its models in its own processes: `roofscope run MODEL --engine vllm` times them."
    return (*([own] if "vllm" in sys.modules else []), *fallback_sentences(recorder.fallbacks, on_gpu=True))


def _before_immediate_exit(end: Callable[[int], None]) -> contextlib.AbstractContextManager[None]:
    """A context in which `os._exit` of this process first calls `end`, since it skips all other cleanup."""
    exit_now, process = os._exit, os.getpid()

    def exit_after_end(code: int) -> None:
        if os.getpid() == process:
            try:
                end(code)
                sys.stdout.flush()
                sys.stderr.flush()
            except Exception as error:  # the script exits with its own code even if the answer fails
                print(f"roofscope: {describe_error(error)}", file=sys.stderr, flush=True)
        exit_now(code)

    return patched(os, _exit=exit_after_end)


def explained(recorder: Recorder, name: str, budget_s: float | None = None, *, interrupted: bool = False) -> Why | None:
    """The answer, after trials of the recorded calls; None if nothing is known of its time.

    By default `budget_s` is as long as the script took, at least 30 s and at most 5 min.
    """
    start_s = now_s()
    seen = recorder.seen(name, interrupted=interrupted)
    own_s = sum(line.seconds for line in seen.own_lines) if "torch" in sys.modules else 0.0
    if not seen.calls and not seen.loads and not seen.unnoted and own_s < _LEAST_OWN_S:
        return None
    from profiler.run.warnings import busy_words

    # The calls of a GPU need one core, to launch them.
    threads = max((each.settings.threads if each.settings.on_cpu else 1 for each in seen.calls), default=1)
    seen = replace(seen, warnings=tuple(busy_words(threads, recorder.foreign)))
    if interrupted or not seen.calls:
        return judge_calls(seen, [])
    import torch

    from profiler.loading.meta_model import quiet_libraries

    # What follows a block or a cell draws the random numbers that it would draw without `why`.
    gpus = {torch.device(each.settings.device).index for each in seen.calls if each.settings.device.startswith("cuda")}
    # Libraries that only this answer imports keep their notes.
    with torch.random.fork_rng(sorted(gpus)), quiet_libraries():
        from profiler.why_slow.trials import with_trials

        return with_trials(recorder, seen, budget_s, start_s)


def write(found: Why, folder: Path) -> None:
    """Write why.json and why.html. Raises RequestError if the folder cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(f"{folder} cannot be written: {error.strerror}.") from None
    replace_file(folder / "why.json", json_text(why_document(found)) + "\n")
    replace_file(folder / "why.html", html_why(found))


@dataclass
class Watching:
    """The result of `with profiler.why() as watching:`, filled in at the end of the block."""

    found: Why | None = None

    def __repr__(self) -> str:
        return "\n\n".join([self.answer, *([self.calls.to_string(index=False)] if self.found else [])])

    @property
    def findings(self) -> tuple[object, ...]:
        """Changes to make, the largest saving first."""
        return self.found.findings if self.found else ()

    @property
    def answer(self) -> str:
        """The answer in sentences."""
        if self.found is None:
            return "No language model was called."
        return "\n".join([*why_sentences(self.found), *self.found.seen.warnings])

    @property
    def calls(self) -> pd.DataFrame:
        """The calls by line, kind and settings, with their times in words, the slowest first."""
        import pandas as pd

        return pd.DataFrame(call_rows(self.found) if self.found else [], columns=list(CALL_COLUMNS))

    def save(self, folder: Path) -> None:
        """Write why.json and why.html. Raises RequestError without an answer, or if the folder cannot be written."""
        if self.found is None:
            raise RequestError("no language model was called: there is nothing to save.")
        write(self.found, folder)


@contextlib.contextmanager
def why(budget_s: float | None = None) -> Iterator[Watching]:
    """Record the calls of language models within a block, and explain their time within `budget_s` seconds afterwards.

    By default these are as many as the block took, at least 30 and at most 300.

    with profiler.why() as watching:
        model.generate(...)
    print(watching.answer)
    """
    recorder, watching = Recorder(), Watching()
    with watched(recorder):
        yield watching
    watching.found = explained(recorder, "this block", budget_s)


def register(shell: Any) -> None:
    """Register `%%why`, which explains the time of one cell, with an IPython shell."""

    def why_cell(line: str, cell: str) -> Watching:
        """`%%why [--budget SECONDS]`: run this cell, and explain the time of its language models."""
        found = re.fullmatch(r"\s*(?:--budget[\s=]+(\d+\.?\d*|\.\d+)\s*)?", line)
        if found is None:
            raise RequestError(f"%%why {line}: it takes --budget SECONDS and nothing else.")
        with why(float(found[1]) if found[1] else None) as watching:
            shell.run_cell("# %%why\n" + cell)  # a first line, so that the others have their numbers
        return watching

    shell.register_magic_function(why_cell, "cell", "why")
