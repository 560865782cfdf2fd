"""The sections of a run's report, in their order. A further section is a function and a line in SECTIONS."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from datetime import UTC, datetime

from rich.console import Console

from profiler.grid.cells import Phase
from profiler.report import terminal_cells  # noqa: F401 - it renders cells and time breakdowns
from profiler.report.batch_test import doubling_table
from profiler.report.blocks import (
    DOCUMENTS,
    HTML,
    MARKDOWN,
    TERMINAL,
    Block,
    BreakdownChart,
    CellsTable,
    Definitions,
    Lines,
    Picture,
    Section,
    Sentences,
    ShellCommand,
    TextTable,
    Tooltip,
    text_table,
)
from profiler.report.execution import RAN_COLUMNS, ran_rows, trial_cell
from profiler.report.forecast import answer_sentences, forecast_table
from profiler.report.glossary import footnotes
from profiler.report.optional_sections import cold_lines, generate_lines, ragged_lines
from profiler.report.roofline_data import cell_points, group_points, roof_lines
from profiler.report.selection import MOST_SIZES, evenly, of_all
from profiler.report.sentences import (
    NO_NUMBER,
    activity_lines,
    end_lines,
    host_line,
    instrument_line,
    no_claim_lines,
    noise_lines,
    packed_line,
    precision_line,
    quality_line,
    rank_lines,
    roofs_lines,
    stage_line,
    unexplained_lines,
    waterfalls,
)
from profiler.report.tables import (
    breakdown_rows,
    card_rows,
    engine_rows,
    has_first_uses,
    health_rows,
    lever_rows,
    module_time_rows,
    roof_rows,
    waiting_rows,
)
from profiler.report.terminal import print_sections
from profiler.stats import samples_for
from profiler.store.folder import EXPLORE_FILE, Run
from profiler.store.forecasts import read_forecast
from profiler.units import processors, scaled, short_count

_MOST_SERIES = 12
_MOST_WAITING_ROWS = 8


def _answer(run: Run) -> Section:
    return Section("", [Sentences(run.document.answer or [NO_NUMBER])])


def _interrupted(run: Run) -> Section | None:
    text = "Interrupted: the cells below are those measured until then."
    return None if run.document.finished else Section("", [Lines([text], "warning")])


def _warnings(run: Run) -> Section | None:
    warnings = run.document.warnings
    return Section("Warnings", [Lines(warnings, "warning")], media=DOCUMENTS) if warnings else None


def _setting(run: Run) -> Section:
    """The model, the device and its roofs."""
    device = run.document.device
    lines = [
        f"{run.model.id}: {short_count(run.model.params)} parameters, {precision_line(run)}, on {device.name}",
        "measured roofs: " + ", ".join(roofs_lines(run)),
    ]
    host = host_line(run)
    return Section("", [Lines(lines, "paragraph"), *([Lines([host], "dim")] if host else [])])


def _roofline(run: Run) -> Section | None:
    if not run.measured:
        return None
    drawn, measured = cell_points(run), len(run.measured)
    tooltips = {
        f"roof-{number}": Tooltip(line.label, f"roof {line.kind}") for number, line in enumerate(roof_lines(run))
    }
    for number, point in enumerate(drawn):
        tooltips[f"cell-{number}"] = Tooltip(point.tooltip, f"point {point.key.phase}", reachable=True)
    note = "points: measured time, counted work; in report.html each point names its cell"
    note += f"; {len(drawn)} of {measured} cells are drawn" if len(drawn) < measured else ""
    alt = "Achieved FLOP/s against arithmetic intensity, both logarithmic"
    return Section("Roofline", [Picture("roofline", alt, (run,), tooltips)], note, DOCUMENTS)


def _cells(run: Run) -> Section:
    return Section("Cells", [CellsTable(run)], "measured times; rates from counted work")


def _waiting(run: Run) -> Section | None:
    rows = waiting_rows(run)
    if not rows:
        return None
    shown = evenly(rows, _MOST_WAITING_ROWS)
    needed = ", ".join(f"p{percent} needs {samples_for(percent)}" for percent in (90, 99))
    cut = f"{len(shown)} of {len(rows)} cells; all are in cells.csv. " if len(shown) < len(rows) else ""
    caption = f"{cut}-: not measured, or too few samples ({needed}); TTFT has one per visit, TPOT one per decode step"
    kinds = [f"{name} p{percent}" for name in ("TTFT", "TPOT") for percent in (50, 90, 99)]
    kinds += ["TPOT, first use"] if has_first_uses(run) else []
    # A percentile for which no cell has enough samples gets no column.
    columns = zip(("cell", *kinds, "visits", "steps"), *shown, strict=True)
    headings, *cells = zip(*(each for each in columns if set(each[1:]) != {"-"}), strict=True)
    table = text_table(headings, [list(row) for row in cells], caption=caption)
    note = "TTFT: time to first token; TPOT: time per output token; each cell is batch x prompt"
    return Section("What a user waits for", [table], note)


def _breakdown(run: Run) -> Section | None:
    blocks: list[Block] = [BreakdownChart(run)]
    note = "from the operators' roofs, replayed kernels and measured dispatch"
    return Section("Where the time goes", blocks, note) if run.measured else None


def _terms(run: Run) -> Section | None:
    rows = breakdown_rows(run)
    caption = "each term, with half of its 95 % interval"
    table = text_table(rows[0], rows[1:], caption=caption) if rows else None
    return Section("", [table], media=DOCUMENTS) if table else None


def _operators(run: Run) -> Section | None:
    if not group_points(run):
        return None
    alt = "Operator groups under the measured roof; the area of a point is its share of the step"
    note = "replayed kernels, counted work; the smallest and the largest cell of each phase"
    return Section("Operators under the roof", [Picture("operators", alt, (run,))], note, HTML)


def _explore(run: Run) -> Section | None:
    if not run.measured:
        return None
    if (run.folder / EXPLORE_FILE).exists():
        text = "This model's floors, memory and forecasts at any batch, prompt and context, with the measured cells."
        return Section("Explore with sliders", [Lines([text], "paragraph")], media=HTML, link=EXPLORE_FILE)
    command = f"roofscope explore {shlex.quote(run.model.id)} --run ."
    return Section("Explore with sliders", [ShellCommand("In this folder", command)], media=DOCUMENTS)


def _ran(run: Run) -> Section | None:
    if not run.measured:
        return None
    cell = trial_cell(run)
    headings = (*RAN_COLUMNS[:2], f"{RAN_COLUMNS[2]} at {cell}" if cell else "")
    table = text_table(headings, ran_rows(run), wrapped=headings[1:])
    packed = packed_line(run)
    blocks: list[Block] = [table, Lines([packed])] if packed else [table]
    return Section("What ran", blocks, "reported by the libraries on this device")


def _levers(run: Run) -> Section | None:
    headings = ("cell", "change", "saves", "of the step", "because")
    rows = lever_rows(run)
    note = (
        "measured in this run, tried on this device, or computed from the cell's breakdown; a negative saving is a cost"
    )
    table = text_table(headings, rows, wrapped=("change", "because"))
    return Section("What would change it", [table], note, DOCUMENTS) if rows else None


def _other_gpus(run: Run) -> Section | None:
    rows = card_rows(run)
    note = f"datasheet: the most tokens/s that their {run.model.dtype} roofs allow, without their host's dispatch"
    return Section("On other GPUs", [text_table(rows[0], rows[1:])], note, DOCUMENTS) if rows else None


def _regimes(run: Run) -> Section | None:
    groups: dict[tuple[Phase, str], dict[tuple[int, int], str]] = {}
    for result in run.measured:
        regimes = groups.setdefault((result.phase, result.engine), {})
        regimes[result.batch_size, result.key.cell.depth] = result.regime or ""
    maps = [_regime_table(f"{phase} ({engine})", regimes) for (phase, engine), regimes in groups.items()]
    return Section("Regimes", maps, "derived, with evidence in run.json", HTML) if maps else None


def _regime_map(run: Run) -> Section | None:
    alt = "The regime of each cell, over prompt or context length and batch"
    note = "derived, with evidence in run.json"
    return Section("Regimes", [Picture("map", alt, (run,))], note, MARKDOWN) if run.measured else None


def _regime_table(title: str, regimes: dict[tuple[int, int], str]) -> TextTable:
    """A row per batch size, a column per length."""
    all_batches, all_depths = sorted({batch for batch, _ in regimes}), sorted({depth for _, depth in regimes})
    batches, depths = evenly(all_batches, MOST_SIZES), evenly(all_depths, MOST_SIZES)
    rows = [[str(batch), *(regimes.get((batch, depth), "") for depth in depths)] for batch in batches]
    shown = of_all(len(batches) * len(depths), len(all_batches) * len(all_depths))
    headings = [str(depth) for depth in depths]
    return text_table(["batch", *headings], rows, texts=headings, caption=title + shown)


def _inside(run: Run) -> Section | None:
    rows = module_time_rows(run)
    headings = ("inside", "time", "share", "TFLOP/s", "GB/s", "FLOP/byte", "roof")
    groups = [number for number, row in enumerate(rows) if not row[0].startswith(" ")]
    table = text_table(headings, rows, groups=groups)
    return Section("Inside a step", [table], "measured with hooks, in a separate pass") if rows else None


def _activity(run: Run) -> Section | None:
    lines = [*activity_lines(run), *unexplained_lines(run)]
    title, note = "Kernels, gaps and unexplained time", "measured in separate passes"
    return Section(title, [Lines(lines)], note) if lines else None


def _engines(run: Run) -> Section | None:
    rows, unclear = engine_rows(run), no_claim_lines(run)
    blocks: list[Block] = []
    if waterfalls(run):
        blocks.append(Picture("engines", "From the first engine's time to another's, term by term", (run,)))
    if rows:
        headings = ("cell", "engine", "per step", "interval", "in which terms")
        texts = ("engine", "per step", "interval")
        blocks.append(text_table(headings, rows, texts=texts, wrapped=("in which terms",)))
    if unclear:
        blocks.append(Lines(unclear))
    note = f"measured in turns: the time that each saves compared with {run.document.engine.names[0]}"
    return Section("Engines", blocks, note) if blocks else None


def _generate(run: Run) -> Section | None:
    lines = generate_lines(run)
    note = "measured in turns with our own loop; its parts are timed in transformers' own functions"
    return Section("The overhead of generate", [Lines(lines)], note) if lines else None


def _ragged(run: Run) -> Section | None:
    lines = ragged_lines(run)
    note = "measured with padding and a mask, and the same shape without; other ways to batch are tried or computed"
    return Section("Prompts of unequal lengths", [Lines(lines)], note) if lines else None


def _cold(run: Run) -> Section | None:
    lines = cold_lines(run)
    note = "measured in a fresh process, and after idle time"
    return Section("Cold and idle", [Lines(lines)], note) if lines else None


def _ranks(run: Run) -> Section | None:
    lines = rank_lines(run)
    return Section("Ranks", [Lines(lines)], "measured on each rank") if lines else None


def _forecast(run: Run) -> Section | None:
    forecast = read_forecast(run.folder)
    if forecast is None:
        return None
    alt = "Forecast time against the batch with the band that holds nine in ten, and measured cells"
    pictures = [Picture("forecast", alt, (run,))] if run.measured else []
    table, assumptions = forecast_table(forecast.cells)
    blocks = [Lines(answer_sentences(forecast), "paragraph"), *pictures, table, Lines(assumptions)]
    return Section("What would happen", blocks, "forecast from the measured cells; bands hold nine in ten", HTML)


def _doubling(run: Run) -> Section | None:
    tests = [test for test in run.document.scaling if test.axis == "batch"][:_MOST_SERIES]
    blocks: list[Block] = []
    for test in tests:
        fixed = test.fixed
        name = f"{fixed['phase']} ({fixed['engine']}), {fixed['prompt_len'] or fixed['context_len']} tokens"
        blocks += [Lines([f"{name}: {' '.join(test.sentences)}"], "paragraph"), doubling_table(run, test)]
    note = "slopes: measured, next to those that the counts predict"
    return Section("Doubling the batch", blocks, note, DOCUMENTS) if blocks else None


def _precision(run: Run) -> Section:
    model = run.model
    quant = ""
    if model.quant != "none":
        scales = " with quantised scales" if model.double_quant else ""
        quant = f", weights in {model.quant}{scales}, products in {model.compute_dtype}"
    unpacked = f"; published as {model.unpacked_from}, here they are dense" if model.unpacked_from else ""
    text = (
        f"{model.dtype}{quant}: {scaled(model.storage_bytes, 'B')} of {model.weights} weights,"
        f" {8 * model.storage_bytes / model.params:.3g} bits per parameter{unpacked}; {model.attention} attention."
        " --quant none,nf4 measures several precisions on one grid."
    )
    note = "counted from the tensors as stored in memory; timing does not depend on their values"
    return Section("Precision", [Lines([text], "paragraph")], note, DOCUMENTS)


def _quality(run: Run) -> Section | None:
    quality = quality_line(run)
    return Section("Quality", [Lines([quality])], "measured") if quality else None


def _noise(run: Run) -> Section | None:
    lines = noise_lines(run)
    return Section("Noise", [Lines(lines)], media=DOCUMENTS) if lines else None


def _roofs(run: Run) -> Section:
    document = run.document
    measured_at = datetime.fromtimestamp(document.ceilings.measured_at_unix_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
    sheet = f"; datasheet: {document.device.datasheet}" if document.device.datasheet else ""
    headings = ("roof", "median", "quartiles", "of the datasheet", "clock", "method")
    table = text_table(headings, roof_rows(run), texts=("quartiles",), wrapped=("method",))
    return Section("Roofs", [table], f"measured here on {measured_at}{sheet}", DOCUMENTS)


def _health(run: Run) -> Section:
    device = run.document.device
    rows = [["device", f"{device.name}, {processors(device.threads, device.kind)}"], *health_rows(run)]
    software = ", ".join(f"{name} {version}" for name, version in run.document.software.items())
    table = text_table(("", ""), [*rows, ["software", software]], wrapped=("",))
    return Section("Device and software", [table], "measured during the run", DOCUMENTS)


def _cost_of_measuring(run: Run) -> Section:
    lines = [line for line in (instrument_line(run), stage_line(run)) if line]
    return Section("", [Lines(lines, "dim")])


def _last_warnings(run: Run) -> Section:
    """At the end of a screen, where they are seen."""
    return Section("", [Lines(run.document.warnings, "warning"), Lines(end_lines(run), "dim")], media=TERMINAL)


def _words(run: Run) -> Section | None:
    pairs = [line.replace("**", "", 2).split(": ", 1) for line in footnotes(run)] if run.measured else []
    return Section("Words", [Definitions([(name, meaning) for name, meaning in pairs])], media=DOCUMENTS)


def _method(run: Run) -> Section:
    coverage = run.document.counting.coverage
    text = (
        "Times are medians with a 95 % interval whose unit is the visit; that of a cell visited once is within the"
        " visit. Rates use model work, the algorithm's minimum; the library's work beyond it is avoidable."
        " Verdicts use the roofs measured here, never a datasheet."
    )
    text += f" The count does not understand {100 * (1 - coverage):.3g} % of the parameters." if coverage < 1 else ""
    blocks = [Lines([text], "paragraph"), ShellCommand("Repeat it", run.document.command)]
    return Section("Method and limits", blocks, media=DOCUMENTS)


SECTIONS: list[Callable[[Run], Section | None]] = [
    _answer,
    _interrupted,
    _setting,
    _warnings,
    _cells,
    _breakdown,
    _terms,
    _waiting,
    _roofline,
    _operators,
    _explore,
    _ran,
    _levers,
    _other_gpus,
    _regimes,
    _regime_map,
    _inside,
    _activity,
    _engines,
    _generate,
    _ragged,
    _cold,
    _ranks,
    _forecast,
    _doubling,
    _precision,
    _quality,
    _noise,
    _roofs,
    _health,
    _cost_of_measuring,
    _words,
    _method,
    _last_warnings,
]
"""Each returns a section of a run's report, or None where the run has nothing for it."""


def run_sections(run: Run) -> list[Section | None]:
    """Return the sections of a run's report, in their order."""
    return [section(run) for section in SECTIONS]


def print_run(run: Run, console: Console) -> None:
    """Print the report of a run on the terminal."""
    print_sections(run_sections(run), console)
