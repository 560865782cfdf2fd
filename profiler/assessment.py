"""From counts, roofs and times to the rows of a run: each cell counted, split, placed and judged."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from profiler.clock import NOTHING, Timing
from profiler.diagnosis.levers import PAGE_FAULTS, Card, JudgedCell, Setting, levers, on_card
from profiler.diagnosis.regimes import Measurement, Verdict, judge
from profiler.diagnosis.roofline import place
from profiler.diagnosis.step_time import TERMS, Demand, Dispatch, Roofs, Split, split
from profiler.grid import Cell, Grid, Phase, decode_context
from profiler.hardware.ceilings import Ceilings
from profiler.hardware.datasheet import gpus
from profiler.hardware.device import Device
from profiler.hardware.telemetry import UNSEEN, Activity
from profiler.loading import (
    LoadedModel,
    dtype_name,
)
from profiler.memory import available_bytes
from profiler.runstore import CELL_COLUMNS, CELL_KEY
from profiler.series import AXES, doubling_tests
from profiler.timing.engines import Engine, GraphEngine
from profiler.timing.outcomes import Gap, Visit
from profiler.timing.sampling import (
    Estimate,
    NoiseReport,
    deviations,
    difference,
    estimate,
    noise_report,
    visit_sigma,
)
from profiler.timing.sweep import TARGET_HALF_WIDTH, phase_samples, seeded_prompts
from profiler.work.attention import AttentionCore
from profiler.work.footprint import model_storage_bytes, predicted_peak_bytes
from profiler.work.formats import CONVERSIONS, four_bit_dense_from_rows
from profiler.work.kernels import attention_path, outlier_columns
from profiler.work.operators import Linear, Operator
from profiler.work.step import ExecutionPath, Step
from profiler.work.walk import ModelWork


@dataclass(frozen=True)
class Context:
    """What diagnosis needs of a loaded model on a measured device."""

    loaded: LoadedModel
    work: ModelWork
    paths: Mapping[tuple[str, Phase], ExecutionPath]
    """How each engine executes each phase; `path_of` adds what a cell decides."""
    info: Device
    ceilings: Ceilings
    dispatch: Mapping[tuple[str, Phase, int], Dispatch]
    """By engine, phase and batch size; empty where it was not measured."""
    dtype: str


@dataclass(frozen=True)
class Beside:
    """What other cells and the device's own reports say about a cell."""

    graph_step_s: float | None = None
    batch_side: str = ""
    depth_side: str = ""
    sm_active: float | None = None
    memory_active: float | None = None
    power_capped: bool = False


@dataclass(frozen=True)
class Alone:
    """An operator's kernels run alone, all its instances together."""

    whole: Timing
    conversion: Timing = NOTHING
    """The part of it that only converts between formats."""


Replayed = Mapping[tuple[Phase, Cell], Mapping[Operator, Alone]]
"""The operators that were run alone, by phase and cell."""


def execution_paths(
    loaded: LoadedModel, work: ModelWork, engines: Mapping[str, Engine], grid: Grid
) -> dict[tuple[str, Phase], ExecutionPath]:
    """How this model is executed on this device: its attention interface, the kernels that torch picks, outliers."""
    request = loaded.request
    attention = getattr(loaded.config.get_text_config(), "_attn_implementation", None) or "sdpa"
    cores = [operator for operator in work.operators if isinstance(operator, AttentionCore)]
    longest = max((*grid.prompt_lens, *grid.context_lens))
    shapes: dict[Phase, tuple[int, int]] = {"prefill": (longest, longest), "decode": (1, longest + 1)}
    asked = {
        phase: attention_path(attention, cores, request.device, request.dtype, query=query, keys=keys)
        for phase, (query, keys) in shapes.items()
    }
    paths: dict[tuple[str, Phase], ExecutionPath] = {}
    for name, engine in engines.items():
        outliers = _outliers(loaded, engine, grid) if request.quant == "int8" else {}
        for phase, path in asked.items():
            paths[name, phase] = replace(
                path,
                cache=engine.cache,
                all_logits=not engine.keeps_last_logits,
                outlier_columns=outliers.get(phase, {}),
            )
    return paths


