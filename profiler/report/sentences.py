"""Sentences about a run, shared by the terminal, HTML and Markdown reports."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from profiler.data.links import Link
from profiler.facts.measurements import BatchTimes
from profiler.facts.roofs import Roof, memory_roof
from profiler.grid.cells import CellKey
from profiler.judge.cells import CellEvidence, EngineDifference
from profiler.judge.regimes import Flag
from profiler.report.device import host_words
from profiler.report.selection import first_engine, of_phase
from profiler.stats import CLAIM_VISITS, MOST_FOREIGN_CORES
from profiler.store.folder import Run
from profiler.units import clock_time, duration, percent, scaled, several, significant

NO_NUMBER = "No cell has a number: there is nothing to conclude."
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
# A smaller share of a step, taken by the measurement itself, has no figure.
_LEAST_OVERHEAD = 0.01
# Shorter stages are omitted from the line on wall time.
_SHORTEST_STAGE_S = 0.5


def regime_names(run: Run) -> dict[CellKey, str]:
    """Return each cell's regime, followed by the short name of its most important flag."""
    return {item.key: _regime(item) for item in run.document.evidence}


def _regime(item: CellEvidence) -> str:
    flags = frozenset(item.flags) - _NEEDLESS.get(item.regime, frozenset())
    word = next((word for flag, word in _SHORT_FLAGS.items() if flag in flags), "")
    return f"{item.regime} ({word})" if word else item.regime


def precision_line(run: Run) -> str:
    """Return `float32, random weights`: the precision and the origin of the weights, for a heading."""
    return f"{run.model.precision}{', random weights' if run.model.weights == 'random' else ''}"


def roofs_lines(run: Run) -> list[str]:
    """Return the measured roofs, each with the datasheet's value if there is one."""
    ceilings, device, dtype = run.document.ceilings, run.document.device, run.model.dtype
    bandwidth, compute = ceilings.memory_bytes_per_s, ceilings.compute.get(dtype)
    lines = ["the memory roof is not known"]
    if bandwidth is not None:
        share = _of_sheet(memory_roof(ceilings.memory), device.datasheet_bytes_per_s)
        lines = [f"memory {scaled(bandwidth, 'B/s')}{share}"]
    if compute:
        share = _of_sheet(compute, device.datasheet_flops_per_s)
        lines.append(f"compute {scaled(compute.per_s, 'FLOP/s')} in {dtype}{share}")
    by_batch = ceilings.dispatch_s.get(first_engine(run), {}).get("decode", {})
    smallest = min(by_batch, default=None)
    if first_engine(run) in run.document.engine.owned:
        return [*lines, f"dispatch is part of the time of {first_engine(run)}"]
    lines.append(
        "dispatch not measured" if smallest is None else f"dispatch {duration(by_batch[smallest])} per decode step"
    )
    return lines


def host_line(run: Run) -> str | None:
    """Return how the host's pace compares, and the shortest step of an engine that dispatches every operator.

    None without a measured pace, or if other processes used the CPU, which slows dispatch.
    """
    ceilings, replayed = run.document.ceilings, run.document.engine.replay_as_graph
    readings = run.document.health.readings
    elsewhere = readings.busy_cores_elsewhere if readings else None
    if ceilings.host is None or (elsewhere is not None and elsewhere.median > MOST_FOREIGN_CORES):
        return None
    decodes = [phases.get("decode", {}) for name, phases in ceilings.dispatch_s.items() if name not in replayed]
    least_s = min((seconds for by_batch in decodes for seconds in by_batch.values()), default=math.inf)
    steps_s = [item.latency_s for item in run.measured if item.phase == "decode" and item.engine not in replayed]
    if least_s > min(steps_s, default=math.inf) or least_s == math.inf:
        return host_words(ceilings.host)
    otherwise = ", a graph can" if run.document.device.kind == "cuda" else ""
    return f"{host_words(ceilings.host)}; no eager engine can go below {duration(least_s)} per step here{otherwise}"


