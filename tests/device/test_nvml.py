"""Readings of NVML (nvml.c stands in for the driver's library), of energy counters, and of busy neighbours."""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pynvml
import pytest
import torch

from profiler.checks import installation as checks
from profiler.device.contention import ForeignLoad, Neighbours
from profiler.device.telemetry import NoSource, NvmlSource, Rapl, Watch, idle_power_w, nvml_source, source_for
from profiler.facts.repetitions import Repetition
from profiler.facts.telemetry import ActiveShares, Reading, Timeline, complaints, health
from profiler.grid.cells import Cell

SOURCE = Path(__file__).with_name("nvml.c")
UUIDS = ("8a3e5c1f-0000-0000-0000-000000000000", "8a3e5c1f-0000-0000-0000-000000000001")
H100 = {
    "clock_mhz": 1980, "power_mw": 652_345, "limit_mw": 700_000, "default_limit_mw": 700_000, "temperature_c": 61,
    "memory_used": 9 << 30, "memory_total": 80 << 30, "sm_percent": 97, "memory_percent": 41, "reasons": 0, "ecc": 1,
    "mig": 0, "persistence": 1, "pcie_generation": 5, "pcie_lanes": 16, "mean_w": 400, "processes": 1,
    "pid.0": os.getpid(),
}  # fmt: skip
CARD = torch.device("cuda", 0)

State = Callable[..., None]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library of a driver, built from nvml.c."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        if os.environ.get("CI"):
            pytest.fail("no C compiler, which CI must have")
        pytest.skip("no C compiler to build a stand-in for libnvidia-ml.so.1")
    built = tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1"
    command = [compiler, "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run([*command, str(SOURCE), "-o", str(built), "-lm"], check=True)
    return built


@pytest.fixture
def nvml(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> State:
    """Set the library's answers: devices by number, then the system."""

    def opened(name: str) -> ctypes.CDLL:
        assert name == "libnvidia-ml.so.1"
        return ctypes.CDLL(str(library))

    for name, value in {"nvmlLib": None, "_nvmlLib_refcount": 0, "_nvmlGetFunctionPointer_cache": {}}.items():
        monkeypatch.setattr(pynvml, name, value)
    monkeypatch.setattr(pynvml, "CDLL", opened)
    state = tmp_path / "state"
    monkeypatch.setenv("NVML_STATE", str(state))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=UUIDS[torch.device(device).index])
    )

    def write(*devices: dict[str, object], **system: object) -> None:
        lines = [f"{key} {value}" for key, value in {"driver": "580.65.06", "cuda": 13000, **system}.items()]
        for number, device in enumerate(devices):
            whole = {"uuid": f"GPU-{UUIDS[number % 2]}", **device}
            lines += [f"{number}.{key} {value}" for key, value in whole.items()]
        written = state.with_suffix(".new")
        written.write_text("\n".join(lines) + "\n")
        written.replace(state)

    return write


def test_every_figure_is_read(nvml: State) -> None:
    """The library has no function that sets anything: a call of one would be a missing figure."""
    nvml({**H100, "reasons": 0x4 | 0x1})
    source = source_for(CARD)
    reading = source.read()
    assert (reading.clock_hz, reading.power_w, reading.power_limit_w) == (1.98e9, 652.345, 700)
    assert reading.temperature_c == 61
    assert (reading.memory_used_bytes, reading.sm_active, reading.memory_active) == (9 << 30, 0.97, 0.41)
    assert (reading.throttle, reading.other_processes) == (("power cap",), 0)
    assert source.facts() == {
        "driver": "580.65.06", "ecc": True, "mig": False, "persistence": True, "power_limit_w": 700.0,
        "default_power_limit_w": 700.0, "pcie_generation": 5, "pcie_lanes": 16,
    }  # fmt: skip
    assert source.energy_j() is not None
    assert source.missing == ()
    assert "power cap" in " ".join(complaints([reading] * 3))
    assert "Set" not in SOURCE.read_text()


