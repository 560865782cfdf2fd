"""The device: its measured ceilings, its health, how the model is stored on it; datasheets, links, several GPUs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from profiler.data.datasheets import Datasheet
from profiler.data.links import Link
from profiler.device.device import Device
from profiler.facts.ceilings import REFERENCE_HOST, REFERENCE_HOST_STEP_S, Ceiling, Ceilings
from profiler.facts.telemetry import ReadingRange
from profiler.json_document import Document, view
from profiler.judge.device_health import DeviceHealth
from profiler.report.blocks import HTML, Lines, Section, TextTable, text_table
from profiler.store.folder import Run
from profiler.units import duration, percent, processors, scaled, significant


def quality_line(run: Run) -> str | None:
    """Return the divergence of a quantised model from the unquantised one; None without `--check-quality`."""
    quality = run.document.quality
    if quality is None:
        return None
    return (
        f"compared with the unquantised model, over {quality.tokens} tokens: mean KL divergence"
        f" {significant(quality.mean_kl_nats, 2)} nats, the same first choice at {percent(quality.top1_agreement)}"
        " of them (a sanity figure, not a benchmark)"
    )


def device(run: Run) -> Section:
    """How the weights are stored, whether the answers are still the same, the ceilings, telemetry and software."""
    info, document = run.document.device, run.document
    measured_at = datetime.fromtimestamp(document.ceilings.measured_at_unix_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
    sheet = f"; datasheet: {info.datasheet}" if info.datasheet else ""
    software = ", ".join(f"{name} {version}" for name, version in document.software.items())
    rows = [["device", f"{info.name}, {processors(info.threads, info.kind)}"], *health_rows(run)]
    of_sheet = {run.model.dtype: info.datasheet_flops_per_s, "bandwidth": info.datasheet_bytes_per_s}
    blocks = [
        Lines([_precision_line(run)], "paragraph", media=HTML),
        Lines([line for line in [quality_line(run)] if line]),
        replace(ceilings_table(document.ceilings.ceilings, of_sheet, document.ceilings.full_clock), media=HTML),
        text_table(("", ""), [*rows, ["software", software]], wrapped=("",), media=HTML),
    ]
    note = f"ceilings measured on {measured_at}{sheet}; the rest during the run"
    return Section("Weights, ceilings, device and software", blocks, note, folded=True)


def _precision_line(run: Run) -> str:
    model = run.model
    quant = ""
    if model.quant != "none":
        scales = " with quantised scales" if model.double_quant else ""
        quant = f", weights in {model.quant}{scales}, matmuls in {model.compute_dtype}"
    unpacked = f"; published as {model.unpacked_from}, here they are dense" if model.unpacked_from else ""
    return (
        f"{model.dtype}{quant}: {scaled(model.storage_bytes, 'B')} of {model.weights} weights,"
        f" {8 * model.storage_bytes / model.params:.3g} bits per parameter{unpacked}; {model.attention} attention."
        " --quant none,nf4 measures several precisions on one grid."
    )


def _ceiling_row(name: str, unit: str, ceiling: Ceiling, peak: float | None) -> list[str]:
    return [
        name,
        scaled(ceiling.per_s, unit),
        f"{scaled(ceiling.low_per_s, '')} to {scaled(ceiling.high_per_s, '')}",
        percent(ceiling.per_s / peak) if peak else "-",
        scaled(ceiling.clock_hz, "Hz") if ceiling.clock_hz else "-",
        str(ceiling.samples),
        ceiling.method,
    ]


def ceilings_table(
    ceilings: Ceilings, datasheet_per_s: Mapping[str, float | None], full_clock: Mapping[str, float] | None = None
) -> TextTable:
    """Return the measured ceilings of one device: median, quartiles, share of the datasheet, clock, samples, method.

    `datasheet_per_s` has FLOP/s by dtype and bytes/s as `bandwidth`; it is empty where there is no datasheet.
    `full_clock` has the FLOP/s by dtype until the power limit.
    """
    bandwidth, rows = datasheet_per_s.get("bandwidth"), []
    for name, ceiling in ceilings.compute.items():
        peak, burst = datasheet_per_s.get(name), (full_clock or {}).get(name)
        rows.append(_ceiling_row(name, "FLOP/s", ceiling, peak))
        if burst:
            of_peak, how = percent(burst / peak) if peak else "-", "the first 20 ms, or the run's own matmuls"
            rows.append([f"{name}, until the power limit", scaled(burst, "FLOP/s"), "", of_peak, "-", "", how])
    rows += [_ceiling_row(name, "B/s", ceiling, bandwidth) for name, ceiling in ceilings.memory.items()]
    if ceilings.weights is not None:
        rows.append(_ceiling_row("the model's own weights", "B/s", ceilings.weights.ceiling, None))
        if ceilings.weights.stream is not None:
            rows.append(_ceiling_row("a stream in the same pieces", "B/s", ceilings.weights.stream, None))
    rows += [_ceiling_row(f"from the {name}", "B/s", ceiling, None) for name, ceiling in ceilings.links.items()]
    rows += [
        [f"launch, {name.removesuffix('_s')}", duration(seconds), "", "-", "", "", "one tiny kernel"]
        for name, seconds in ceilings.launch.items()
    ]
    headings = ("ceiling", "measured", "quartiles", "of datasheet", "clock", "samples", "how")
    return text_table(headings, rows, wrapped=("how",))


def ceilings_section(
    on: Device, ceilings: Ceilings, datasheet_per_s: Mapping[str, float | None], warnings: Sequence[str]
) -> Section:
    """Return the ceilings of one device: its warnings, `ceilings_table`, caches and the host's pace."""
    curve = ", ".join(f"{point.nbytes >> 20} MiB {scaled(point.bytes_per_s, 'B/s')}" for point in ceilings.curve)
    host = [f"launching a standard step takes this host {duration(ceilings.host.step_s)}"] if ceilings.host else []
    head = [f"{on.name}, {processors(on.threads, on.kind)}", *(f"warning: {text}" for text in warnings)]
    lines = [f"repeated reads: {curve}", *host]
    return Section("", [Lines(head), ceilings_table(ceilings, datasheet_per_s), Lines(lines)])