def _of_sheet(roof: Roof, peak: float | None) -> str:
    if not roof.measured:
        return " (the datasheet's, not measured)"
    return f" ({percent(roof.per_s / peak)} of the datasheet)" if peak else ""


def rank_lines(run: Run) -> list[str]:
    """Return the number of ranks, their link, and for each step the ranks' times, the link's time and their sum."""
    link = run.document.ceilings.collective
    if run.document.ranks < 2 or link is None:
        return []
    lines = [
        f"{run.document.ranks} ranks, each with {scaled(run.model.storage_bytes, 'B')} of weights, by {link.name}:"
        f" {duration(link.alpha_s)} per message and {scaled(link.bus_bytes_per_s, 'B/s')} (busbw)"
        + (f"; {_sweep(link)}" if link.points else "")
    ]
    for step in run.document.rank_steps:
        times = ", ".join(duration(seconds) for seconds in step.own_s)
        hides = f", which hides {duration(step.hidden_s)} of the host's dispatch" if step.hidden_s else ""
        lines.append(
            f"{step.key.name}: the ranks' own shares take {times}, {duration(step.last_s)} waiting for the last at each"
            f" exchange, the link {duration(step.exchanged_s)}{hides}:"
            f" {duration(step.predicted_s)} predicted, {duration(step.measured_s)} measured"
        )
    return lines


def _sweep(link: Link) -> str:
    """Return the smallest and the largest size of a sweep of all-reduces."""
    first, last = link.points[0], link.points[-1]
    return (
        f"an all-reduce of {first.nbytes >> 10} KiB takes {duration(first.seconds)}, one of {last.nbytes >> 20} MiB"
        f" {duration(last.seconds)} (algbw {scaled(last.alg_bytes_per_s, 'B/s')}, busbw"
        f" {scaled(last.bus_bytes_per_s, 'B/s')})"
    )


def engine_claims(run: Run) -> list[EngineDifference]:
    """Return the differences between engines that exceed noise."""
    return [item for item in run.document.engine.differences if item.is_claim]


def waterfalls(run: Run) -> list[EngineDifference]:
    """Return the engine differences that the time breakdowns of both engines explain."""
    return [item for item in engine_claims(run) if item.terms]


def no_claim_lines(run: Run) -> list[str]:
    """Return the number of cells in which engines differ by no more than noise, and of cells with too few visits."""
    differences = run.document.engine.differences
    once = sum(item.visits < CLAIM_VISITS for item in differences)
    noise = len(differences) - len(engine_claims(run)) - once
    lines = []
    if noise:
        lines.append(f"in {several(noise, 'cell', 'cells')} engines differ by no more than noise")
    if once:
        cells = several(once, "cell has", "cells have")
        lines.append(f"{cells} only one visit of an engine: no difference is claimed; a larger --budget gives more")
    return lines


def interval(item: EngineDifference) -> str:
    """Return the bounds of a claim's interval."""
    low_s, high_s = sorted((abs(item.low_s), abs(item.high_s)))
    return f"{duration(low_s)} to {duration(high_s)}"


def instrument_line(run: Run) -> str:
    """Return the overhead of the measurement per step, absolute and as a share of the fastest decode step."""
    mark_s = run.document.engine.instrument_s_per_step
    fastest_s = min((result.latency_s for result in of_phase(run.measured, "decode")), default=None)
    if mark_s is None or fastest_s is None:
        return "measurement overhead: not known"
    share = mark_s / fastest_s
    words = percent(share) if share >= _LEAST_OVERHEAD else f"less than {percent(_LEAST_OVERHEAD)}"
    return f"measurement overhead: {duration(mark_s)} per step, {words} of the fastest one"


