"""Ask a GPU what only a GPU can answer: python tests/gpu/questions.py --out FOLDER

The questions are in the order of their value, each with its most seconds and what its answer decides; together they fit
15 minutes. `--only deep,tuned` asks some of them, and `--list` none. FOLDER gets answers.json, which is written again
after every question, a log of each, and runs.tar.gz with the runs. Models have random weights; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
_RUNS = "runs/gpu"
_MISTRAL = "mistral-7b-v0.1 --weights random --dtype bfloat16 --device cuda:0 --new-tokens 32"
_LONG = _MISTRAL.replace("--new-tokens 32", "--new-tokens 128")


@dataclass(frozen=True)
class Question:
    """A run of roofscope whose figures answer it."""

    name: str
    seconds: float
    """At most; then it is ended, and the next one follows."""
    decides: str
    run: str
    """Arguments of `roofscope run`."""
    environment: str = ""


QUESTIONS = (
    Question("default", 90, "what the default minute answers", _MISTRAL),
    Question(
        "window", 85, "what changes save beyond a moving window, and that no trial loses the device",
        f"{_MISTRAL} --context-lens 4096 --batch-sizes 1,16 --budget 60",
    ),
    Question(
        "counted", 85, "whether the counters read more than nf4's bytes in a graph as well, which uses more bandwidth",
        f"{_LONG} --quant nf4 --prompt-lens 128 --batch-sizes 1,8 --engine eager,graph --no-levers --budget 60",
    ),
    Question(
        "compiled", 120, "what a compiled step takes next to a graph's, on one GPU",
        f"{_MISTRAL} --prompt-lens 128 --batch-sizes 1 --engine graph,compile --no-levers --budget 90",
    ),
    Question(
        "tuned", 120, "what inductor's own matrix-vector products save of that",
        f"{_MISTRAL} --prompt-lens 128 --batch-sizes 1 --engine compile --no-levers --budget 90",
        "TORCHINDUCTOR_COORDINATE_DESCENT_TUNING=1",
    ),
    Question(
        "no-cudnn", 60, "what a first use and a steady step cost without cuDNN's attention",
        f"{_MISTRAL} --prompt-lens 128 --batch-sizes 1 --no-levers --budget 35", "TORCH_CUDNN_SDPA_DEPRIORITIZED=1",
    ),
)  # fmt: skip


def main() -> int:
    """Ask the questions, and write their answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path, default=Path(_RUNS))
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    chosen = [each for each in QUESTIONS if not options.only or each.name in options.only.split(",")]
    if options.list:
        for each in chosen:
            print(f"{each.name:10} {each.seconds:4.0f} s  {each.decides}")
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    answers: dict[str, Any] = {}
    for question in chosen:
        answers[question.name] = _asked(question, options.out)
        (options.out / "answers.json").write_text(json.dumps(answers, indent=1) + "\n")
        with tarfile.open(options.out / "runs.tar.gz", "w:gz") as packed:
            if (_ROOT / _RUNS).exists():
                packed.add(_ROOT / _RUNS, arcname="runs")
    return 0 if all(found["exit"] == 0 for found in answers.values()) else 1


def _asked(question: Question, out: Path) -> dict[str, Any]:
    """Ask in a process of its own; what it printed is in FOLDER/NAME.log."""
    command = [sys.executable, "-m", "profiler", "run", *question.run.split(), "--plain"]
    command += ["--out", f"{_RUNS}/{question.name}"]
    environment = os.environ | dict([question.environment.split("=")] if question.environment else [])
    start_s, code = time.perf_counter(), None
    with (out / f"{question.name}.log").open("w") as log:
        try:
            code = subprocess.run(
                command, cwd=_ROOT, env=environment, timeout=question.seconds, stdout=log, stderr=subprocess.STDOUT,
                check=False,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            code = None
    seconds = time.perf_counter() - start_s
    text = (out / f"{question.name}.log").read_text(errors="replace")
    print(f"== {question.name}: {seconds:.0f} s, exit {code}\n{text[-3000:]}", flush=True)
    return {"decides": question.decides, "seconds": seconds, "exit": code}


if __name__ == "__main__":
    sys.exit(main())
