"""Warnings about a judged run, each with its figure."""

import re
import statistics
from collections.abc import Iterator, Mapping, Sequence

from profiler.data.datasheets import Datasheet, gpus
from profiler.facts.ceilings import Ceilings, CeilingsRemeasured
from profiler.facts.repetitions import Gap, Repetition, Status
from profiler.facts.run_facts import Facts
from profiler.facts.telemetry import complaints
from profiler.grid.cells import Cell
from profiler.judge.breakdown import WHY_TOO_FAST
from profiler.judge.cell_stages import Judged
from profiler.judge.demand import counted_traffic, faster_matmuls, moved, weight_read_share
from profiler.judge.machine_speed import busy_sentences, mode_words, swing_words
from profiler.judge.regimes import Flag
from profiler.units import percent, scaled, several

# Two clocks around the same loop must agree this well.
_CLOCKS_AGREE = 0.02
_HEALTHY_SHARE = 0.9
# The memory model is within 7 % of Mistral-7B's peaks in bfloat16 and nf4, and libraries of small models add 10 %.
_FOREIGN_SHARE = 0.2
_FIGURE = re.compile(r"\d[\d.]*")


def run_warnings(facts: Facts, judged: Sequence[Judged]) -> list[str]:
    """Warnings that may change a conclusion: the device, its ceilings, cells without a number, disagreeing clocks."""
    return [
        *complaints(facts.readings, of_cores=not busy_sentences(facts)),
        *mode_words(facts),
        *_flagged(judged),
        *_other_traffic(facts, judged),
        *_foreign_tensors(facts),
        *_gaps(facts.gaps, facts.repetitions),
        *_two_clocks(facts.repetitions),
    ]


def run_remarks(facts: Facts, judged: Sequence[Judged]) -> list[str]:
    """Warnings that change no conclusion, since the verdicts take them into account."""
    return [
        *swing_words(facts),
        *health_warnings(next((gpu for gpu in gpus() if gpu.gpu == facts.device.datasheet), None), facts.ceilings),
        *_weight_read(facts.ceilings),
        *_moved(facts.ceilings, facts.remeasured_ceilings),
        *_raised(facts),
        *_parts_exceed(judged),
    ]


def health_warnings(sheet: Datasheet | None, ceilings: Ceilings) -> list[str]:
    """Warnings about a GPU whose settled rates are clearly below those of a healthy one of its kind."""
    if sheet is None:
        return []
    dtype = sheet.sustained_dtype
    checks = (
        (f"{dtype} matmuls", ceilings.compute.get(dtype), sheet.sustained_flops_per_s, "FLOP/s"),
        ("copies", ceilings.memory.get("copy"), sheet.sustained_copy_bytes_per_s, "B/s"),
    )
    return [
        f"this {sheet.gpu} sustains {scaled(ceiling.per_s, unit)} in {what}; a healthy one {scaled(healthy, unit)} at"
        f" {sheet.tdp_w:g} W: look at its power limit, its temperature and other processes."
        for what, ceiling, healthy, unit in checks
        if ceiling is not None and healthy is not None and ceiling.per_s < _HEALTHY_SHARE * healthy
    ]


def _weight_read(ceilings: Ceilings) -> Iterator[str]:
    share = weight_read_share(ceilings)
    if ceilings.weights is not None and share != 1.0:
        per_s = ceilings.weights.ceiling.per_s
        yield (
            f"the model's own weights are read at {scaled(per_s, 'B/s')}, {percent(abs(share - 1))}"
            f" {'slower' if share < 1 else 'faster'} than a stream of their size ({scaled(per_s / share, 'B/s')}):"
            " every cell is judged with both rates."
        )


def _moved(ceilings: Ceilings, remeasured: Sequence[CeilingsRemeasured]) -> Iterator[str]:
    parts = [
        f"{name} from {scaled(first.per_s, unit)} to {scaled(later.per_s, unit)}"
        for name, unit, first, later in (moved(ceilings, remeasured[-1]) if remeasured else ())
    ]
    if parts:
        yield (
            f"the ceilings moved since they were measured: {', '.join(parts)}; cells are judged under the lowest and"
            " the highest."
        )


def _raised(facts: Facts) -> Iterator[str]:
    if (found := faster_matmuls(facts)) is not None:
        matmuls, ceiling_per_s = found
        yield (
            f"the compute ceiling of {scaled(ceiling_per_s, 'FLOP/s')} was too low, and is raised to"
            f" {scaled(matmuls.flops_per_s, 'FLOP/s')}, the rate of {matmuls.count} matmuls of {matmuls.where}."
        )


