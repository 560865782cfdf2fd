"""Sites, the seam for their calls, and the recording of reached clauses."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml
import pytest
import torch
from simulated.native import why_not
from simulated.truth import A100
from simulated.world import simulated

from . import clauses
from .kinds import KINDS, PLAUSIBLE, modes, plausible
from .seam import Seam
from .sites import ROOT, Injection, Site, place_of, positions

LINE = "torch.cuda.synchronize@measure/visit.py:205#3 sticky once eager"


def test_a_line_replays_its_fault() -> None:
    fault = Injection.parse(LINE)
    assert fault == Injection(Site("torch.cuda.synchronize", "measure/visit.py:205"), 3, "sticky", "once", "eager")
    assert str(fault) == LINE
    with pytest.raises(ValueError, match="API@file:line#n"):
        Injection.parse("torch.cuda.synchronize sticky")


@pytest.mark.parametrize(("mode", "hit"), [("once", [3]), ("on", [3, 4, 5])])
def test_a_fault_hits_once_or_from_then_on(mode: str, hit: list[int]) -> None:
    fault = Injection.parse(LINE.replace("once", mode))
    assert [number for number in range(1, 6) if fault.hits(fault.site, number)] == hit
    assert not fault.hits(Site("torch.cuda.synchronize", "measure/visit.py:206"), 3)


@pytest.mark.parametrize(("numbers", "chosen"), [([4], [4]), ([4, 7], [4, 7]), ([1, 2, 3, 4, 9], [1, 3, 9])])
def test_the_first_the_middle_and_the_last(numbers: list[int], chosen: list[int]) -> None:
    assert positions(numbers) == chosen


def called_from(file: str, inner: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function in a file of the profiler that calls another in its second line."""
    namespace: dict[str, Any] = {"inner": inner}
    exec(compile("def call():\n    return inner()", f"{ROOT}{file}", "exec"), namespace)
    found: Callable[[], Any] = namespace["call"]
    return found


def test_a_place_is_the_nearest_line_outside_the_doors() -> None:
    def here() -> str | None:
        return place_of(sys._getframe())

    through_the_door = called_from("device/clock.py", here)
    assert called_from("roofs/streams.py", through_the_door)() == "roofs/streams.py:2"
    assert through_the_door() == "device/clock.py:2"
    assert here() is None


def test_every_kind_is_used_and_known() -> None:
    assert {kind for kinds in PLAUSIBLE.values() for kind in kinds} == set(KINDS)
    assert plausible("import pynvml") == plausible("import torchao") == ("import",)
    assert plausible("pynvml.nvmlDeviceGetPowerUsage") == ("nvml-lost", "nvml-unsupported")
    assert plausible("bitsandbytes.functional.dequantize_4bit") == plausible("bitsandbytes")
    assert plausible("torch.cuda.device_count") == ()
    assert modes("kernel", "sticky") == ("once",)
    assert modes("kernel", "passing") == ("once", "on")
    raised = [kind.raised() for kind in KINDS.values() if kind.raised is not None]
    assert any(isinstance(error, torch.OutOfMemoryError) for error in raised)
    assert any(isinstance(error, pynvml.NVMLError_GpuIsLost) for error in raised)
    assert any(isinstance(error, importlib.metadata.PackageNotFoundError) for error in raised)


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_a_broken_context_fails_every_call_with_its_error(tmp_path: Path) -> None:
    """Like cudaErrorIllegalAddress: the process can do no more work on that card (CUDA Runtime API)."""

    def use() -> list[str]:
        found = []
        for call in (
            lambda: torch.ones(4, device="cuda"),
            torch.cuda.synchronize,
            torch.cuda.memory_allocated,
            torch.cuda.synchronize,
            torch.cuda.empty_cache,
            lambda: torch.ones(4, device="cuda"),
        ):
            try:
                call()
                found.append("")
            except torch.AcceleratorError as error:
                found.append(str(error).splitlines()[0])
        return found

    fault = Injection(Site("torch.cuda.synchronize", "roofs/streams.py:2"), 1, "sticky", "once", "eager")
    broken = "CUDA error: an illegal memory access was encountered"
    with simulated(A100) as world:
        seam = Seam(world, [tmp_path], fault)
        with seam.installed():
            assert called_from("roofs/streams.py", use)() == ["", broken, "", broken, broken, broken]
        assert [call.site for call in seam.fired] == [fault.site]
    with simulated(A100) as world, Seam(world, [tmp_path], fault).installed():
        assert called_from("roofs/measure.py", use)() == [""] * 6


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_calls_are_recorded_by_their_site(tmp_path: Path) -> None:
    def use() -> None:
        for _ in range(2):
            torch.cuda.synchronize()
        torch.zeros(4, device="cuda")
        (tmp_path / "file").write_text("text")

    with simulated(A100) as world:
        seam = Seam(world, [tmp_path])
        with seam.installed():
            called_from("roofs/streams.py", use)()
    apis = [(call.site.api, call.number) for call in seam.calls if call.site.place == "roofs/streams.py:2"]
    assert [api for api in apis if api[0].startswith(("torch", "disk"))] == [
        ("torch.cuda.synchronize", 1), ("torch.cuda.synchronize", 2), ("disk open", 1), ("disk write", 1),
    ]  # fmt: skip
    assert {("allocate", 1), ("kernel", 1)} <= set(apis)


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_a_slow_kernel_takes_ten_times_as_long(tmp_path: Path) -> None:
    """A sum of 1 GiB at 1.4 TB/s takes 0.77 ms."""
    seconds = []
    for kind in ("passing", "slow"):
        fault = Injection(Site("kernel", "roofs/streams.py:2"), 1, kind, "once", "eager")
        with simulated(A100) as world:
            data = torch.empty(1 << 28, device="cuda")

            def use(data: torch.Tensor = data) -> None:
                torch.cuda.synchronize()
                data.sum()
                torch.cuda.synchronize()

            site = "roofs/streams.py" if kind == "slow" else "elsewhere.py"
            with Seam(world, [tmp_path], fault).installed():
                before_s = world.host.now_s
                called_from(site, use)()
            seconds.append(world.host.now_s - before_s)
    assert seconds[0] == pytest.approx((1 << 30) / A100.bytes_per_s, rel=0.02)
    assert seconds[1] == pytest.approx(10 * seconds[0], rel=0.02)


SOURCE = """
try:
    raise KeyError
except ValueError:
    pass
except KeyError:
    reached_it = True
"""


def test_a_clause_records_that_it_was_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "watched"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "inner.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(clauses, "reached", set())
    clauses.watch("watched")
    assert importlib.import_module("watched.inner").reached_it
    assert clauses.reached == {"inner.py:6"}
    assert clauses.clauses(package) == ["inner.py:4", "inner.py:6"]


def test_the_modules_that_face_a_device() -> None:
    own = [clause for clause in clauses.clauses(Path(ROOT)) if clauses.faces_device(clause)]
    assert any(clause.startswith("device/telemetry.py:") for clause in own)
    assert any(clause.startswith("errors.py:") for clause in own)
    assert not any(clause.startswith(("report/", "judge/")) for clause in own)
    assert len(own) < sum(
        isinstance(node, ast.ExceptHandler)
        for path in Path(ROOT).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
    )
