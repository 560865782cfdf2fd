"""The rows of a run as they come, what they say of each other, and the setting that advice is given in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from profiler.diagnosis.levers import Card, JudgedCell, Setting, levers, on_card
from profiler.diagnosis.series import AXES, doubling_tests
from profiler.engines.transformers import GraphEngine
from profiler.grid import Cell, Grid, Phase
from profiler.job.demands import Beside, counted_row, evidence_record, measured_row, noise_of
from profiler.machine.datasheet import gpus
from profiler.machine.device import Device
from profiler.machine.telemetry import UNSEEN, Activity
from profiler.probes.kernels import Replayed
from profiler.probes.subject import Context, predicted_peak
from profiler.record.run import CELL_COLUMNS
from profiler.timing.outcomes import Gap, Visit, phase_samples
from profiler.timing.sampling import deviations, difference, estimate, visit_sigma
from profiler.work.attention import AttentionCore
from profiler.work.formats import four_bit_dense_from_rows
from profiler.work.operators import Linear


class Assessment:
    """The rows of a run as they come: a cell is judged again only when something new was measured of it."""

    def __init__(self, context: Context, grid: Grid) -> None:
        self._context = context
        self._grid = grid
        self._rows = {key: {**counted_row(context, *key, grid), "status": "skipped"} for key in _keys(grid)}
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
            noise = noise_of(phase, visits, throttled, machine_drift, sigma)
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
            row, verdict, judged = measured_row(context, phase, cell, grid, visits, time_s, kernels, noise, beside)
            self._rows[phase, cell] |= row
            self._judged[phase, cell] = judged
            self._evidence[phase, cell] = {
                **evidence_record(self._rows[phase, cell], verdict),
                "split_half_widths_s": dict(judged.split.half_widths_s),
                "noise_reasons": list(noise.reasons),
                "predicted_peak_memory_bytes": predicted_peak(context, cell, grid),
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