def unexplained_lines(run: Run) -> list[str]:
    """Return a line per cell with much unexplained time: its share, and the two operator groups with most of it."""
    results, lines = run.by_key(), []
    for item in run.document.evidence:
        if item.unexplained_in_s:
            result = results[item.key]
            most = [
                f"{group.replace('_', ' ')} ({duration(excess_s)})"
                for group, excess_s in list(item.unexplained_in_s.items())[:2]
            ]
            lines.append(
                f"{item.key.name}: {percent(result.unexplained_s / result.latency_s)} of its time is not explained;"
                f" timed with hooks, most of it is in {' and '.join(most)}"
            )
    return lines


def paying_batches(times: Sequence[BatchTimes]) -> str:
    """Return in words where the packed format pays; empty without times.

    The break-even batch is between the last batch of one side and the first of the other. Between them the rounds
    disagree, or no batch was timed.
    """
    if not times:
        return ""
    first, last = times[0].batch, times[-1].batch
    packed, dense = ([item.batch for item in times if item.pays is pays] for pays in (True, False))
    if not packed and not dense:
        return f"packed and dense weights are equally fast at batches {first} to {last}"
    if packed and dense and max(packed) < min(dense):
        return f"packed weights are faster up to batch {max(packed)}, dense ones from batch {min(dense)} on"
    if packed and dense and max(dense) < min(packed):
        return f"dense weights are faster up to batch {max(dense)}, packed ones from batch {min(packed)} on"
    if packed and dense:
        return f"packed weights are faster only at batches {', '.join(map(str, packed))}"
    side, batches = ("packed", packed) if packed else ("dense", dense)
    if len(batches) == len(times):
        return f"{side} weights are faster at batches {first} to {last}"
    of_batches = f"batch{'' if len(batches) == 1 else 'es'} {', '.join(map(str, batches))}"
    return f"{side} weights are faster at {of_batches}; at the others rounds disagree"


def activity_lines(run: Run) -> list[str]:
    """Return kernels, gaps and busy share of the traced steps, and on CUDA the commands of nsys and ncu."""
    document = run.document
    on_cuda = document.device.kind == "cuda"
    what = "kernels" if on_cuda else "operators"
    lines = [
        f"{item.key.name}: {item.kernels} {what}, one of them running {percent(item.busy_share)} of the time;"
        f" {item.gaps} gaps of {duration(item.gap_s / item.gaps) if item.gaps else '0'} on average"
        for item in document.activity
    ]
    lines += [f"{name}: {breaks} graph breaks" for name, breaks in document.engine.graph_breaks.items()]
    lines += [
        f"{name}: {several(skips, 'compiled piece runs', 'compiled pieces run')} without a CUDA graph"
        for name, skips in document.engine.graph_skips.items()
        if skips
    ]
    if lines and on_cuda:
        command = f"{document.command} --breakdown"
        lines.append(f"with NVTX ranges per group: nsys profile --trace=cuda,nvtx -o step {command}")
        lines.append(
            "bytes per kernel: ncu --nvtx --metrics dram__bytes_read.sum,dram__bytes_write.sum --clock-control none"
            f" {command}"
        )
    return lines


def packed_line(run: Run) -> str | None:
    """Return up to which batch the packed format pays; None for dense models, or if it was not measured."""
    packed = run.document.packed_batches
    if packed is None or not packed.times:
        return None
    ends = dict.fromkeys((packed.times[0], packed.times[-1]))
    seconds = " and ".join(
        f"{duration(item.packed_s)} against {duration(item.dense_s)} at batch {item.batch}" for item in ends
    )
    return (
        f"{packed.format} ({packed.kernel}) against dense {packed.dense_dtype}, all packed linears of a decode step:"
        f" {paying_batches(packed.times)} ({seconds})"
    )


def quality_line(run: Run) -> str | None:
    """Return the divergence of a quantised model from the unquantised one; None without `--check-quality`."""
    quality = run.document.quality
    if quality is None:
        return None
    return (
        f"compared with the unquantised model, over {quality.tokens} tokens: mean KL divergence"
        f" {significant(quality.mean_kl_nats, 2)} nats, the same first choice at {percent(quality.top1_agreement)}"
        " of them (a sanity figure, not a benchmark)"
    )


