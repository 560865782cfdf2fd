"""A hundred times the size: one run of many cells through the whole job, without the model's own time.

    python tests/benchmarks/sizes.py [--cells 10000] [--folder FOLDER]

A tiny model is loaded and its roofs are measured; then each cell gets an invented visit at once. Half of the cells are
visited, the run is interrupted, and a resume in another process visits the rest. Prints CPU seconds and peak memory per
stage, and the size of the files. A run of a single cell comes first, as the minimum.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from profiler.facts.visits import Visit
from profiler.grid.cells import Cell
from profiler.measure.sweep import Plan
from profiler.report.progress import QuietListener
from profiler.run import measure as measuring
from profiler.run import pipeline as run
from profiler.run import setup as foundation
from profiler.run.options import Options
from profiler.run.validate import prepare, prepare_resume


def peak_mb() -> int:
    """Return the peak of memory since the last call, in 10^6 bytes (proc(5): VmHWM, which 5 in clear_refs resets)."""
    status = Path("/proc/self/status").read_text()
    Path("/proc/self/clear_refs").write_text("5")
    return int(status.split("VmHWM:")[1].split()[0]) * 1024 // 10**6


class Stages(QuietListener):
    """Print CPU seconds and memory at the start of each stage; the peak is that of the stage before."""

    def stage(self, text: str) -> None:
        print(f"{time.process_time():8.1f} s {peak_mb():7.0f} MB  {text}", flush=True)


def visited(cell: Cell) -> Visit:
    """Return a visit of a machine whose time grows with the tokens."""
    prefill_s = 1e-3 + 1e-6 * cell.batch_size * cell.depth
    return Visit(cell, 0, prefill_s, (1e-3, 1.1e-3, 1e-3), prefill_s + 3e-3, (), None, time.time())


def half_at_a_time(
    _engines: object, plan: Plan, *, earlier: Any = (), before_visits: Any, **_named: Any
) -> Iterator[Visit]:
    """Visit every cell that is not known yet; interrupt the first run of several cells half way."""
    known = {outcome.cell for outcome in earlier}
    left = [cell for cell in plan.grid.cells if cell not in known]
    before_visits()
    interrupted = not known and len(left) > 1
    for cell in left[: len(left) // 2] if interrupted else left:
        yield visited(cell)
    if interrupted:
        raise KeyboardInterrupt


PARTS = ("a single cell", "interrupted half way", "resumed")


def run_part(part: str, side: int, base: Path) -> None:
    """Run one of the runs in this process."""
    measured = foundation.measure_dispatch
    # Dispatch of one batch is used for all, since a twin per batch would add time that is not of interest here.
    foundation.measure_dispatch = lambda loaded, config, machine, batches, engines, budget_s, *rest: [
        replace(one, batch_size=batch)
        for one in measured(loaded, config, machine, batches[:1], engines, budget_s, *rest)
        for batch in batches
    ]
    for name in ("replay_kernels", "hook_cell"):
        setattr(measuring, name, lambda *_: iter(()))
    grid = {"prompt_lens": tuple(range(1, 2 * side + 1, 2)), "batch_sizes": tuple(range(1, side + 1)), "new_tokens": 8}
    options = Options(model=str(base / "model"), budget_s=1.0, no_levers=True, out=base / "run", **grid)
    if part == "a single cell":
        options = replace(options, prompt_lens=(1,), batch_sizes=(1,), out=base / "single")
    elif part == "resumed":
        options = replace(options, prompt_lens=None, batch_sizes=(1,), out=None)
    prepared = prepare_resume(base / "run", options) if part == "resumed" else prepare(options)
    with contextlib.suppress(KeyboardInterrupt):
        run.execute(prepared, Stages(), half_at_a_time)
    Stages().stage("the end")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=10_000)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--part", choices=PARTS)
    options = parser.parse_args()
    base = options.folder or Path(tempfile.mkdtemp(prefix="roofscope-sizes-"))
    if options.part:
        run_part(options.part, round(options.cells**0.5), base)
        return
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=128, max_position_embeddings=4096)).save_pretrained(base / "model")
    for part in PARTS:
        print(f"{part}:", flush=True)
        arguments = ["--cells", str(options.cells), "--folder", str(base), "--part", part]
        subprocess.run([sys.executable, __file__, *arguments], check=True)
    for file in sorted((base / "run").iterdir()):
        print(f"{file.stat().st_size / 1e6:10.2f} MB  {file.name}")


if __name__ == "__main__":
    main()
