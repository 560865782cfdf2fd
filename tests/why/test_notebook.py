"""`%%why` explains a cell of a notebook, with the lines as the user sees them."""

from __future__ import annotations

from typing import Any

import pytest
from hurry import with_effort
from IPython.core.interactiveshell import InteractiveShell
from planted_faults import tiny_llama


@pytest.fixture
def shell() -> Any:
    found = InteractiveShell()
    found.run_line_magic("load_ext", "profiler")
    found.user_ns |= {"model": tiny_llama()}
    return found


def test_a_cell_runs_in_the_notebook_and_is_explained(shell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cell's names stay in the notebook, and the second line below `%%why` is line 3."""
    with_effort(monkeypatch, script_floor=False)
    cell = "import torch\nfound = model.generate(torch.ones(1, 8, dtype=torch.long), max_new_tokens=2)\n"
    watching = shell.run_cell_magic("why", "--budget 0", cell)
    assert shell.user_ns["found"].shape == (1, 10)
    [call] = watching.found.seen.calls
    assert (call.where, call.words) == ("cell:3", "generate 1 x 8 + 2")
    assert repr(watching).startswith("this block spent")
    assert "generate 1 x 8 + 2" in repr(watching)


def test_a_cell_that_fails_or_calls_no_model_has_an_answer(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The notebook shows the cell's own exception."""
    assert repr(shell.run_cell_magic("why", "", "1 / 0\n")) == "No language model was called."
    assert "ZeroDivisionError" in "".join(capsys.readouterr())
