"""Check that roofscope works from its wheel, with the versions that its users have.

    python tests/stacks.py [NAME ...] [--folder FOLDER]

For each named stack (default: all) it makes a virtual environment in FOLDER/NAME and installs the wheel and the stack's
packages. Then it runs the steps below. A step prints one line; its whole output is FOLDER/NAME/logs/STEP.txt. The last
lines are a Markdown table of all stacks in FOLDER. Exit code 0: no step failed.

A stack takes minutes, and 6 GB where pip finds only a CUDA build of torch. An environment in FOLDER is reused.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_OPTIONAL = ("bitsandbytes", "compressed-tensors", "gguf", "torchao")
"""Packages that an image for inference often lacks."""
_TESTING = ("filelock", "hypothesis", "pytest", "pytest-timeout", "pytest-xdist")
"""Packages that the simulated cards need."""
_SHOWN = ("torch", "transformers", "accelerate", *_OPTIONAL, "numpy", "pandas", "pydantic")
_HANGS_S = 3600
"""A step that takes longer hangs, and is stopped."""


@dataclass(frozen=True)
class Stack:
    """The packages of an environment."""

    purpose: str
    pinned: Mapping[str, str] = field(default_factory=dict)
    """Versions that differ from constraints.txt."""
    without: tuple[str, ...] = ()
    """Declared dependencies that are not installed."""
    python: str = "python3.11"
    brief: bool = False
    """Whether libraries' formats and simulated GPUs are left out, which do not depend on what the stack changes."""


_IMAGE = {"transformers": "5.17.0", "accelerate": "1.15.0", "huggingface_hub": "1.*"}
STACKS = {
    "tested": Stack("constraints.txt, all extras"),
    "bare": Stack("an offline image for inference", {"torch": "2.11.0", **_IMAGE}, without=_OPTIONAL),
    "bare-2.13": Stack("the same with the tested torch", {"torch": "2.13.0", **_IMAGE}, without=_OPTIONAL, brief=True),
    "lowest": Stack("the lowest versions of the dependencies", without=("compressed-tensors", "torchao")),
    "lowest-formats": Stack("the same with the extra `formats`"),
    "newest": Stack("the newest versions, with torch 2.13", {"torch": "2.13.0"}),
    "newest-torch": Stack("the newest versions, torch too"),
    "python3.12": Stack("constraints.txt on Python 3.12", python="python3.12", brief=True),
    "python3.13": Stack("constraints.txt on Python 3.13", python="python3.13", brief=True),
}

CELL = ["--prompt-lens", "8", "--batch-sizes", "1", "--new-tokens", "4", "--budget", "15", "--plain", "--quiet"]
"""One cell, which every budget measures."""
QUICK = ["--no-trials"]
FORMATS = {
    "none": "",
    **dict.fromkeys(("nf4", "fp4", "int8"), "bitsandbytes"),
    **dict.fromkeys(("int8wo", "int4wo", "fp8"), "torchao"),
}
"""Every format of --quant, and the package that it needs."""
SIMULATED = {
    "T4, eager": "test_scenarios.py::test_attention_in_plain_matmuls_on_an_old_card",
    "H100, graph": "test_scenarios.py::test_two_cards_one_after_the_other_in_one_process",
    "4090, eager": "test_scenarios.py::test_a_small_model_on_a_large_cache",
}
_ACCEPTANCE = "installation,recovery,ceilings,trace,tokens,bytes,precision,telemetry,devices,doubling"
"""Groups of the acceptance script that make no claim about time."""
_AT_A_TIME = 2
"""Steps that run in parallel; each takes one core and a gigabyte."""
_IMPORTS = """
import importlib, pkgutil, profiler
names = [found.name for found in pkgutil.walk_packages(profiler.__path__, "profiler.")]
names = [name for name in names if not name.endswith("__main__")]
for name in names:
    importlib.import_module(name)
print(len(names), "modules of", profiler.__file__)
"""
_VERSIONS = """
import json, sys, torch
from importlib import metadata
found = {found.metadata["Name"].lower(): found.version for found in metadata.distributions()}
print(json.dumps({**found, "torch": torch.__version__, "python": sys.version.split()[0]}))
"""


@dataclass(frozen=True)
class Step:
    name: str
    command: Sequence[str]
    lacks: str = ""
    """The missing package for which it must be refused. Empty: it must succeed.

    A refusal is one line that names the package and `pip install`, with exit code 2.
    """


def result(step: str, outcome: str, reason: str, began_s: float) -> dict[str, Any]:
    """How a step ended: ok, refused (as it must be), failed, or not run."""
    return {"step": step, "outcome": outcome, "reason": reason, "took_s": time.monotonic() - began_s}


