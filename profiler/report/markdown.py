"""report.md: a run's report to paste into an issue."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import UTC, datetime

from profiler.report.execution import RAN_COLUMNS, ran_rows, trial_cell
from profiler.report.export import markdown_table, markdown_text, tokens_table
from profiler.report.glossary import footnotes
from profiler.report.optional_sections import cold_lines, generate_lines, ragged_lines
from profiler.report.sections import (
    activity_lines,
    engine_lines,
    host_line,
    instrument_line,
    noise_lines,
    quality_line,
    rank_lines,
    roofs_lines,
    stage_line,
    unexplained_lines,
)
from profiler.report.selection import MOST_ROWS_A_PHASE, spanning
from profiler.report.tables import lever_rows
from profiler.store.folder import Run
from profiler.units import processors, scaled, short_count

_PICTURES = ["![roofline](roofline.png)", "", "![where the time goes](split.png)", "", "![regimes](map.png)", ""]


def markdown_report(run: Run) -> str:
    """Return the report as Markdown; it links to the pictures in its folder if any cell was measured."""
    document = run.document
    quality = quality_line(run)
    lines = [markdown_text(f"# {run.model.id} on {document.device.name}"), ""]
    lines += [*map(markdown_text, document.answer), ""] if document.answer else []
    lines += [*(f"- {markdown_text(line)}" for line in _facts(run)), f"- {_command(run)}", ""]
    lines += _ran(run)
    lines += _section("Engines", engine_lines(run))
    lines += _section("Ranks", rank_lines(run))
    lines += _section("The generate tax", generate_lines(run))
    lines += _section("Prompts of unequal lengths", ragged_lines(run))
    lines += _section("Cold and idle", cold_lines(run))
    lines += [f"**Quality**: {markdown_text(quality)}.", ""] if quality else []
    lines += _section("Inside a step", [*activity_lines(run), *unexplained_lines(run)])
    lines += _section("Noise", noise_lines(run))
    lines += _section("Warnings", document.warnings)
    lines += [] if document.finished else ["**Interrupted**: the cells below are those measured until then.", ""]
    lines += _PICTURES if run.measured else []
    levers = (
        f"{cell}: {change} {saves} ({share}), {because}" for cell, change, saves, share, because in lever_rows(run)
    )
    lines += _section(
        "What would change it", levers, " (tried here, or computed from the cell's split; a negative saving is a cost)"
    )
    shown = spanning(run.results, MOST_ROWS_A_PHASE)
    if len(shown) < len(run.results):
        lines += [f"{len(shown)} of {len(run.results)} rows; all are in cells.csv.", ""]
    lines += [markdown_table(tokens_table(replace(run, results=tuple(shown)))), *_section("Words", footnotes(run))]
    return "\n".join(lines)


def _section(title: str, items: Iterable[str], remark: str = "") -> list[str]:
    bullets = [f"- {markdown_text(item)}" for item in items]
    return [f"**{title}**{remark}", "", *bullets, ""] if bullets else []


def _ran(run: Run) -> list[str]:
    """Return a table of the execution path."""
    heading = "**What really ran**" + (
        f", and what was tried in its place at {cell}" if (cell := trial_cell(run)) else ""
    )
    rows = [RAN_COLUMNS, ("---",) * len(RAN_COLUMNS), *(map(markdown_text, row) for row in ran_rows(run))]
    return [heading, "", *(f"| {' | '.join(row)} |" for row in rows), ""]


def _command(run: Run) -> str:
    """Return the command that repeats a run, as code; a backtick in it would end the code."""
    command = run.document.command.replace("`", "'")
    return f"repeat it: `{command}`"


def _facts(run: Run) -> Iterator[str]:
    """Return the lines with the model, the device and the measured roofs."""
    document, model, device = run.document, run.model, run.document.device
    random = model.weights == "random"
    weights = "random weights (timing does not depend on their values)" if random else "checkpoint"
    yield (
        f"model: {short_count(model.params)} parameters, {model.precision}, {weights}, {model.attention} attention,"
        f" {scaled(model.storage_bytes, 'B')} in memory"
    )
    yield f"device: {device.name}, {processors(device.threads, device.kind)}"
    measured_at = datetime.fromtimestamp(document.ceilings.measured_at_unix_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
    yield f"roofs, measured here on {measured_at}: {'; '.join(roofs_lines(run))}"
    if host := host_line(run):
        yield host
    yield instrument_line(run)
    if stages := stage_line(run):
        yield stages
    yield f"software: {', '.join(f'{name} {version}' for name, version in document.software.items())}"
