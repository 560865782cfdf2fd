"""What is no script, and what ends one before its end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_watching import ran

from profiler.errors import RequestError
from profiler.why_slow.script import run_script


def test_a_notebook_is_refused_with_what_would_work(tmp_path: Path) -> None:
    notebook = tmp_path / "own.ipynb"
    notebook.write_text('{"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}')
    with pytest.raises(RequestError, match=r"is a notebook.*jupyter nbconvert --to script .*own\.ipynb.*profiler\.why"):
        run_script(notebook, [])


def test_an_exit_at_once_is_answered_first_and_a_childs_is_not(tmp_path: Path) -> None:
    """`os._exit` runs nothing behind it, in a child neither: one answer, and each exit code as it was asked for."""
    done = ran(
        "import os\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    os._exit(5)\n"
        "print('child', os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)\n"
        "try:\n"
        "    os._exit(7)\n"
        "finally:\n"
        "    print('never', flush=True)\n",
        tmp_path,
    )
    assert (done.returncode, done.stdout) == (7, "child 5\n")
    assert done.stderr.count("nothing to explain") == 1


@pytest.mark.slow
def test_calls_before_an_exit_at_once_are_explained(tiny_folder: Path, tmp_path: Path) -> None:
    script = (
        "import os, sys, torch\n"
        "from transformers import AutoModelForCausalLM\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
        "model.generate(torch.ones(1, 8, dtype=torch.long), max_new_tokens=4, do_sample=False)\n"
        "os._exit(3)\n"
    )
    done = ran(script, tmp_path, str(tiny_folder))
    assert done.returncode == 3
    assert "1 call of generate" in done.stderr
    [call] = json.loads((tmp_path / "why" / "why.json").read_text())["calls"]
    assert (call["where"], call["new_tokens"]) == ("own.py:4", 4)
