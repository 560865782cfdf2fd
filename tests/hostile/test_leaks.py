"""Nothing leaks: commands that write have secrets in their environment, and all bytes of their files are searched."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import profiler
from profiler.device.device import ENVIRONMENT

pytestmark = pytest.mark.slow

SECRETS = {
    "a token in the environment": "hf_SecretOfTheEnvironment",
    "a key in the environment": "AKIASecretOfTheCloud",
    "a token in a git remote": "ghp_SecretOfTheRemote",
    "a token file of the hub": "hf_SecretOfTheFile",
    "a word in the model's path": "sk-SecretOfThePath",
    "the home folder's name": "somebody-SecretOfTheHome",
}
UNUSED_HERE = (
    "CUBLASLT_WORKSPACE_SIZE", "CUDA_MODULE_LOADING", "DISABLE_ADDMM_CUDA_LT", "NCCL_ALGO", "NCCL_PROTO",
    "NVIDIA_TF32_OVERRIDE",
)  # fmt: skip
"""Variables that a run records if their values are short words or numbers. Nothing on a CPU reads them."""
SCRIPT = """
import sys
import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
model(torch.ones(1, 8, dtype=torch.long))
AutoModelForCausalLM.from_pretrained(sys.argv[1])
"""


@dataclass(frozen=True)
class Written:
    """The files and outputs of all commands, and their attempted connections."""

    folder: Path
    connections: list[str]
    codes: dict[str, int]
    isolated: bool
    """Whether the commands ran in a network namespace without a route."""


@pytest.fixture(scope="module")
def written(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Run all commands in one process with a separate HOME, repository and tokens; without a network if possible."""
    tokens = list(SECRETS.values())
    base = tmp_path_factory.mktemp("leaks")
    home = base / tokens[5]
    model, work = home / tokens[4] / "tiny", base / "work"
    shutil.copytree(tiny_folder, model)
    (work / ".git").mkdir(parents=True)
    (work / "runs").mkdir()
    (work / ".git" / "config").write_text(f'[remote "origin"]\n url = https://me:{tokens[2]}@example.com/x.git\n')
    for folder in (home / ".cache" / "huggingface", base / "hub"):
        folder.mkdir(parents=True)
        (folder / "token").write_text(tokens[3])
    script = home / "script.py"
    script.write_text(SCRIPT)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "XDG_"))}
    environment |= {"HOME": str(home), "HF_HOME": str(base / "hub"), "HF_TOKEN": tokens[0], "AWS_SECRET": tokens[1]}
    environment |= {"PYTHONPATH": str(Path(profiler.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    environment |= dict(zip(UNUSED_HERE, tokens, strict=True))
    isolated = subprocess.run(["unshare", "-rn", "true"], capture_output=True, check=False, timeout=20).returncode == 0
    command = [sys.executable, Path(__file__).with_name("every_command.py"), model, script, work / "runs"]
    done = subprocess.run(
        [*(["unshare", "-rn"] if isolated else []), *command],
        cwd=work, env=environment, capture_output=True, text=True, timeout=550, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    printed = json.loads(done.stdout.splitlines()[-1])
    return Written(work / "runs", printed["connections"], printed["codes"], isolated)


def test_every_command_wrote_something(written: Written) -> None:
    """Without files there would be nothing to search, and without settings no variable that could have a secret."""
    assert not {name for name, code in written.codes.items() if code != 0 and "gate" not in name}, written.codes
    names = {file.name for file in written.folder.rglob("*")}
    assert {
        "run.json", "samples.jsonl", "operators.csv", "cells.csv", "report.html", "roofline.png",
        "trace.json.gz", "why.json", "why.html", "cells.parquet",
    } <= names  # fmt: skip
    assert json.loads((written.folder / "why" / "why.json").read_text())["script"] == "script.py"
    assert {*UNUSED_HERE} <= {*ENVIRONMENT}
    assert json.loads((written.folder / "one" / "run.json").read_text())["software"]["OMP_NUM_THREADS"] == "1"


def test_no_file_holds_a_secret(written: Written) -> None:
    """Packed files are unpacked; matplotlib does not compress the texts of its pictures."""
    for file in (file for file in written.folder.rglob("*") if file.is_file()):
        content = file.read_bytes()
        content = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
        assert {what for what, secret in SECRETS.items() if secret.encode() in content} == set(), file.name


def test_no_network_is_used_or_needed(written: Written) -> None:
    """An audit hook saw no lookup, connection or transfer; the namespace has no route, not even to this machine."""
    assert written.connections == []
    if not written.isolated:
        pytest.skip("this system allows no network namespace (unshare -rn)")
    assert set(written.codes.values()) <= {0, 3}, "3: an inconclusive gate"
