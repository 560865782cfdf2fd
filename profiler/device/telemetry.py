"""Telemetry of a device: clocks, power, temperature, energy, throttling (NVML, RAPL)."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import psutil
import torch

from profiler.device.clock import now_s
from profiler.device.contention import ForeignLoad
from profiler.device.device import processor, text_of
from profiler.errors import describe_error
from profiler.facts.telemetry import THROTTLE_BITS, HardwareCounters, Reading

_INTERVAL_S = 0.5
_CGROUP = Path("/sys/fs/cgroup")
_GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")

DeviceSettings = dict[str, str | int | float | bool | None]
"""Settings of a device by name; None for what it does not report."""


class TelemetrySource:
    """A source of readings of one device; this one reads nothing."""

    failures: Mapping[str, str] = {}
    """The error of each quantity that failed unexpectedly, by name; not of those that the device lacks."""

    missing: tuple[str, ...] = ()
    """Names of the quantities that this source cannot read."""

    def read(self) -> Reading:
        """Take one reading; never raises."""
        return Reading()

    def facts(self) -> DeviceSettings:
        """Return settings and limits that do not change during a run; None for what cannot be read."""
        return {}

    def energy_j(self) -> float | None:
        """Return joules since some fixed moment; None without an energy counter."""
        return None

    def counters(self, busy_s: float | None = None) -> HardwareCounters | None:
        """Return the GPU's counters of its `busy_s` since a call without it, both synchronised; None without them."""
        return None


_NOT_OFFERED = ("Not Supported", "Function Not Found", "Insufficient Permissions")
"""NVML's errors for a field that the card, the driver or the user's rights do not give (nvml.h, nvmlReturn_t)."""

_LEAST_COUNTED_S, _QUIET_S = 0.5, 0.15
"""The shortest interval that counters describe, and how long the GPU idles at both its ends: a sample is up to 0.1 s
old. An H100's said 38 % of a matmul that kept it busy for 0.1 s."""


