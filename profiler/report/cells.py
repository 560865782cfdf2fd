"""The cells of a run: their table, noise and regimes, on the roofline and by batch size."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from rich.console import Console

from profiler.grid.cells import PHASES, CellKey
from profiler.judge.cells import CellResult
from profiler.judge.regimes import Flag
from profiler.judge.scaling import DoublingTest
from profiler.report.blocks import (
    DOCUMENTS,
    Block,
    CellsTable,
    Lines,
    Picture,
    Section,
    TextTable,
    Tooltip,
    evenly,
    text_table,
)
from profiler.report.columns import columns_with_values
from profiler.report.roofline_data import point_words, roof_lines
from profiler.report.selection import MOST_SIZES, evidence_of, half_width, of_phase, spanning
from profiler.report.terminal import UnbrokenText, print_block, rich_table
from profiler.store.folder import Run
from profiler.units import duration, percent, scaled, several, significant


def cells(run: Run) -> Section:
    """Every cell, and why all are noisy if they are."""
    blocks = [CellsTable(run), Lines(common_noise_lines(run), media=DOCUMENTS)]
    return Section("Cells", blocks, "measured times; rates from counted work")


_UNBOUNDED = 1000
_SHORT_CONFIDENCE = {"high": "high", "medium": "med", "low": "low", None: ""}
# The columns that a narrow terminal omits first: the others imply them.
_FIRST_TO_GO = ("memory", "TFLOP/s", "GB/s", "MFU", "MBU", "tok/s")


@print_block.register
def _(block: CellsTable, console: Console) -> None:
    """A row per cell; columns are omitted before any is cut to the console's width."""
    whole = block.most is None
    cells = [result for result in block.run.results if whole or result.status != "forecast"]
    phases = sum(bool(of_phase(cells, phase)) for phase in PHASES)
    shown = cells if block.most is None or len(cells) <= block.most else spanning(cells, max(1, block.most // phases))
    unbounded = console.options.update(max_width=_UNBOUNDED)
    for omitted in range(len(_FIRST_TO_GO) + 1):
        table = rich_table(_cells_table(block.run, shown, _FIRST_TO_GO[:omitted]))
        if console.measure(table, options=unbounded).maximum <= console.width:
            break
    console.print(table)
    some = [f"{len(shown)} of {len(cells)} cells; all are in cells.csv"] if len(shown) < len(cells) else []
    for note in [*some, *_cell_notes(block.run, forecasts=whole)]:
        console.print(UnbrokenText(note, "dim"))


def _cells_table(run: Run, results: Sequence[CellResult], omitted: Sequence[str]) -> TextTable:
    words, once, evidence, own = regime_names(run), visited_once(run), evidence_of(run), own_noise(run)
    columns = [column for column in columns_with_values(run, "terminal") if column.heading not in omitted]
    # A cell without a verdict has its status in place of one, so these have a text in every run.
    headings = list(dict.fromkeys([*(column.heading for column in columns), "regime", "sure"]))
    rows = []
    for result in results:
        texts, key = {column.heading: column.entry(result).text for column in columns}, result.key
        texts |= {"regime": f"({result.status})", "sure": ""}
        if result.status == "forecast":
            texts["±"] = _interval(result, "±")
        elif result.status == "ok":
            # What all cells share does not mark a cell.
            marked = key in own or not (key in evidence and evidence[key].noise_reasons)
            mark = "*" if key in once else "~" if result.noise != "quiet" and marked else ""
            texts |= {"±": _interval(result, mark), "regime": words.get(key, "")}
            texts["sure"] = _SHORT_CONFIDENCE[result.confidence]
        rows.append([texts[heading] for heading in headings])
    starts = [number for number, result in enumerate(results) if number and result.phase != results[number - 1].phase]
    return text_table(headings, rows, texts=("engine", "regime", "sure"), groups=starts)


def _interval(result: CellResult, mark: str) -> str:
    width = half_width(result)
    if math.isnan(width):
        return "n=1"
    return f"{mark}{100 * width:.1f} %" if width < 0.1 else f"{mark}{percent(width)}"


def _cell_notes(run: Run, *, forecasts: bool) -> list[str]:
    """Return the meanings of the marks in the table, and the noise that all cells share."""
    forecast, notes = [result for result in run.results if result.status == "forecast"], []
    if forecast and forecasts:
        of_all = f"{len(forecast)} of {len(run.results)} rows"
        notes.append(f"(forecast): {of_all} are estimated from the measured ones, since --budget ended first")
    elif forecast:
        ranges = []
        for phase in PHASES:
            if times_s := [result.latency_s for result in of_phase(forecast, phase)]:
                ends = dict.fromkeys(map(duration, (min(times_s), max(times_s))))
                ranges.append(f"{phase} {' to '.join(ends)}")
        cells = several(len(forecast), "more cell is", "more cells are")
        since = "forecast from these, since --budget ended first"
        notes.append(f"{cells} {since}: {', '.join(ranges)} (--full, cells.csv)")
    if visited_once(run):
        notes.append("* visited once: ± is within that visit; a larger --budget gives more visits")
    return [*notes, *(_memory_notes(run) if forecasts else []), *common_noise_lines(run)]


def _memory_notes(run: Run) -> list[str]:
    """Return the most memory that a cell takes, counted and measured, next to the device's room, if it was measured.

    On a CPU only the whole process is measured.
    """
    evidence = evidence_of(run)
    peaks = [(evidence[cell.key], cell.peak_memory_bytes) for cell in run.measured if cell.key in evidence]
    largest, measured = max(peaks, key=lambda each: each[0].predicted_peak_memory_bytes, default=(None, None))
    if largest is None or not measured:
        return []
    sizes = largest.predicted_peak_memory_bytes, measured, run.document.device.memory_bytes
    counted, held, room = (scaled(nbytes, "B") for nbytes in sizes)
    whole = "with libraries and measuring, the process held" if run.document.device.kind == "cpu" else "measured"
    return [f"memory: {largest.key.name} needs {counted} by the counts, {whole} {held}; the device has {room}"]


def visited_once(run: Run) -> set[CellKey]:
    """Return the cells visited once; empty if all cells were."""
    once = {result.key for result in run.measured if result.visits == 1}
    return once if len(once) < len(run.measured) else set()


_NUMBER = re.compile(r"\d+(?:\.\d+)?")


def common_noise_lines(run: Run) -> list[str]:
    """Return `all 32 cells: the machine itself drifted by 23 %`, if all cells share a kind of reason."""
    total = len(run.document.evidence)
    texts = [text for cells, text in _noise_kinds(run) if len(cells) == total > 1]
    return [f"all {total} cells: {'; '.join(texts)}"] if texts else []


def own_noise(run: Run) -> set[CellKey]:
    """Return the cells with a noise reason that not all cells share."""
    total = len(run.document.evidence)
    return {key for cells, _ in _noise_kinds(run) if not len(cells) == total > 1 for key in cells}


def _noise_kinds(run: Run) -> list[tuple[list[CellKey], str]]:
    """Return the cells of each kind of noise reason (its text without figures), and the reason; most frequent first."""
    kinds: dict[str, dict[CellKey, str]] = {}
    for item in run.document.evidence:
        for why in item.noise_reasons:
            kinds.setdefault(_NUMBER.sub("#", why), {})[item.key] = why
    ranked = sorted(kinds.values(), key=len, reverse=True)
    return [(list(texts), _together(list(texts.values()))) for texts in ranked]


def _together(texts: Sequence[str]) -> str:
    """Return `time known to within 2.6 to 9.1 %`: reasons of one kind as one text, with the range of each figure."""
    figures = iter(zip(*(_NUMBER.findall(text) for text in texts), strict=True))

    def span(_: re.Match[str]) -> str:
        values = sorted(next(figures), key=float)
        return values[0] if values[0] == values[-1] else f"{values[0]} to {values[-1]}"

    return _NUMBER.sub(span, texts[0])


# Short names of flags in tables, the most important first; run.json has the full names.
_SHORT_FLAGS = {
    Flag.INEFFICIENT_KERNELS: "kernels",
    Flag.WASTEFUL_PATH: "copies",
    Flag.KV_BOUND: "KV",
    Flag.ABOVE_ROOF: "above roof",
}
# Flags that a regime already implies.
_NEEDLESS: Mapping[str, frozenset[Flag]] = {
    "compute-bound": frozenset({Flag.INEFFICIENT_KERNELS, Flag.WASTEFUL_PATH}),
    "kernel-bound": frozenset({Flag.INEFFICIENT_KERNELS}),
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
    tooltips = {
        f"roof-{number}": Tooltip(line.label, f"roof {line.kind}") for number, line in enumerate(roof_lines(run))
    }
    for number, point in enumerate(run.measured):
        tooltips[f"cell-{number}"] = Tooltip(point_words(point), f"point {point.key.phase}", reachable=True)
    note = "points: measured time, counted work; in report.html each point names its cell"
    alt = "Achieved FLOP/s against arithmetic intensity, both logarithmic"
    return Section("Roofline", [Picture("roofline", alt, (run,), tooltips)], note, DOCUMENTS)


def regimes(run: Run) -> Section | None:
    alt = "The regime and the tokens/s of each cell of the first engine over batch and length"
    note = "derived, with evidence in run.json"
    return Section("Regimes", [Picture("map", alt, (run,))], note, DOCUMENTS) if run.measured else None


_MOST_SERIES = 12


def doubling(run: Run) -> Section | None:
    tests = [test for test in run.document.scaling if test.axis == "batch"][:_MOST_SERIES]
    blocks: list[Block] = []
    for test in tests:
        fixed = test.fixed
        name = f"{fixed['phase']} ({fixed['engine']}), {fixed['prompt_len'] or fixed['context_len']} tokens"
        blocks += [Lines([f"{name}: {' '.join(test.sentences)}"], "paragraph"), doubling_table(run, test)]
    note = "slopes: measured, next to those that the counts predict"
    return Section("Doubling the batch", blocks, note, DOCUMENTS) if blocks else None


def doubling_table(run: Run, test: DoublingTest) -> TextTable:
    """Return a row per batch size, with the slope from the size before it.

    Of more than `MOST_SIZES` doublings, evenly picked ones are shown, from the first to the last.
    """
    by_batch = {result.batch_size: result for result in run.measured if test.holds(result)}
    steps = evenly(test.doublings, MOST_SIZES)
    rows = [[*_batch_texts(by_batch[test.doublings[0].smaller]), *[""] * 6]]
    for step in steps:
        slopes = (step.slope, step.bytes_slope, step.flops_slope)
        slope, *predicted = (f"{each:.2f}" for each in slopes)
        measured = [f"{step.gain:.2f}x", slope, f"{step.low:.2f} .. {step.high:.2f}"]
        rows.append([*_batch_texts(by_batch[step.larger]), *measured, *predicted, step.side])
    omitted = len(test.doublings) - len(steps)
    caption = "slope: 0 if a larger batch takes no longer, 1 if time grows with it; by bytes, by FLOPs: as counted"
    caption += f"; {omitted} more sizes are in run.json" if omitted else ""
    headings = ("batch", "time", "tok/s", "gain", "slope", "interval", "by bytes", "by FLOPs", "evidence for")
    return text_table(headings, rows, texts=("evidence for",), caption=caption)


def _batch_texts(result: CellResult) -> list[str]:
    return [str(result.batch_size), duration(result.latency_s), significant(result.tokens_per_s)]
