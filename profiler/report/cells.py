"""The cells of a run: their table and regimes, on the roofline and by batch size."""

import itertools
from collections.abc import Mapping, Sequence

from rich.console import Console

from profiler.grid.cells import PHASES, CellKey
from profiler.judge.cells import CellResult
from profiler.judge.regimes import Flag
from profiler.judge.scaling import DoublingTest
from profiler.report.blocks import HTML, CellsTable, Lines, Picture, Section, TextTable, evenly, text_table
from profiler.report.columns import columns_with_values
from profiler.report.glossary import roofline_words
from profiler.report.roofline_data import ceiling_lines, point_words
from profiler.report.selection import MOST_SIZES, first_engine, of_first_engine, of_phase, spanning
from profiler.report.terminal import UnbrokenText, print_block, rich_table
from profiler.store.folder import CELLS_FILE, Run
from profiler.units import duration, several, short_count, significant


def cells(run: Run) -> Section:
    """Every cell. The terminal prints the notes with the table."""
    model, prompts = run.model, run.document.grid.prompts
    precision = model.precision + (", random weights" if model.weights == "random" else "")
    setting = [f"{model.id}: {short_count(model.params)} parameters, {precision}, on {run.document.device.name}"]
    setting += [f"prompts: those of {prompts}, in the model's own tokens"] if prompts else []
    blocks = [Lines(setting, "paragraph"), CellsTable(run), Lines(_cell_notes(run), media=HTML)]
    return Section("Cells", blocks, "measured times; rates from counted work")


_IN_VERDICT = ("regime", "confidence")
_VERDICT = ", ".join(_IN_VERDICT)
_FLAGS = "flags"
_MOST_STEPS = 2
# What a narrow terminal omits first: the flags of a regime, and columns that the others imply.
_FIRST_TO_GO = ("memory", _FLAGS, "B/s", "FLOP/s", "tok/s")


