"""Facts of one cell, from operators with known figures."""

from collections.abc import Mapping, Sequence
from typing import Any

from machines import ceiling

from profiler.facts.ceilings import READ, Ceilings
from profiler.facts.measurements import Replay
from profiler.facts.operators import OperatorWork
from profiler.facts.overhead import Overhead
from profiler.facts.repetitions import Repetition
from profiler.facts.run_facts import DeviceFacts, Facts, ModelFacts
from profiler.grid.cells import Cell, CellKey, Grid
from profiler.judge.breakdown import TERMS, StepCeilings, TimeBreakdown
from profiler.judge.cell_stages import Judged, Timed
from profiler.judge.regimes import Measurement, Verdict
from profiler.judge.savings import ChangeEffect, EngineDifference, TrialResult
from profiler.stats import Estimate, Noise, NoiseReport

CEILINGS = StepCeilings(1e12, None, overlaps=True)
CELL = Cell(batch_size=1, prompt_len=64, new_tokens=8)
KEY = CellKey("decode", CELL)


def terms(parts: TimeBreakdown) -> float:
    return sum(float(getattr(parts, name)) for name in TERMS)


def pairs(text: str) -> dict[str, Any]:
    """The values of `name=value`: numbers, or words."""
    found = dict(item.split("=") for item in text.split() if "=" in item)
    return {name: value if value[0].isalpha() else float(value) for name, value in found.items()}


def timed_step(flops: float, nbytes: float, low_s: float, high_s: float, **fields: Any) -> Timed:
    """A decode step with this work and this interval of its time."""
    work = OperatorWork("all", "mlp", 1, "float16", flops, nbytes, 0.0, 0.0)
    return Timed(KEY, [work], "ok", time=Estimate((low_s + high_s) / 2, low_s, high_s, 9), **fields)


def breakdown(half_widths_s: Mapping[str, float] | None = None, **terms: float) -> TimeBreakdown:
    """A breakdown of these terms, which add up to its time; terms that are not given are 0."""
    all_s = dict.fromkeys(TERMS, 0.0) | terms
    floor_s = all_s["weights_s"] + all_s["kv_s"] + all_s["compute_s"]
    widths_s = half_widths_s or {}
    return TimeBreakdown(latency_s=sum(all_s.values()), floor_s=floor_s, half_widths_s=widths_s, **all_s)


def judged(
    key: CellKey, parts: TimeBreakdown, verdict: Verdict, *operators: OperatorWork, grade: Noise = "quiet",
    repetitions: Sequence[Repetition] = (), ceilings: StepCeilings = CEILINGS, tried: tuple[TrialResult, ...] = (),
    changes: tuple[ChangeEffect, ...] = (), engines: tuple[EngineDifference, ...] = (), **of_step: Any,
) -> Judged:  # fmt: skip
    """A step with these terms and this verdict, under ceilings of 1 TB/s and 100 TFLOP/s."""
    time_s, noise = Estimate(*(parts.latency_s,) * 3, 9), NoiseReport(grade, ())
    timed = Timed(key, operators, "ok", key.tokens, time_s, repetitions=repetitions, noise=noise)
    measurement = Measurement(parts, timed, 100e12, ceilings)
    return Judged(measurement, verdict, 100e12, tried=tried, engines=engines, changes=changes, **of_step)


def model(**parts: Any) -> ModelFacts:
    plain: dict[str, Any] = {
        "id": "made", "kind": "card", "revision": None, "architecture": "LlamaForCausalLM", "params": 1,
        "dtype": "float16", "quant": "none", "double_quant": False, "compute_dtype": "float16", "weights": "random",
        "storage_bytes": 1, "load_s": 1.0, "first_call_s": 1.0, "unpacked_from": None, "attention": "sdpa",
        "offloaded_bytes": {}, "placement": None,
    }  # fmt: skip
    return ModelFacts(**{**plain, **parts})


def facts(
    operators: Sequence[OperatorWork], replays: Mapping[str, Replay] | None = None, *, flops_per_s: float,
    bytes_per_s: float, kind: str = "cuda", host_s: float | None = None, **of_model: Any,
) -> Facts:  # fmt: skip
    """Return the facts of one cell on a device with these ceilings."""
    return Facts(
        model=model(**of_model),
        device=DeviceFacts(kind, "made", 1, 1, 1, ""),
        grid=Grid((64,), (1,), 8),
        ceilings=Ceilings({"float16": ceiling(flops_per_s)}, {READ: ceiling(bytes_per_s)}, 1, True),
        operators={KEY: operators},
        predicted_peak_bytes={CELL: 1},
        overhead={} if host_s is None else {("eager", "decode", 1): Overhead(host_s, 0.0)},
        replays={KEY: replays or {}},
    )
