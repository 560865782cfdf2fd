"""Cost of a planted fault as `roofscope why` predicts it, compared with the saving from removing it.

    python tests/benchmarks/why_seconds.py [--rounds 3] [NAME ...]

Both scripts take turns on one core for some rounds; the printed figures are medians. `next` is the second finding: a
fault that is hardly more expensive than it does not test the order.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "why"))

from planted_faults import FAULTS, SCRIPTS, fixed_source, on_one_core, run_watched, save_small_llama, taken_s

from profiler.why_slow.command import explained


def held(name: str, rounds: int, model: Path, folder: Path) -> str:
    """Return a line for one script: predicted and saved seconds, their ratio, and the second finding."""
    (folder / f"{name}.py").write_text(fixed_source(name))
    run_watched(folder / f"{name}.py", model)
    said, saved, others, first, taken = [], [], [], [], []
    for _ in range(rounds):
        found = explained(run_watched(SCRIPTS / f"{name}.py", model), name)
        assert found is not None
        without_s = taken_s(run_watched(folder / f"{name}.py", model).seen(name))
        taken.append(taken_s(found.seen))
        saved.append(taken[-1] - without_s)
        said.append(sum(item.saves_s for item in found.findings if item.id == FAULTS[name][0]))
        first.append(found.findings[0].id if found.findings else "-")
        rest = [(item.saves_s, item.id) for item in found.findings if item.id != FAULTS[name][0]]
        others.append(max(rest, default=(0.0, "-")))
    said_s, saved_s = statistics.median(said), statistics.median(saved)
    ratios = ", ".join(f"{a / b:.2f}" for a, b in zip(said, saved, strict=True))
    next_s, other = max(others)
    return (
        f"{name:22} {statistics.median(taken):6.2f} {said_s:7.3f} {saved_s:7.3f} {said_s / saved_s:6.2f}  ({ratios})"
        f"  next {other} {next_s:.3f}  first {', '.join(dict.fromkeys(first))}"
    )


def main() -> None:
    """Print a line per script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(FAULTS))
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print(f"{'script':22} {'took s':>6} {'said s':>7} {'saved s':>7} {'ratio':>6}  (each round)", flush=True)
    with tempfile.TemporaryDirectory() as made, on_one_core():
        save_small_llama(Path(made) / "small-llama")
        for name in options.names:
            with contextlib.redirect_stdout(open(os.devnull, "w")):
                line = held(name, options.rounds, Path(made) / "small-llama", Path(made))
            print(line, flush=True)


if __name__ == "__main__":
    main()
