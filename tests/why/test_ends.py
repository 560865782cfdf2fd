"""Files that are not scripts, and scripts that end with `os._exit`."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_watching import ran

from profiler.errors import RequestError
from profiler.why_slow.script import run_script


def test_a_notebook_is_refused_with_an_alternative(tmp_path: Path) -> None:
    notebook = tmp_path / "own.ipynb"
    notebook.write_text('{"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}')
    with pytest.raises(RequestError, match=r"is a notebook.*jupyter nbconvert --to script .*own\.ipynb.*%%why"):
        run_script(notebook, [])


def test_os_exit_gives_an_answer_except_in_a_child(tmp_path: Path) -> None:
    """`os._exit` runs no later code, also in a child. There is one answer, and both exit codes are the script's."""
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