def requirements(stack: str, wheel: Path, folder: Path) -> list[str]:
    """Return the requirements for pip, and write the constraints of the stack into `folder`."""
    known = STACKS[stack]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed, formats = project["dependencies"], project["optional-dependencies"]["formats"]
    pins = [f"{name}=={version}" for name, version in known.pinned.items()]
    if stack.startswith("newest"):
        return ["--upgrade", "--upgrade-strategy", "eager", f"{wheel}[formats]", *pins, *_TESTING]
    if stack.startswith("lowest"):
        lowest = dict(text.split(">=") for text in (needed if stack == "lowest" else needed + formats))
        return [str(wheel), *(f"{name}=={version}.*" for name, version in lowest.items()), *_TESTING]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(line for line in lines if line.split("==")[0] not in known.pinned))
    if not known.without:
        return ["-c", str(constraints), f"{wheel}[dev]"]
    kept = [text for text in needed if text.split(">=")[0] not in known.without]
    return ["-c", str(constraints), *kept, *pins, *_TESTING]


def _pip(commands: Path, environment: Mapping[str, str], *words: str) -> None:
    """Run pip. Raises RuntimeError with pip's errors if it fails."""
    command = [str(commands / "python"), "-m", "pip", "--disable-pip-version-check", "-q", *words]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RuntimeError(" ".join(line for line in ended.stderr.splitlines() if "WARNING" not in line))


def install(stack: str, folder: Path, environment: Mapping[str, str]) -> Path:
    """Make the environment if it is missing, and install the wheel of this checkout. Returns its folder of commands.

    Raises RuntimeError if pip fails, FileNotFoundError if the stack's Python is missing.
    """
    commands = folder / "venv" / "bin"
    if not commands.exists():
        subprocess.run([STACKS[stack].python, "-m", "venv", folder / "venv"], check=True, env=environment)
    for old in folder.glob("roofscope-*.whl"):
        old.unlink()
    _pip(commands, environment, "wheel", "--no-deps", "-w", str(folder), str(ROOT))
    [wheel] = folder.glob("roofscope-*.whl")
    _pip(commands, environment, "install", "--force-reinstall", "--no-deps", str(wheel))
    if not (folder / "installed").exists():
        _pip(commands, environment, "install", "--no-compile", *requirements(stack, wheel, folder))
        (folder / "installed").touch()
    return commands


def steps(commands: Path, work: Path, stack: Stack) -> tuple[list[Step], list[Step]]:
    """Return the steps for an environment with these commands; those of the second part read runs of the first."""
    without, formats = stack.without, ("none", "nf4") if stack.brief else FORMATS
    python, roofscope = str(commands / "python"), str(commands / "roofscope")
    tiny = str(_tiny_model(work))
    first = [
        Step("run", [roofscope, "run", "smollm2-135m", *CELL, *QUICK, "--out", "one"]),
        Step("pip check", [python, "-m", "pip", "check"]),
        Step("imports", [python, "-c", _IMPORTS]),
        Step("--engine static", [roofscope, "run", tiny, *CELL, *QUICK, "--engine", "static", "--out", "static"]),
    ]
    for words in (["--version"], ["doctor"], ["models"], ["count", "gpt2", "--crosscheck"]):
        first.append(Step(words[0], [roofscope, *words]))
    for quant in formats:
        more = ["--trace"] if quant == "none" else QUICK
        command = [roofscope, "run", tiny, *CELL, *more, "--quant", quant, "--out", quant]
        first.append(Step(f"--quant {quant}", command, FORMATS[quant] if FORMATS[quant] in without else ""))
    if not stack.brief:
        script = str(ROOT / "tests" / "gpu" / "acceptance.py")
        without_times = ["--dry-run", "--only", _ACCEPTANCE, "--out", str(work / "acceptance")]
        first.insert(0, Step("acceptance, dry", [python, script, *without_times]))
    for name, test in () if stack.brief else SIMULATED.items():
        command = [python, "-m", "pytest", "-q", "-rs", "-n", "0", "-p", "no:cacheprovider", f"tests/simulated/{test}"]
        first.append(Step(f"simulated {name}", command))
    pair = ["none", "static" if "bitsandbytes" in without else "nf4"]
    table = str(ROOT / "tests" / "data" / "foreign" / "llama-bench-two-gpus.md")
    reading = (
        ["compare", *pair],
        ["report", *pair],
        ["judge", "one"],
        ["forecast", str(ROOT / "runs" / "reference" / "smollm2-135m-xeon")],
        ["export", "one", "--format", "parquet", "--out", "one.parquet"],
        ["place", table, "--model", "gpt-oss-20b"],
    )
    return first, [Step(words[0], [roofscope, *words]) for words in reading]