def health_rows(run: Run) -> list[list[str]]:
    """Return the device's telemetry during the run and its settings; the last row names what is not available."""
    health = run.document.health
    known: dict[str, str | None] = {}
    if readings := health.readings:
        others = readings.other_processes
        known = {
            "readings": str(readings.readings),
            "clock": _spread(readings.clock_hz, "Hz"),
            "power": _spread(readings.power_w, "W"),
            "SMs active": _spread(readings.sm_active, ""),
            "memory active": _spread(readings.memory_active, ""),
            "temperature": _spread(readings.temperature_c, "°C"),
            "cores busy with other processes": _spread(readings.busy_cores_elsewhere, ""),
            "other processes on the device": None if others is None else str(others),
            "throttled by": None if readings.throttle is None else ", ".join(readings.throttle) or "nothing",
        }
    known["power at rest"] = None if health.idle_power_w is None else scaled(health.idle_power_w, "W")
    for name, value in health.settings.items():
        unit = " W" if name.endswith("_w") else ""  # a setting's name ends with its unit
        known[name.removesuffix("_w").replace("_", " ")] = None if value is None else f"{value}{unit}"
    unseen = [*(name for name, text in known.items() if text is None), *health.not_seen]
    missing = dict.fromkeys(name.replace("_", " ") for name in unseen)
    rows = [[name, text] for name, text in known.items() if text is not None]
    return [*rows, ["not available here", ", ".join(missing)]] if missing else rows


def _spread(spread: ReadingRange | None, unit: str) -> str | None:
    if spread is None:
        return None
    readings = (spread.low, spread.median, spread.high)
    low, middle, high = (scaled(value if value >= 0.005 else 0.0, unit).strip() for value in readings)
    return middle if low == high else f"{middle} ({low} to {high})"


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
    columns = [_figures(gpu) for gpu in gpus]
    rows = [["year", *(str(gpu.year) for gpu in gpus), *([""] if len(gpus) == 2 else [])]]
    for name in columns[0]:
        values = [figures[name] for figures in columns]
        ratio = [f"{values[1] / values[0]:.2f}x" if values[0] and values[1] else "-"] if len(gpus) == 2 else []
        rows.append([name, *map(_shown, values), *ratio])
    headings = ["dense peaks", *(gpu.gpu for gpu in gpus), *(["second / first"] if len(gpus) == 2 else [])]
    sources = [f"sustained, {gpu.gpu}: {gpu.sustained_source}." for gpu in gpus if gpu.sustained_source]
    return text_table(headings, rows, caption=" ".join(sources))


def _figures(gpu: Datasheet) -> dict[str, float | None]:
    units = {name: "TOP/s" if name == "int8" else "TFLOP/s" for name in _DTYPES}
    return {
        "memory, GiB": gpu.memory_bytes / 2**30,
        "bandwidth, GB/s": gpu.bandwidth_bytes_per_s / 1e9,
        "L2, MiB": _per(gpu.l2_bytes, 2**20),
        "SMs": gpu.sm_count,
        **{f"{name}, {units[name]}": _per(gpu.peak_flops_per_s(dtype), 1e12) for name, dtype in _DTYPES.items()},
        **{f"ridge {name}, FLOP/byte": gpu.ridge_flops_per_byte(dtype) for name, dtype in _RIDGES.items()},
        "link, GB/s": _per(gpu.link_bytes_per_s, 1e9),
        "TDP, W": gpu.tdp_w,
        "16 bits sustained, TFLOP/s": _per(gpu.sustained_flops_per_s, 1e12),
        "copies sustained, GB/s": _per(gpu.sustained_copy_bytes_per_s, 1e9),
    }