class NvmlSource(TelemetrySource):
    """NVML through nvidia-ml-py. A field that fails is None, with its name in `missing`; nothing is ever set."""

    def __init__(self, uuid: str, nvml: Any) -> None:
        self._nvml = nvml
        self.failures: dict[str, str] = {}
        nvml.nvmlInit()
        self._handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        self._counted: tuple[float, Any] | None = None

    def read(self) -> Reading:
        nvml, handle = self._nvml, self._handle
        # The second of two functions is for older drivers: before R535 for the reasons, before R510 for the processes.
        reasons = self._ask(
            "throttle reasons",
            lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle),
            lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
        )
        # In a container NVML gives the host's process ids, and this process would be counted as another.
        processes = self._ask(
            "other processes",
            lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle),
            lambda: nvml.nvmlDeviceGetComputeRunningProcesses_v2(handle),
        )
        pids = [process.pid for process in processes or ()]
        active = self._ask("activity", lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
        return Reading(
            clock_hz=self._ask("clock", lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM) * 1e6),
            power_w=self._ask("power", lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3),
            power_limit_w=self._ask("power limit", lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3),
            temperature_c=self._ask(
                "temperature", lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
            ),
            memory_used_bytes=self._ask("memory", lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).used)),
            sm_active=None if active is None else active.gpu / 100,
            memory_active=None if active is None else active.memory / 100,
            throttle=None if reasons is None else tuple(name for bit, name in THROTTLE_BITS.items() if reasons & bit),
            other_processes=len(pids) - 1 if os.getpid() in pids else None,
        )

    def facts(self) -> DeviceSettings:
        nvml, handle = self._nvml, self._handle
        questions: dict[str, Callable[[], Any]] = {
            "driver": nvml.nvmlSystemGetDriverVersion,
            "ecc": lambda: bool(nvml.nvmlDeviceGetEccMode(handle)[0]),
            "mig": lambda: bool(nvml.nvmlDeviceGetMigMode(handle)[0]),
            "persistence": lambda: bool(nvml.nvmlDeviceGetPersistenceMode(handle)),
            "power_limit_w": lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3,
            "default_power_limit_w": lambda: nvml.nvmlDeviceGetPowerManagementDefaultLimit(handle) / 1e3,
            "pcie_generation": lambda: nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle),
            "pcie_lanes": lambda: nvml.nvmlDeviceGetCurrPcieLinkWidth(handle),
        }
        return {name: self._ask(name, question) for name, question in questions.items()}

    def energy_j(self) -> float | None:
        energy_mj = self._ask("energy", lambda: self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))
        return None if energy_mj is None else energy_mj / 1e3

    def counters(self, busy_s: float | None = None) -> HardwareCounters | None:
        """NVML's GPM metrics, which need no root: on GPUs from Hopper on, but not on their slices (MIG)."""
        nvml = self._nvml
        if busy_s is not None and busy_s < _LEAST_COUNTED_S:
            return None
        try:
            if not nvml.nvmlGpmQueryDeviceSupport(self._handle).isSupportedDevice:
                return None
            time.sleep(_QUIET_S)
            sample = nvml.nvmlGpmSampleGet(self._handle, nvml.nvmlGpmSampleAlloc())
            before, self._counted = self._counted, (now_s(), sample)
            if before is None:
                return None
            try:
                percents = 100 * (busy_s or 1.0) / (self._counted[0] - before[0])
                return HardwareCounters(*(value / percents for value in _gpm_values(nvml, before[1], sample)))
            finally:
                nvml.nvmlGpmSampleFree(before[1])
        except Exception:  # older cards, drivers and libraries have none, and a user may lack the right to them
            return None

    def _ask(self, name: str, *questions: Callable[[], Any]) -> Any:
        """The first answer; without one None, and the name becomes one of the missing."""
        for question in questions:
            try:
                return question()
            except Exception as error:
                # An older nvidia-ml-py lacks the newer names.
                if not isinstance(error, AttributeError) and not str(error).startswith(_NOT_OFFERED):
                    self.failures.setdefault(name, describe_error(error))
        if name not in self.missing:
            self.missing += (name,)
        return None


def _gpm_values(nvml: Any, before: Any, after: Any) -> list[float]:
    """GPM metrics between two samples, in percent, in the order of HardwareCounters."""
    metrics = (nvml.NVML_GPM_METRIC_SM_UTIL, nvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL, nvml.NVML_GPM_METRIC_DRAM_BW_UTIL)
    request = nvml.c_nvmlGpmMetricsGet_t()
    request.version = nvml.NVML_GPM_METRICS_GET_VERSION
    request.numMetrics = len(metrics)
    request.sample1, request.sample2 = before, after
    for number, metric in enumerate(metrics):
        request.metrics[number].metricId = metric
    nvml.nvmlGpmMetricsGet(request)
    found = [request.metrics[number] for number in range(len(metrics))]
    if any(metric.nvmlReturn for metric in found):
        raise RuntimeError("a metric has no value")
    return [float(metric.value) for metric in found]


class HostSource(TelemetrySource):
    """The host: its clock, RAPL, and the load of processes other than this one and its `helper_pids`."""

    def __init__(self, helper_pids: Sequence[int] = ()) -> None:
        self._helper_pids = helper_pids
        self._load = ForeignLoad(helper_pids)
        self._rapl = Rapl()
        self.missing = () if self.energy_j() is not None else ("energy",)

    def read(self) -> Reading:
        busy_cores = self._load.cores()
        if busy_cores is not None:
            self._load = ForeignLoad(self._helper_pids)
        frequency = psutil.cpu_freq()
        return Reading(
            clock_hz=frequency.current * 1e6 if frequency and frequency.current else None,
            memory_used_bytes=int(psutil.virtual_memory().used),
            busy_cores_elsewhere=busy_cores,
        )

    def facts(self) -> DeviceSettings:
        return {
            **processor(),
            "governor": text_of(_GOVERNOR),
            "torch_threads": torch.get_num_threads(),
            "allowed_cores": len(os.sched_getaffinity(0)),
            "cgroup_cpu_quota": text_of(_CGROUP / "cpu.max"),
            "cgroup_memory_limit": text_of(_CGROUP / "memory.max"),
        }

    def energy_j(self) -> float | None:
        return self._rapl.energy_j()


