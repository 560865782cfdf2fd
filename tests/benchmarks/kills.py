"""SIGKILL at random moments of every command that writes: files must stay readable, and a repetition must finish.

    python tests/benchmarks/kills.py [--kills 50] [--commands run,why] [--seed 0]

Each kill ends a separate process, forked from one that has imported everything. Its moment is drawn evenly over the CPU
seconds of the command. A command that ends before its moment is not counted. It lowers those CPU seconds, since a
budget in seconds has less work on a busy machine. `run` and `batch-test` are resumed each time; at the end each run is
finished, and no cell of it may be lost or duplicated. Exit code 1: a fault was found.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

SCRIPT = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
model(torch.ones(1, 8, dtype=torch.long))
"""
GRID = ["--prompt-lens", "8", "--batch-sizes", "1,2", "--new-tokens", "4", "--budget", "1", "--quiet"]
MOST_S = 900.0
MOST_TRIES = 4
"""Attempts per kill: a moment that comes too late is drawn again."""


def started(arguments: Sequence[str], out: Path) -> int:
    """Start a process that runs one command, and return its number."""
    child = os.fork()
    if child:
        return child
    code: object = 1
    try:
        for stream in (1, 2):
            os.dup2(os.open(out / f"stream-{stream}", os.O_CREAT | os.O_TRUNC | os.O_WRONLY), stream)
        from profiler.cli.app import main

        sys.argv = ["roofscope", *arguments]
        main()
    except SystemExit as end:
        code = end.code or 0
    finally:
        os._exit(code if isinstance(code, int) else 1)


def killed(arguments: Sequence[str], out: Path, after_s: float = math.inf) -> float:
    """Kill a command after some CPU seconds. Return its CPU seconds if it ended before, else 0.

    Raises RuntimeError if the command itself failed, since nothing would be killed then.
    """
    begun, child, last_s = time.monotonic(), started(arguments, out), 0.0
    while last_s < after_s and time.monotonic() - begun < MOST_S:
        number, status = os.waitpid(child, os.WNOHANG)
        if number == child:
            if os.waitstatus_to_exitcode(status) not in (0, 3):
                raise RuntimeError("the command fails without a kill")
            return last_s
        times = psutil.Process(child).cpu_times()
        last_s = times.user + times.system
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return 0.0


def reads(folder: Path) -> str:
    """Return what is wrong with the files of a folder; empty if nothing is."""
    from profiler.store.folder import read_document, read_results

    for file in folder.rglob("*.json"):
        json.loads(file.read_text())
    for samples in folder.rglob("samples.jsonl"):
        for line in samples.read_bytes().split(b"\n")[:-1]:
            json.loads(line)
        if (samples.parent / "run.json").exists():
            read_document(samples.parent)
        if (samples.parent / "cells.csv").exists():
            read_results(samples.parent)
    for ending, last in ((".png", b"IEND\xaeB`\x82"), (".html", b"</html>")):
        for file in folder.rglob(f"*{ending}"):
            if not file.read_bytes().rstrip(b"\n").endswith(last):
                return f"{file.name} is cut off"
    return ""


def finished(run: Path) -> bool:
    document = run / "run.json"
    return document.exists() and '"finished": true' in document.read_text()


def commands(model: str, script: str, done: Path) -> dict[str, Callable[[Path], Sequence[str]]]:
    """Return each command by the folder that it writes to."""

    def resumed(out: Path, *words: str) -> Sequence[str]:
        if (out / "run" / "run.json").exists():
            return ["run", model, "--resume", str(out / "run"), "--budget", "1", "--quiet"]
        return [*words, "--out", str(out / "run")]

    return {
        "run": lambda out: resumed(out, "run", model, *GRID),
        "batch-test": lambda out: resumed(out, "batch-test", model, "--prompt", "8", *GRID[4:]),
        "judge": lambda _out: ["judge", str(done)],
        "report": lambda _out: ["report", str(done)],
        "why": lambda out: ["why", "--out", str(out / "why"), script, model],
    }  # fmt: skip


def twice(folder: Path) -> list[tuple[int, int]]:
    """Return the cells that were visited twice in one round."""
    records = map(json.loads, (folder / "samples.jsonl").read_text().splitlines())
    first = [(one["batch_size"], one["prompt_len"], one["round"]) for one in records if "round" in one]
    return [cell for cell in set(first) if first.count(cell) > 1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commands", default="")
    options = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="roofscope-kills-"))
    os.environ |= {"HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(base / "cache")}
    os.chdir(base)
    model, script = base / "model", base / "script.py"
    script.write_text(SCRIPT)
    import pytest
    import torch

    sys.path.insert(0, str(Path(__file__).parents[1]))
    from hurry import hurry

    torch.set_num_threads(1)
    from small_models import small_model

    for name in ("profiler.report.write", "profiler.run.pipeline", "profiler.why_slow.command"):
        importlib.import_module(name)  # here, so no forked process imports it
    patch = pytest.MonkeyPatch()
    hurry(patch, script_least_s=2.0)
    patch.setattr("profiler.roofs.bandwidth._STREAM_LEAST_BYTES", 4 << 20)
    patch.setattr("profiler.roofs.bandwidth._STREAM_CACHE_MULTIPLE", 0)
    patch.setattr("profiler.roofs.gemm.measurable_dtypes", lambda _device: ["float32"])
    patch.setattr("profiler.run.batch_test.MOST_SEQUENCES", 32)
    small_model("Llama", max_position_embeddings=256).save_pretrained(model)
    done = base / "done"
    killed(["run", str(model), *GRID, "--out", str(done)], base)
    moments, faults = random.Random(options.seed), 0
    for name, arguments in commands(str(model), str(script), done).items():
        if not options.commands or name in options.commands.split(","):
            faults += tried(name, arguments, base / name.replace(" ", "-"), done, moments, options.kills)
    return int(faults > 0)


def tried(
    name: str, arguments: Callable[[Path], Sequence[str]], out: Path, done: Path, moments: random.Random, kills: int
) -> int:
    """Kill a command so many times. Prints and returns the number of faults."""
    hits, runs, wrong = 0, 0, []
    (out / "whole").mkdir(parents=True)
    most_s = killed(arguments(out / "whole"), out)
    print(f"{name}: {most_s:.1f} CPU s", flush=True)
    for number in range(MOST_TRIES * kills):
        if hits == kills:
            break
        folder = out / str(runs)
        folder.mkdir(exist_ok=True)
        if took_s := killed(arguments(folder), out, most_s * moments.random()):
            most_s = min(most_s, took_s)
        else:
            hits += 1
        try:
            trouble = reads(folder) or reads(done)
        except Exception as error:
            trouble = f"{type(error).__name__}: {error}"
        wrong += [f"kill {number}: {trouble}"] if trouble else []
        runs += finished(folder / "run")
    last = out / str(runs)
    last.mkdir(exist_ok=True)
    killed(arguments(last), out)
    wrong += [f"at the end: {trouble}"] if (trouble := reads(last)) else []
    for run in out.glob("*/run"):
        wrong += [f"{cell} is there twice" for cell in twice(run)]
        wrong += [] if finished(run) else [f"{run} is not finished"]
    print(f"{name}: {hits} kills ({most_s:.1f} CPU s), {len(wrong)} faults", *wrong, sep="\n  ", flush=True)
    return len(wrong)


if __name__ == "__main__":
    sys.exit(main())
