"""How far off forecasts are: python tests/benchmarks/forecast.py [RUN ...] [--card card.json]

Of each run: trained on its corners (8 of 32 cells) and forecast on all other cells, and each cell forecast from the
others. With a card's profile: the run's model forecast on it, as if it had never run there. And published figures
against the ranges that have not seen their card, or their model.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import numpy as np

from profiler.diagnosis.attained import Stray, attained_by, family_of, steps_of, strays
from profiler.diagnosis.columns import Array
from profiler.diagnosis.forecast import fit
from profiler.diagnosis.profile import CardProfile, fitted_on
from profiler.job.forecast import Known, known_of
from profiler.machine.published import published
from profiler.record.profiles import read_profile

RUNS = Path(__file__).parents[2] / "runs" / "reference"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, default=[RUNS / "smollm2-135m-epyc", RUNS / "smollm2-135m-zen4"])
    parser.add_argument("--card", type=Path, help="a profile of the card that the runs were taken on")
    parser.add_argument("--no-published", action="store_true")
    asked = parser.parse_args()
    for folder in asked.runs:
        known = known_of(folder)
        measured = known.trained.measured
        print(f"{folder.name}: {known.facts.model.id}, {known.facts.model.precision}, {len(measured)} cells")
        chosen = corners(known)
        rest = np.setdiff1d(np.arange(len(measured)), chosen)
        if len(rest):
            told = fit(measured.at(chosen), known.trained.fitted.device).forecast(measured.demanded.at(rest))
            say(f"  trained on {len(chosen)}, forecast {len(rest)}", told.latency_s / measured.latency_s[rest] - 1)
        say("  each from the others", known.trained.within.errors)
        say("  the extremes from the rest", known.trained.outside.errors)
        if asked.card:
            on_card(known, read_profile(asked.card))
    if not asked.no_published:
        ranges()


def corners(known: Known) -> Array:
    """The smallest and the largest batch and prompt: 8 of 32 cells of the default grid."""
    steps = known.trained.measured.demanded.steps
    batches, prompts = ((values.min(), values.max()) for values in (steps.batch, steps.prompt_len))
    return np.flatnonzero(np.isin(steps.batch, batches) & np.isin(steps.prompt_len, prompts))


def on_card(known: Known, profile: CardProfile) -> None:
    measured = known.trained.measured
    layers = sum(column.count for column in measured.demanded.columns if column.heads is not None)
    told = fitted_on(profile, known.facts.model.dtype, layers).forecast(measured.demanded)
    off = told.latency_s / measured.latency_s - 1
    for phase in (True, False):
        chosen = measured.demanded.steps.prefill == phase
        if chosen.any():
            say(f"  {'prefill' if phase else 'decode'} on the card's profile", off[chosen])


def ranges() -> None:
    rows: dict[tuple[str, str], list[tuple[bool, float]]] = {}
    for name in ("gpu", "model"):
        for value in sorted({getattr(point, name) for point in published()}):
            others = [point for point in published() if getattr(point, name) != value]
            known: dict[str, list[Stray]] = {}
            for point in (point for point in published() if getattr(point, name) == value):
                if not any(other.kind == point.kind for other in others):
                    continue
                left_out = known.setdefault(point.kind, strays(others, point.kind))
                family = family_of(point.format, point.batch, point.query_tokens)
                told = attained_by(others, point.kind, family, left_out).range_s(steps_of([point]), point.phase)
                low, high = float(told.low_s[0]), float(told.high_s[0])
                inside = 0.999 * low <= point.latency_s <= 1.001 * high
                for key in ((point.kind, f"{family} {point.phase}"), ("all", "")):
                    rows.setdefault(key, []).append((inside, high / low))
    for (kind, what), found in sorted(rows.items()):
        share, width = statistics.mean(inside for inside, _ in found), statistics.median(wide for _, wide in found)
        print(f"published {kind} {what}: {100 * share:.0f} % of {len(found)} inside, upper/lower {width:.2f}")


def say(what: str, errors: Array) -> None:
    off = np.abs(errors)
    print(f"{what}: median {100 * np.median(off):.1f} %, nine in ten within {100 * np.quantile(off, 0.9):.1f} %")


if __name__ == "__main__":
    main()