class NoSource(TelemetrySource):
    """A device that reports nothing; `why` is the reason of every failure."""

    missing = ("clock", "power", "temperature", "throttle reasons", "other processes", "energy")

    def __init__(self, why: str = "") -> None:
        self.failures = dict.fromkeys(self.missing, why) if why else {}


def source_for(device: torch.device, helper_pids: Sequence[int] = ()) -> TelemetrySource:
    """Return the source of readings for a device and its `helper_pids`; without NVML one that reports nothing."""
    if device.type == "cpu":
        return HostSource(helper_pids)
    try:
        return nvml_source(device)
    except Exception as error:
        return NoSource(describe_error(error))


def nvml_source(device: torch.device) -> NvmlSource:
    """Return NVML's view of a CUDA device or of a slice (MIG). Raises the error of a missing library or driver."""
    import pynvml

    uuid = torch.cuda.get_device_properties(device).uuid
    try:
        return NvmlSource(f"GPU-{uuid}", pynvml)
    except pynvml.NVMLError_NotFound:
        return NvmlSource(f"MIG-{uuid}", pynvml)


@dataclass
class Watch:
    """Reads a source every `interval_s` in a thread, while the `with` block runs."""

    source: TelemetrySource
    interval_s: float = _INTERVAL_S
    readings: list[Reading] = field(default_factory=list)
    _taken: int = 0

    def __enter__(self) -> Self:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="roofscope-telemetry", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=2 * self.interval_s)

    def taken(self) -> tuple[Reading, ...]:
        since, self._taken = self._taken, len(self.readings)
        return tuple(self.readings[since : self._taken])

    def look(self, at_unix_s: float) -> None:
        """Take one reading now, dated `at_unix_s`: a short event may end between two readings of the thread."""
        with contextlib.suppress(Exception):  # a failing source must not end the run
            self.readings.append(replace(self.source.read(), at_unix_s=at_unix_s))

    def _run(self) -> None:
        while not self._stop.wait(self.interval_s):
            self.look(time.time())


def idle_power_w(source: TelemetrySource, seconds: float = 1.0) -> float | None:
    """Return the idle power in watts, by the energy counter over `seconds`; None without a counter."""
    before_j, start = source.energy_j(), now_s()
    if before_j is None:
        return None
    time.sleep(seconds)
    after_j = source.energy_j()
    return None if after_j is None else (after_j - before_j) / (now_s() - start)


@dataclass
class Rapl:
    """Energy of all CPU packages, of which zones are parts, by counters that wrap (power/powercap/powercap.rst)."""

    root: Path = Path("/sys/class/powercap")
    _packages: list[Path] = field(init=False)
    _last_uj: dict[Path, int] = field(default_factory=dict)
    _wrapped_uj: int = 0

    def __post_init__(self) -> None:
        zones = sorted(self.root.glob("intel-rapl:*"))
        self._packages = [zone for zone in zones if (text_of(zone / "name") or "").startswith("package")]

    def energy_j(self) -> float | None:
        """Return joules since some moment; None without a package, or if a counter or its range is unreadable."""
        try:
            now_uj = {zone: int((zone / "energy_uj").read_text()) for zone in self._packages}
            before_uj, self._last_uj = self._last_uj, now_uj
            wrapped = [zone for zone in self._packages if now_uj[zone] < before_uj.get(zone, 0)]
            self._wrapped_uj += sum(int((zone / "max_energy_range_uj").read_text()) for zone in wrapped)
        except (OSError, ValueError):
            return None
        return (sum(self._last_uj.values()) + self._wrapped_uj) / 1e6 if self._packages else None
