"""Tables of devices: datasheets, measured roofs, health of several GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from profiler.data.datasheets import Datasheet
from profiler.data.links import Link
from profiler.device.device import Device
from profiler.facts.roofs import (
    REFERENCE_HOST,
    REFERENCE_HOST_STEP_S,
    Ceilings,
    CurvePoint,
    HostPace,
    Roof,
    WeightReadRoof,
)
from profiler.json_document import Document, view
from profiler.judge.device_health import DeviceHealth
from profiler.report.blocks import TextTable, text_table
from profiler.units import duration, percent, scaled, significant

_SHOWN = ("memory_bytes", "bandwidth_bytes_per_s", "tdp_w", "peak_", "source")
"""How the fields begin whose uncertainty `gpus_table` marks: the printed figures of a datasheet and their source."""


_DTYPES = {
    "fp64": "float64",
    "fp32": "float32",
    "tf32": "tfloat32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp8": "float8_e4m3fn",
    "fp4": "float4_e2m1fn_x2",
    "int8": "int8",
}
_RIDGES = {name: dtype for name, dtype in _DTYPES.items() if name not in ("fp64", "bf16")}


def gpu_columns(gpus: Sequence[Datasheet]) -> TextTable:
    """Return a column per datasheet with all its figures; of two, a last column has the second over the first."""
    figures: dict[str, list[float | None]] = {
        "memory, GiB": [gpu.memory_bytes / 2**30 for gpu in gpus],
        "bandwidth, GB/s": [gpu.bandwidth_bytes_per_s / 1e9 for gpu in gpus],
        "L2, MiB": [gpu.l2_bytes / 2**20 for gpu in gpus],
        "SMs": [gpu.sm_count for gpu in gpus],
        **{
            f"{name}, {'TOP/s' if name == 'int8' else 'TFLOP/s'}": [_in_tera(gpu.peak_flops_per_s(of)) for gpu in gpus]
            for name, of in _DTYPES.items()
        },
        **{
            f"ridge {name}, FLOP/byte": [gpu.ridge_flops_per_byte(dtype) for gpu in gpus]
            for name, dtype in _RIDGES.items()
        },
        "link, GB/s": [gpu.link_bytes_per_s / 1e9 if gpu.link_bytes_per_s else None for gpu in gpus],
        "TDP, W": [gpu.tdp_w for gpu in gpus],
        "16 bits sustained, TFLOP/s": [_in_tera(gpu.sustained_flops_per_s) for gpu in gpus],
        "copies sustained, GB/s": [
            gpu.sustained_copy_bytes_per_s and gpu.sustained_copy_bytes_per_s / 1e9 for gpu in gpus
        ],
    }
    rows = [["year", *(str(gpu.year) for gpu in gpus), *([""] if len(gpus) == 2 else [])]]
    for name, values in figures.items():
        ratio = [f"{values[1] / values[0]:.2f}x" if values[0] and values[1] else "-"] if len(gpus) == 2 else []
        rows.append([name, *map(_shown, values), *ratio])
    headings = ["dense peaks", *(gpu.gpu for gpu in gpus), *(["second / first"] if len(gpus) == 2 else [])]
    sources = [f"sustained, {gpu.gpu}: {gpu.sustained_source}." for gpu in gpus if gpu.sustained_source]
    return text_table(headings, rows, caption=" ".join(sources))


def _shown(value: float | None) -> str:
    return "-" if value is None else str(value) if isinstance(value, int) else significant(value)


def _in_tera(value: float | None) -> float | None:
    return value / 1e12 if value else None


def gpus_table(gpus: Sequence[Datasheet]) -> TextTable:
    """Return a row per datasheet: memory, bandwidth, dense peaks, and the ridge point of 16-bit matmuls."""
    rows = []
    for gpu in gpus:
        best16 = gpu.peak_bf16_flops_per_s or gpu.peak_fp16_flops_per_s
        peaks = {name: gpu.peak_flops_per_s(dtype) for name, dtype in _DTYPES.items() if name != "bf16"}
        rows.append(
            [
                gpu.gpu + (" ?" if any(name.startswith(_SHOWN) for name in gpu.uncertain) else ""),
                f"{gpu.memory_bytes / 2**30:.0f}",
                f"{gpu.bandwidth_bytes_per_s / 1e9:.0f}",
                *(_shown(_in_tera(peak)) for peak in (peaks | {"fp16": best16}).values()),
                significant(best16 / gpu.bandwidth_bytes_per_s) if best16 else "-",
                f"{gpu.tdp_w:.0f}",
            ]
        )
    headings = ("GPU", "GiB", "GB/s", "fp64", "fp32", "tf32", "fp16", "fp8", "fp4", "int8", "ridge", "W")
    caption = (
        "dense peaks in TFLOP/s (int8: TOP/s; fp16: or bfloat16); GB/s of memory; ridge: FLOP/byte in 16 bits;"
        " W: TDP; ?: sources differ on a figure shown here"
    )
    return text_table(headings, rows, caption=caption)


def health_lines(devices: Sequence[DeviceHealth]) -> list[str]:
    """Return a line per GPU that is clearly slower than the best, or one line that says that all agree."""
    if slow := [item.words for item in devices if item.ill]:
        return slow
    slowest = max(devices, key=lambda item: item.behind)
    return [
        f"No GPU is slower than the others: {' and '.join(item.device for item in devices)} agree ({slowest.device} is"
        f" {percent(slowest.behind)} slower at most, and by more than noise in {percent(slowest.surely)} of the cells)."
    ]


@dataclass(frozen=True)
class DeviceEntry:
    """The device whose roofs were measured."""

    kind: str
    name: str
    memory_bytes: int
    last_level_cache_bytes: int
    threads: int
    """torch's compute threads on a CPU; streaming multiprocessors of a GPU."""
    compute_capability: str
    """CUDA's, or the vector instructions that torch uses on a CPU."""
    uuid: str
    datasheet: str | None
    """The name of its datasheet; null without one."""


