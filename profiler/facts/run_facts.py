"""The input of judging: a run's model, its device, and all its facts."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

from profiler.data.datasheets import Datasheet
from profiler.data.free_memory import idle_room_bytes
from profiler.facts.ceilings import Ceilings
from profiler.facts.fact import MergedFacts
from profiler.facts.operators import OperatorWork
from profiler.facts.repetitions import phase_samples
from profiler.facts.telemetry import Timeline
from profiler.grid.cells import CellKey, Grid

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


@dataclass(frozen=True)
class ModelFacts:
    """The model of a run, as it was loaded."""

    id: str
    kind: str
    """Its source: card (a preset), hub, folder or gguf."""
    revision: str | None
    architecture: str
    params: int
    dtype: str
    quant: str
    double_quant: bool
    compute_dtype: str
    """The dtype of quantised matmuls."""
    weights: str
    """`checkpoint` or `random`."""
    storage_bytes: int
    load_s: float
    first_call_s: float
    unpacked_from: str | None
    """The format of a packed checkpoint whose weights are dense in memory; None for others."""
    attention: str
    offloaded_bytes: Mapping[str, int]
    """Bytes of weights that cross a link at every step, by location: host or disk."""
    placement: Mapping[str, str] | None
    linear_weights: int = 0
    """Weights of the block linears."""
    linear_bytes: int = 0
    """Bytes of these weights as stored, with scales."""
    cache_itemsize: int = 2
    """Bytes per element of the KV cache."""
    four_bit_dense_from_rows: int | None = None
    """Rows from which every 4-bit kernel first writes a dense 16-bit copy on this device; None: never or unknown."""
    linears: Mapping[str, int] = field(default_factory=dict)
    """Number of linears by class, format and first action of their kernel; empty in older runs."""
    experts: str | None = None
    """transformers' implementation of the experts; None without experts."""

    @property
    def precision(self) -> str:
        """Such as `bfloat16`, or `bfloat16, nf4`."""
        return self.dtype if self.quant == "none" else f"{self.dtype}, {self.quant}"


@dataclass(frozen=True)
class OwnedModel:
    """The model and cache of an engine that loads the model itself."""

    version: str
    load_s: float
    """Seconds to load, compile, capture and warm up, before the first cell."""
    weight_bytes: int
    cache_bytes: int
    """Bytes reserved for the cache, filled or not."""


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


@dataclass(frozen=True)
class DeviceFacts:
    """The device of a run, with the figures of its datasheet for the model's dtype if it has one."""

    kind: str
    name: str
    memory_bytes: int
    last_level_cache_bytes: int
    threads: int
    compute_capability: str
    datasheet: str | None = None
    """The row of the table of datasheets."""
    datasheet_flops_per_s: float | None = None
    datasheet_bytes_per_s: float | None = None

    @property
    def room_bytes(self) -> int:
        """The bytes that a model may take of its memory if nothing else runs there (`data.free_memory`)."""
        return idle_room_bytes(self.kind, self.memory_bytes)

    @property
    def hides_overhead(self) -> bool:
        """Whether the host can run ahead of the device, which then hides overhead."""
        return self.kind == "cuda"


@dataclass(frozen=True, kw_only=True)
class Facts(MergedFacts):
    """All facts of a run so far, merged, with the model, device and grid that they describe."""

    model: ModelFacts
    device: DeviceFacts
    grid: Grid
    ceilings: Ceilings
    operators: Mapping[CellKey, Sequence[OperatorWork]]
    graph_engines: frozenset[str] = frozenset()
    """Engines whose decode step is one launch of a captured graph."""
    generate_engines: frozenset[str] = frozenset()
    """Engines that call transformers' `generate`."""
    owning_engines: frozenset[str] = frozenset()
    """Engines that load the model themselves and hide its kernels."""

    @cached_property
    def timeline(self) -> Timeline:
        """The telemetry readings, searchable by time."""
        return Timeline(self.readings)

    @property
    def measured(self) -> list[CellKey]:
        """Keys of the measured cells, in the order of the table's rows."""
        return [key for key in self.grid.keys if self.repetitions.get(key.cell)]

    def medians_s(self) -> dict[CellKey, float]:
        return {
            key: statistics.median(chain.from_iterable(phase_samples(key.phase, self.repetitions[key.cell])))
            for key in self.measured
        }