FIELDS = {
    ("nvmlDeviceGetClockInfo",): ("clock", {"clock_hz"}),
    ("nvmlDeviceGetPowerUsage",): ("power", {"power_w"}),
    ("nvmlDeviceGetEnforcedPowerLimit",): ("power limit", {"power_limit_w"}),
    ("nvmlDeviceGetTemperature",): ("temperature", {"temperature_c"}),
    ("nvmlDeviceGetMemoryInfo",): ("memory", {"memory_used_bytes"}),
    ("nvmlDeviceGetUtilizationRates",): ("activity", {"sm_active", "memory_active"}),
    tuple(f"nvmlDeviceGetComputeRunningProcesses_v{n}" for n in (3, 2)): ("other processes", {"other_processes"}),
    tuple(f"nvmlDeviceGetCurrentClocks{of}Reasons" for of in ("Event", "Throttle")): ("throttle reasons", {"throttle"}),
}


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_NO_PERMISSION])
def test_each_field_fails_alone(nvml: State, code: int) -> None:
    nvml(H100)
    whole = asdict(source_for(CARD).read())
    for functions, (name, fields) in FIELDS.items():
        nvml({**H100, **dict.fromkeys(functions, code)})
        source = source_for(CARD)
        assert asdict(source.read()) == {**whole, **dict.fromkeys(fields)}, name
        assert source.missing == (name,)


def test_the_second_of_two_cards_and_a_container_that_hides_process_ids(nvml: State) -> None:
    nvml(H100, {**H100, "clock_mhz": 1095, "reasons": 0x20})
    assert source_for(torch.device("cuda", 1)).read().throttle == ("software thermal",)
    assert source_for(CARD).read().clock_hz == 1.98e9
    for hidden in ({"processes": 2, "pid.0": 99_999_998, "pid.1": 99_999_999}, {"processes": 0}):
        nvml({**H100, **hidden})
        assert source_for(CARD).read().other_processes is None


def test_a_slice_of_a_card(nvml: State) -> None:
    """torch gives the UUID of a slice, which NVML knows with the prefix `MIG-`; a slice has no clock and no power."""
    slice_of_it = {"uuid": f"MIG-{UUIDS[0]}", "memory_used": 1 << 30, "processes": 0}
    nvml(slice_of_it, {**H100, "mig": 1})
    source = source_for(CARD)
    assert isinstance(source, NvmlSource)
    reading = source.read()
    assert (reading.memory_used_bytes, reading.power_w) == (1 << 30, None)
    assert {"clock", "power", "activity", "throttle reasons"} <= set(source.missing)


def test_a_card_that_falls_off_the_bus(nvml: State) -> None:
    """Earlier readings remain, later ones are empty, and empty ones do not count."""
    nvml({**H100, "reasons": 0x4})
    source = source_for(CARD)
    with Watch(source, interval_s=0.02) as watch:
        time.sleep(0.15)
        nvml({**H100, "lost": 1})
        time.sleep(0.15)
    first, last = watch.readings[0], watch.readings[-1]
    assert (first.clock_hz, first.throttle) == (1.98e9, ("power cap",))
    assert {value for name, value in asdict(last).items() if name != "at_unix_s"} == {None}
    assert source.energy_j() is None
    assert health(watch.readings).clock_hz.low == 1.98e9  # type: ignore[union-attr]
    assert "(power cap) in 100 % of the readings" in " ".join(complaints(watch.readings))


