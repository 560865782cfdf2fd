"""`why`: run a script, record its calls, try them with changes, and write the answer."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from profiler import effort
from profiler.device.clock import now_s
from profiler.device.contention import ForeignLoad
from profiler.errors import RequestError, describe_error
from profiler.json_document import json_text
from profiler.store.writer import replace_file
from profiler.why_slow.findings import CallFloor, Why, judge_calls
from profiler.why_slow.observations import Observations
from profiler.why_slow.patches import watched
from profiler.why_slow.recorder import Recorder
from profiler.why_slow.render import html_why, why_document
from profiler.why_slow.script import run_module, run_script

# Trials may take twice as long as the script's own calls, within these: three pairs of each change to a call of a few
# seconds take most of the least.
# Of which first calls, run again once warm, may take so much.
_FOR_FIRST_CALLS = 0.25


@dataclass(frozen=True)
class Watched:
    """A script that was run: the answer; None where no model of transformers ran."""

    why: Why | None
    folder: Path | None = None


def why_script(
    script: Path | None,
    module: str,
    arguments: Sequence[str],
    out: Path | None,
    streams: contextlib.AbstractContextManager[object],
    tell: Callable[[Watched], object],
) -> int:
    """Run a script, or a module, unmodified, within `streams`; then `tell` what its models' time went to, and give its
    exit code.

    Raises RequestError for a script that cannot be read.
    """
    recorder, name, process = Recorder(), module or Path(str(script)).name, os.getpid()
    foreign = ForeignLoad(children=True)
    with contextlib.ExitStack() as around:

        def end(code: int) -> None:
            around.close()
            tell(_answered(recorder, name, foreign, out, interrupted=code == 130))

        around.enter_context(streams)
        around.enter_context(watched(recorder))
        around.enter_context(_told_before_exit(end))
        code = run_module(module, arguments) if script is None else run_script(script, arguments)
        if os.getpid() != process:
            raise SystemExit(code)  # a child that the script forked has come to its end: nobody asked it why
        end(code)
    return code


@contextlib.contextmanager
def _told_before_exit(end: Callable[[int], None]) -> Iterator[None]:
    """Within, `os._exit` in this process, which ends a script at once, first does what its end does."""
    leave, process = os._exit, os.getpid()

    def told_first(code: int) -> None:
        if os.getpid() == process:
            try:
                end(code)
                sys.stdout.flush()
                sys.stderr.flush()
            except Exception as error:  # the script is left as it asked, whatever becomes of the answer
                print(f"roofscope: {describe_error(error)}", file=sys.stderr, flush=True)
        leave(code)

    os._exit = told_first  # type: ignore[assignment]
    try:
        yield
    finally:
        os._exit = leave


def _answered(recorder: Recorder, name: str, foreign: ForeignLoad, out: Path | None, *, interrupted: bool) -> Watched:
    """What was seen, explained and written."""
    found = explained(recorder, name, foreign, interrupted=interrupted)
    if found is None:
        return Watched(None)
    folder = out or Path("runs") / _folder_name(name)
    write(found, folder)
    return Watched(found, folder)


def explained(
    recorder: Recorder, name: str, foreign: ForeignLoad | None = None, *, interrupted: bool = False
) -> Why | None:
    """What was seen, tried and judged; None where no model was called or loaded. `foreign` has looked meanwhile."""
    seen = recorder.seen(name, interrupted=interrupted)
    if not seen.calls and not seen.loads and not seen.unnoted:
        return None
    if foreign is not None:
        seen = replace(seen, warnings=tuple(_others(seen, foreign)))
    if interrupted or not seen.calls:
        return judge_calls(seen, [])
    # torch is there by now: the script has used it.
    from profiler.why_slow.trials import once_warm, try_changes

    own = effort.STANDARD
    budget_s = min(own.script_most_s, max(own.script_least_s, 2 * seen.calls_s))
    start_s = now_s()
    seen = once_warm(recorder, seen, _FOR_FIRST_CALLS * budget_s)
    trials, missed = try_changes(recorder, seen, budget_s - (now_s() - start_s))
    return judge_calls(seen, trials, _floor(recorder, seen) if own.script_floor else None, missed)


def _others(seen: Observations, foreign: ForeignLoad) -> list[str]:
    """What is said of others that kept cores busy which the calls needed; a card's calls are dispatched by one."""
    from profiler.run.warnings import busy_words

    ran_with = [call.settings for call in seen.calls]
    threads = [int(told["threads"]) if told["device"] == "cpu" else 1 for told in ran_with]
    return busy_words(max(threads, default=1), foreign)


def _floor(recorder: Recorder, seen: Observations) -> CallFloor | None:
    """The least seconds of all calls here that did not fail; None where a model cannot be counted."""
    from profiler.why_slow.floor import floor_of_calls

    try:
        done = [pair for pair in zip(seen.calls, recorder.notes, strict=True) if not pair[0].failed]
        return floor_of_calls([(call, noted.model()) for call, noted in done]) if done else None
    except Exception:  # a stranger's model may fail anywhere in it, and the answer stands without
        return None


def write(found: Why, folder: Path) -> None:
    """Write why.json and why.html. Raises RequestError where the folder cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(f"{folder} cannot be written: {error.strerror}.") from None
    replace_file(folder / "why.json", json_text(why_document(found)) + "\n")
    replace_file(folder / "why.html", html_why(found))


def _folder_name(script: str) -> str:
    stem = re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(script).stem)
    return f"why-{stem}-{datetime.now(UTC).strftime('%Y%m%d-%H%M%S')}"


@dataclass
class Watching:
    """What `with profiler.why() as watching:` gives: the answer once the block has ended."""

    found: Why | None = None

    @property
    def findings(self) -> tuple[object, ...]:
        """What to change, the dearest first."""
        return self.found.findings if self.found else ()

    @property
    def answer(self) -> str:
        """The answer in sentences."""
        from profiler.why_slow.render import why_sentences

        if self.found is None:
            return "No model of transformers was called."
        return "\n".join([*why_sentences(self.found), *self.found.seen.warnings])

    def save(self, folder: Path) -> None:
        """Write why.json and why.html. Raises RequestError."""
        if self.found is None:
            raise RequestError("no model of transformers was called: there is nothing to save.")
        write(self.found, folder)


@contextlib.contextmanager
def why() -> Iterator[Watching]:
    """Watch the models of transformers that are called within, and say afterwards what their time went to.

    with profiler.why() as watching:
        model.generate(...)
    print(watching.answer)
    """
    recorder, watching, foreign = Recorder(), Watching(), ForeignLoad(children=True)
    with watched(recorder):
        yield watching
    watching.found = explained(recorder, "this block", foreign)