def _outliers(loaded: LoadedModel, engine: Engine, grid: Grid) -> dict[Phase, dict[str, float]]:
    """The columns with outliers that LLM.int8() finds in the shortest prompt, and in a step behind it."""
    cell = Cell(1, min((*grid.prompt_lens, *grid.context_lens)))
    ids = seeded_prompts(cell, loaded.config.get_text_config().vocab_size).to(loaded.request.device)
    slots = cell.depth + grid.new_tokens
    with torch.inference_mode():
        engine.prepare(1, slots)
        state = engine.prefill(ids, slots)
        prefill = outlier_columns(loaded.module)
        engine.decode(state)
        return {"prefill": prefill, "decode": outlier_columns(loaded.module)}


def path_of(context: Context, phase: Phase, cell: Cell, grid: Grid) -> ExecutionPath:
    """How a cell's step is executed; a static cache is as long as the cell needs it."""
    path = context.paths[cell.engine, phase]
    return replace(path, static_cache_len=cell.depth + grid.new_tokens) if path.cache == "static" else path


def step_of(phase: Phase, cell: Cell, grid: Grid) -> Step:
    """The step that a cell's figure describes: its whole prompt, or the middle step of its decode loop."""
    if phase == "prefill":
        return Step(cell.batch_size, cell.prompt_len, 0)
    return Step(cell.batch_size, 1, decode_context(cell.depth, grid.new_tokens))


def _demand(operator: Operator, step: Step, path: ExecutionPath, ceilings: Ceilings, alone: Alone | None) -> Demand:
    work = operator.work(step, path)
    return Demand(
        name=operator.name,
        group=operator.group,
        flops=float(work.model_flops),
        weight_bytes=float(work.weight_bytes + work.embedding_bytes + work.logits_bytes),
        kv_bytes=float(work.kv_read_bytes + work.kv_write_bytes),
        compute_flops_per_s=ceilings.compute_flops_per_s(dtype_name(operator.dtype)),
        **_as_replayed(alone),
    )


def _as_replayed(alone: Alone | None) -> dict[str, float]:
    if alone is None:
        return {}
    return {
        "replayed_s": alone.whole.median_s,
        "replayed_half_width_s": alone.whole.half_width_s,
        "dequantise_s": alone.conversion.median_s,
        "dequantise_half_width_s": alone.conversion.half_width_s,
    }


def expected_visit_s(context: Context, grid: Grid) -> dict[Cell, float]:
    """The floor of a whole visit of each cell, used to tell the time left before any was measured."""
    expected = {}
    for cell in grid.cells:
        total = 0.0
        times: dict[Phase, int] = {"prefill": 2, "decode": grid.decode_steps}
        for phase in cell.phases:
            total += times[phase] * _split(context, phase, cell, grid, latency_s=1.0, replayed={})[0].floor_s
        expected[cell] = total
    return expected


def _split(
    context: Context,
    phase: Phase,
    cell: Cell,
    grid: Grid,
    latency_s: float,
    replayed: Mapping[Operator, Alone],
    latency_half_width_s: float = 0.0,
    faults: float = 0.0,
) -> tuple[Split, dict[str, float]]:
    """The split of a cell's time with so many page `faults` in it, and the seconds of its avoidable work by cause."""
    step, path = step_of(phase, cell, grid), path_of(context, phase, cell, grid)
    demands = []
    avoidable_bytes: dict[str, float] = {}
    for operator in context.work.operators:
        alone = replayed.get(operator)
        demands.append(_demand(operator, step, path, context.ceilings, alone))
        work = operator.work(step, path)
        # A replayed kernel has paid for its own operands; what is avoidable around it has not been paid for.
        operands = {} if alone is not None else {"operands": work.activation_bytes}
        for cause, nbytes in {**operands, **work.avoidable_bytes}.items():
            if cause not in CONVERSIONS:  # which happen inside the replayed module
                avoidable_bytes[cause] = avoidable_bytes.get(cause, 0.0) + float(nbytes)
    working_set = float(context.work.work(step, path).model_bytes)
    roofs = _roofs(context, phase, cell, working_set)
    faults_s = faults * context.ceilings.page_fault_s
    parts = split(latency_s, demands, sum(avoidable_bytes.values()), roofs, latency_half_width_s, faults_s)
    avoidable_s = {cause: nbytes / roofs.memory_bytes_per_s for cause, nbytes in avoidable_bytes.items()}
    return parts, {**avoidable_s, PAGE_FAULTS: faults_s}


