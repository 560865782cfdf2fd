"""The acceptance script, dry on a CPU; its known kernels, also on simulated GPUs."""

import json
import re
import sys
import tarfile
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import acceptance
import pytest
import torch
from claims import formats
from claims.bench import Attempt, Bench, Check
from claims.kernels import UNKNOWN, judged_kernels
from machines import HOST
from simulated.truth import H100, RTX_4090, Truth
from simulated.world import simulated

from profiler.device.machine import machine_for
from profiler.facts.ceilings import Ceilings
from profiler.judge.breakdown import TERMS
from profiler.judge.regimes import Regime
from profiler.roofs.measure import measure

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
    monkeypatch.setattr("profiler.grid.ranges.MOST_SEQUENCES", 64)  # the limit of a doubling is not judged here
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


@pytest.mark.slow
def test_questions_fit_their_minutes_and_are_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Together they may take 560 s. A CPU answers those of the script's own groups, on the tiny model."""
    script = (ROOT / "tests/gpu/questions.sh").read_text()
    asked = re.findall(r'^    (?:ask|run) (\S+) (\d+) "', script, re.MULTILINE)
    assert sum(int(seconds) for _, seconds in asked) <= 560
    groups = re.findall(r"--only (\S+)", script)
    assert set(groups) == {*acceptance.questions(), "counters"} <= {name for name, _ in asked}
    found = scoreboard(monkeypatch, tmp_path, "--dry-run", "--only", ",".join(groups))
    assert {check["group"] for check in found["checks"] if check["value"]} == set(acceptance.questions())


def test_a_failed_attempt_is_followed_by_the_next_one_and_a_killed_call_leaves_its_checks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def attempts(bench: Bench) -> list[Attempt]:
        begun = mock.Mock(side_effect=AssertionError("begun without its library"))
        return [
            Attempt("fails", mock.Mock(side_effect=RuntimeError("the first line\nand another")), cuda=False),
            Attempt("needs", begun, cuda=False, package="a_library_that_nobody_has"),
            Attempt("holds", lambda bench: [Check("holds", True)], cuda=False),
            Attempt("killed", mock.Mock(side_effect=KeyboardInterrupt), cuda=False),
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


@pytest.fixture(scope="module")
def ceilings() -> Ceilings:
    return measure(HOST, ["float32"], model_dtype="float32")


@pytest.mark.timing
@pytest.mark.slow
def test_every_known_kernel_gets_its_label_or_none(ceilings: Ceilings) -> None:
    """On a shared machine a label may be missing, but it is never a wrong one."""
    found = list(judged_kernels(HOST, ceilings, seconds=1.5))
    assert {item.kernel.label.partition(",")[0] for item in found} == set(get_args(Regime)) - {UNKNOWN}
    assert [(item.kernel.name, item.label, item.rounds) for item in found if item.is_wrong] == []
    for item in found:
        assert sum(getattr(item.split, term) for term in TERMS) == pytest.approx(item.split.latency_s, rel=1e-9)


@pytest.mark.timing
@pytest.mark.slow
def test_wrong_ceilings_move_the_verdict(ceilings: Ceilings) -> None:
    """With three times the memory ceiling and four times the compute ceiling, no kernel reaches a ceiling."""
    faster = replace(
        ceilings,
        memory={name: replace(ceiling, per_s=3 * ceiling.per_s) for name, ceiling in ceilings.memory.items()},
        compute={name: replace(ceiling, per_s=4 * ceiling.per_s) for name, ceiling in ceilings.compute.items()},
    )
    assert [item.label for item in islice(judged_kernels(HOST, faster, seconds=1.5), 2)] == [UNKNOWN, UNKNOWN]


# A B200 has 126 MiB of L2 and 8 TB/s (NVIDIA's datasheet), an RTX 4090 72 MiB.
_B200 = H100.but(bytes_per_s=7.2e12, l2_bytes=126 << 20, l2_bytes_per_s=20e12)


@pytest.mark.slow
@pytest.mark.parametrize("truth", [RTX_4090.but(launch_s=20e-6), _B200.but(launch_s=8e-6)], ids=["RTX 4090", "B200"])
def test_no_cache_hides_the_weights_of_a_known_kernel(truth: Truth) -> None:
    """The 64 MiB of a 4096 x 4096 matrix in float32 fit in both caches: sixteen rows of it would wait for the host."""
    brief = {"CHAIN": 200, "LOOK_S": 1e-3, "LEAST_ROUNDS": 2, "MOST_ROUNDS": 2}
    with simulated(truth), mock.patch.multiple("claims.kernels", **brief):
        machine = machine_for(torch.device("cuda", 0))
        ceilings = measure(machine, ["float32"], model_dtype="float32", budget_s=0.6)
        found = list(judged_kernels(machine, ceilings))
    assert [(item.kernel.name, item.label) for item in found if item.label != item.kernel.label] == []
