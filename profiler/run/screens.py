"""The text of commands that compare their own measurements: precisions with the first, batch sizes with the doubled."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote

from profiler.grid.cells import CellKey, Phase
from profiler.judge.cells import CellResult, difference_of
from profiler.judge.difference import SAME, Difference, has_claim_repetitions
from profiler.judge.machine_speed import BUSY
from profiler.judge.scaling import DoublingTest
from profiler.report.blocks import HTML, TERMINAL, Block, Lines, Picture, Section, Sentences, ShellCommand, text_table
from profiler.report.cells import doubling_table, regime_names
from profiler.report.device import quality_line
from profiler.report.glossary import roofline_words
from profiler.report.html import html_page
from profiler.report.overview import NO_NUMBER, end_lines
from profiler.report.selection import of_phase
from profiler.store.folder import Run, replace_file
from profiler.units import duration, percent, scaled, significant, utc_minute

PRECISION_COLUMNS = ("precision", "dtype", "memory", "saved", "decode", "dequantising", "tok/s", "regime")
AGAINST_COLUMNS = ("cell", "precision", "time", "speed-up", "interval")


@dataclass(frozen=True)
class PrecisionDifference:
    """One cell in one precision, compared with the same cell in the first precision."""

    precision: str
    key: CellKey
    time_s: float
    difference: Difference
    """This precision next to the first."""

    @property
    def speed_up(self) -> float:
        """Time of the first precision over this one's: above 1 it is faster."""
        return math.exp(-self.difference.log_ratio)

    @property
    def timed_once(self) -> bool:
        """Whether a run has a single repetition, which does not show how much repetitions of one cell differ."""
        return not has_claim_repetitions(self.difference.repetitions)


def compare_with_first(runs: Sequence[Run]) -> list[PrecisionDifference]:
    """Every cell of the further runs, compared with the one of the same sizes in the first, whatever its new tokens."""

    def sizes(row: CellResult) -> CellKey:
        return replace(row.key, cell=replace(row.key.cell, new_tokens=0))

    first = {sizes(row): row for row in runs[0].measured}
    return [
        PrecisionDifference(run.model.quant, row.key, row.latency_s, difference_of(base, row))
        for run in runs[1:]
        for row in run.measured
        if (base := first.get(sizes(row))) is not None
    ]


def precision_sentences(runs: Sequence[Run]) -> list[str]:
    """One sentence per further precision: its memory, and its speed in each phase compared with the first."""
    base = runs[0].model
    sentences = []
    for run in runs[1:]:
        smaller = base.storage_bytes / run.model.storage_bytes
        parts = [f"{run.model.quant} takes {smaller:.2g}x less memory than {base.precision}"]
        for phase in ("decode", "prefill"):
            if cells := [item for item in compare_with_first([runs[0], run]) if item.key.phase == phase]:
                parts.append(f"{phase} {_phase_words(cells)}")
        sentences.append("; ".join(parts) + ".")
    return sentences


def _phase_words(cells: Sequence[PrecisionDifference]) -> str:
    """The speed of a precision in one phase, from the cells that were timed more than once."""
    repeated = [item for item in cells if not item.timed_once]
    if not repeated:
        ratios = sorted(item.speed_up for item in cells)
        speeds = " to ".join(dict.fromkeys(f"{ratio:.2g}x" for ratio in (ratios[0], ratios[-1])))
        return f"was timed once ({speeds} as fast then): no claim"
    cells_words = f", as far as it was timed twice ({len(repeated)} of {len(cells)} cells)"
    return _claim_words(repeated) + (cells_words if len(repeated) < len(cells) else "")


def _claim_words(cells: Sequence[PrecisionDifference]) -> str:
    claims = [item for item in cells if item.difference.is_claim]
    wins, losses = ([item for item in claims if item.difference.verdict == word] for word in ("faster", "slower"))
    if not claims:
        same = all(item.difference.verdict == "same" for item in cells)
        return f"is the same within {percent(SAME)}" if same else "cannot be distinguished"
    best, worst = max(claims, key=lambda item: item.speed_up), min(claims, key=lambda item: item.speed_up)
    if not (wins and losses):
        word, bound, end = ("faster", "up", best) if wins else ("slower", "down", worst)
        where, rest = "throughout", ""
        if len(claims) < len(cells):
            where, rest = f"in {len(claims)} of {len(cells)} cells", ", the rest cannot be distinguished"
        return f"is {word} {where} ({bound} to {end.speed_up:.2g}x at batch {end.key.cell.name}){rest}"
    first = min(losses, key=lambda item: item.key.tokens)
    return (
        f"gains up to {best.speed_up:.2g}x and loses in {len(losses)} of {len(cells)} cells, first at batch"
        f" {first.key.cell.name}"
    )


def precision_rows(runs: Sequence[Run]) -> list[list[str]]:
    """Return a row of `PRECISION_COLUMNS` per precision, with the time of its smallest decode step."""
    base, rows = runs[0].model.storage_bytes, []
    for run in runs:
        model, columns = run.model, ["-"] * 4
        saved = scaled(base - model.storage_bytes, "B") if base > model.storage_bytes else "-"
        if decodes := of_phase(run.measured, "decode"):
            first = decodes[0]
            dequantising = duration(first.dequantise_s) if first.dequantise_s else "-"
            regime = regime_names(run).get(first.key, "-")
            columns = [duration(first.latency_s), dequantising, significant(first.tokens_per_s), regime]
        rows.append([model.quant, model.dtype, scaled(model.storage_bytes, "B"), saved, *columns])
    return rows