def _roofs(context: Context, phase: Phase, cell: Cell, working_set_bytes: float) -> Roofs:
    links = context.ceilings.links
    return Roofs(
        memory_bytes_per_s=context.ceilings.memory_bytes_per_s_for(working_set_bytes),
        dispatch=context.dispatch.get((cell.engine, phase, cell.batch_size)),
        overlaps=context.info.overlaps_dispatch,
        memory_half_width=context.ceilings.memory_half_width,
        compute_half_width=context.ceilings.compute_half_width(context.dtype),
        fetch_s=sum(nbytes / links[where].per_s for where, nbytes in context.loaded.offloaded_bytes.items()),
    )


def no_room(cell: Cell, context: Context, grid: Grid) -> str | None:
    """Why a cell cannot fit into memory, or None. The weights are loaded already; the rest must still find room."""
    weights = model_storage_bytes(context.loaded.module)
    peak = _predicted_peak(context, cell, grid)
    room = available_bytes(context.loaded.request.device)
    if peak - weights > room * _MEMORY_MARGIN:
        return f"needs {(peak - weights) / 1e9:.1f} GB beside the weights, {room / 1e9:.1f} GB is free"
    return None


def _predicted_peak(context: Context, cell: Cell, grid: Grid) -> int:
    weights = model_storage_bytes(context.loaded.module)
    return predicted_peak_bytes(
        context.work, weights, cell.batch_size, cell.depth, grid.new_tokens, context.paths[cell.engine, "prefill"]
    )


