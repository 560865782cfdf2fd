"""What a report begins and ends with: answer, setting, warnings, method."""

from __future__ import annotations

import re

from profiler.judge.answer import budget_for
from profiler.report.blocks import (
    DOCUMENTS,
    FIRST_LOOK,
    FULL,
    FULL_SCREEN,
    TERMINAL,
    Lines,
    Section,
    Sentences,
    ShellCommand,
    TextTable,
    text_table,
)
from profiler.store.folder import CELLS_FILE, Run
from profiler.units import duration, percent, short_count

NO_NUMBER = "No cell has a number: there is nothing to conclude."


def answer(run: Run) -> Section:
    lines = [] if run.document.finished else ["Interrupted: the cells below are those measured until then."]
    return Section("", [Sentences(run.document.answer or [NO_NUMBER]), Lines(lines, "warning")])


def advice(run: Run) -> Section | None:
    """The lines of code that the answer advises, and the command that has time for those that were not tried."""
    document = run.document
    commands = [ShellCommand(item.phrase, item.line) for item in document.advised]
    for item in document.not_tried:
        commands.append(ShellCommand(f"{item.change} (not tried)", item.how))
        if item.preparing_s:
            # An option that the command has already gets a new value.
            command = f"{re.sub(r' --budget [^ ]+', '', document.command)} --budget {budget_for(item.preparing_s)}"
            commands.append(ShellCommand(f"try {item.change}", command))
    return Section("To change it", list(commands), "to copy", DOCUMENTS)


def warnings(run: Run) -> Section:
    return Section("Warnings", [Lines(run.document.warnings, "warning")], media=DOCUMENTS)


def setting(run: Run) -> Section:
    """The model and the device."""
    prompts = run.document.grid.prompts
    precision = run.model.precision + (", random weights" if run.model.weights == "random" else "")
    lines = [
        f"{run.model.id}: {short_count(run.model.params)} parameters, {precision}, on {run.document.device.name}",
        *([f"prompts: those of {prompts}, in the model's own tokens"] if prompts else []),
    ]
    return Section("", [Lines(lines, "paragraph")])


# Stages of a run before its budget begins, and the names of those after it in the table of seconds.
_BEFORE = ("starting", "loading")
_PARTS = {"roofs": "ceilings", "dispatch": "overhead", "changes": "trials"}
_PARTS |= {name: name for name in ("timing", "replays", "trials")}


def _after_loading_s(run: Run) -> dict[str, float]:
    """Return the seconds of the stages that `--budget` counts."""
    return {name: seconds for name, seconds in run.document.stage_s.items() if not name.startswith(_BEFORE)}


def seconds_table(run: Run) -> TextTable:
    """Return the seconds of each part of a run after loading, with their share."""
    parts_s = dict.fromkeys((*_PARTS.values(), "rest"), 0.0)
    for name, seconds in _after_loading_s(run).items():
        parts_s[_PARTS.get(name, "rest")] += seconds
    total_s = sum(parts_s.values())
    rows = [[part, f"{seconds:.1f} s", percent(seconds / total_s)] for part, seconds in parts_s.items() if seconds]
    return text_table(("after loading", "time", "share"), rows, media=FULL)


def _time_lines(run: Run) -> list[str]:
    """Return `measured for 58 s (--budget 60), after 7.6 s of imports and 1.2 s of loading`; nothing if not stored."""
    stages, after_s, budget_s = run.document.stage_s, _after_loading_s(run), run.document.engine.budget_s
    budget = f" (--budget {round(budget_s, 1):g})" if budget_s else ""
    before = [
        f"{s:.1f} s of {name.replace('starting', 'imports')}" for name, s in stages.items() if name not in after_s
    ]
    return [f"measured for {sum(after_s.values()):.0f} s{budget}, after {' and '.join(before)}"] if before else []


def method(run: Run) -> Section:
    """How to read the figures, and the command that repeats the run."""
    coverage = run.document.counting.coverage
    text = (
        "Times are medians with a 95 % interval whose unit is the repetition. Rates use model work, the algorithm's"
        " minimum; the library's work beyond it is redundant. Verdicts use the ceilings measured here, never a"
        " datasheet."
    )
    text += f" The count does not understand {100 * (1 - coverage):.3g} % of the parameters." if coverage < 1 else ""
    words = "roofscope explain TERM --run . explains each word of this report, with the figures of this run."
    blocks = [Lines([text, words], "paragraph"), ShellCommand("Repeat it", run.document.command)]
    return Section("Method and limits", blocks, media=DOCUMENTS)


def ending(run: Run) -> Section:
    """What measuring cost; at the end of a screen the warnings, where they are seen, and what to open next.

    A first look has the warnings that change a conclusion.
    """
    changing = [warning for warning in run.document.warnings if warning not in run.document.remarks]
    mark_s = run.document.engine.instrument_s_per_step
    blocks = [
        seconds_table(run),
        Lines(_time_lines(run), "dim", media=DOCUMENTS),
        Lines([f"reading the clock adds {duration(mark_s)} to a step"] if mark_s else [], "dim", media=FULL),
        Lines(run.document.warnings, "warning", media=FULL_SCREEN),
        Lines(changing, "warning", media=FIRST_LOOK),
        Lines(end_lines(run), "dim", media=TERMINAL),
    ]
    return Section("Where the seconds went", blocks)


def end_lines(run: Run) -> list[str]:
    """Return the seconds, the run's folder, and what to open next: its report if it has one, and its table."""
    page = "next: report.html; " if (run.folder / "report.html").exists() else ""
    files = f"{page}table: {CELLS_FILE}, roofscope export; roofscope explain TERM"
    return [*_time_lines(run), f"run: {run.folder}", files]