def stage_line(run: Run) -> str | None:
    """Return `wall time 2:05: timing 70 s, replays 10 s`: the stages of the run, the longest first."""
    stages = run.document.stage_s
    if not stages:
        return None
    ordered = sorted(stages.items(), key=lambda item: -item[1])
    parts = [f"{name} {seconds:.0f} s" for name, seconds in ordered if seconds >= _SHORTEST_STAGE_S]
    return f"wall time {clock_time(sum(stages.values()))}" + (f": {', '.join(parts)}" if parts else "")


def end_lines(run: Run) -> list[str]:
    """Return the run's folder and, if it has a report, the page to open next: the end of a screen."""
    page = run.folder / "report.html"
    next_line = f"next: open {page}; roofscope explain TERM explains a word of this screen"
    return [f"run: {run.folder}", *([next_line] if page.exists() else [])]


def common_noise(run: Run) -> dict[str, list[str]]:
    """Return the noise reasons that all cells of the run share, by kind."""
    evidence = run.document.evidence
    kinds = _noise_kinds(run)
    return {kind: list(texts.values()) for kind, texts in kinds.items() if len(texts) == len(evidence) > 1}


def own_noise(run: Run) -> dict[CellKey, list[str]]:
    """Return the noise reasons of each cell, without those that all cells share."""
    common = common_noise(run)
    reasons = {
        item.key: [why for why in item.noise_reasons if _NUMBER.sub("#", why) not in common]
        for item in run.document.evidence
    }
    return {key: texts for key, texts in reasons.items() if texts}


def common_noise_line(run: Run) -> str | None:
    """Return `all 32 cells: the machine itself drifted by 23 %`, or None where all cells share no reason."""
    reasons = [_together(texts) for texts in common_noise(run).values()]
    return f"all {len(run.document.evidence)} cells: {'; '.join(reasons)}" if reasons else None


def noise_lines(run: Run) -> list[str]:
    """Return the noise reasons: a line for those of all cells, one per kind that several share, one per other cell."""
    common, kinds = common_noise(run), _noise_kinds(run)
    shared = {kind: texts for kind, texts in kinds.items() if kind not in common and len(texts) >= _MIN_SHARED_CELLS}
    lines = [line] if (line := common_noise_line(run)) else []
    for texts in sorted(shared.values(), key=len, reverse=True):
        lines.append(f"{len(texts)} of {len(run.document.evidence)} cells: {_together(list(texts.values()))}")
    for key, reasons in own_noise(run).items():
        unshared = [why for why in reasons if _NUMBER.sub("#", why) not in shared]
        if unshared:
            lines.append(f"{key.name}: {', '.join(unshared)}")
    return lines


_NUMBER = re.compile(r"\d+(?:\.\d+)?")
# A reason that at least this many cells share is printed in one line.
_MIN_SHARED_CELLS = 3


def _noise_kinds(run: Run) -> dict[str, dict[CellKey, str]]:
    """Return the cells of each kind of reason (its text without figures), with each cell's own text."""
    kinds: dict[str, dict[CellKey, str]] = {}
    for item in run.document.evidence:
        for why in item.noise_reasons:
            kinds.setdefault(_NUMBER.sub("#", why), {})[item.key] = why
    return kinds


def _together(texts: Sequence[str]) -> str:
    """Return `time known to within 2.6 to 9.1 %`: reasons of one kind as one text, with the range of each figure."""
    figures = iter(zip(*(_NUMBER.findall(text) for text in texts), strict=True))

    def span(_: re.Match[str]) -> str:
        values = sorted(next(figures), key=float)
        return values[0] if values[0] == values[-1] else f"{values[0]} to {values[-1]}"

    return _NUMBER.sub(span, texts[0])


def visited_once(run: Run) -> set[CellKey]:
    """Return the cells visited once; empty if all cells were."""
    once = {result.key for result in run.measured if result.visits == 1}
    return once if len(once) < len(run.measured) else set()
