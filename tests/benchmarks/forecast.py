"""How far `forecast RUN` is off: a default run forecasts eight cells, which are then measured.

    python tests/benchmarks/forecast.py [MODEL] [--budget SECONDS] [--out FOLDER] [OPTIONS OF run]
    python tests/benchmarks/forecast.py --committed

Run it at rest. `--committed` leaves cells out of committed runs: the first two repetitions of the cells of a default
grid forecast the other cells, which are compared with their later repetitions. The exit code is 1 if fewer than nine in
ten intervals hold, or if the median error said is below half of the real one.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

from profiler.cli.options import EXIT_INCOMPLETE
from profiler.counting.operators import Linear
from profiler.facts.ceilings import drift
from profiler.facts.repetitions import Repetition
from profiler.forecast.command import RunFacts, forecast_run, run_facts
from profiler.forecast.options import ForecastRequest
from profiler.grid.cells import DEFAULT_ENGINE, Cell, CellKey, Grid
from profiler.judge.judge_run import time_run
from profiler.measure.kernels import keys_between
from profiler.predict.cross_validation import train
from profiler.predict.kernel_times import MeasuredCells
from profiler.predict.operator_arrays import Array
from profiler.predict.result import BETWEEN_CELLS, cross_validated_error
from profiler.store.folder import read_document, read_results

MORE = Path(__file__).parents[1] / "data" / "forecast"
LEAST_HELD, LEAST_SAID = 0.9, 0.5
TWICE = 2


@dataclass(frozen=True)
class Checked:
    """The forecast of one cell and its measurement, in seconds."""

    name: str
    latency_s: float
    low_s: float
    high_s: float
    measured_s: float
    said: float
    """The median error that the forecast says, as a share."""

    @property
    def off(self) -> float:
        return self.latency_s / self.measured_s - 1

    @property
    def holds(self) -> bool:
        return self.low_s <= self.measured_s <= self.high_s


def shares(rows: Sequence[Checked]) -> tuple[float, float, float]:
    """Return (share of intervals that hold, real error at the median, said error at the median)."""
    off, said = (float(np.median(values)) for values in ([abs(row.off) for row in rows], [row.said for row in rows]))
    return sum(row.holds for row in rows) / len(rows), off, said


def eight_unseen(grid: Grid) -> tuple[list[int], list[int]]:
    """Return (prompts, batches): a prompt between those of a grid and one beyond, at its batches and beyond them."""
    prompts, batches = sorted(grid.prompt_lens), sorted(grid.batch_sizes)
    between = math.isqrt(prompts[-2] * prompts[-1])
    largest = batches[-1]
    third = 3 * largest // 4 if largest > 2 else 3
    return [between, prompts[-1] + between], [batches[0], third, largest, 2 * largest]


def measured_later(model: str, budget_s: float, options: Sequence[str], out: Path) -> list[Checked]:
    """Run a model on its default grid within a budget, forecast eight unseen cells, and measure them."""

    def run(folder: Path, *more: str) -> Path:
        command = [sys.executable, "-m", "profiler", "run", model, *options, *more, "--out", folder]
        done = subprocess.run(command, check=False)
        if done.returncode not in (0, EXIT_INCOMPLETE):
            sys.exit(done.returncode)
        return folder

    first = run(out / "first", "--budget", f"{budget_s:g}")
    prompts, batches = (",".join(map(str, sorted(set(sizes)))) for sizes in eight_unseen(read_document(first).grid))
    answer = forecast_run(first, ForecastRequest(prompt_lens=prompts, batch_sizes=batches))
    later = read_results(run(out / "later", "--prompt-lens", prompts, "--batch-sizes", batches))
    times_s = {(row.phase, row.batch_size, row.prompt_len): row.latency_s for row in later if row.status == "ok"}
    checked = []
    for cell in answer.cells:
        said = answer.error if cell.basis == BETWEEN_CELLS else answer.beyond
        measured_s = times_s.get((cell.phase, cell.batch_size, cell.prompt_len))
        median = said.median if said and said.median else math.nan
        if measured_s is not None:
            checked.append(Checked(cell.name, cell.latency_s, cell.low_s, cell.high_s, measured_s, median))
    return checked


def default_grid(known: RunFacts) -> Array:
    """Return the cells of a run of 4 x 4 that a default run has: the smallest three batches at every other prompt."""
    steps = known.trained.measured.demanded.steps
    batches, prompts = np.unique(steps.batch)[:3], np.unique(steps.prompt_len)[::2]
    return np.flatnonzero(np.isin(steps.batch, batches) & np.isin(steps.prompt_len, prompts))


def left_out(folder: Path) -> list[Checked]:
    """Forecast the cells outside a run's default grid from the first two repetitions in it; compare with later
    repetitions."""
    known = run_facts(folder)
    facts, chosen = known.facts, default_grid(known)
    ordered = {
        cell: sorted(repetitions, key=lambda repetition: repetition.round)
        for cell, repetitions in facts.repetitions.items()
    }
    early = {cell: repetitions[:TWICE] for cell, repetitions in ordered.items()}
    end_unix_s = max(
        repetition.at_unix_s + repetition.wall_s for repetitions in early.values() for repetition in repetitions
    )
    drift_readings = [look for look in facts.drift_readings if look.at_unix_s <= end_unix_s]
    measured = at_repetitions(known, early)
    later_s = at_repetitions(
        known, {cell: repetitions[TWICE:] or repetitions for cell, repetitions in ordered.items()}
    ).latency_s
    device = known.trained.fitted.device
    trained = train(as_run(measured, chosen), device, drift(drift_readings, on_gpu=facts.device.kind == "cuda"))
    rest = np.setdiff1d(np.arange(len(measured)), chosen)
    forecast, half_width = trained.forecast(measured.demanded.at(rest))
    unseen = trained.beyond(forecast.demanded.steps).any(axis=1)
    said = [cross_validated_error(held, trained.repeat_width, "").median for held in (trained.within, trained.outside)]
    return [
        Checked(
            f"{folder.name} {facts.grid.keys[at].name}",
            forecast.latency_s[index],
            forecast.latency_s[index] / math.exp(half_width[index]),
            forecast.latency_s[index] * math.exp(half_width[index]),
            later_s[at],
            said[int(unseen[index])] or math.nan,
        )
        for index, at in enumerate(rest)
    ]


def at_repetitions(known: RunFacts, repetitions: Mapping[Cell, Sequence[Repetition]]) -> MeasuredCells:
    timed = time_run(replace(known.facts, repetitions={cell: list(of_cell) for cell, of_cell in repetitions.items()}))
    found = [timed.cells[key].time for key in known.facts.grid.keys]
    return replace(
        known.trained.measured,
        latency_s=np.array([time.median_s for time in found]),
        half_width_s=np.array([(time.high_s - time.low_s) / 2 for time in found]),
    )


def as_run(measured: MeasuredCells, chosen: Array) -> MeasuredCells:
    """Return the facts that a run of only the `chosen` cells would have, with replays at the rows between them."""
    steps, kept = measured.demanded.steps, measured.at(chosen)
    own = kept.demanded.steps
    columns = own.prefill, own.batch, own.prompt_len, own.context, own.new_tokens
    keys = [
        CellKey.at("prefill" if prefill else "decode", batch, prompt_len, context, new_tokens, DEFAULT_ENGINE)
        for prefill, batch, prompt_len, context, new_tokens in zip(*(of.tolist() for of in columns), strict=True)
    ]
    rows = [key.tokens for key in keys_between(keys)]
    between = measured.at(np.flatnonzero(np.isin(steps.tokens, rows)))
    linears = {column.operator for column in measured.demanded.columns if isinstance(column.source, Linear)}
    seconds = {name: values for name, values in between.seconds.items() if name in linears}
    return replace(kept, between=replace(between, seconds=seconds))


def main() -> int:
    """Print the table in seconds and shares, the share of intervals that hold, and both errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--committed", action="store_true")
    parser.add_argument("--budget", type=float, default=60.0)
    parser.add_argument("--out", type=Path)
    arguments, options = parser.parse_known_args()
    if arguments.committed:
        rows = [row for folder in sorted(MORE.glob("smollm2-*")) for row in left_out(folder)]
    else:
        out = arguments.out or Path(tempfile.mkdtemp())
        rows = measured_later(arguments.model, arguments.budget, options, out)
    table = pd.DataFrame([{**asdict(row), "off": row.off, "holds": row.holds} for row in rows])
    print(table.to_string(float_format="%.4g"))
    held, off, said = shares(rows)
    print(f"{100 * held:.0f} % of {len(rows)} hold; off by {100 * off:.1f} % at the median, {100 * said:.1f} % said")
    return int(held < LEAST_HELD or said < LEAST_SAID * off)


if __name__ == "__main__":
    sys.exit(main())