@print_block.register
def _(block: CellsTable, console: Console) -> None:
    """A row per cell; columns are omitted before any is cut to the console's width."""
    run, whole = block.run, block.most is None
    cells = [result for result in run.results if whole or result.status != "forecast"]
    phases = sum(bool(of_phase(cells, phase)) for phase in PHASES)
    shown = cells if block.most is None or len(cells) <= block.most else spanning(cells, max(1, block.most // phases))
    unbounded = console.options.update(max_width=10 * console.width)
    for omitted, gap in itertools.product(range(len(_FIRST_TO_GO) + 1), (2, 1)):
        table = rich_table(_cells_table(run, shown, _FIRST_TO_GO[:omitted]), 10 * console.width, gap)
        if console.measure(table, options=unbounded).maximum <= console.width:
            break
    console.print(table)
    some = [f"{len(shown)} of {len(cells)} rows; all are in cells.csv"] if len(shown) < len(cells) else []
    for note in [*some, *_cell_notes(run)]:
        console.print(UnbrokenText(note, "dim"))


def _cells_table(run: Run, results: Sequence[CellResult], omitted: Sequence[str]) -> TextTable:
    columns = [column for column in columns_with_values(run, "terminal") if column.heading not in omitted]
    headings = [column.heading for column in columns if column.heading not in _IN_VERDICT] + [_VERDICT]
    with_flags, rows = {} if _FLAGS in omitted else regime_names(run), []
    for result in results:
        texts = {column.heading: column.entry(result).text for column in columns}
        regime = with_flags.get(result.key, result.regime or "-")
        verdict = f"{regime}, {result.confidence.replace('medium', 'med')}" if result.confidence else regime
        texts[_VERDICT] = verdict if result.status == "ok" else f"({result.status})"
        rows.append([texts[heading] for heading in headings])
    starts = [number for number, result in enumerate(results) if number and result.phase != results[number - 1].phase]
    return text_table(headings, rows, texts=("engine", _VERDICT), groups=starts)


def _cell_notes(run: Run) -> list[str]:
    once = sum(result.repetitions == 1 for result in run.measured)
    two = f" ({several(once, 'row has', 'rows have')} one repetition, which gives none)" if once else ""
    words = (roofline_words(run) or "").removesuffix(", measured here")
    ceilings = f"; % ceiling: share of {words}" if words else ""
    notes = [f"±: half of the 95 % interval{two}{ceilings}", *batch_lines(run)]
    if larger := run.document.grid.larger:
        prompts, batches = (", ".join(map(str, sizes)) for sizes in (larger.prompt_lens, larger.batch_sizes))
        why = f"needs about --budget {larger.budget_s:.0f}" if larger.budget_s else "does not fit into memory"
        notes.append(f"a larger grid, prompts {prompts} x batches {batches}, {why}")
    if unreached := run.document.grid.unreached:
        notes.append(f"left out: {', '.join(cell.name for cell in unreached)} tokens; a larger --budget reaches them")
    if forecast := sum(result.status == "forecast" for result in run.results):
        rows = several(forecast, "row is", "rows are")
        notes.append(f"{rows} forecast, as in runs recorded before 0.5.0: {CELLS_FILE}")
    return notes


def batch_lines(run: Run) -> list[str]:
    """Return what each measured doubling of the batch gives at the shortest prompt: the 95 % interval of the factor.

    Without a doubling it returns other multiples, and the command that measures doublings. A cell whose time is not
    usable is in none.
    """
    gains: dict[tuple[int, int], list[str]] = {}
    for phase in reversed(PHASES):
        fixed = {"phase": phase, "engine": first_engine(run)}
        tests = [test for test in run.document.scaling if test.axis == "batch" and fixed.items() <= test.fixed.items()]
        for test in sorted(tests, key=lambda each: (each.fixed["prompt_len"], each.fixed["context_len"]))[:1]:
            usable = {cell.batch_size for cell in run.measured if test.holds(cell.key) and cell.noise != "unusable"}
            for step in test.doublings:
                if {step.smaller, step.larger} <= usable:
                    ends = ((step.larger / step.smaller) ** (1 - slope) for slope in (step.high, step.low))
                    factor = " to ".join(dict.fromkeys(significant(end, 2) for end in ends))
                    gained = gains.setdefault((step.smaller, step.larger), [])
                    gained.append(f"{factor}{'' if gained else ' times the tokens'} in {phase}")
    doubled = [sizes for sizes in gains if sizes[1] == 2 * sizes[0]]
    lines = [
        f"batch x{large / small:g} ({small} to {large}): {', '.join(gains[small, large])}"
        for small, large in (doubled or list(gains))[:_MOST_STEPS]
    ]
    if doubled:
        return lines
    batches = {cell.batch_size for cell in run.measured}
    is_vague = any(2 * batch in batches for batch in batches)
    what = "no doubling of the batch is known well enough" if is_vague else "no batch size was doubled"
    return [*lines, f"{what}: roofscope batch-test measures it"]


# Short names of flags in tables, the most important first; run.json has the full names.
_SHORT_FLAGS = {
    Flag.INEFFICIENT_KERNELS: "kernels",
    Flag.WASTEFUL_PATH: "copies",
    Flag.KV_BOUND: "KV",
    Flag.ABOVE_CEILING: "above ceiling",
}
# Flags that a regime already implies.
_NEEDLESS: Mapping[str, frozenset[Flag]] = {
    "compute-bound": frozenset({Flag.INEFFICIENT_KERNELS, Flag.WASTEFUL_PATH}),
    "slow-kernels": frozenset({Flag.INEFFICIENT_KERNELS}),
}


def regime_names(run: Run) -> dict[CellKey, str]:
    """Return each cell's regime, followed by the short name of its most important flag."""
    names: dict[CellKey, str] = {}
    for item in run.document.evidence:
        flags = frozenset(item.flags) - _NEEDLESS.get(item.regime, frozenset())
        word = next((word for flag, word in _SHORT_FLAGS.items() if flag in flags), "")
        names[item.key] = f"{item.regime} ({word})" if word else item.regime
    return names


def roofline(run: Run) -> Section | None:
    if not run.measured:
        return None
    tooltips = {f"ceiling-{at}": (line.label, f"ceiling {line.kind}") for at, line in enumerate(ceiling_lines(run))}
    tooltips |= {f"cell-{at}": (point_words(cell), f"point {cell.phase}") for at, cell in enumerate(run.measured)}
    note = "measured time, counted work; an arrow ends at the ceiling of its step"
    alt = "Achieved FLOP/s against arithmetic intensity, both logarithmic"
    return Section("Roofline", [Picture("roofline", alt, (run,), tooltips)], note, HTML)


_LEAST_MAPPED = 9
"""Cells of a map: fewer are read in their table."""
_MOST_SERIES = 12


def batch_sizes(run: Run) -> Section:
    """The regimes over batch and length, and what doubling the batch gives."""
    alt = "The regime and the tokens/s of each cell of the first engine over batch and length"
    maps = [Picture("map", alt, (run,))] if len(of_first_engine(run)) >= _LEAST_MAPPED else []
    series = list[Lines | TextTable]()
    for test in [test for test in run.document.scaling if test.axis == "batch"][:_MOST_SERIES]:
        fixed = test.fixed
        name = f"{fixed['phase']} ({fixed['engine']}), {fixed['prompt_len'] or fixed['context_len']} tokens"
        series += [Lines([f"{name}: {' '.join(test.sentences)}"], "paragraph"), doubling_table(run, test)]
    note = "regimes with evidence in run.json; slopes: measured, next to those that the counts predict"
    return Section("Doubling the batch", [*maps, *series], note, HTML, folded=True)


def doubling_table(run: Run, test: DoublingTest) -> TextTable:
    """Return a row per batch size, with the slope from the size before it; of many, `MOST_SIZES` evenly picked."""
    by_batch = {result.batch_size: result for result in run.measured if test.holds(result.key)}
    steps = evenly(test.doublings, MOST_SIZES)
    rows = [[*_batch_texts(by_batch[test.doublings[0].smaller]), *[""] * 6]]
    for step in steps:
        slope, *predicted = (f"{each:.2f}" for each in (step.slope, step.bytes_slope, step.flops_slope))
        measured = [f"{step.gain:.2f}x", slope, f"{step.low:.2f} .. {step.high:.2f}"]
        rows.append([*_batch_texts(by_batch[step.larger]), *measured, *predicted, step.side])
    omitted = len(test.doublings) - len(steps)
    caption = "slope: 0 if a larger batch takes no longer, 1 if time grows with it; by bytes, by FLOPs: as counted"
    caption += f"; {omitted} more sizes are in run.json" if omitted else ""
    headings = ("batch", "time", "tok/s", "gain", "slope", "interval", "by bytes", "by FLOPs", "evidence for")
    return text_table(headings, rows, texts=("evidence for",), caption=caption)


def _batch_texts(result: CellResult) -> list[str]:
    return [str(result.batch_size), duration(result.latency_s), significant(result.tokens_per_s)]