class Assessment:
    """The rows of a run as they come: a cell is judged again only when something new was measured of it."""

    def __init__(self, context: Context, grid: Grid) -> None:
        self._context = context
        self._grid = grid
        self._rows = {key: {**_counted_row(context, *key, grid), "status": "skipped"} for key in _keys(grid)}
        self._evidence: dict[tuple[Phase, Cell], dict[str, Any]] = {}
        self._judged: dict[tuple[Phase, Cell], JudgedCell] = {}
        self._visits: dict[Cell, Sequence[Visit]] = {}
        self._deviations: dict[tuple[Phase, Cell], NDArray[np.float64]] = {}

    def measured(
        self,
        cell: Cell,
        visits: Sequence[Visit],
        replayed: Replayed | None = None,
        throttled: Sequence[str] = (),
        machine_drift: float = 0.0,
        sides: Mapping[tuple[Phase, Cell], Mapping[str, str]] | None = None,
        active: Activity = UNSEEN,
    ) -> None:
        """Take in a cell's visits so far, its kernels' own times where they were replayed, and what disturbed it."""
        context, grid = self._context, self._grid
        self._visits[cell] = visits
        for phase in cell.phases:
            kernels = (replayed or {}).get((phase, cell), {})
            self._deviations[phase, cell] = deviations(phase_samples(phase, visits))
            sigma = self._visit_sigma(phase)
            noise = _noise(phase, visits, throttled, machine_drift, sigma)
            side = (sides or {}).get((phase, cell), {})
            beside = Beside(
                graph_step_s=self._graph_step_s(phase, cell),
                batch_side=side.get("batch", ""),
                depth_side=side.get("prompt" if phase == "prefill" else "context", ""),
                sm_active=active.sm,
                memory_active=active.memory,
                power_capped="power cap" in throttled,
            )
            time_s = estimate(phase_samples(phase, visits), sigma)
            row, verdict, judged = _measured_row(context, phase, cell, grid, visits, time_s, kernels, noise, beside)
            self._rows[phase, cell] |= row
            self._judged[phase, cell] = judged
            self._evidence[phase, cell] = {
                **_evidence_record(self._rows[phase, cell], verdict),
                "split_half_widths_s": dict(judged.split.half_widths_s),
                "noise_reasons": list(noise.reasons),
                "predicted_peak_memory_bytes": _predicted_peak(context, cell, grid),
            }

    def _graph_step_s(self, phase: Phase, cell: Cell) -> float | None:
        """The same step by the graph engine, where this run has one."""
        visits = self._visits.get(replace(cell, engine=GraphEngine.name))
        if phase != "decode" or not visits or cell.engine == GraphEngine.name:
            return None
        return estimate(phase_samples(phase, visits)).median_s

    def _visit_sigma(self, phase: Phase) -> float:
        """How far visits of the same cell lie apart in this run, so far."""
        return visit_sigma(found for (of, _), found in self._deviations.items() if of == phase)

    def _knees(self) -> dict[tuple[Phase, Cell], float]:
        """By cell, the batch at which FLOPs overtake bytes at its depth, where there is one."""
        found: dict[tuple[Phase, Cell], float] = {}
        for test in self._doubling_tests():
            if test["axis"] == "batch" and test["knee_predicted"] is not None:
                found |= {
                    position: test["knee_predicted"]
                    for position, row in self._rows.items()
                    if all(row[name] == value for name, value in test["fixed"].items())
                }
        return found

    def _doubling_tests(self) -> list[dict[str, Any]]:
        ceilings = self._context.ceilings
        return doubling_tests(
            self.cells, ceilings.compute_flops_per_s(self._context.dtype), ceilings.memory_bytes_per_s
        )

    def sides(self) -> dict[tuple[Phase, Cell], dict[str, str]]:
        """What doubling each size from a cell speaks for (to it, for the largest), by axis: batch, prompt, context."""
        sides: dict[tuple[Phase, Cell], dict[str, str]] = {key: {} for key in self._rows}
        for test in self._doubling_tests():
            axis, column = test["axis"], AXES[test["axis"]][0]
            for step in reversed(test["doublings"]):
                for size in (step["larger"], step["smaller"]):
                    wanted = {**test["fixed"], column: size}
                    for position, row in self._rows.items():
                        if all(row[name] == value for name, value in wanted.items()) and (
                            size == step["smaller"] or axis not in sides[position]
                        ):
                            sides[position][axis] = step["side"]
        return sides

    def unexplained(self, share: float) -> list[tuple[Phase, Cell]]:
        """Cells that leave more than `share` of their time unexplained, the worst first."""
        left = {key: judged.split.unexplained_s / judged.split.latency_s for key, judged in self._judged.items()}
        return sorted((key for key in left if left[key] > share), key=lambda key: -left[key])

    def carried(self, phase: Phase, cell: Cell, groups: Mapping[str, float]) -> None:
        """Take in which groups of operators carry the unexplained part of a cell, in seconds."""
        self._evidence[phase, cell]["unexplained_in_s"] = dict(groups)

    def has(self, cell: Cell) -> bool:
        """Whether every phase of a cell is judged; an interruption may come between two."""
        return all((phase, cell) in self._judged for phase in cell.phases)

    def missed(self, gap: Gap) -> None:
        """Take in why a cell has no number; one that has some keeps them."""
        for phase in gap.cell.phases:
            if (phase, gap.cell) not in self._judged:
                self._rows[phase, gap.cell]["status"] = gap.status

    @property
    def differences(self) -> list[dict[str, Any]]:
        """What each further engine saves against the first, cell by cell, with its interval."""
        first, *others = self._grid.engines
        found = []
        for phase, cell in self._rows:
            base = replace(cell, engine=first)
            if cell.engine not in others or not (self._visits.get(cell) and self._visits.get(base)):
                continue
            before, after = (phase_samples(phase, self._visits[each]) for each in (base, cell))
            saved = difference(before, after, self._visit_sigma(phase))
            found.append(
                {
                    "phase": phase,
                    "batch_size": cell.batch_size,
                    "prompt_len": cell.prompt_len,
                    "context_len": cell.context_len,
                    "engine": cell.engine,
                    "against": first,
                    "saves_s": saved.median_s,
                    "low_s": saved.low_s,
                    "high_s": saved.high_s,
                }
            )
        return found

    @property
    def cells(self) -> pd.DataFrame:
        """cells.csv as it stands."""
        return pd.DataFrame(list(self._rows.values()), columns=list(CELL_COLUMNS))

    @property
    def evidence(self) -> list[dict[str, Any]]:
        """What each verdict stands on and what would change the cell, in the order of the rows."""
        setting, judged, knees = setting_of(self._context), self.judged, self._knees()
        return [
            {
                **self._evidence[key],
                "levers": [
                    asdict(lever) for lever in levers(replace(self._judged[key], knee=knees.get(key)), setting, judged)
                ],
                "at_least_s_on": {
                    card.name: time_s
                    for card in setting.cards
                    if (time_s := on_card(self._judged[key], card, setting)) is not None
                },
            }
            for key in self._rows
            if key in self._evidence
        ]

    @property
    def judged(self) -> list[JudgedCell]:
        """The cells with a verdict, in the order of the rows."""
        return [self._judged[key] for key in self._rows if key in self._judged]


def _keys(grid: Grid) -> list[tuple[Phase, Cell]]:
    phases: tuple[Phase, ...] = ("prefill", "decode")
    ordered = sorted(grid.cells, key=lambda cell: (grid.engines.index(cell.engine), cell.batch_size, cell.depth))
    return [(phase, cell) for phase in phases for cell in ordered if phase in cell.phases]


