"""The glossary: each term in two lines, with a run's own figures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from profiler.errors import RequestError, near_misses
from profiler.grid.cells import PHASES, Phase
from profiler.judge.breakdown import TERMS
from profiler.judge.regimes import Regime
from profiler.report.selection import of_phase
from profiler.stats import samples_for
from profiler.store.folder import Run
from profiler.units import duration, percent, scaled, significant


@dataclass(frozen=True)
class Term:
    """A word and its meaning."""

    meaning: str
    figures: Callable[[Run], str | None] = lambda run: None
    """Returns a run's figures for the term, or None if the run has none."""


def explanation(term: str, run: Run | None = None) -> str:
    """Return the meaning of a term, and its figures in `run`. Raises RequestError for an unknown term."""
    names = {name.lower(): name for name in GLOSSARY}
    key = names.get(term.strip().lower())
    if key is None:
        hint = near_misses(term.lower(), tuple(names))
        raise RequestError(f"{term!r} is not in the glossary.{hint} `roofscope explain` lists all terms.")
    figures = GLOSSARY[key].figures(run) if run is not None else None
    return f"{key}: {GLOSSARY[key].meaning}" + (f"\nIn this run: {figures}" if figures else "")


def footnotes(run: Run) -> list[tuple[str, str]]:
    """Return each term that this run's report uses, and its meaning with the run's figures if there are any."""
    used = ["intensity", "attained", "dispatch", "kernels", "avoidable work", "unexplained", "TTFT", "interval"]
    used += sorted({result.regime for result in run.results if result.regime})
    if run.document.engine.owned:
        used.insert(3, "engine")
    if any(not math.isnan(result.mbu) for result in run.results):
        used += ["MFU", "MBU"]
    if any(result.status == "forecast" for result in run.results):
        used.append("forecast")
    figures = {name: GLOSSARY[name].figures(run) for name in used}
    return [(name, GLOSSARY[name].meaning + (f" Here: {text}." if text else "")) for name, text in figures.items()]


def _range(run: Run, column: str, show: Callable[[float], str], phase: Phase = "decode") -> str | None:
    column_values = (float(getattr(result, column)) for result in of_phase(run.measured, phase))
    values = [value for value in column_values if not math.isnan(value)]
    if not values:
        return None
    low, high = show(min(values)), show(max(values))
    return f"{low} in {phase}" if low == high else f"{low} to {high} in {phase}"


def _percentiles(run: Run, columns: Mapping[int, str], phase: Phase) -> str | None:
    """The range of each percentile, or the samples that it needs."""
    if _range(run, columns[50], duration, phase) is None:
        return None
    ranges = {percent: _range(run, column, duration, phase) for percent, column in columns.items()}
    return "; ".join(
        f"p{percent} {shown}" if shown else f"p{percent} needs {samples_for(percent)} samples, no cell has so many"
        for percent, shown in ranges.items()
    )


def _both(run: Run, column: str, show: Callable[[float], str]) -> str | None:
    parts = [_range(run, column, show, phase) for phase in PHASES]
    return "; ".join(part for part in parts if part) or None


def _of_sheet(run: Run, column: str) -> str | None:
    device = run.document.device
    without = None if device.datasheet else f"none, there is no datasheet of {device.name}"
    return _both(run, column, percent) or without


def _counted(run: Run, *, regime: Regime) -> str | None:
    measured = run.measured
    return f"{sum(result.regime == regime for result in measured)} of {len(measured)} cells" if measured else None


def _share(run: Run, *, column: str) -> str | None:
    ratios = (getattr(result, column) / result.latency_s for result in run.measured)
    shares = [share for share in ratios if not math.isnan(share)]
    ends = dict.fromkeys(map(percent, (min(shares), max(shares)))) if shares else ()
    return f"{' to '.join(ends)} of the time" if ends else None


def _roofs(run: Run) -> tuple[float, float] | None:
    ceilings = run.document.ceilings
    compute, memory = ceilings.compute_roof(run.model.dtype), ceilings.memory_bytes_per_s
    return None if compute is None or memory is None else (compute.per_s, memory)