def _tiny_model(folder: Path) -> Path:
    """A Llama of two layers, as a folder with a config and no weights."""
    path = folder / "tiny-llama"
    path.mkdir(exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "intermediate_size": 192,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256,
        "max_position_embeddings": 1024,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    return path


def done(step: Step, work: Path, environment: Mapping[str, str], without: Sequence[str]) -> dict[str, Any]:
    """Run a step. Its output is kept in the folder `logs` next to `work`."""
    began_s = time.monotonic()
    where = ROOT if "pytest" in step.command else work
    try:
        ended = subprocess.run(
            step.command, cwd=where, env=environment, capture_output=True, text=True, timeout=_HANGS_S, check=False
        )
    except subprocess.TimeoutExpired:
        return result(step.name, "failed", f"it did not end in {_HANGS_S} s", began_s)
    log = work.with_name("logs") / f"{re.sub(r'[^a-z0-9.]+', '-', step.name.lower())}.txt"
    log.write_text(f"{' '.join(step.command)}\nexit code {ended.returncode}\n{ended.stdout}\n{ended.stderr}")
    return result(step.name, *judged(step, ended, without), began_s)


def judged(step: Step, ended: subprocess.CompletedProcess[str], without: Sequence[str]) -> tuple[str, str]:
    """The outcome of a step and its reason."""
    errors, lines = ended.stderr.strip().splitlines(), ended.stdout.strip().splitlines()
    if step.name == "pip check":
        lines = [line for line in lines if not any(f"requires {name}, which is not" in line for name in without)]
        broken = ended.returncode != 0 and lines
        return ("failed", "; ".join(lines)) if broken else ("ok", "")
    if step.lacks:
        refused = ended.returncode == 2 and len(errors) == 1
        if refused and "pip install" in errors[0] and step.lacks in errors[0]:
            return "refused", errors[0]
        return "failed", f"exit code {ended.returncode}, not refused for want of {step.lacks}: {(errors or ['-'])[-1]}"
    if ended.returncode:
        found = [line for line in lines if line.startswith("E  ")] or errors or lines or ["it printed nothing"]
        return "failed", f"exit code {ended.returncode}: {found[-1]}"
    skipped = next((line for line in lines if line.startswith("SKIPPED")), "")
    return ("not run", skipped.split(": ", 1)[-1]) if skipped else ("ok", "")


def tried(stack: str, folder: Path) -> bool:
    """Make one stack and run its steps. Writes `stack.json`, and returns whether it was made and no step failed."""
    known = STACKS[stack]
    work = folder / "work"
    shutil.rmtree(work, ignore_errors=True)
    for path in (work, folder / "logs", folder / "tmp"):
        path.mkdir(parents=True, exist_ok=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    environment["TMPDIR"] = str(folder / "tmp")
    began_s = time.monotonic()
    results, versions = [], {}

    def add(found: dict[str, Any]) -> None:
        results.append(found)
        reason = f": {found['reason'][:300]}" if found["reason"] else ""
        print(f"{found['outcome']:8}{stack}: {found['step']} ({found['took_s']:.0f} s){reason}", flush=True)

    try:
        commands = install(stack, folder, environment)
        versions = json.loads(subprocess.check_output([commands / "python", "-c", _VERSIONS], env=environment))
        add(result("install", "ok", "", began_s))
    except (RuntimeError, FileNotFoundError, subprocess.CalledProcessError) as error:
        add(result("install", "failed", str(error), began_s))
    if versions:
        # One thread each: steps run in parallel, and none makes a claim about time.
        environment |= {"XDG_CACHE_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        end = partial(done, work=work, environment=environment, without=known.without)
        with ThreadPoolExecutor(_AT_A_TIME) as pool:
            for group in steps(commands, work, known):
                for found in pool.map(end, group):
                    add(found)
    today = datetime.now(UTC).date().isoformat()
    kept = {"date": today, "purpose": known.purpose, "versions": versions, "results": results}
    (folder / "stack.json").write_text(json.dumps(kept, indent=1))
    return bool(versions) and all(found["outcome"] != "failed" for found in results)


def tables(folder: Path) -> str:
    """Versions and outcomes of every stack in the folder, in Markdown."""
    found = {name: json.loads(file.read_text()) for name in STACKS if (file := folder / name / "stack.json").exists()}
    outcomes = {name: {item["step"]: item for item in kept["results"]} for name, kept in found.items()}
    names = max((list(of) for of in outcomes.values()), key=len, default=[])
    lines = [_row("stack", "packages", "date", "python", *_SHOWN), _row(*["---"] * (4 + len(_SHOWN)))]
    for name, kept in found.items():
        versions = [kept["versions"].get(package, "-") for package in ("python", *_SHOWN)]
        lines.append(_row(f"`{name}`", kept["purpose"], kept["date"], *versions))
    lines += ["", _row("step", *(f"`{name}`" for name in found)), _row(*["---"] * (1 + len(found)))]
    for step in names:
        lines.append(_row(step, *(of.get(step, {"outcome": "-"})["outcome"] for of in outcomes.values())))
    return "\n".join(lines)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(STACKS))
    parser.add_argument("--folder", type=Path, default=None, help="is kept; a temporary one only if a step failed")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in STACKS]:
        parser.error(f"{', '.join(unknown)} is no stack; use {', '.join(STACKS)}.")
    folder = (options.folder or Path(tempfile.mkdtemp(prefix="roofscope-stacks-"))).resolve()
    good = [tried(name, folder / name) for name in options.names or STACKS]
    print(tables(folder))
    if options.folder is None and all(good):  # its environments take 14 GB
        shutil.rmtree(folder)
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