def _noise(
    phase: Phase, visits: Sequence[Visit], throttled: Sequence[str], machine_drift: float, sigma: float
) -> NoiseReport:
    busy = [(visit.foreign_cores, visit.wall_s) for visit in visits if visit.foreign_cores is not None]
    foreign = sum(cores * wall_s for cores, wall_s in busy) / sum(wall_s for _, wall_s in busy) if busy else None
    return noise_report(
        phase_samples(phase, visits),
        foreign_cores=foreign,
        throttled=throttled,
        machine_drift=machine_drift,
        visit_sigma=sigma,
    )


def _faults(phase: Phase, visits: Sequence[Visit]) -> float:
    """Page faults of a prefill, or of a decode step; a median over visits."""
    if phase == "prefill":
        return statistics.median(visit.prefill_faults for visit in visits)
    return statistics.median(visit.decode_faults / max(1, len(visit.decode_s)) for visit in visits)


def _counted_row(context: Context, phase: Phase, cell: Cell, grid: Grid) -> dict[str, Any]:
    step = step_of(phase, cell, grid)
    work = context.work.work(step, path_of(context, phase, cell, grid))
    return {
        "phase": phase,
        "batch_size": cell.batch_size,
        "prompt_len": cell.prompt_len,
        "context_len": int(step.context),
        "new_tokens": grid.new_tokens,
        "engine": cell.engine,
        "model_flops": int(work.model_flops),
        "model_bytes": round(float(work.model_bytes)),
        "executed_flops": int(work.executed_flops),
        "executed_bytes": round(float(work.executed_bytes)),
        "intensity": float(work.intensity),
    }


def _measured_row(
    context: Context,
    phase: Phase,
    cell: Cell,
    grid: Grid,
    visits: Sequence[Visit],
    time_s: Estimate,
    replayed: Mapping[Operator, Alone],
    noise: NoiseReport,
    beside: Beside,
) -> tuple[dict[str, Any], Verdict, JudgedCell]:
    p90_s, p99_s = np.percentile(np.concatenate(phase_samples(phase, visits)), [90, 99])
    step = step_of(phase, cell, grid)
    work = context.work.work(step, path_of(context, phase, cell, grid))
    sheet = context.info.datasheet
    placement = place(
        time_s.median_s,
        float(work.model_flops),
        float(work.model_bytes),
        sheet.peak_flops_per_s(context.dtype) if sheet else None,
        sheet.bandwidth_bytes_per_s if sheet else None,
    )
    half_width_s = (time_s.high_s - time_s.low_s) / 2
    faults = _faults(phase, visits)
    parts, avoidable_s = _split(context, phase, cell, grid, time_s.median_s, replayed, half_width_s, faults)
    user_facing = _user_facing(phase, cell, grid, visits)
    verdict = judge(
        Measurement(
            split=parts,
            model_flops=float(work.model_flops),
            model_bytes=float(work.model_bytes),
            compute_flops_per_s=context.ceilings.compute_flops_per_s(context.dtype),
            roofs=_roofs(context, phase, cell, float(work.model_bytes)),
            latency_low_s=time_s.low_s,
            latency_high_s=time_s.high_s,
            noise=noise.grade,
            offloaded=context.loaded.offloaded,
            cache_resident=context.ceilings.cache_resident(float(work.model_bytes)),
            issue_s=user_facing.get("issue_s") if context.info.overlaps_dispatch else None,
            **asdict(beside),
        )
    )
    tokens = float(step.tokens)
    peaks = [visit.peak_memory_bytes for visit in visits if visit.peak_memory_bytes is not None]
    row: dict[str, Any] = {
        "status": "ok",
        "latency_s": time_s.median_s,
        "latency_low_s": time_s.low_s,
        "latency_high_s": time_s.high_s,
        "samples": time_s.samples,
        "tokens_per_s": tokens / time_s.median_s,
        "tokens_per_s_per_seq": tokens / cell.batch_size / time_s.median_s,
        "flops_per_s": placement.flops_per_s,
        "bytes_per_s": placement.bytes_per_s,
        "mfu": math.nan if placement.mfu is None else placement.mfu,
        "mbu": math.nan if placement.mbu is None else placement.mbu,
        "attained": parts.attained,
        "floor_s": parts.floor_s,
        **{name: getattr(parts, name) for name in TERMS},
        "regime": verdict.regime,
        "confidence": verdict.confidence,
        "peak_memory_bytes": max(peaks) if peaks else None,
        "noise": noise.grade,
        "p90_s": float(p90_s),
        "p99_s": float(p99_s),
        "stopped": "interval" if time_s.half_width <= TARGET_HALF_WIDTH else "budget",
        **user_facing,
    }
    judged = JudgedCell(
        phase=phase,
        batch_size=cell.batch_size,
        depth=cell.depth,
        engine=cell.engine,
        tokens_per_s=row["tokens_per_s"],
        flops_per_s=placement.flops_per_s,
        bytes_per_s=placement.bytes_per_s,
        split=parts,
        verdict=verdict,
        rows=int(step.batch * step.query),
        memory_bytes=float(_predicted_peak(context, cell, grid)),
        avoidable_s=avoidable_s,
    )
    return row, verdict, judged