def warnings_of(runs: Sequence[Run]) -> list[str]:
    """Return each warning of the runs once, with the precisions that it concerns unless it concerns all."""
    precisions: dict[str, list[str]] = {}
    for run in runs:
        for warning in run.document.warnings:
            precisions.setdefault(warning, []).append(run.model.quant)
    return [text if len(names) == len(runs) else f"{', '.join(names)}: {text}" for text, names in precisions.items()]


def difference_rows(runs: Sequence[Run]) -> list[list[str]]:
    """Return a row of `AGAINST_COLUMNS` per cell that compares a further precision with the first."""
    order = {run.model.quant: number for number, run in enumerate(runs)}
    rows = []
    for item in sorted(compare_with_first(runs), key=lambda item: (item.key.phase, order[item.precision], item.key)):
        low, high = math.exp(-item.difference.log_high), math.exp(-item.difference.log_low)
        interval = "one repetition: no claim" if item.timed_once else f"{low:.2f} .. {high:.2f}"
        rows.append([item.key.name, item.precision, duration(item.time_s), f"{item.speed_up:.2f}x", interval])
    return rows


def comparison_sections(runs: Sequence[Run]) -> list[Section | None]:
    """Return the sections of a comparison of runs of one model, each in a folder next to the page."""
    first, precision = runs[0], runs[0].model.precision
    setting = [f"{first.model.id} on {first.document.device.name}"]
    busy = [sentence for run in runs for sentence in run.answer[:1] if sentence.startswith(BUSY)]
    compared = precision_sentences(runs) or ["A single precision was run: there is nothing to compare."]
    decodes = of_phase(first.measured, "decode")
    of_columns = f"memory of the weights; times, tok/s and regime of {decodes[0].key.name}" if decodes else ""
    memory = text_table(PRECISION_COLUMNS, precision_rows(runs), texts=("dtype", "regime"), caption=of_columns)
    caption = f"speed-up: above 1x it is faster than {precision}; with the 95 % interval of the ratio"
    rows, once = difference_rows(runs), sum(item.timed_once for item in compare_with_first(runs))
    table = text_table(AGAINST_COLUMNS, rows, texts=("precision",), caption=caption)
    too_few = f"{once} of {len(rows)} cells were timed once, too few for a claim"
    every_cell = [table, Lines([too_few] if once else [], "dim")]
    alt = "Tokens per second and the time of a decode step against the batch, a line per precision"
    picture = [Picture("throughput", alt, tuple(runs))]
    is_measured = all(run.measured for run in runs)
    end, page = [f"run: {run.folder}" for run in runs], page_of_several(runs)
    if (budget_s := first.document.engine.budget_s) is not None:
        end.insert(0, f"each had --budget {budget_s:g}, on one grid")
    last_lines = [
        Lines([f"{run.model.quant} {quality}" for run in runs if (quality := quality_line(run))]),
        Lines(warnings_of(runs), "warning"),
        Lines([*end, f"next: open {page}"] if page.exists() else end, "dim"),
    ]
    return [
        Section("", [Sentences([*busy[:1], *compared])]),
        Section("", [Lines(setting)], media=TERMINAL),
        Section("Tokens per second", picture, "measured; both axes logarithmic", HTML) if is_measured else None,
        Section("Precisions", [memory], "memory counted from the stored tensors, times measured"),
        Section(f"Every cell compared with {precision}", every_cell, "measured") if rows else None,
        *map(_of_run, runs),
        Section("", last_lines, media=TERMINAL),
    ]


def _of_run(run: Run) -> Section:
    quality = quality_line(run)
    blocks: list[Block] = [Sentences(run.answer or [NO_NUMBER])]
    blocks += [Lines([f"Quality: {quality}."], "paragraph")] if quality else []
    blocks += [Lines(run.document.warnings, "warning")] if run.document.warnings else []
    blocks.append(ShellCommand("Repeat it", run.document.command))
    return Section(run.model.precision, blocks, media=HTML, link=quote(f"{run.folder.name}/report.html"))


def page_of_several(runs: Sequence[Run]) -> Path:
    """Return the page that compares several runs of one model."""
    return runs[0].folder.parent / "report.html"


def write_comparison(runs: Sequence[Run]) -> None:
    """Write the page of several runs of one model, with links to their own reports."""
    first = runs[0]
    names = ", ".join(run.model.quant for run in runs)
    subtitle = f"{names} · {utc_minute(first.document.created)} · roofscope {first.document.roofscope}"
    page = html_page(f"{first.model.id} on {first.document.device.name}", subtitle, comparison_sections(runs))
    replace_file(page_of_several(runs), page)


def doubling_sections(run: Run, phase: Phase) -> list[Section]:
    """Return a run's batch-doubling tests of one phase, with its warnings and its folder."""
    tests = [test for test in run.document.scaling if test.axis == "batch" and test.fixed["phase"] == phase]
    too_few = "Fewer than two batch sizes have a number: there is nothing to compare."
    sections = [_series(run, test) for test in tests] or [Section("", [Sentences([too_few])])]
    late = sorted({cell.batch_size for cell in run.document.grid.unreached})
    ends = [f"No time was left for batch {', '.join(map(str, late))}: a larger --budget reaches them."] if late else []
    end = [Lines([*ends, *run.document.warnings], "warning"), Lines(end_lines(run), "dim")]
    return [*sections, Section("", end)]


def _series(run: Run, test: DoublingTest) -> Section:
    fixed, model = test.fixed, run.model
    depth = f"{fixed['prompt_len']} prompt tokens" if fixed["prompt_len"] else f"context {fixed['context_len']}"
    setting = [
        f"{model.id}, {model.dtype}, {fixed['phase']} with the engine {fixed['engine']}, {depth}",
        f"ceilings: {roofline_words(run) or 'not known'}",
    ]
    return Section("", [Sentences(test.sentences), Lines(setting), doubling_table(run, test)])
