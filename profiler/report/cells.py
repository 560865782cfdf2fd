"""The cells of a run: their table, their regimes and their percentiles, on the roofline and by batch size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rich.console import Console

from profiler.grid.cells import PHASES, Cell, CellKey, Phase
from profiler.judge.cells import CellResult
from profiler.judge.regimes import Flag
from profiler.judge.scaling import Doubling, DoublingTest
from profiler.report.blocks import (
    DOCUMENTS,
    FIRST_LOOK,
    FULL,
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
from profiler.report.noise import common_noise_line, own_noise, visited_once
from profiler.report.roofline_data import cell_points, roof_lines
from profiler.report.selection import MOST_SIZES, evidence_of, half_width, of_all, of_phase, spanning
from profiler.report.terminal import UnbrokenText, print_block, rich_table
from profiler.stats import samples_for
from profiler.store.folder import Run
from profiler.units import duration, percent, scaled, several, significant


def cells(run: Run) -> Section:
    return Section("Cells", [CellsTable(run)], "measured times; rates from counted work", FULL)


def measured_cells(run: Run) -> Section:
    return Section("", [CellsTable(run, forecasts=False)], media=FIRST_LOOK)


_UNBOUNDED = 1000
_SHORT_CONFIDENCE = {"high": "high", "medium": "med", "low": "low", None: ""}


@print_block.register
def _(block: CellsTable, console: Console) -> None:
    console.print(rich_table(cells_table(block, console)))
    for note in _cell_notes(block):
        console.print(UnbrokenText(note, "dim"))


# The columns that a narrow terminal omits first: the others imply them.
_FIRST_TO_GO = ("memory", "TFLOP/s", "GB/s", "MFU", "MBU", "tok/s")


def cells_table(block: CellsTable, console: Console) -> TextTable:
    """Return a row per cell; columns are omitted before any is cut to the console's width."""
    unbounded = console.options.update(max_width=_UNBOUNDED)
    table = _cells_table(block, ())
    for number in range(1, len(_FIRST_TO_GO) + 1):
        if console.measure(rich_table(table), options=unbounded).maximum <= console.width:
            break
        table = _cells_table(block, _FIRST_TO_GO[:number])
    return table