def _shown(value: float | None) -> str:
    return "-" if value is None else str(value) if isinstance(value, int) else significant(value)


def _per(value: float | None, unit: float) -> float | None:
    return value / unit if value else None


def gpus_table(gpus: Sequence[Datasheet]) -> TextTable:
    """Return a row per datasheet: memory, bandwidth, dense peaks, and the ridge point of 16-bit matmuls."""
    rows = []
    for gpu in gpus:
        best16 = gpu.peak_bf16_flops_per_s or gpu.peak_fp16_flops_per_s
        peaks = {name: gpu.peak_flops_per_s(dtype) for name, dtype in _DTYPES.items() if name != "bf16"}
        row = [
            gpu.gpu + (" ?" if any(name.startswith(_SHOWN) for name in gpu.uncertain) else ""),
            f"{gpu.memory_bytes / 2**30:.0f}",
            f"{gpu.bandwidth_bytes_per_s / 1e9:.0f}",
            *(_shown(_per(peak, 1e12)) for peak in (peaks | {"fp16": best16}).values()),
            significant(best16 / gpu.bandwidth_bytes_per_s) if best16 else "-",
            f"{gpu.tdp_w:.0f}",
        ]
        rows.append(row)
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
    names, share = " and ".join(item.device for item in devices), percent(slowest.slower_share)
    return [
        f"No GPU is slower than the others: {names} agree ({slowest.device} is {percent(slowest.behind)} slower at"
        f" most, and by more than noise in {share} of the cells)."
    ]


@dataclass(frozen=True)
class DeviceEntry(Device):
    """The device whose ceilings were measured."""

    datasheet: str | None  # type: ignore[assignment]
    """The name of its datasheet; null without one."""


@dataclass(frozen=True)
class ReferenceHost:
    """The host that others are compared with."""

    name: str
    step_s: float
    """Overhead of a decode step of the standard model."""


@dataclass(frozen=True)
class CeilingsContext:
    """What `roofscope ceilings --format json` has next to the fields of the measured `Ceilings`."""

    device: DeviceEntry
    plateau: bool
    """Whether the two largest sizes are read equally fast; otherwise a cache still serves a part."""
    memory_bytes_per_s: float | None
    """The memory ceiling beyond all caches; null if not measured."""
    host_index: float | None
    """Overhead of this host relative to the reference host; null if not measured."""
    reference_host: ReferenceHost
    datasheet_per_s: Mapping[str, float | None]
    """Dense peaks by dtype in FLOP/s, and `bandwidth` in bytes/s; empty without a datasheet."""
    warnings: Sequence[str]


def ceilings_document(
    device: Device, measured: Ceilings, datasheet_per_s: Mapping[str, float | None], warnings: Sequence[str]
) -> dict[str, object]:
    """Return the document of a device's measured ceilings: the fields of `Ceilings` and of `CeilingsContext`."""
    context = CeilingsContext(
        device=DeviceEntry(**{**vars(device), "datasheet": device.datasheet and device.datasheet.gpu}),
        plateau=measured.plateau,
        memory_bytes_per_s=measured.memory_bytes_per_s if measured.memory else None,
        host_index=measured.host.index if measured.host else None,
        reference_host=ReferenceHost(REFERENCE_HOST, REFERENCE_HOST_STEP_S),
        datasheet_per_s=datasheet_per_s,
        warnings=warnings,
    )
    return vars(context) | vars(measured)


@dataclass(frozen=True)
class GpuEntry(Datasheet):
    """One datasheet: `roofscope gpus --format json` is a list of them."""

    ridge_flops_per_byte: Mapping[str, float | None] = field(kw_only=True)  # type: ignore[assignment]
    """By dtype; null where the datasheet has no rate."""


def gpu_rows(gpus: Sequence[Datasheet]) -> list[GpuEntry]:
    dtypes = (*_RIDGES.values(), "bfloat16")
    return [
        view(GpuEntry, gpu, ridge_flops_per_byte={name: gpu.ridge_flops_per_byte(name) for name in dtypes})
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
    return f"{nbytes / 2**20:.3g} MiB" if nbytes >= 1 << 20 else f"{nbytes / 2**10:.3g} KiB"
