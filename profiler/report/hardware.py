"""The device, its roofs and its health, and how the model is stored on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from profiler.device.device import Device
from profiler.facts.roofs import REFERENCE_HOST, Ceilings, HostPace, Roof
from profiler.facts.telemetry import ReadingRange
from profiler.report.blocks import DOCUMENTS, Lines, Section, TextTable, text_table
from profiler.store.folder import Run
from profiler.units import duration, percent, processors, scaled, significant


def precision(run: Run) -> Section:
    """How the weights are stored, and whether the quantised model still gives the same answers."""
    model = run.model
    quant = ""
    if model.quant != "none":
        scales = " with quantised scales" if model.double_quant else ""
        quant = f", weights in {model.quant}{scales}, products in {model.compute_dtype}"
    unpacked = f"; published as {model.unpacked_from}, here they are dense" if model.unpacked_from else ""
    text = (
        f"{model.dtype}{quant}: {scaled(model.storage_bytes, 'B')} of {model.weights} weights,"
        f" {8 * model.storage_bytes / model.params:.3g} bits per parameter{unpacked}; {model.attention} attention."
        " --quant none,nf4 measures several precisions on one grid."
    )
    note = "counted from the tensors as stored in memory; timing does not depend on their values"
    quality = [line for line in [quality_line(run)] if line]
    return Section("Precision", [Lines([text], "paragraph", media=DOCUMENTS), Lines(quality)], note)


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
    """The measured roofs, and the device's telemetry, settings and software."""
    info, document = run.document.device, run.document
    measured_at = datetime.fromtimestamp(document.ceilings.measured_at_unix_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
    sheet = f"; datasheet: {info.datasheet}" if info.datasheet else ""
    software = ", ".join(f"{name} {version}" for name, version in document.software.items())
    rows = [["device", f"{info.name}, {processors(info.threads, info.kind)}"], *health_rows(run)]
    health = text_table(("", ""), [*rows, ["software", software]], wrapped=("",))
    note = f"roofs measured on {measured_at}{sheet}; the rest during the run"
    return Section("Roofs, device and software", [_roofs_table(run), health], note, DOCUMENTS)


def _roofs_table(run: Run) -> TextTable:
    """Return a row per measured roof: name, median, quartiles, share of the datasheet, clock, samples, method."""
    ceilings, device = run.document.ceilings, run.document.device
    rows = [
        _roof_row(f"memory: {name}", "B/s", roof, device.datasheet_bytes_per_s)
        for name, roof in ceilings.memory.items()
    ]
    for name, roof in ceilings.compute.items():
        peak = device.datasheet_flops_per_s if name == run.model.dtype else None
        rows.append(_roof_row(f"compute: {name}", "FLOP/s", roof, peak))
        if burst := ceilings.full_clock.get(name):
            of_peak, how = percent(burst / peak) if peak else "-", "the fastest sample"
            rows.append([f"compute: {name}, until the power limit", scaled(burst, "FLOP/s"), "", of_peak, "-", "", how])
    if ceilings.weights is not None:
        rows.append(_roof_row("memory: the model's own weights", "B/s", ceilings.weights.roof, None))
        if ceilings.weights.stream is not None:
            rows.append(_roof_row("memory: a stream in the same pieces", "B/s", ceilings.weights.stream, None))
    rows += [_roof_row(f"links: {name}", "B/s", roof, None) for name, roof in ceilings.links.items()]
    headings = ("roof", "median", "quartiles", "of the datasheet", "clock", "samples", "method")
    return text_table(headings, rows, texts=("quartiles",), wrapped=("method",))


def _roof_row(name: str, unit: str, roof: Roof, peak: float | None) -> list[str]:
    return [
        name,
        scaled(roof.per_s, unit),
        f"{scaled(roof.low_per_s, '')} to {scaled(roof.high_per_s, '')}",
        percent(roof.per_s / peak) if peak else "-",
        scaled(roof.clock_hz, "Hz") if roof.clock_hz else "-",
        str(roof.samples),
        roof.method,
    ]


def ceilings_table(ceilings: Ceilings, datasheet_per_s: Mapping[str, float | None]) -> TextTable:
    """Return the measured roofs of one device, with quartiles and the datasheet's values.

    `datasheet_per_s` has FLOP/s by dtype and bytes/s as `bandwidth`; it is empty where there is no datasheet.
    """
    rows = [_roof_row(name, "FLOP/s", roof, datasheet_per_s.get(name)) for name, roof in ceilings.compute.items()]
    rows += [_roof_row(name, "B/s", roof, datasheet_per_s.get("bandwidth")) for name, roof in ceilings.memory.items()]
    rows += [
        [f"launch, {name.removesuffix('_s')}", duration(seconds), "", "-", "", "", "one tiny kernel"]
        for name, seconds in ceilings.launch.items()
    ]
    headings = ("roof", "measured", "quartiles", "of datasheet", "clock", "samples", "how")
    return text_table(headings, rows, wrapped=("how",))


def ceilings_section(
    device: Device, ceilings: Ceilings, datasheet_per_s: Mapping[str, float | None], warnings: Sequence[str]
) -> Section:
    """Return the roofs of one device: `ceilings_table`, its warnings, caches, links and the host's pace."""
    curve = ", ".join(f"{point.nbytes >> 20} MiB {scaled(point.bytes_per_s, 'B/s')}" for point in ceilings.curve)
    lines = [f"repeated reads: {curve}"]
    lines += [f"from {name}: {scaled(link.per_s, 'B/s')}" for name, link in ceilings.links.items()]
    lines += [host_words(ceilings.host)] if ceilings.host else []
    head = [f"{device.name}, {processors(device.threads, device.kind)}", *(f"warning: {text}" for text in warnings)]
    return Section("", [Lines(head), ceilings_table(ceilings, datasheet_per_s), Lines(lines)])


def host_words(host: HostPace) -> str:
    """`this host dispatches 1.9x slower than the reference, an AMD EPYC (Zen 4, 2.6 GHz)`."""
    pace = "as fast as"
    if host.index >= 1.05:
        pace = f"{host.index:.1f}x slower than"
    elif host.index <= 0.95:
        pace = f"{1 / host.index:.1f}x faster than"
    return f"this host dispatches {pace} the reference, an {REFERENCE_HOST}"


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
