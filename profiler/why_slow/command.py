"""`why`: run a script, a block or a cell, record its calls, repeat them with changes, and write the answer."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profiler import effort
from profiler.device.clock import now_s
from profiler.errors import RequestError, RoofscopeError, describe_error
from profiler.fallbacks import fallback_sentences
from profiler.json_document import json_text
from profiler.patching import patched
from profiler.store.folder import replace_file
from profiler.why_slow.findings import LEAST_SHARE, TRIALS_SHARE, CallFloor, Untried, Why, judge_calls
from profiler.why_slow.observations import Observations
from profiler.why_slow.patches import watched
from profiler.why_slow.recorder import Recorder
from profiler.why_slow.render import html_why, why_document
from profiler.why_slow.script import run_module, run_script, scripts_own_profiler

if TYPE_CHECKING:
    import pandas as pd

    from profiler.why_slow.floor import Subject
    from profiler.why_slow.module_times import ModuleTimes
    from profiler.why_slow.repeat_call import CallGroup

# Without a language model, the lines of a script with torch are an answer from so many seconds on.
_LEAST_OWN_S = 1.0
# Share of the budget for repeating first calls.
_FIRST_CALLS_SHARE = 0.25
# Share of the budget by whose end the modules that the floor or a finding needs were timed.
_MODULES_SHARE = 0.5


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
        return _with_trials(recorder, seen, budget_s, start_s)


def _with_trials(recorder: Recorder, seen: Observations, budget_s: float | None, start_s: float) -> Why:
    """The answer to a script that called models, which it began to look for at `start_s`."""
    # The script has loaded torch, so this import costs little.
    from profiler.why_slow.costs import conversion_findings, placement_findings, plan_findings
    from profiler.why_slow.module_times import fallback_findings, module_times
    from profiler.why_slow.trials import call_groups, once_warm, try_changes

    limits = effort.STANDARD
    if budget_s is None:
        budget_s = min(limits.script_most_s, max(limits.script_least_s, seen.wall_s))
    on_core = 1 - seen.waiting
    seen = once_warm(recorder, seen, _FIRST_CALLS_SHARE * on_core * budget_s)
    untried = Untried()
    groups = call_groups(recorder, seen, untried)
    until_s = start_s + _MODULES_SHARE * budget_s
    subjects: dict[str, Subject] = {}
    known: dict[CallGroup, ModuleTimes | None] = {}

    def times_of(group: CallGroup) -> ModuleTimes | None:
        if known.get(group) is None:
            subject = subjects.get(group.calls[0].model)
            known[group] = module_times(group, lambda seconds: now_s() + seconds / on_core <= until_s, subject)
        return known[group]

    floor = _floor(recorder, seen, groups, subjects, times_of) if limits.script_floor else None
    for group in groups:
        group.floor = floor
    more = [*placement_findings(groups, untried), *plan_findings(groups, untried)]
    more += fallback_findings(seen.fallbacks, groups, times_of, untried)
    trials = try_changes(groups, LEAST_SHARE * seen.steady_s, start_s + TRIALS_SHARE * budget_s, untried, on_core)
    more += conversion_findings(seen, recorder.loaded_models)
    until_s = start_s + budget_s
    times = times_of(groups[0]) if groups and floor else None
    slowest = times.slowest() if times else []
    return judge_calls(seen, trials, floor, untried.lines(budget_s), [*more, *untried.computed], slowest)


def _floor(
    recorder: Recorder,
    seen: Observations,
    groups: Sequence[CallGroup],
    subjects: dict[str, Subject],
    times_of: Callable[[CallGroup], ModuleTimes | None],
) -> CallFloor | None:
    """The floor of all calls that did not fail, if a model can be counted; `subjects` gets those of the models."""
    from profiler.why_slow.floor import floor_of_calls, subjects_of

    outside_s: dict[int, float | None] = {}
    calls = [call for call in seen.calls if not call.failed]
    with contextlib.suppress(Exception):  # a user's model may fail in any way, and the answer is useful without a floor
        subjects |= subjects_of(recorder.notes)
        for group in groups:
            names = tuple(f"{name}." for name in subjects[group.calls[0].model].outside)
            if not (has_tokens := group.call.prompt_len > 0):
                names = ("",)  # all modules are counted as they run
            if names and (not has_tokens or _has_other_inputs(group)):
                times = times_of(group)
                more_s = times.ceiling_within(names) / len(group.calls) if times else None
                outside_s |= {call.number: more_s for call in group.calls}
        if calls and (found := floor_of_calls(calls, subjects, outside_s)).seconds:
            return found
    return None


def _has_other_inputs(group: CallGroup) -> bool:
    """Whether the calls run an encoder, or were passed other numbers than token ids: pictures, sounds."""
    others = (value for name, value in group.middle[1].named.items() if name not in ("inputs_embeds", "attention_mask"))
    return group.model.config.is_encoder_decoder or any(
        getattr(value, "is_floating_point", lambda: False)() for value in others
    )


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
        """The answer, and the table of calls."""
        return "\n\n".join([self.answer, *([self.calls.to_string(index=False)] if self.found else [])])

    @property
    def findings(self) -> tuple[object, ...]:
        """Changes to make, the largest saving first."""
        return self.found.findings if self.found else ()

    @property
    def answer(self) -> str:
        """The answer in sentences."""
        from profiler.why_slow.render import why_sentences

        if self.found is None:
            return "No language model was called."
        return "\n".join([*why_sentences(self.found), *self.found.seen.warnings])

    @property
    def calls(self) -> pd.DataFrame:
        """The calls by line, kind and settings, with their times in words, the slowest first."""
        import pandas as pd

        from profiler.why_slow.render import CALL_COLUMNS, call_rows

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