def _user_facing(phase: Phase, cell: Cell, grid: Grid, visits: Sequence[Visit]) -> dict[str, Any]:
    """Medians over the visits of what belongs to one phase alone; NaN where it was not measured."""

    def median(values: Sequence[float | None]) -> float:
        known = [value for value in values if value is not None]
        return statistics.median(known) if known else math.nan

    found = {"device_memory_bytes": median([visit.device_memory_bytes for visit in visits])}
    if phase == "prefill":
        return {**found, "ttft_s": median([visit.ttft_s for visit in visits])}
    generated = cell.batch_size * grid.new_tokens
    energy_j = [None if visit.energy_j is None else visit.energy_j / generated for visit in visits]
    return {
        **found,
        "first_step_s": median([visit.decode_s[0] for visit in visits]),
        "issue_s": median([None if v.issue_s is None else v.issue_s / len(v.decode_s) for v in visits]),
        "joules_per_token": median(energy_j),
    }


def _evidence_record(row: Mapping[str, Any], verdict: Verdict) -> dict[str, Any]:
    return {
        **{name: row[name] for name in CELL_KEY},
        "regime": verdict.regime,
        "confidence": verdict.confidence,
        "flags": list(verdict.flags),
        "signals": [asdict(item) for item in verdict.evidence],
        "conflicts": [item.signal for item in verdict.conflicts],
    }


def setting_of(context: Context) -> Setting:
    """What advice needs to know of this device and model."""
    linears = [op for op in context.work.operators if isinstance(op, Linear) and op.rows != "last"]
    cores = [op for op in context.work.operators if isinstance(op, AttentionCore)]
    bits = sum(op.count * op.weight.weight_bytes * 8 for op in linears)
    weights = sum(op.count * op.weight.in_features * op.weight.out_features for op in linears)
    device, ceilings = context.loaded.request.device, context.ceilings
    sixteen = ceilings.compute.get(_SIXTEEN_BIT) if context.dtype == "float32" else None
    shapes = {(op.weight.in_features, op.weight.out_features) for op in linears}
    dense_from = [four_bit_dense_from_rows(device, torch.bfloat16, *shape) for shape in shapes]
    return Setting(
        device_name="CPU" if context.info.kind == "cpu" else context.info.name.removeprefix("NVIDIA "),
        memory_bytes_per_s=ceilings.memory_bytes_per_s,
        compute_flops_per_s=ceilings.compute_flops_per_s(context.dtype),
        weight_bits=bits / weights if weights else 16.0,
        can_graph=context.info.kind == "cuda",
        weights=float(weights),
        cache_bits=8.0 * cores[0].itemsize if cores else 16.0,
        four_bit_dense_from_rows=min(dense_from, default=None),
        sixteen_bit_flops_per_s=sixteen.per_s if sixteen else None,
        cards=_cards(context.dtype, context.info),
        dtype=context.dtype,
    )


_SIXTEEN_BIT = "bfloat16"
# What is rented most; every other card is in `roofscope gpus`.
_RENTED = ("T4", "L4", "A10G", "L40S", "A100 80GB SXM", "H100 SXM", "H200 SXM", "B200 SXM")


def _cards(dtype: str, here: Device) -> tuple[Card, ...]:
    own = here.datasheet.gpu if here.datasheet else None
    return tuple(
        Card(gpu.gpu, float(gpu.memory_bytes), gpu.bandwidth_bytes_per_s, peak)
        for gpu in gpus()
        if gpu.gpu in _RENTED and gpu.gpu != own and (peak := gpu.peak_flops_per_s(dtype)) is not None
    )


# A cell is refused before it is tried when its predicted peak leaves less than this share of memory free.
_MEMORY_MARGIN = 0.95