def _flagged(judged: Sequence[Judged]) -> Iterator[str]:
    if unsteady := [cell for cell in judged if Flag.UNSTEADY in cell.verdict.flags]:
        yield (
            f"{several(len(unsteady), 'cell would get', 'cells would get')} another label under the lowest or the"
            f" highest ceiling of this run (first: {unsteady[0].key.name}, {unsteady[0].verdict.evidence[-1].signal})."
        )
    if above := [cell for cell in judged if Flag.ABOVE_CEILING in cell.verdict.flags]:
        yield (
            f"{several(len(above), 'cell is', 'cells are')} above a measured ceiling (first: {above[0].key.name}):"
            f" {WHY_TOO_FAST} there, so their labels have a low confidence."
        )


def _parts_exceed(judged: Sequence[Judged]) -> Iterator[str]:
    shares = {
        cell.key: -cell.terms.unexplained_s / cell.terms.latency_s
        for cell in judged
        if cell.terms.exceeds_step and Flag.ABOVE_CEILING not in cell.verdict.flags
    }
    if shares:
        key = max(shares, key=lambda each: shares[each])
        yield (
            f"in {several(len(shares), 'cell', 'cells')} the parts of a step, each measured by itself, take longer than"
            f" the whole step (most: {percent(shares[key])} longer, {key.name}): a step finds in a cache what a replay"
            " reads from memory, or the machine was slower in between. Kernels lose at most the printed time there."
        )


def _other_traffic(facts: Facts, judged: Sequence[Judged]) -> list[str]:
    found = ((cell.key.name, counted_traffic(facts, cell.key)) for cell in judged)
    return [
        f"in {name} the GPU's counters saw {scaled(each.bytes_per_s, 'B/s')} of memory traffic, and its operators move"
        f" {scaled(each.executed_bytes_per_s, 'B/s')}: another process may use this GPU, or the counts miss work."
        for name, each in found
        if each is not None and each.differs
    ]


def _foreign_tensors(facts: Facts) -> Iterator[str]:
    peaks = [
        (max(repetition.peak_memory_bytes or 0 for repetition in of_cell), facts.predicted_peak_bytes[cell])
        for cell, of_cell in facts.repetitions.items()
        if facts.device.kind == "cuda" and any(repetition.peak_memory_bytes for repetition in of_cell)
    ]
    peak, needed = min(peaks, key=lambda pair: pair[0] / pair[1], default=(0, 1))
    if peak > (1 + _FOREIGN_SHARE) * needed:
        foreign, peak_words, needed_words = (scaled(nbytes, "B") for nbytes in (peak - needed, peak, needed))
        yield f"a peak of {peak_words} held {foreign} of foreign tensors: a step needs {needed_words}."


def _gaps(gaps: Mapping[Cell, Gap], repetitions: Mapping[Cell, Sequence[Repetition]]) -> list[str]:
    words = {
        False: ("cell has no number", "cells have no number"),
        True: (
            "cell failed in a later repetition and keeps its number",
            "cells failed in a later repetition and keep their numbers",
        ),
    }
    alike: dict[tuple[bool, Status, str], list[Gap]] = {}
    for cell, gap in gaps.items():
        # Reasons of one kind differ only in their figures.
        alike.setdefault((bool(repetitions.get(cell)), gap.status, _FIGURE.sub("", gap.reason)), []).append(gap)
    return [
        f"{several(len(rows), *words[has_number])} (first: batch {rows[0].cell.name}, {status}: {rows[0].reason})."
        for (has_number, status, _), rows in sorted(alike.items())
    ]


def _two_clocks(repetitions: Mapping[Cell, Sequence[Repetition]]) -> Iterator[str]:
    ratios = {
        cell: statistics.median(each.loop_s / sum(each.decode_s) for each in of_cell if each.loop_s)
        for cell, of_cell in repetitions.items()
        if any(each.loop_s for each in of_cell)
    }
    apart = {cell: ratio for cell, ratio in ratios.items() if abs(ratio - 1) > _CLOCKS_AGREE}
    if apart:
        cell, ratio = max(apart.items(), key=lambda item: abs(item[1] - 1))
        yield (
            f"in {len(apart)} cells the host's clock and the sum of the steps differ by more than"
            f" {percent(_CLOCKS_AGREE)} (most: {percent(ratio - 1)} at batch {cell.name})."
        )
