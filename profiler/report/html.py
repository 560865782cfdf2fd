"""report.html: one self-contained file that opens offline; every figure says whether it was measured or derived."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, select_autoescape

from profiler.diagnosis.step_time import TERM_NAMES, TERMS
from profiler.record.run import Run
from profiler.report.glossary import footnotes
from profiler.report.lines import (
    activity_lines,
    breakdown_rows,
    card_rows,
    cell_name,
    engine_lines,
    instrument_line,
    lever_rows,
    noise_lines,
    quality_line,
    roofs_lines,
    split_rows,
    unexplained_lines,
)
from profiler.report.roofs import cache_levels, dispatch_roof
from profiler.units import duration, percent, scaled, significant

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 880, 460, 100, 50, 16, 16
_MARGIN = 2.5
_TABLE = (
    ("phase", "", None),
    ("engine", "", None),
    ("batch_size", "batch", None),
    ("prompt_len", "prompt", None),
    ("context_len", "context", None),
    ("status", "status", None),
    ("latency_s", "time", duration),
    ("half_width", "±", percent),
    ("p99_s", "p99", duration),
    ("ttft_s", "TTFT", duration),
    ("tokens_per_s", "tokens/s", significant),
    ("flops_per_s", "TFLOP/s", lambda value: significant(value / 1e12)),
    ("bytes_per_s", "GB/s", lambda value: significant(value / 1e9)),
    ("mfu", "MFU", percent),
    ("mbu", "MBU", percent),
    ("attained", "roof", percent),
    ("regime", "regime", None),
    ("confidence", "sure", None),
    ("noise", "noise", None),
)


def html_report(run: Run) -> str:
    """The report of a run as one HTML document; needs nothing but the run."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=select_autoescape(default=True), trim_blocks=True
    )
    cells = run.cells.copy()
    cells["half_width"] = (cells["latency_high_s"] - cells["latency_low_s"]) / 2 / cells["latency_s"]
    cells.loc[cells["samples"] < 2, "half_width"] = math.nan  # a single sample has no known width
    measured = cells[cells["status"] == "ok"]
    return environment.get_template("report.html.j2").render(
        run=run,
        document=run.document,
        roofs=roofs_lines(run),
        roof_rows=_roof_rows(run),
        chart=_roofline(run, measured) if len(measured) else None,
        bars=[_bar(row) for row in measured.to_dict("records")],
        split_names=TERM_NAMES,
        maps=_maps(measured),
        columns=[(column, label or column) for column, label, _ in _TABLE],
        rows=[_row(row) for row in cells.to_dict("records")],
        engines=engine_lines(run),
        instrument=instrument_line(run),
        noisy=noise_lines(run),
        scaling=[item for item in run.document.scaling if item["axis"] == "batch"],
        inside=breakdown_rows(run),
        uncertain=split_rows(run),
        active=[*activity_lines(run), *unexplained_lines(run)],
        levers=lever_rows(run),
        cards=card_rows(run),
        quality=quality_line(run),
        words=[line.replace("**", "", 2).split(": ", 1) for line in footnotes(run)] if len(measured) else [],
        duration=duration,
        scaled=scaled,
        significant=significant,
    )


def _row(row: dict[Any, Any]) -> list[dict[str, Any]]:
    """The cells of one table row: what is shown, and the plain value that sorting uses."""
    shown = []
    for column, _, show in _TABLE:
        value = row[column]
        missing = value is None or (isinstance(value, float) and math.isnan(value))
        text = "-" if missing else show(float(value)) if show else str(value)
        shown.append({"text": text, "sort": "" if missing else value, "number": show is not None})
    return shown


def _roof_rows(run: Run) -> list[dict[str, str]]:
    """Every measured roof with its spread, how it was measured, and its share of the datasheet."""
    ceilings, device = run.document.ceilings, run.document.device
    rows = []
    sheets = {"B/s": device.get("datasheet_bytes_per_s"), "FLOP/s": device.get("datasheet_flops_per_s")}
    for kind, unit in (("memory", "B/s"), ("compute", "FLOP/s"), ("links", "B/s")):
        for name, roof in ceilings.get(kind, {}).items():
            own = kind == "memory" or name == run.document.model["dtype"]
            peak = sheets[unit] if own and kind != "links" else None
            rows.append(
                {
                    "name": f"{kind}: {name}",
                    "value": scaled(roof["per_s"], unit),
                    "spread": f"{scaled(roof['low_per_s'], unit)} to {scaled(roof['high_per_s'], unit)}",
                    "share": percent(roof["per_s"] / peak) if peak else "-",
                    "clock": scaled(roof["clock_hz"], "Hz") if roof.get("clock_hz") else "-",
                    "method": roof["method"],
                }
            )
    return rows


def _bar(row: dict[Any, Any]) -> dict[str, Any]:
    """The split of one cell in percent of its time, positive parts stacked to the right of the negative ones."""
    shares = {column: 100 * row[column] / row["latency_s"] for column in TERMS}
    left = sum(min(share, 0.0) for share in shares.values())
    parts, at = [], 0.0
    for column, share in shares.items():
        start = left if share < 0 else at
        if share < 0:
            left -= share
        else:
            at += share
        parts.append(
            {
                "key": column.removesuffix("_s"),
                "name": TERM_NAMES[column],
                "start": start,
                "share": abs(share),
                "signed": share,
            }
        )
    return {"name": cell_name(row), "time": duration(row["latency_s"]), "parts": parts}


