"""The files beside a run's numbers: roofline.png and report.md."""

from __future__ import annotations

from datetime import UTC, datetime

from profiler.record.run import Run
from profiler.report.export import markdown_table, tokens_table
from profiler.report.glossary import footnotes
from profiler.report.html import html_report
from profiler.report.lines import (
    activity_lines,
    engine_lines,
    instrument_line,
    lever_rows,
    noise_lines,
    quality_line,
    roofs_lines,
    unexplained_lines,
)
from profiler.report.plots import save
from profiler.units import count, scaled


def _when(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M UTC")


def write_reports(run: Run) -> None:
    """Write report.html and report.md, and the pictures when at least one cell has a number."""
    has_numbers = bool((run.cells["status"] == "ok").any())
    if has_numbers:
        for name in ("roofline", "map", "split"):
            save([run], name, run.folder / f"{name}.png")
    (run.folder / "report.html").write_text(html_report(run), encoding="utf-8")
    (run.folder / "report.md").write_text(markdown_report(run, picture=has_numbers), encoding="utf-8")


def markdown_report(run: Run, *, picture: bool) -> str:
    """A report to paste into an issue."""
    document = run.document
    model, device = document.model, document.device
    weights = (
        "random weights (timing does not depend on their values)" if model["weights"] == "random" else "checkpoint"
    )
    quant = "" if model["quant"] == "none" else f", {model['quant']}"
    lines = [f"# {model['id']} on {device['name']}", ""]
    lines += [*document.answer, ""] if document.answer else []
    lines += [
        f"- model: {count(model['params'])} parameters, {model['dtype']}{quant}, {weights},"
        f" {model['attention']} attention, {scaled(model['storage_bytes'], 'B')} in memory",
        f"- device: {device['name']}, {device['threads']} {'threads' if device['kind'] == 'cpu' else 'SMs'}",
        f"- roofs, measured here on {_when(document.ceilings['measured_at_unix_s'])}: {'; '.join(roofs_lines(run))}",
        f"- {instrument_line(run)}",
        f"- software: {', '.join(f'{name} {version}' for name, version in document.software.items())}",
        f"- repeat it: `{document.command}`",
        "",
    ]
    if differences := engine_lines(run):
        lines += ["**Engines**", "", *(f"- {line}" for line in differences), ""]
    if quality := quality_line(run):
        lines += [f"**Quality**: {quality}.", ""]
    if inside := [*activity_lines(run), *unexplained_lines(run)]:
        lines += ["**Inside a step**", "", *(f"- {line}" for line in inside), ""]
    if noisy := noise_lines(run):
        lines += ["**Noise**", "", *(f"- {line}" for line in noisy), ""]
    if document.warnings:
        lines += ["**Warnings**", "", *(f"- {warning}" for warning in document.warnings), ""]
    if not document.finished:
        lines += ["**Interrupted**: the cells below are those measured until then.", ""]
    if picture:
        lines += ["![roofline](roofline.png)", "", "![where the time goes](split.png)", "", "![regimes](map.png)", ""]
    if levers := lever_rows(run):
        lines += ["**What would change it** (the most that each change can save)", ""]
        lines += [f"- {cell}: {change} {saves} ({share}), {because}" for cell, change, saves, share, because in levers]
        lines += [""]
    lines += [markdown_table(tokens_table(run))]
    lines += ["**Words**", "", *(f"- {line}" for line in footnotes(run)), ""]
    return "\n".join(lines)
