"""The device of a run (name, memory, caches, capability) and the versions of its software."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from profiler.data.datasheets import Datasheet, find
from profiler.device.memory import total_bytes
from profiler.errors import DeviceError
from profiler.options import check_device_name
from profiler.packages import MISSING, version_of

if TYPE_CHECKING:
    import torch

CPUINFO_FILE = Path("/proc/cpuinfo")
CPUS_FOLDER = Path("/sys/devices/system/cpu")
KERNEL_FILE = Path("/proc/version")
_UNKNOWN_CACHE_BYTES = 32 << 20
# The names in /proc/cpuinfo on x86 and on ARM, and their names here.
_PROCESSOR_IDS = {
    "vendor_id": "", "cpu family": "family", "model": "model", "CPU implementer": "implementer",
    "CPU variant": "variant", "CPU part": "part",
}  # fmt: skip
_VECTOR_FLAGS = ("avx", "amx", "fma", "f16c", "sve", "sme", "asimd", "i8mm", "bf16")
ENVIRONMENT = (
    "ATEN_CPU_CAPABILITY", "CUBLASLT_WORKSPACE_SIZE", "CUBLAS_WORKSPACE_CONFIG", "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING", "DISABLE_ADDMM_CUDA_LT", "DNNL_DEFAULT_FPMATH_MODE",
    "DNNL_MAX_CPU_ISA", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "MKL_DYNAMIC", "MKL_ENABLE_INSTRUCTIONS", "MKL_NUM_THREADS",
    "NCCL_ALGO", "NCCL_NVLS_ENABLE", "NCCL_P2P_DISABLE", "NCCL_PROTO", "NVIDIA_TF32_OVERRIDE", "OMP_DYNAMIC",
    "OMP_NUM_THREADS", "OMP_PROC_BIND", "OMP_WAIT_POLICY", "ONEDNN_DEFAULT_FPMATH_MODE", "ONEDNN_MAX_CPU_ISA",
    "OPENBLAS_NUM_THREADS", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "TORCHDYNAMO_DISABLE", "TORCHINDUCTOR_COORDINATE_DESCENT_TUNING", "TORCHINDUCTOR_CPP_WRAPPER",
    "TORCHINDUCTOR_CUDAGRAPHS", "TORCHINDUCTOR_FREEZING", "TORCHINDUCTOR_MAX_AUTOTUNE",
    "TORCHINDUCTOR_MAX_AUTOTUNE_GEMM", "TORCHINDUCTOR_MAX_AUTOTUNE_POINTWISE", "TORCHINDUCTOR_USE_FAST_MATH",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_BLAS_PREFER_CUBLASLT", "TORCH_COMPILE_DISABLE",
    "TORCH_CUDNN_SDPA_DEPRIORITIZED",
)  # fmt: skip
"""Environment variables that change how fast a step runs: switches and numbers, never a path or a device's id."""
# Words and numbers such as AVX512_CORE_AMX or max_split_size_mb:128; no token, path, address or UUID.
_WORD = r"(?:[A-Za-z0-9]{1,12}(?:\.\d{1,4})?|cudaMallocAsync)"
_SETTING = re.compile(rf":?{_WORD}(?:[:,_]{_WORD}){{0,15}}")


@dataclass(frozen=True)
class Device:
    """A CPU or a CUDA device."""

    kind: str
    name: str
    memory_bytes: int
    last_level_cache_bytes: int
    threads: int
    """torch's compute threads on a CPU; streaming multiprocessors of a GPU."""
    compute_capability: str
    """CUDA's, or the vector instructions that torch uses on a CPU."""
    datasheet: Datasheet | None
    uuid: str = ""
    """Of a GPU: distinguishes two of the same name."""

    @property
    def sixteen_bit_dtype(self) -> str:
        """BF16 or FP16, as it multiplies it: FP16 on GPUs before Ampere (compute capability 8.0)."""
        return "float16" if self.kind == "cuda" and float(self.compute_capability) < 8.0 else "bfloat16"

    @property
    def host_threads(self) -> int:
        """The host threads that it needs: all of a CPU's, one to launch a GPU's steps."""
        return self.threads if self.kind == "cpu" else 1


def describe(device: torch.device) -> Device:
    import torch

    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return Device(
            kind="cuda",
            name=properties.name,
            memory_bytes=int(properties.total_memory),
            last_level_cache_bytes=int(getattr(properties, "L2_cache_size", 0)),
            threads=int(properties.multi_processor_count),
            compute_capability=f"{properties.major}.{properties.minor}",
            datasheet=find(properties.name, int(properties.total_memory), int(properties.multi_processor_count)),
            uuid=str(getattr(properties, "uuid", "")),
        )
    return Device(
        kind="cpu",
        name=_cpuinfo().get("model name") or platform.processor() or platform.machine(),
        memory_bytes=total_bytes(device),
        last_level_cache_bytes=_cpu_last_level_cache_bytes(),
        threads=torch.get_num_threads(),
        compute_capability=torch.backends.cpu.get_cpu_capability(),
        datasheet=None,
    )


