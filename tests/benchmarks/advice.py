"""Execute the lines that a run advises in fresh processes on the same machine, and compare what they save.

    python -m tests.benchmarks.advice RUN [--all] [--turns 8]

Two processes load the model with plain transformers, one as in the run and one with the line, and take turns. Printed
is a row per line: the saving that the run states and the real one, each with its 95 % interval. They agree if the
intervals overlap. --all also executes the lines of dtypes, formats, attention and threads that the run tried or had no
time for, and prints the largest saving. The exit code is 1 if a saving has the wrong sign.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from profiler.facts.measurements import NotTried
from profiler.judge.advice import Advice
from profiler.loading.changes import Circumstances, format_change
from profiler.loading.config import load_config
from profiler.loading.load import load
from profiler.loading.request import DTYPES, ModelRequest
from profiler.loading.source import resolve
from profiler.stats import student_t
from profiler.store.folder import Run, read_gathered, read_run

WORKER = """
import json, re, sys, time
import torch, transformers
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LogitsProcessorList, QuantizedCache, TorchAoConfig
try:
    from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
except ImportError:
    pass
folder, base, dtype, line, threads, batch, prompt, new = json.loads(sys.argv[1])
if threads:
    torch.set_num_threads(threads)
parts = {"from_pretrained": base, "model.generate": ""}
statements = []
for part in filter(None, line.split("; ")):
    found = re.fullmatch(r"(from_pretrained|model.generate)\\(\\.\\.\\., (.*)\\)", part)
    if found and found[1] == "from_pretrained":
        parts[found[1]] += ", " + found[2]
    elif found:
        parts[found[1]] = found[2]
    else:
        statements.append(part)
if not re.search(r"(^|, )dtype=", parts["from_pretrained"]):
    parts["from_pretrained"] += f", dtype=torch.{dtype}"
model = eval(f"AutoModelForCausalLM.from_pretrained(folder, {parts['from_pretrained']})").eval()
for statement in statements:
    exec(statement)
ids = torch.arange(batch * prompt).reshape(batch, prompt) % model.config.get_text_config().vocab_size
ids = ids.to(model.device)
marks = []
def mark(_, scores):
    if scores.is_cuda:
        torch.cuda.synchronize()
    marks.append(time.perf_counter())
    return scores
print("ready", flush=True)
for _ in sys.stdin:
    marks[:] = [time.perf_counter()]
    eval("model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new,"
         f" do_sample=False, pad_token_id=0, logits_processor=LogitsProcessorList([mark]), {parts['model.generate']})")
    steps = sorted(b - a for a, b in zip(marks[4:], marks[5:]))
    print(json.dumps([marks[1] - marks[0], steps[len(steps) // 2]]), flush=True)
"""


@dataclass(frozen=True)
class Saving:
    """A saving in seconds, with its 95 % interval."""

    seconds: float
    half_width_s: float

    def overlaps(self, other: Saving) -> bool:
        return abs(self.seconds - other.seconds) <= self.half_width_s + other.half_width_s

    def __str__(self) -> str:
        return f"{1e3 * self.seconds:.1f} +- {1e3 * self.half_width_s:.1f} ms"


def real_savings(folder: Path, run: Run, line: str, shape: tuple[int, int], turns: int) -> tuple[Saving, Saving]:
    """Return what a line saves of a prefill and of a decode step, from calls of both processes in turn."""
    device, model = run.document.device, run.model
    base, threads = 'device_map="cuda:0"', 0
    if device.kind == "cpu":
        base, threads = 'device_map="cpu"', device.threads
    if model.quant != "none" and "quantization_config" not in line:
        here = Circumstances(on_gpu=device.kind == "cuda", dtype=model.dtype)
        base += f", {format_change(model.quant, model.compute_dtype, here).loading}"
    settings = [threads, *shape, 16]
    with ExitStack() as stack:
        plain, changed = (
            stack.enter_context(worker([str(folder), base, model.dtype, each, *settings])) for each in ("", line)
        )
        calls = [(plain(), changed()) for _ in range(turns + 1)][1:]
    prefill, step = ([before[at] - after[at] for before, after in calls] for at in (0, 1))
    return saving_of(prefill), saving_of(step)


@contextmanager
def worker(settings: Sequence[Any]) -> Iterator[Callable[[], tuple[float, float]]]:
    """Yield a call that lets a process generate once, and returns the seconds of its prefill and of a step."""
    command, pipe = [sys.executable, "-c", WORKER, json.dumps(settings)], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True) as process:
        if process.stdout.readline() != "ready\n":
            raise RuntimeError(f"the process of {settings[3] or 'the model as it is'} ended")

        def called() -> tuple[float, float]:
            process.stdin.write("go\n")
            process.stdin.flush()
            prefill_s, step_s = json.loads(process.stdout.readline())
            return prefill_s, step_s

        yield called
        process.stdin.close()


def saving_of(differences_s: Sequence[float]) -> Saving:
    spread = statistics.stdev(differences_s) / math.sqrt(len(differences_s))
    return Saving(statistics.mean(differences_s), student_t(len(differences_s) - 1) * spread)


def checkpoint(run: Run, parent: Path) -> Path:
    """Return the folder of the run's model; a model of random weights is made and saved first."""
    model = run.model
    source = resolve(model.id)
    if model.weights == "checkpoint" and source.path is not None:
        return source.path
    import torch

    request = ModelRequest(source, torch.device("cpu"), DTYPES[model.dtype])
    load(request, load_config(source)).module.save_pretrained(parent / "model")
    return parent / "model"


def lines_of(run: Run, everything: bool) -> dict[str, Advice | None]:
    """Return the lines to execute, with the advice of those that are advised."""
    lines: dict[str, Advice | None] = {item.line: item for item in run.document.advised}
    if everything:
        gathered = read_gathered(run.folder)
        tried = [trial.line for trials in gathered.trials.values() for trial in trials]
        for line in (*tried, *(item.line for item in gathered.every(NotTried))):
            if line and "torch.compile" not in line and "model.generate" not in line:
                lines.setdefault(line, None)
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--turns", type=int, default=8)
    options = parser.parse_args()
    run = read_run(options.run)
    first = min(run.measured, key=lambda row: (row.phase != "decode", row.batch_size, row.prompt_len))
    wrong, saved = False, dict[str, float]()
    with tempfile.TemporaryDirectory() as parent:
        folder = checkpoint(run, Path(parent))
        for line, advice in lines_of(run, options.all).items():
            cell = advice or first
            shape = cell.batch_size, cell.prompt_len
            try:
                prefill, step = real_savings(folder, run, line, shape, options.turns)
            except (RuntimeError, OSError) as error:
                print(f"| {line} | - | does not run: {error} |", flush=True)
                continue
            saved[line] = step.seconds
            row = f"| {cell.batch_size} x {cell.prompt_len} | {line} |"
            for name, said, real in (
                ("step", advice and advice.step, step),
                ("prefill", advice and advice.prefill, prefill),
            ):
                if said is None:
                    row += f" {name}: real {real} |"
                    continue
                stated = Saving(said.saves_s, said.half_width_s)
                wrong |= stated.seconds * real.seconds < 0 and abs(real.seconds) > real.half_width_s and said.is_clear
                agrees = "agree" if stated.overlaps(real) else "differ"
                row += f" {name}: said {stated}, real {real}: {agrees} |"
            print(row, flush=True)
    if saved:
        best = max(saved, key=lambda line: saved[line])
        advised = "advised" if best in {item.line for item in run.document.advised} else "not advised"
        print(f"largest real saving of a step: {1e3 * saved[best]:.1f} ms, {best} ({advised})")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