def _maps(cells: pd.DataFrame) -> list[dict[str, Any]]:
    """Regimes over batch and depth: one table a phase and engine."""
    found = []
    for (phase, engine), group in cells.groupby(["phase", "engine"], sort=False):
        depth = "prompt_len" if phase == "prefill" else "context_len"
        table = group.pivot_table(index="batch_size", columns=depth, values="regime", aggfunc="first")
        found.append(
            {
                "title": f"{phase} ({engine})",
                "depths": [int(value) for value in table.columns],
                "rows": [
                    (int(batch), [_text(value) for value in row])
                    for batch, row in zip(table.index, table.values, strict=True)
                ],
            }
        )
    return found


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _roofline(run: Run, cells: pd.DataFrame) -> dict[str, Any]:
    """Coordinates of the roofline picture: roofs as lines, cells as points with their words."""
    ceilings, device, dtype = run.document.ceilings, run.document.device, run.document.model["dtype"]
    bandwidth = float(ceilings["memory_bytes_per_s"])
    roofs = {name: float(roof["per_s"]) for name, roof in ceilings["compute"].items()}
    peak = roofs.get(dtype, max(roofs.values()))
    xs = [*cells["intensity"], peak / bandwidth]
    ys = [
        *cells["flops_per_s"],
        *roofs.values(),
        *([device["datasheet_flops_per_s"]] if device.get("datasheet_flops_per_s") else []),
    ]
    x_scale = _Scale(min(xs) / _MARGIN, max(xs) * _MARGIN, _LEFT, _WIDTH - _RIGHT)
    y_scale = _Scale(min(ys) / _MARGIN, max(ys) * _MARGIN, _HEIGHT - _BOTTOM, _TOP)
    lines = [
        _roof_line(
            "measured",
            f"measured: {scaled(bandwidth, 'B/s')}, {scaled(peak, 'FLOP/s')} {dtype}",
            bandwidth,
            peak,
            x_scale,
            y_scale,
        )
    ]
    for name, value in roofs.items():
        if name != dtype:
            lines.append(
                _roof_line("other", f"measured: {scaled(value, 'FLOP/s')} {name}", bandwidth, value, x_scale, y_scale)
            )
    for level in cache_levels(run):
        name = f"measured: a cache, at {level.nbytes >> 20} MiB, {scaled(level.bytes_per_s, 'B/s')}"
        lines.append(_roof_line("cache", name, level.bytes_per_s, peak, x_scale, y_scale))
    if (dispatch := dispatch_roof(run)) is not None:
        name = f"measured: dispatch of a decode step, {duration(dispatch.step_s)}"
        lines.append(_roof_line("dispatch", name, dispatch.bytes_per_s, peak, x_scale, y_scale))
    for where, link in ceilings.get("links", {}).items():
        lines.append(
            _roof_line(
                "link",
                f"measured: from the {where}, {scaled(link['per_s'], 'B/s')}",
                link["per_s"],
                peak,
                x_scale,
                y_scale,
            )
        )
    if device.get("datasheet_bytes_per_s") and device.get("datasheet_flops_per_s"):
        sheet = device["datasheet_bytes_per_s"], device["datasheet_flops_per_s"]
        lines.append(
            _roof_line(
                "sheet",
                f"datasheet (dense): {scaled(sheet[0], 'B/s')}, {scaled(sheet[1], 'FLOP/s')}",
                *sheet,
                x_scale,
                y_scale,
            )
        )
    points = [
        {
            "x": round(x_scale(row["intensity"]), 1),
            "y": round(y_scale(row["flops_per_s"]), 1),
            "phase": row["phase"],
            "title": f"{cell_name(row)}: {duration(row['latency_s'])}, {significant(row['tokens_per_s'])} tokens/s,"
            f" {significant(row['intensity'])} FLOP/byte, {scaled(row['flops_per_s'], 'FLOP/s')},"
            f" {percent(row['attained'])} of the roofline, {row['regime']}",
        }
        for row in cells.to_dict("records")
    ]
    return {
        "width": _WIDTH,
        "height": _HEIGHT,
        "bottom": _HEIGHT - _BOTTOM,
        "left": _LEFT,
        "right": _WIDTH - _RIGHT,
        "top": _TOP,
        "lines": lines,
        "points": points,
        "x_ticks": [(round(x_scale(value), 1), significant(value)) for value in x_scale.decades()],
        "y_ticks": [(round(y_scale(value), 1), scaled(value, "FLOP/s")) for value in y_scale.decades()],
    }


class _Scale:
    """A logarithmic axis: value -> pixels."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self._low, self._high = math.log10(low), math.log10(high)
        self._start, self._end = start, end

    def __call__(self, value: float) -> float:
        share = (math.log10(value) - self._low) / (self._high - self._low)
        return self._start + share * (self._end - self._start)

    @property
    def low(self) -> float:
        return float(10**self._low)

    @property
    def high(self) -> float:
        return float(10**self._high)

    def decades(self) -> Sequence[float]:
        return [10.0**power for power in range(math.ceil(self._low), math.floor(self._high) + 1)]


def _roof_line(kind: str, title: str, bandwidth: float, peak: float, x: _Scale, y: _Scale) -> dict[str, str]:
    ridge = min(max(peak / bandwidth, x.low), x.high)
    ends = [
        (x.low, min(x.low * bandwidth, peak)),
        (ridge, min(ridge * bandwidth, peak)),
        (x.high, min(x.high * bandwidth, peak)),
    ]
    if kind == "other":
        ends = ends[1:]
    # The slanted part begins where it enters the picture.
    if ends[0][1] < y.low and kind != "other":
        ends[0] = (y.low / bandwidth, y.low)
    return {"kind": kind, "title": title, "points": " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in ends)}