def compute_capability(device: torch.device) -> tuple[int, int]:
    """Return the CUDA compute capability of `device` as (major, minor); (0, 0) for a CPU."""
    import torch

    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def gpu_count() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def make_current(device: torch.device) -> None:
    """Make a CUDA device the one that this process uses; a CPU always is."""
    import torch

    if device.type == "cuda":
        torch.cuda.set_device(device)


def resolve_device(name: str) -> torch.device:
    """Return the device for `auto`, `cpu`, `cuda` or `cuda:N`. Raises RequestError if it does not exist."""
    import torch

    check_device_name(name)
    if name == "auto":
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    if name == "cpu":
        return torch.device("cpu")
    index = name.partition(":")[2]
    if not torch.cuda.is_available():
        build = "this torch is a CPU build" if torch.version.cuda is None else "no CUDA device answers"
        raise DeviceError(f"--device {name}: {build}; use --device cpu.")
    count = torch.cuda.device_count()
    if index and int(index) >= count:
        raise DeviceError(f"--device {name}: there are {count} CUDA devices, numbered from 0.")
    return torch.device("cuda", int(index) if index else torch.cuda.current_device())


def software() -> dict[str, str]:
    """Return versions by name: Python, the kernel, torch, its CUDA and libraries above it; and the `environment`."""
    import torch

    versions = {"python": platform.python_version(), "system": f"{platform.system()} {platform.release()}"}
    packages = {name: version_of(name) for name in ("torch", "transformers", "accelerate", "bitsandbytes")}
    versions |= {name: version for name, version in packages.items() if version != MISSING}
    return versions | ({"cuda": torch.version.cuda} if torch.version.cuda else {}) | environment()


def environment() -> dict[str, str]:
    """Return the variables of `ENVIRONMENT` that are set; other values than short words and numbers are left out."""
    values = {name: os.environ.get(name, "") for name in ENVIRONMENT}
    return {name: value for name, value in values.items() if _SETTING.fullmatch(value)}


def processor() -> dict[str, str | None]:
    """Return what distinguishes processors of one name: maker, model, stepping, vectors; None if unknown."""
    info = _cpuinfo()
    ids = [f"{name} {info[key]}".strip() for key, name in _PROCESSOR_IDS.items() if key in info]
    flags = info.get("flags", info.get("Features", "")).split()
    vectors = sorted(flag for flag in flags if flag.startswith(_VECTOR_FLAGS))
    return {
        "processor": ", ".join(ids) or None,
        "stepping": info.get("stepping", info.get("CPU revision")),
        "vector_instructions": " ".join(vectors) or None,
    }


def text_of(file: Path) -> str | None:
    """Return the text of a file of the kernel; None if it cannot be read."""
    try:
        return file.read_text().strip()
    except OSError:
        return None


def _cpuinfo() -> dict[str, str]:
    of_one_core = (text_of(CPUINFO_FILE) or "").split("\n\n")[0]
    pairs = (line.partition(":") for line in of_one_core.splitlines())
    return {name.strip(): " ".join(value.split()) for name, colon, value in pairs if colon}


def _cpu_last_level_cache_bytes() -> int:
    """Sum of the distinct last-level caches of this process's cores: there may be one for every few."""
    last: dict[str, int] = {}
    for core in os.sched_getaffinity(0):
        caches = [_cpu_cache(folder) for folder in (CPUS_FOLDER / f"cpu{core}" / "cache").glob("index*")]
        nbytes, sharing = max((cache for cache in caches if cache is not None), default=(0, ""))
        last[sharing] = nbytes
    return sum(last.values()) or _UNKNOWN_CACHE_BYTES


def _cpu_cache(folder: Path) -> tuple[int, str] | None:
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    try:
        size, sharing = (folder / "size").read_text().strip(), (folder / "shared_cpu_list").read_text().strip()
        return (int(size[:-1]) * units[size[-1]] if size[-1] in units else int(size)), sharing
    except (OSError, ValueError, IndexError):
        return None


def under_wsl() -> bool:
    """Return whether this is Linux under Windows (WSL), whose driver may spill a card's memory to the system's."""
    return "microsoft" in (text_of(KERNEL_FILE) or "").lower()


def physical_cores() -> int:
    """Return the number of cores that this process may use; two hardware threads of one core count once."""
    files = [CPUS_FOLDER / f"cpu{core}" / "topology" / "thread_siblings_list" for core in os.sched_getaffinity(0)]
    return len({file.read_text() for file in files if file.exists()}) or len(files)