def _shown(block: CellsTable) -> Sequence[CellResult]:
    """Return the cells that have rows."""
    cells = [result for result in block.run.results if block.forecasts or result.status != "forecast"]
    phases = sum(bool(of_phase(cells, phase)) for phase in PHASES)
    return cells if block.most is None or len(cells) <= block.most else spanning(cells, max(1, block.most // phases))


def _cells_table(block: CellsTable, omitted: Sequence[str]) -> TextTable:
    run, results = block.run, _shown(block)
    words = regime_names(run)
    noisy, once = _noisy(run), visited_once(run)
    columns = [column for column in columns_with_values(run, "terminal") if column.heading not in omitted]
    # A cell without a verdict has its status in place of one, so these have a text in every run.
    headings = list(dict.fromkeys([*(column.heading for column in columns), "regime", "sure"]))
    rows = []
    for result in results:
        texts = {column.heading: column.entry(result).text for column in columns}
        if result.status == "ok":
            mark = "*" if result.key in once else "~" if result.key in noisy else ""
            judged = words.get(result.key, ""), _SHORT_CONFIDENCE[result.confidence]
            texts |= {"±": _interval(result, mark)}
        else:
            judged = f"({result.status})", ""
            texts |= {"±": _interval(result, "±")} if result.status == "forecast" else {}
        texts |= dict(zip(("regime", "sure"), judged, strict=True))
        rows.append([texts[heading] for heading in headings])
    starts = [number for number, result in enumerate(results) if number and result.phase != results[number - 1].phase]
    return text_table(headings, rows, texts=("engine", "regime", "sure"), groups=starts)


def _noisy(run: Run) -> set[CellKey]:
    """Return the cells that are noisier than the rest of the run, for another reason than all cells share."""
    own, evidence = own_noise(run), evidence_of(run)
    return {
        result.key
        for result in run.measured
        if result.noise != "quiet"
        and (result.key in own or not (result.key in evidence and evidence[result.key].noise_reasons))
    }


def _interval(result: CellResult, mark: str) -> str:
    width = half_width(result)
    if math.isnan(width):
        return "n=1"
    return f"{mark}{100 * width:.1f} %" if width < 0.1 else f"{mark}{percent(width)}"


def _cell_notes(block: CellsTable) -> list[str]:
    """Return the meanings of the marks in the table, and the noise that all cells share."""
    run, notes = block.run, []
    forecasts = [result for result in run.results if result.status == "forecast"]
    shown, total = len(_shown(block)), len(run.results) - (0 if block.forecasts else len(forecasts))
    if shown < total:
        notes.append(f"{shown} of {total} cells; all are in cells.csv")
    if forecasts and block.forecasts:
        of_all = f"{len(forecasts)} of {len(run.results)} rows"
        notes.append(f"(forecast): {of_all} are estimated from the measured ones, since --budget ended first")
    elif forecasts:
        notes.append(_forecast_line(forecasts))
    if visited_once(run):
        notes.append("* visited once: ± is within that visit; a larger --budget gives more visits")
    memory = _memory_note(run) if block.forecasts else ""
    return [*notes, *filter(None, (memory, common_noise_line(run)))]


def _forecast_line(forecasts: Sequence[CellResult]) -> str:
    """Return how many cells were only forecast, and the range of their times in each phase."""
    ranges = []
    for phase in PHASES:
        if times_s := [result.latency_s for result in of_phase(forecasts, phase)]:
            ends = dict.fromkeys(map(duration, (min(times_s), max(times_s))))
            ranges.append(f"{phase} {' to '.join(ends)}")
    cells = several(len(forecasts), "more cell is", "more cells are")
    return f"{cells} forecast from these, since --budget ended first: {', '.join(ranges)} (--full, cells.csv)"


def _memory_note(run: Run) -> str:
    """Return the most memory that a cell takes, counted and measured, next to the device's room; empty if unmeasured.

    On a CPU only the whole process is measured.
    """
    evidence = evidence_of(run)
    peaks = [(evidence[cell.key], cell.peak_memory_bytes) for cell in run.measured if cell.key in evidence]
    largest, measured = max(peaks, key=lambda each: each[0].predicted_peak_memory_bytes, default=(None, None))
    if largest is None or not measured:
        return ""
    counted, room = (
        scaled(nbytes, "B") for nbytes in (largest.predicted_peak_memory_bytes, run.document.device.memory_bytes)
    )
    whole = "with libraries and measuring, the process held" if run.document.device.kind == "cpu" else "measured"
    held = scaled(measured, "B")
    return f"memory: {largest.key.name} needs {counted} by the counts, {whole} {held}; the device has {room}"


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


_MOST_WAITING_ROWS = 8


def waiting(run: Run) -> Section | None:
    rows = waiting_rows(run)
    if not rows:
        return None
    shown = evenly(rows, _MOST_WAITING_ROWS)
    needed = ", ".join(f"p{percent} needs {samples_for(percent)}" for percent in (90, 95, 99))
    cut = f"{len(shown)} of {len(rows)} cells; all are in cells.csv. " if len(shown) < len(rows) else ""
    caption = f"{cut}n: samples, one per prefill or decode step; -: not measured, or too few ({needed})"
    kinds = [f"TTFT p{percent}" for percent in (50, 90, 95)] + [f"TPOT p{percent}" for percent in (50, 90, 99)]
    kinds += ["TPOT, first use"] if has_first_uses(run) else []
    # A percentile for which no cell has enough samples gets no column.
    columns = zip(("cell", *kinds, "TTFT n", "TPOT n"), *shown, strict=True)
    headings, *cells = zip(*(each for each in columns if set(each[1:]) != {"-"}), strict=True)
    table = text_table(headings, [list(row) for row in cells], caption=caption)
    note = "TTFT: time to first token; TPOT: time per output token; each cell is batch x prompt"
    return Section("What a user waits for", [table], note, FULL)


_NO_PERCENTILES = (math.nan,) * 3


def waiting_rows(run: Run) -> list[list[str]]:
    """Return a row per measured cell: p50, p90 and p95 of the time to first token; p50, p90 and p99 per output token.

    Tokens of one sequence are one decode step apart. A percentile that needs more samples than the cell has is `-`.
    Where new KV lengths cost time (`has_first_uses`), the step at such a length follows; then the numbers of samples.
    """
    evidence, new_lengths = evidence_of(run), has_first_uses(run)
    results: dict[Cell, dict[Phase, CellResult]] = {}
    for result in run.measured:
        results.setdefault(result.key.cell, {})[result.phase] = result
    rows = []
    for cell, phases in results.items():
        first, step = phases.get("prefill"), phases.get("decode")
        ttft_s = (first.ttft_s, first.ttft_p90_s, first.ttft_p95_s) if first else _NO_PERCENTILES
        tpot_s = (step.latency_s, step.p90_s, step.p99_s) if step else _NO_PERCENTILES
        uses = [duration(evidence[step.key].first_use_s or math.nan)] if step and new_lengths else [""] * new_lengths
        ttfts = first.ttft_samples or first.visits if first else 0  # older tables have one per visit
        samples = [str(each or 0) for each in (ttfts, step.samples if step else 0)]
        rows.append([cell.name, *map(duration, ttft_s), *map(duration, tpot_s), *uses, *samples])
    return rows


def has_first_uses(run: Run) -> bool:
    """Whether a decode step of the run takes longer at a KV length that is new to the process."""
    return any(item.first_use_s is not None for item in run.document.evidence)


def roofline(run: Run) -> Section | None:
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


def regimes(run: Run) -> Section | None:
    groups: dict[tuple[Phase, str], dict[tuple[int, int], str]] = {}
    for result in run.measured:
        regimes = groups.setdefault((result.phase, result.engine), {})
        regimes[result.batch_size, result.key.cell.depth] = result.regime or ""
    maps = [_regime_table(f"{phase} ({engine})", regimes) for (phase, engine), regimes in groups.items()]
    return Section("Regimes", maps, "derived, with evidence in run.json", DOCUMENTS) if maps else None


def _regime_table(title: str, regimes: dict[tuple[int, int], str]) -> TextTable:
    """A row per batch size, a column per length."""
    all_batches, all_depths = sorted({batch for batch, _ in regimes}), sorted({depth for _, depth in regimes})
    batches, depths = evenly(all_batches, MOST_SIZES), evenly(all_depths, MOST_SIZES)
    rows = [[str(batch), *(regimes.get((batch, depth), "") for depth in depths)] for batch in batches]
    shown = of_all(len(batches) * len(depths), len(all_batches) * len(all_depths))
    headings = [str(depth) for depth in depths]
    return text_table(["batch", *headings], rows, texts=headings, caption=title + shown)


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


_DOUBLING_COLUMNS = ("batch", "time", "tok/s", "gain", "slope", "interval", "by bytes", "by FLOPs", "evidence for")


def doubling_table(run: Run, test: DoublingTest) -> TextTable:
    """Return a row per batch size, with the slope from the size before it.

    Of more than `MOST_SIZES` doublings, evenly picked ones are shown, from the first to the last.
    """
    by_batch = {result.batch_size: result for result in run.measured if test.holds(result)}
    steps = evenly(test.doublings, MOST_SIZES)
    rows = [[*_batch_texts(by_batch[test.doublings[0].smaller]), *[""] * 6]]
    rows += [[*_batch_texts(by_batch[step.larger]), *_slope_texts(step)] for step in steps]
    omitted = len(test.doublings) - len(steps)
    caption = "slope: 0 if a larger batch takes no longer, 1 if time grows with it; by bytes, by FLOPs: as counted"
    caption += f"; {omitted} more sizes are in run.json" if omitted else ""
    return text_table(_DOUBLING_COLUMNS, rows, texts=("evidence for",), caption=caption)


def _batch_texts(result: CellResult) -> list[str]:
    return [str(result.batch_size), duration(result.latency_s), significant(result.tokens_per_s)]


def _slope_texts(step: Doubling) -> list[str]:
    """Return gain, slope, interval, the slopes that bytes and FLOPs predict, and the bound that the slope supports."""
    return [
        f"{step.gain:.2f}x",
        f"{step.slope:.2f}",
        f"{step.low:.2f} .. {step.high:.2f}",
        f"{step.bytes_slope:.2f}",
        f"{step.flops_slope:.2f}",
        step.side,
    ]
