"""Predicted savings of changes, compared with the real saving of a run with that change.

    python tests/benchmarks/levers.py [--model smollm2-135m] [--forms bfloat16,int8wo,int4wo,nf4] [--out FOLDER]

A run in float32 tries each format on a few layers, and computes what it had no time to try. Then the whole model runs
in each format, and with each engine. A sign is right unless both intervals exclude 0 on different sides. A computed
saving is right if it contains the real one, within the interval of that. FOLDER stores the runs; existing ones are not
repeated. With ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 the machine is an older CPU.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

import profiler
from profiler.facts.measurements import COMPILED, STATIC_CACHE
from profiler.grid.cells import CellKey
from profiler.judge.cells import CellResult, trial_results
from profiler.judge.how_to import FOUR_BIT_WEIGHTS, SIXTEEN_BIT_DTYPE
from profiler.loading.request import DTYPES
from profiler.store.folder import Run, read_facts, read_gathered, read_run

BATCHES, PROMPTS = "1,8", "64,512"
MEDIAN, WORST = 0.15, 0.35
"""Limits of the error of a trial, as shares of the saving: at the median and everywhere."""


def main() -> None:
    """Print a line per cell and format, and a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--forms", default="bfloat16,int8wo,int4wo,nf4")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = options.out or Path(made)
        base = run_of(options.model, "none", folder)
        facts = read_facts(base.folder, base.document, read_gathered(base.folder, base.document))
        before = results_of(base)
        print(f"{'':18}{'form':10}{'step ms':>9}{'said ms':>16}{'saved ms':>16}", flush=True)
        signs, clear, off = 0, 0, []
        for form in options.forms.split(","):
            after = results_of(run_of(options.model, form, folder))
            for key, trials in facts.trials.items():
                said = next((item for item in trial_results(trials) if item.form == form), None)
                if said is None:
                    continue
                one = before[key]
                said_s, said_off_s = (1 - said.ratio) * one.latency_s, said.half_width_at(one.latency_s) * one.latency_s
                saved_s, saved_off_s = saved(one, after[key])
                print(
                    f"{key.name:18}{form:10}{1e3 * one.latency_s:9.1f}{1e3 * said_s:9.1f} ±{1e3 * said_off_s:5.1f}"
                    f"{1e3 * saved_s:9.1f} ±{1e3 * saved_off_s:5.1f}"
                )
                if abs(said_s) > said_off_s and abs(saved_s) > saved_off_s:
                    clear += 1
                    signs += said_s * saved_s > 0
                    off.append(abs(said_s / saved_s - 1))
        _print_computed(base, folder, options)
        print(
            f"the sign is right in {signs} of {clear} that differ by more than their intervals; the saving is"
            f" {100 * statistics.median(off):.0f} % off at the median (limit {100 * MEDIAN:.0f} %) and"
            f" {100 * max(off):.0f} % at the worst (limit {100 * WORST:.0f} %)"
        )


ENGINES = {STATIC_CACHE: "static", COMPILED: "compile"}
"""The engine that carries out a change."""
SAME = {SIXTEEN_BIT_DTYPE: "bfloat16", FOUR_BIT_WEIGHTS: "nf4"}
"""The format that carries out a change of another name."""


def _print_computed(base: Run, folder: Path, options: argparse.Namespace) -> None:
    """Print each computed saving with the real one, and how many contain it."""
    before = results_of(base)
    print(f"\n{'':18}{'computed':24}{'step ms':>9}{'said ms':>18}{'saved ms':>16}", flush=True)
    held: dict[str, list[bool]] = {"between": [], "at most": []}
    widths = []
    for cell in base.document.evidence:
        for lever in cell.levers:
            form = SAME.get(lever.change, lever.change)
            if lever.basis != "computed" or form not in (*options.forms.split(","), *ENGINES):
                continue
            after = results_of(run_of(options.model, "engines" if form in ENGINES else form, folder))
            one = after[cell.key] if form in ENGINES else before[cell.key]
            engine = ENGINES.get(form, cell.key.cell.engine)
            saved_s, off_s = saved(one, after[replace(cell.key, cell=replace(cell.key.cell, engine=engine))])
            kind = "at most" if lever.at_least_s is None else "between"
            least_s = -math.inf if lever.at_least_s is None else lever.at_least_s
            right = least_s - off_s <= saved_s <= lever.saves_s + off_s
            held[kind].append(right)
            if lever.at_least_s is not None:
                widths.append(lever.saves_s / lever.at_least_s)
            print(
                f"{cell.key.name:18}{lever.change:24}{1e3 * before[cell.key].latency_s:9.1f}"
                f"{'' if lever.at_least_s is None else f'{1e3 * lever.at_least_s:.1f}':>8} ..{1e3 * lever.saves_s:8.1f}"
                f"{1e3 * saved_s:9.1f} ±{1e3 * off_s:5.1f}{'' if right else '  missed'}",
                flush=True,
            )
    for kind, all_right in held.items():
        print(f"{kind}: {sum(all_right)} of {len(all_right)} contain the real saving")
    if widths:
        print(f"the upper end is {statistics.median(widths):.2f} times the lower one at the median\n")


def run_of(model: str, form: str, folder: Path) -> Run:
    """Return the run in one format, an existing one if possible.

    `none` is float32, which tries the others; `engines` is float32 with every engine of `ENGINES`.
    """
    out = folder / form
    if out.exists():
        return read_run(out)
    dtype, quant = ("float32", "none") if form in ("none", "engines") else ("auto", form)
    if form in DTYPES:
        dtype, quant = form, "none"
    options = {"batch_sizes": BATCHES, "prompt_lens": PROMPTS, "no_levers": form != "none"}
    if form == "engines":
        options["engine"] = ",".join(["eager", *ENGINES.values()])
    return profiler.profile(model, dtype=dtype, quant=quant, out=out, **options)


def results_of(run: Run) -> dict[CellKey, CellResult]:
    """Return the measured cells of a run."""
    return {result.key: result for result in run.measured}


def saved(one: CellResult, other: CellResult) -> tuple[float, float]:
    """Return the seconds by which the other cell is faster, with half of their 95 % interval."""
    widths = [(cell.latency_high_s - cell.latency_low_s) / 2 for cell in (one, other)]
    return one.latency_s - other.latency_s, math.hypot(*widths)


if __name__ == "__main__":
    main()