def _roofline(run: Run) -> str | None:
    if (roofs := _roofs(run)) is None:
        return None
    measured = run.document.ceilings.ceilings.measured(run.model.dtype)
    return f"{scaled(roofs[1], 'B/s')} and {scaled(roofs[0], 'FLOP/s')}, {'' if measured else 'not all '}measured here"


def _ridge(run: Run) -> str | None:
    if (roofs := _roofs(run)) is None:
        return None
    return f"{significant(roofs[0] / roofs[1])} FLOP/byte"


def _witness(run: Run) -> str | None:
    if (weights := run.document.ceilings.weights) is None:
        return None
    stream_per_s = weights.stream.per_s if weights.stream else run.document.ceilings.memory_bytes_per_s
    stream = f", a stream {scaled(stream_per_s, 'B/s')}" if stream_per_s else ""
    return f"{scaled(weights.roof.per_s, 'B/s')}{stream}"


def _interval(run: Run) -> str | None:
    widths = [(result.latency_high_s - result.latency_low_s) / 2 / result.latency_s for result in run.measured]
    return f"half-width {100 * statistics.median(widths):.1f} % at the median cell" if widths else None


_REGIMES: dict[Regime, str] = {
    "memory-bound": "moving bytes explains most of the device's time; fewer bytes help, faster arithmetic does not.",
    "compute-bound": "arithmetic explains most of the device's time; a faster dtype helps, fewer bytes do not.",
    "overhead-bound": (
        "the host's dispatch sets the pace; graphs, compiling or larger batches help, a faster device does not."
    ),
    "mixed": (
        "two causes contribute and neither dominates (a GPU and its host that take equally long, too), or"
        " vLLM hides its causes."
    ),
    "kernel-bound": (
        "replayed in isolation, the kernels stay far below every roof at these shapes; other kernels or formats help."
    ),
    "link-bound": (
        "weights outside the GPU, or results that GPUs exchange, set the pace; a faster device does not help."
    ),
    "inconclusive": "the evidence is missing, too noisy or contradicts itself; no label would be honest.",
}
"""What each regime means."""

