"""Runs of the scripts: with and without a cure, and under `roofscope why`."""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.smollm2 import CACHE

from .corpus import Cure, Found, Script
from .models import make

MADE = CACHE / "real"

# The script and its cured version take turns on one core with one thread, so other processes hardly matter.
TIMED = """
import json, os, runpy, sys, time
os.sched_setaffinity(0, [max(os.sched_getaffinity(0))])
import torch, transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, pipeline
torch.set_num_threads(1)
rounds, *versions = json.loads(sys.argv[1])
given = sys.argv[2:]
taken = []
for _ in range(1 + rounds):
    for version in versions:
        sys.argv = [version, *given]
        start = time.process_time()
        runpy.run_path(version, run_name="__main__")
        taken.append(time.process_time() - start)
print("seconds", json.dumps(taken), file=sys.stderr)
"""


def arguments(script: Script) -> list[str]:
    """The paths of a script's models."""
    MADE.mkdir(parents=True, exist_ok=True)
    return [str(make(name, MADE)) for name in script.arguments]


def environment() -> dict[str, str]:
    """The environment of a user, where torch chooses its threads."""
    return {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | {"HF_HUB_OFFLINE": "1"}


def measure(script: Script, cure: Cure, rounds: int) -> tuple[float, float]:
    """Median seconds of the script before and after a cure, without imports and the warm-up round.

    Raises RuntimeError if a version fails.
    """
    given = arguments(script)
    with tempfile.TemporaryDirectory() as folder:
        cured = Path(folder) / script.path.name
        cured.write_text(script.cured(cure))
        order = json.dumps([rounds, str(script.path), str(cured)])
        command = [sys.executable, "-W", "ignore", "-c", TIMED, order, *given]
        ended = subprocess.run(command, capture_output=True, text=True, env=environment())
    if ended.returncode:
        raise RuntimeError(f"{script.name}: {ended.stderr[-1500:]}")
    taken = json.loads(ended.stderr.rpartition("seconds ")[2].splitlines()[0])
    return statistics.median(taken[2::2]), statistics.median(taken[3::2])


def run_why(script: Script) -> Found:
    """Run `roofscope why` on a script, and save its answer and printed text in MADE / "answers".

    Raises CalledProcessError if the script fails.
    """
    given = arguments(script)
    folder = MADE / "answers" / script.name
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "profiler", "why", "--plain", "--out", str(folder), str(script.path), *given]
    start = time.monotonic()
    ended = subprocess.run(command, check=True, capture_output=True, text=True, env=environment())
    took_s = time.monotonic() - start
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "screen.txt").write_text(ended.stdout + ended.stderr)
    file = folder / "why.json"
    answer = json.loads(file.read_text()) if file.exists() else {"findings": [], "wall_s": took_s}
    script_s = answer["wall_s"]
    return Found(
        findings=tuple((item["id"], item["saves_s"]) for item in answer["findings"]),
        script_s=script_s,
        why_s=took_s - script_s,
        budget_s=min(300.0, max(30.0, script_s)),
    )
