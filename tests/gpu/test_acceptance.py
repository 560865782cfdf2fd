"""The acceptance script: as a dry run on a CPU in CI, and for real on a card (pytest -m gpu)."""

from __future__ import annotations

import json
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import acceptance
import pytest
import torch
from claims import formats
from claims.bench import Attempt, Bench, Check

ROOT = Path(__file__).resolve().parents[2]


def scoreboard(monkeypatch: pytest.MonkeyPatch, folder: Path, *options: str) -> dict[str, Any]:
    """Return the script's scoreboard. It runs in this process, where its models and libraries are loaded already."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))  # restored after the script
    monkeypatch.setattr(sys, "argv", ["acceptance.py", "--out", str(folder), *options])
    assert acceptance.main() == 0
    found: dict[str, Any] = json.loads((folder / "scoreboard.json").read_text())
    return found


@pytest.mark.slow
def test_dry_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # One format that converts by groups, one by rows; other tests cover each.
    monkeypatch.setattr(formats, "SHARES", {name: formats.SHARES[name] for name in ("nf4", "int8wo")})
    monkeypatch.setattr("profiler.run.batch_test.MOST_SEQUENCES", 64)  # the limit of a doubling is not judged here
    found = scoreboard(monkeypatch, tmp_path, "--dry-run")
    assert found["failed"] == 0
    assert found["passed"] >= 12
    assert {check["group"] for check in found["checks"]} == set(acceptance.groups())
    names = {check["name"] for check in found["checks"] if check["passed"] is None}
    assert any("second process" in name for name in names)
    assert all(check["why"] for check in found["checks"] if check["passed"] is None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs.tar.gz", "scoreboard.json"]
    with tarfile.open(tmp_path / "runs.tar.gz") as archive:
        assert {"main/run.json", "main/report.html", "doubling/cells.csv"} <= set(archive.getnames())


def test_a_failed_attempt_is_followed_by_the_next_one_and_a_killed_call_leaves_its_checks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def raises(error: BaseException) -> Callable[[Bench], list[Check]]:
        def run(bench: Bench) -> list[Check]:
            raise error

        return run

    def attempts(bench: Bench) -> list[Attempt]:
        begun = raises(AssertionError("begun without its library"))
        return [
            Attempt("fails", raises(RuntimeError("the first line\nand another")), cuda=False),
            Attempt("needs", begun, cuda=False, package="a_library_that_nobody_has"),
            Attempt("holds", lambda bench: [Check("holds", True)], cuda=False),
            Attempt("killed", raises(KeyboardInterrupt()), cuda=False),
        ]

    monkeypatch.setattr(acceptance, "groups", lambda: {"one": attempts, "two": attempts})
    with pytest.raises(KeyboardInterrupt):
        scoreboard(monkeypatch, tmp_path, "--dry-run")
    found = json.loads((tmp_path / "scoreboard.json").read_text())
    assert [(check["name"], check["passed"], check["why"]) for check in found["checks"]] == [
        ("fails", False, "RuntimeError: the first line"),
        ("needs", None, "a_library_that_nobody_has is not installed"),
        ("holds", True, ""),
        ("two", None, "not begun yet"),
    ]


def test_no_file_names_a_call_that_changes_a_card() -> None:
    """No file sets a clock, a power limit, persistence or MIG, or starts the program that does."""
    setters = ("nvmlDeviceSet", "nvmlDeviceReset", '"nvidia-smi"')
    files = [path for folder in ("profiler", "tests") for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 100
    own = Path(__file__).resolve()
    assert not [path for path in files if path != own and any(word in path.read_text("utf-8") for word in setters)]


@pytest.mark.gpu
@pytest.mark.timing
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_this_card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = scoreboard(monkeypatch, tmp_path)
    assert found["failed"] == 0
    assert found["seconds"] < 9.5 * 60
