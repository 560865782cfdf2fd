"""NVML through the real nvidia-ml-py, with a substitute (nvml.c) for the driver's library."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest
import torch

from profiler.checks import installation as checks
from profiler.device.telemetry import NoSource, NvmlSource, Watch, idle_power_w, nvml_source, source_for
from profiler.facts.telemetry import complaints, health

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
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The library of current drivers and of those of 2021."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        if os.environ.get("CI"):
            pytest.fail("no C compiler, which CI must have")
        pytest.skip("no C compiler to build a stand-in for libnvidia-ml.so.1")
    folder, built = tmp_path_factory.mktemp("nvml"), {}
    for name, options in (("today", []), ("old", ["-DOLD_DRIVER"])):
        built[name] = folder / name / "libnvidia-ml.so.1"
        built[name].parent.mkdir()
        command = [compiler, "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", *options]
        subprocess.run([*command, str(SOURCE), "-o", str(built[name]), "-lm"], check=True)
    return built


@pytest.fixture
def nvml(
    libraries: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> State:
    """Set the library's answers: devices by number, then the system. With the parameter `old` the driver is of 2021."""
    library = libraries[getattr(request, "param", "today")]

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


@pytest.mark.parametrize("nvml", ["old"], indirect=True)
def test_a_driver_of_2021_reports_the_same_under_older_names(nvml: State) -> None:
    """Before R535 throttle reasons have another name, and before R510 processes another format."""
    nvml({**H100, "reasons": 0x40, "processes": 2, "pid.1": 4711}, driver="470.57.02", cuda=11040)
    source = nvml_source(CARD)
    reading = source.read()
    assert (reading.throttle, reading.other_processes, source.missing) == (("hardware thermal",), 1, ())
    assert checks.driver()[1] == "NVIDIA 470.57.02, supports CUDA up to 11.4"


def test_the_second_of_two_cards(nvml: State) -> None:
    nvml(H100, {**H100, "clock_mhz": 1095, "reasons": 0x20})
    assert source_for(torch.device("cuda", 1)).read().throttle == ("software thermal",)
    assert source_for(CARD).read().clock_hz == 1.98e9


def test_a_container_hides_this_process_id(nvml: State) -> None:
    nvml({**H100, "processes": 2, "pid.0": 99_999_998, "pid.1": 99_999_999})
    assert source_for(CARD).read().other_processes is None
    nvml({**H100, "processes": 0})
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

    def gone(_: str) -> ctypes.CDLL:
        raise OSError("libnvidia-ml.so.1: cannot open shared object file")

    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "CDLL", gone)
    assert isinstance(source_for(CARD), NoSource)
    assert checks.driver_versions()[1] is None


def test_power_at_rest_over_a_counter_that_ticks(nvml: State) -> None:
    """400 W with ten updates per second: the power over 0.5 s is right within one update."""
    nvml(H100)
    watts = idle_power_w(source_for(CARD), seconds=0.5)
    assert watts == pytest.approx(400, rel=0.25)