def test_no_driver_and_no_library(nvml: State, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml(H100, init=pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    assert isinstance(source_for(CARD), NoSource)
    with pytest.raises(pynvml.NVMLError, match="Driver Not Loaded"):
        nvml_source(CARD)
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "CDLL", Mock(side_effect=OSError("libnvidia-ml.so.1: cannot open shared object file")))
    assert isinstance(source_for(CARD), NoSource)
    assert checks.driver_versions()[1] is None


def test_power_at_rest_over_a_counter_that_ticks(nvml: State) -> None:
    """400 W with ten updates per second: the power over 0.5 s is right within one update."""
    nvml(H100)
    assert idle_power_w(source_for(CARD), seconds=0.5) == pytest.approx(400, rel=0.25)


RANGE_UJ = 262_143_328_850
"""The range of a Xeon's package: about 2^32 units of 2^-14 J, or 262,144 J."""


def zone(root: Path, number: str, name: str, energy_uj: int) -> Path:
    folder = root / f"intel-rapl:{number}"
    folder.mkdir()
    (folder / "name").write_text(f"{name}\n")
    (folder / "energy_uj").write_text(f"{energy_uj}\n")
    (folder / "max_energy_range_uj").write_text(f"{RANGE_UJ}\n")
    return folder


def used_j(counter: Rapl, *zones: tuple[Path, int]) -> float | None:
    """Joules between two readings, with these values of the zones at the second."""
    before_j = counter.energy_j()
    for folder, energy_uj in zones:
        (folder / "energy_uj").write_text(f"{energy_uj}\n")
    after_j = counter.energy_j()
    return None if before_j is None or after_j is None else after_j - before_j


def test_all_packages_count_and_neither_their_parts_nor_the_platform(tmp_path: Path) -> None:
    """3 J of one package and 4 J of the other; the cores' 2 J are part of it, and the platform's 9 J contain both."""
    folders = [
        zone(tmp_path, number, name, 10_000_000)
        for number, name in (("0", "package-0"), ("1", "package-1"), ("0:0", "core"), ("2", "psys"))
    ]
    moved = zip(folders, (13_000_000, 14_000_000, 12_000_000, 19_000_000), strict=True)
    assert used_j(Rapl(tmp_path), *moved) == pytest.approx(7.0)


def test_a_counter_that_wraps_continues(tmp_path: Path) -> None:
    """0.32885 J up to its range plus 1 J after it is 1.32885 J; the next 2 J count as usual."""
    package = zone(tmp_path, "0", "package-0", RANGE_UJ - 328_850)
    counter = Rapl(tmp_path)
    assert used_j(counter, (package, 1_000_000)) == pytest.approx(1.32885, abs=1e-4)
    assert used_j(counter, (package, 3_000_000)) == pytest.approx(2.0, abs=1e-4)
    (package / "energy_uj").unlink()
    assert counter.energy_j() is None, "a package that cannot be read"
    assert Rapl(tmp_path / "none").energy_j() is None


def test_a_falling_clock_is_reported() -> None:
    falling = [Reading(clock_hz=1.9e9 - 0.1e9 * step) for step in range(5)]
    assert "1900 to 1500 MHz" in complaints(falling)[0]
    assert complaints([Reading(clock_hz=1.9e9)] * 5) == []


def test_activity_is_only_that_of_the_repetitions() -> None:
    """Readings between two repetitions belong to another cell, and so do those in the first second of a repetition."""
    readings = [
        Reading(sm_active=share, memory_active=share / 2, clock_hz=1e9, at_unix_s=at)
        for at, share in ((0.5, 0.1), (1.5, 0.9), (5.0, 0.1), (10.5, 0.1), (11.5, 0.7), (12.0, 0.8))
    ]
    shares = Timeline(readings).active([(0.0, 2.0), (10.0, 2.0)])
    assert (shares.sm, shares.memory) == (0.8, 0.4)
    assert Timeline(readings).active([(0.0, 1.0)]) == ActiveShares(None, None, clock_hz=1e9), "too short to judge"
    assert Timeline(readings).active([(20.0, 2.0)]) == ActiveShares(None, None)


def test_the_power_cap_of_a_prefill_is_not_the_decode_steps() -> None:
    """Power is averaged over up to a second, so a reading early in the loop may be about the prefill before it."""
    cell = Cell(16, 512, 32)
    repetition = Repetition(cell, 0, 0.24, (0.03,) * 60, 2.1, (), None, 100.0, ttft_s=0.25, loop_s=1.8)
    assert repetition.spans("prefill")[0] == (100.0, 0.25)
    [(start, seconds)] = repetition.spans("decode")
    assert (start, seconds) == (pytest.approx(100.3), 1.8)
    readings = [Reading(throttle=("power cap",), at_unix_s=at) for at in (100.2, 100.5)]
    readings.append(Reading(throttle=(), at_unix_s=101.8))
    timeline = Timeline(readings)
    assert timeline.throttled(repetition.spans("prefill"), "prefill") == ("power cap",)
    assert timeline.throttled(repetition.spans("decode"), "decode") == ()
    late = Timeline([*readings, Reading(throttle=("power cap",), at_unix_s=101.9)])
    assert late.throttled(repetition.spans("decode"), "decode") == ("power cap",)


_SPIN = "import time; end = time.time() + 60\nwhile time.time() < end: pass"
_START = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {_SPIN!r}], stdout=2).pid)"


