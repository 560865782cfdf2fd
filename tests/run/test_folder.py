"""A run's folder survives interruptions, kills and full disks. It is read back whole, and refused if damaged."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

import profiler
from profiler.errors import RunError
from profiler.store.document import SCHEMA_VERSION
from profiler.store.folder import read_run
from profiler.store.samples import read_records


@pytest.fixture
def stored(tmp_path: Path) -> profiler.Run:
    """A copy of a committed run."""
    return read_run(
        Path(shutil.copytree(ROOT / "runs" / "reference" / "smollm2-135m-zen5-bfloat16", tmp_path / "copy"))
    )


ROOT = Path(__file__).parents[2]
HURRIED = ROOT / "tests" / "hurry.py"


def run_cli(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(HURRIED), "run", *arguments]
    # A suite in a shell's background ignores Ctrl-C, and so would the processes that it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_a_killed_run_is_finished_by_resume(roofscope, tiny_folder: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """After SIGKILL in a sweep and a torn last line, --resume loses no visit and repeats none."""
    folder = tmp_path / "killed"
    options = ["--prompt-lens", "8,16,32", "--batch-sizes", "1,2", "--new-tokens", "8", "--budget", "600"]
    process = run_cli(str(tiny_folder), *options, "--out", str(folder), "--quiet")
    samples = folder / "samples.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (samples.exists() and b'"visit"' in samples.read_bytes()):
        time.sleep(0.01)
    process.kill()
    process.communicate(timeout=60)
    before = samples.read_text().splitlines()
    assert len(read_run(folder).cells) == 12, "the table is written during the sweep"
    assert roofscope("export", str(folder)).code == 0
    with samples.open("a") as file:
        file.write('{"kind": "visit", "batch_')

    refused = roofscope("run", "--resume", str(folder))
    assert (refused.code, refused.err.count("\n")) == (2, 1)
    assert "path again" in refused.err
    other = roofscope("run", "gpt2", "--resume", str(folder), "--quiet")
    assert other.code == 2
    assert "it profiled tiny-llama" in other.err

    done = roofscope("run", str(tiny_folder), "--resume", str(folder), "--budget", "1", "--quiet")
    assert done.code == 0, done.err
    run = read_run(folder)
    assert run.document.finished
    assert (run.cells["status"] == "ok").all()
    after = samples.read_text().splitlines()
    assert after[: len(before)] == before
    visits = [
        (record["batch_size"], record["prompt_len"], record["round"])
        for record in read_records(folder)
        if "round" in record
    ]
    assert sorted(visits) == sorted(set(visits)), "no visit is repeated"
    assert roofscope("run", str(tiny_folder), "--resume", str(folder)).code == 2, "a finished run is not changed"


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("run.json", "{", "run.json"),
        ("run.json", '{"schema_version": 6}', "run.json"),
        ("run.json", json.dumps({"schema_version": SCHEMA_VERSION + 1, "something_new": 1}), "newer roofscope"),
        ("run.json", '{"schema_version": 5}', r"roofscope 0\.3\.0"),
        ("cells.csv", "phase\nprefill\n", "batch_size"),
        ("cells.csv", None, "cells.csv"),
        ("run.json", None, "run.json"),
    ],
)
def test_a_damaged_folder_says_which_file_and_another_schema_which_release(
    stored: profiler.Run, name: str, content: str | None, says: str
) -> None:
    file = stored.folder / name
    file.unlink() if content is None else file.write_text(content)
    with pytest.raises(RunError, match=says):
        read_run(stored.folder)


def test_a_damaged_sample_is_named_by_its_line(stored: profiler.Run) -> None:
    samples = stored.folder / "samples.jsonl"
    lines = samples.read_text().splitlines()
    samples.write_text("\n".join([lines[0], lines[1][:40], *lines[2:]]) + "\n")
    with pytest.raises(RunError, match="line 2"):
        read_records(stored.folder)
    assert len(read_run(stored.folder).cells) == len(stored.cells), "the table can still be read"


def test_a_run_without_a_later_column_is_read(stored: profiler.Run) -> None:
    """What a run did not record is not known; a table without times is damaged."""
    copy = stored.folder
    frame = pd.read_csv(copy / "cells.csv")
    frame.drop(columns="visits").to_csv(copy / "cells.csv", index=False)
    assert {result.visits for result in read_run(copy).results} == {None}
    frame.drop(columns="latency_s").to_csv(copy / "cells.csv", index=False)
    with pytest.raises(RunError, match="latency_s"):
        read_run(copy)


@pytest.mark.slow
def test_engines_and_depths_in_one_run(profile_tiny: Callable[..., profiler.Run]) -> None:
    """Every engine visits every cell; a filled cache has a decode and no prefill; differences have intervals."""
    sizes = {"prompt_lens": [16], "context_lens": [64], "batch_sizes": [1, 2], "new_tokens": 12}
    run = profile_tiny(**sizes, engine="eager,static", budget_s=2)
    counts = run.cells.groupby(["engine", "phase"]).size().to_dict()
    assert counts == {(e, phase): n for e in ("eager", "static") for phase, n in (("prefill", 2), ("decode", 4))}
    deep = run.cells[run.cells["prompt_len"] == 0]
    assert set(deep["context_len"]) == {64 + 12 // 2}
    assert set(deep["phase"]) == {"decode"}
    differences = run.document.engine.differences
    assert len(differences) == 6
    assert all(item.low_s <= item.saves_s <= item.high_s for item in differences)
    # A static cache is read to its last slot; a dynamic one is copied whole at every step.
    executed = run.cells.set_index(["engine", "phase", "batch_size", "prompt_len"])["executed_bytes"]
    layers, token_bytes, slots = 2, 2 * 2 * 16 * 4, 16 + 12
    held = 16 + 12 // 2
    assert executed["eager", "decode", 1, 16] - executed["static", "decode", 1, 16] == layers * token_bytes * (
        2 * (held + 1) - (slots - held - 1)  # the new token fills one
    )