GLOSSARY: dict[str, Term] = {
    "prefill": Term(
        "the forward pass over a whole prompt; it fills the KV cache and gives the first token.",
        lambda run: _range(run, "latency_s", duration, "prefill"),
    ),
    "decode": Term(
        "one forward pass that adds one token to every sequence; it reads all weights and the KV cache.",
        lambda run: _range(run, "latency_s", duration),
    ),
    "cell": Term("one phase (prefill or decode) at one batch size and one length; a run measures a grid of cells."),
    "1 x 64": Term("batch 1 with prompts of 64 tokens: the name of a cell, batch x prompt length."),
    "visit": Term("one sample of a cell: a prefill and a loop of decode steps; visits of all cells take turns."),
    "roof": Term("a limit of this device, measured: bytes/s of memory, FLOP/s of matmuls, or the time of dispatch."),
    "time breakdown": Term(
        "the measured time of a cell as a sum of terms: weights, KV cache, arithmetic, kernels, dispatch and others."
    ),
    "split": Term("the picture of the time breakdown (`split.png`)."),
    **{term.short: Term(term.meaning, partial(_share, column=column)) for column, term in TERMS.items()},
    "regime": Term("what limits a cell: memory-, compute-, overhead-, kernel- or link-bound, mixed, or inconclusive."),
    "sure": Term("the confidence in a regime (high, medium or low): how far the evidence is from the thresholds."),
    "tried": Term(
        "a saving measured on a few layers of this model on this device, in turns with the unchanged layers."
    ),
    "computed": Term("a saving that follows from the time breakdown; it is a bound (at most) or an estimate (about)."),
    "drift": Term("a change of the machine's speed within a run; a probe next to each visit measures it."),
    "replay": Term("running a step's kernels again in isolation, with the model's own calls, to time each of them."),
    "host": Term("the CPU and the Python process that start the device's operators."),
    "host index": Term("how fast this host dispatches, compared with a reference host."),
    "preset": Term("a model that roofscope knows by name (`roofscope models`): its config, without its weights."),
    "precision": Term("how weights are stored and products computed: a dtype (bfloat16) or a format (nf4, int8wo)."),
    "product": Term("a matrix multiplication."),
    "linear": Term("a layer that multiplies its input with a weight matrix."),
    "slope": Term("of log time against log size: 0 means more work is free, 1 that time grows with the work."),
    "context": Term("the tokens that are in the KV cache when a decode step starts."),
    "instrument": Term("the measurement's own cost: marks around each step."),
    "TTFT": Term(
        "time to first token as a user sees it: the prompt to the device, the prefill, the token back on the host.",
        lambda run: _percentiles(run, {50: "ttft_s", 90: "ttft_p90_s", 95: "ttft_p95_s"}, "prefill"),
    ),
    "TPOT": Term(
        "time per output token: one decode step; its median is `latency_s`, its tail `p90_s` and `p99_s`.",
        lambda run: _percentiles(run, {50: "latency_s", 90: "p90_s", 99: "p99_s"}, "decode"),
    ),
    "intensity": Term(
        "model FLOPs per model byte; the x-axis of the roofline.", lambda run: _both(run, "intensity", significant)
    ),
    "witness": Term(
        "the bandwidth of reading the model's own weights in place; a check of the memory roof, which is a stream's.",
        _witness,
    ),
    "roofline": Term(
        "the most FLOP/s that an intensity allows: bandwidth times intensity, and no more than the compute roof.",
        _roofline,
    ),
    "ridge point": Term("the intensity at which the memory roof meets the compute roof.", _ridge),
    "MFU": Term("model FLOP/s over the datasheet's dense peak (arXiv:2204.02311).", lambda run: _of_sheet(run, "mfu")),
    "MBU": Term(
        "model bytes/s over the datasheet's bandwidth; weights as stored, live KV once.",
        lambda run: _of_sheet(run, "mbu"),
    ),
    "attained": Term(
        "the share of the measured roofline: the time that the work needs at the measured roofs over the time it took.",
        lambda run: _both(run, "attained", percent),
    ),
    **{name: Term(meaning, partial(_counted, regime=name)) for name, meaning in _REGIMES.items()},
    "CUDA graph": Term("the kernels of a step, recorded once; the host then starts all of them with one launch."),
    "static cache": Term("a KV cache of fixed size: no shape changes from step to step, so steps can be captured."),
    "hollow twin": Term(
        "the same architecture with next to no width: it dispatches the same operators and computes almost nothing.",
        lambda run: _share(run, column="dispatch_s"),
    ),
    "lever": Term(
        "a change and the time it saves in one cell: measured in this run, tried on this device, or computed from the"
        " cell's breakdown."
    ),
    "model work": Term("the minimum of FLOPs and bytes that the algorithm needs; rates, MFU and MBU use it."),
    "executed work": Term("the FLOPs and bytes that the library executes; the part above model work is avoidable."),
    "KV bytes": Term(
        "bytes of the KV cache: 2 x layers x KV heads x head width x bytes per element, per token and sequence."
    ),
    "KV equals weights": Term(
        "the context at which one sequence's KV cache is as large as the weights: weight bytes / KV bytes per token."
    ),
    "attention is half": Term(
        "the context at which 4 x layers x heads x head width x context equals 2 x the weights: half of decode's FLOPs."
    ),
    "batch at most": Term(
        "the most sequences that fit a GPU with their KV cache, state and workspace, in whatever pieces free memory is."
    ),
    "tight": Term(
        "the tensors of a step fit a GPU, but it runs out of memory if torch's allocator leaves free memory in pieces."
    ),
    "bound by compute": Term(
        "the batch from which decode is compute-bound; of the linears: bytes per weight x FLOP/s / (2 x bandwidth)."
    ),
    "floor": Term("the least time of a step: the sum over its operators of max(FLOPs / FLOP/s, bytes / bandwidth)."),
    "tok/s at most": Term("new tokens of a step / its floor, without the host's dispatch."),
    "knee": Term("the batch size beyond which throughput stops improving: time grows with the batch."),
    "interval": Term(
        "the 95 % confidence interval of the median, from the spread between visits (of one visit, within it).",
        _interval,
    ),
    "forecast": Term(
        "a time estimated from the measured cells, if the budget ended first; nine in ten are inside its interval."
    ),
    "noise": Term("quiet, noisy or unusable: by the interval, drift, modes, outliers, throttling and other users."),
    "offloaded": Term(
        "weights are on the host or the disk and cross a link at every step; the breakdown has a term for it."
    ),
}