@pytest.mark.timing
def test_a_busy_process_is_named_with_its_cores() -> None:
    """It is not this one's child: the process that started it has ended."""
    neighbours = Neighbours()
    pid = int(subprocess.run([sys.executable, "-c", _START], stdout=subprocess.PIPE, check=True, text=True).stdout)
    try:
        neighbours.look()
        time.sleep(1.0)
        found = neighbours.look()
    finally:
        os.kill(pid, signal.SIGKILL)
    [own] = [process for process in found.processes if process.pid == pid]
    assert "python" in own.name
    assert 0.2 < own.cores < 1.1
    assert found.cores > 0.2


@pytest.mark.parametrize(("numbers", "expected"), [((0, 12, 14), 40.0), ((0, 1), None)])
def test_cores_are_known_by_their_numbers(
    numbers: tuple[int, ...], expected: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CPUs 12 and 14 are ours, and others add 10 s to each within 0.5 s; a container may number its own from 0."""

    def busy(ticks: int) -> None:
        lines = [f"cpu{number} {ticks if number else 0} 0 0 0 0 0 0 0 0 0" for number in numbers]
        (tmp_path / "stat").write_text("\n".join(["cpu 0 0 0 0 0 0 0 0 0 0", *lines, ""]))

    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {12, 14})
    monkeypatch.setattr("profiler.device.contention.now_s", Mock(side_effect=[100.0, 100.5]))
    busy(0)
    load = ForeignLoad()
    busy(1000)
    assert load.cores() == (expected and pytest.approx(expected, rel=0.05))


@pytest.mark.cpu
def test_own_processes_are_no_foreign_load() -> None:
    """A helper that keeps running, and a child that ends meanwhile; the kernel counts CPU time in ticks of 10 ms."""
    loop = "import time; end = time.process_time() + {}\nwhile time.process_time() < end: pass"
    helper = subprocess.Popen([sys.executable, "-c", loop.format(60)])
    try:
        foreign, without_helper, without_children = ForeignLoad(), ForeignLoad([helper.pid]), ForeignLoad(children=True)
        before, started_s = psutil.Process(helper.pid).cpu_times(), time.perf_counter()
        subprocess.run([sys.executable, "-c", loop.format(0.3)], check=True)
        loads = [load.cores() for load in (foreign, without_helper, without_children)]
        after, took_s = psutil.Process(helper.pid).cpu_times(), time.perf_counter() - started_s
    finally:
        helper.kill()
        helper.wait()
    busy, helped, own = (cores for cores in loads if cores is not None)
    worked_s = after.user + after.system - before.user - before.system
    assert busy - helped == pytest.approx(worked_s / took_s, abs=0.1)
    assert busy - own >= 0.9 * (0.3 + worked_s) / took_s - 0.1