@dataclass(frozen=True)
class ReferenceHost:
    """The host that others are compared with."""

    name: str
    step_s: float
    """Dispatch of a decode step of the standard model."""


@dataclass(frozen=True)
class CeilingsDocument(Document):
    """`roofscope ceilings --format json`."""

    device: DeviceEntry
    compute: Mapping[str, Roof]
    """FLOP/s of a large matrix product, by dtype name."""
    memory: Mapping[str, Roof]
    """Bytes/s by kind: read, copy, triad, and the matrix-vector product in the model's dtype."""
    stream_bytes: int
    """Size of the streamed buffers."""
    beyond_cache: bool
    """Whether the buffers were too large for any cache to serve."""
    curve: Sequence[CurvePoint]
    """Read bandwidth by buffer size, up to the streamed buffers; caches show as steps."""
    launch: Mapping[str, float]
    """Seconds of the host to submit one tiny kernel, and of the device to run it (by graph replay)."""
    page_fault_s: float
    """Seconds of the first access to a new page (CPU); 0 if not measured."""
    links: Mapping[str, Roof]
    """Bytes/s from the `host` and from other GPUs to the device."""
    collective: Link | None
    """The link between the ranks that share a model; null with one device."""
    host: HostPace | None
    """Dispatch speed of the host; null if not measured."""
    measured_s: float
    """Seconds that the measurement took."""
    measured_at_unix_s: float
    weights: WeightReadRoof | None
    """Bandwidth of reading a model's weights; null without a model."""
    missing: Mapping[str, str]
    """The reason, in one line, for each roof that could not be measured, by name."""
    plateau: bool
    """Whether the two largest sizes are read equally fast; otherwise a cache still serves a part."""
    memory_bytes_per_s: float | None
    """The memory roof beyond all caches; null if not measured."""
    host_index: float | None
    """Dispatch time of this host relative to the reference host; null if not measured."""
    reference_host: ReferenceHost
    datasheet_per_s: Mapping[str, float | None]
    """Dense peaks by dtype in FLOP/s, and `bandwidth` in bytes/s; empty without a datasheet."""
    warnings: Sequence[str]


