"""What a report begins and ends with: figures, answer, warnings, method."""

import math

from profiler.report.blocks import (
    FIRST_LOOK,
    FULL,
    FULL_SCREEN,
    HTML,
    TERMINAL,
    BreakdownChart,
    Lines,
    Section,
    Sentences,
    ShellCommand,
    TextTable,
    Tiles,
    text_table,
)
from profiler.report.selection import cell_words, of_first_engine, of_phase, smallest_known
from profiler.store.folder import CELLS_FILE, Run
from profiler.units import duration, percent, significant

NO_NUMBER = "No cell has a number: there is nothing to conclude."


def answer(run: Run) -> Section:
    """What a page begins with: figures, where a token's time goes, the line to change, the answer, warnings."""
    end = [] if run.document.finished else ["Interrupted: the cells below are those measured until then."]
    corner = smallest_known(run)
    return Section(
        "",
        [
            _tiles(run),
            *([BreakdownChart(run, only=corner, media=HTML)] if corner else []),
            *_lines_to_copy(run),
            Sentences(run.document.answer or [NO_NUMBER]),
            Lines(end, "warning"),
            Lines(run.document.warnings, "warning", media=HTML),
        ],
    )


def _tiles(run: Run) -> Tiles:
    known, corner, tiles = [cell for cell in of_first_engine(run) if cell.noise != "unusable"], smallest_known(run), []
    if corner is None:
        return Tiles([], media=HTML)
    if decodes := of_phase(known, "decode"):
        fastest = max(decodes, key=lambda cell: cell.tokens_per_s)
        tiles.append((duration(corner.latency_s), "per token", cell_words(corner)))
        tiles.append((significant(fastest.tokens_per_s), "tokens/s", cell_words(fastest)))
    prefills = [cell for cell in of_phase(known, "prefill") if not math.isnan(cell.ttft_s)]
    if prefills:
        first = min(prefills, key=lambda cell: cell.key.cell != corner.key.cell)
        tiles.append((duration(first.ttft_s), "to the first token", cell_words(first)))
    if corner.attained <= 1:
        tiles.append((percent(corner.attained), "of its ceiling", f"{cell_words(corner)}: {corner.regime}"))
    return Tiles(tiles, media=HTML)


def _lines_to_copy(run: Run) -> list[ShellCommand]:
    lines = []
    for item in run.document.advised:
        effects = " and ".join(item.clear_effects("decode step"))
        lines.append((f"{item.phrase}, {effects} at {item.batch_size} x {item.prompt_len} (tried)", item.line))
    kind = "To change" if lines else "To change, not tried"
    untried = [(f"{item.change} would save {item.amount} (computed)", item.how) for item in run.document.not_tried]
    return [ShellCommand(f"{kind}: {label}", line, media=HTML) for label, line in lines or untried]


# Stages of a run before its budget begins, and the names of those after it in the table of seconds.
_BEFORE = ("starting", "loading")
_PARTS = {
    "roofs": "ceilings",
    "dispatch": "overhead",
    "changes": "trials",
    **{name: name for name in ("timing", "replays", "trials")},
}


def _after_loading_s(run: Run) -> dict[str, float]:
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
    stage_s, after_s, budget_s = run.document.stage_s, _after_loading_s(run), run.document.engine.budget_s
    budget = f" (--budget {round(budget_s, 1):g})" if budget_s else ""
    earlier = (f"{seconds:.1f} s of {name}" for name, seconds in stage_s.items() if name not in after_s)
    before = " and ".join(earlier).replace("starting", "imports")
    return [f"measured for {sum(after_s.values()):.0f} s{budget}, after {before}"] if before else []


def method(run: Run) -> Section:
    """How to read the figures, what measuring cost, and at the end of a screen the warnings, where they are seen."""
    coverage = run.document.counting.coverage
    text = (
        "Times are medians with a 95 % interval whose unit is the repetition. Rates use model work, the algorithm's"
        " minimum; the library's work beyond it is redundant. Verdicts use the ceilings measured here, never a"
        " datasheet."
    )
    text += f" The count does not understand {100 * (1 - coverage):.3g} % of the parameters." if coverage < 1 else ""
    words = "roofscope explain TERM --run . explains each word of this report, with the figures of this run."
    changing = [warning for warning in run.document.warnings if warning not in run.document.remarks]
    mark_s = run.document.engine.instrument_s_per_step
    blocks = [
        Lines([text, words], "paragraph", media=HTML),
        ShellCommand("Repeat it", run.document.command, media=HTML),
        seconds_table(run),
        Lines(_time_lines(run), "dim", media=HTML),
        Lines([f"reading the clock adds {duration(mark_s)} to a step"] if mark_s else [], "dim", media=FULL),
        Lines(run.document.warnings, "warning", media=FULL_SCREEN),
        Lines(changing, "warning", media=FIRST_LOOK),
        Lines(end_lines(run), "dim", media=TERMINAL),
    ]
    return Section("Method and limits", blocks, folded=True)


def end_lines(run: Run) -> list[str]:
    """Return the seconds, the run's folder, and what to open next: its report if it has one, and its table."""
    page = "next: report.html; " if (run.folder / "report.html").exists() else ""
    files = f"{page}table: {CELLS_FILE}, roofscope export; roofscope explain TERM"
    return [*_time_lines(run), f"run: {run.folder}", files]