def ceilings_document(
    device: Device, measured: Ceilings, datasheet_per_s: Mapping[str, float | None], warnings: Sequence[str]
) -> CeilingsDocument:
    """Return the document of a device's measured roofs."""
    sheet = device.datasheet
    return CeilingsDocument(
        device=DeviceEntry(**{**vars(device), "datasheet": sheet.gpu if sheet else None}),
        **vars(measured),
        plateau=measured.plateau,
        memory_bytes_per_s=measured.memory_bytes_per_s if measured.memory else None,
        host_index=measured.host.index if measured.host else None,
        reference_host=ReferenceHost(REFERENCE_HOST, REFERENCE_HOST_STEP_S),
        datasheet_per_s=datasheet_per_s,
        warnings=warnings,
    )


@dataclass(frozen=True)
class GpuEntry(Datasheet):
    """One datasheet: `roofscope gpus --format json` is a list of them."""

    ridge_flops_per_byte: Mapping[str, float | None] = field(kw_only=True)  # type: ignore[assignment]
    """By dtype; null where the datasheet has no rate."""


def gpu_rows(gpus: Sequence[Datasheet]) -> list[GpuEntry]:
    """Return the entries of the JSON document."""
    return [
        GpuEntry(
            **vars(gpu),
            ridge_flops_per_byte={name: gpu.ridge_flops_per_byte(name) for name in (*_RIDGES.values(), "bfloat16")},
        )
        for gpu in gpus
    ]


@dataclass(frozen=True)
class MessageEntry:
    """One message of the sweep."""

    nbytes: int
    """Bytes of the reduced tensor."""
    seconds: float
    """Mean seconds of an all-reduce."""
    alg_bytes_per_s: float
    """`nbytes` over the time (algbw of nccl-tests)."""
    bus_bytes_per_s: float
    """The rate at each rank's link (busbw of nccl-tests)."""
    fitted_s: float
    """Seconds by the fit."""


@dataclass(frozen=True)
class LinkDocument(Document):
    """`roofscope ceilings --link N --format json`."""

    name: str
    """The library, and the number of ranks."""
    ranks: int
    alpha_s: float
    """Latency: seconds of an empty all-reduce."""
    bus_bytes_per_s: float
    """Bandwidth at each rank's link."""
    half_bytes: float
    """The message whose transfer takes as long as the latency."""
    points: Sequence[MessageEntry]


def link_document(link: Link) -> LinkDocument:
    """Return the document of a measured link, which has points."""
    ranks = link.points[0].ranks
    points = [
        view(MessageEntry, point, fitted_s=link.seconds("all_reduce", point.nbytes, ranks)) for point in link.points
    ]
    return view(LinkDocument, link, ranks=ranks, half_bytes=link.half_bytes(ranks), points=points)


def link_table(document: LinkDocument) -> TextTable:
    """Return a row per message: its time, both rates, and the time by the fit."""
    rows = [
        [
            message_size(point.nbytes),
            duration(point.seconds),
            scaled(point.alg_bytes_per_s, "B/s"),
            scaled(point.bus_bytes_per_s, "B/s"),
            f"{100 * (point.fitted_s / point.seconds - 1):+.0f} %",
        ]
        for point in document.points
    ]
    caption = "algbw: bytes over time; busbw: the rate at each rank's link; fit: its time compared with measured"
    return text_table(("message", "time", "algbw", "busbw", "fit"), rows, caption=caption)


def link_lines(document: LinkDocument) -> list[str]:
    """Return what the link is, what it means for a step, and how `place` uses it."""
    alpha_us, gb_per_s = 1e6 * document.alpha_s, document.bus_bytes_per_s / 1e9
    return [
        f"{document.name}: an all-reduce takes {duration(document.alpha_s)}, and the time of its bytes at"
        f" {scaled(document.bus_bytes_per_s, 'B/s')} (busbw).",
        f"Messages below {message_size(document.half_bytes)} wait mostly for latency: fewer messages help, fewer bytes"
        " hardly do.",
        f"Use it: roofscope place FILE --tp {document.ranks} --link {significant(alpha_us)},{significant(gb_per_s)}",
    ]


def message_size(nbytes: float) -> str:
    """Return the size of a message in KiB or MiB."""
    return f"{nbytes / 2**20:.3g} MiB" if nbytes >= 1 << 20 else f"{nbytes / 2**10:.3g} KiB"
