"""Rows of the tables that terminal, HTML and Markdown share."""

from __future__ import annotations

import math
from dataclasses import replace

from profiler.facts.roofs import Roof
from profiler.facts.telemetry import ReadingRange
from profiler.grid.cells import PHASES, Cell, CellKey, Phase
from profiler.judge.breakdown import TERM_NAMES
from profiler.judge.cells import CellEvidence, CellResult
from profiler.judge.engine_differences import where_it_lies
from profiler.judge.module_times import GroupTime
from profiler.report.breakdown_bars import WORTH_SHOWING
from profiler.report.selection import evidence_of, selected_cells
from profiler.report.sentences import engine_claims, interval
from profiler.store.folder import Run
from profiler.units import duration, percent, saving, scaled, significant

TableRow = list[str]


def module_time_rows(run: Run) -> list[TableRow]:
    """Return a row per step and one per module group in it, for the smallest and the largest cell of each phase."""
    groups: dict[CellKey, list[GroupTime]] = {}
    for item in run.document.breakdown:
        groups.setdefault(item.key, []).append(item)
    results, rows = run.by_key(), []
    for phase in PHASES:
        keys = sorted(
            (key for key in groups if key.phase == phase), key=lambda key: key.cell.batch_size * key.cell.depth
        )
        for key in dict.fromkeys([*keys[:1], *keys[-1:]]):
            step_s, own_s = groups[key][0].step_s, results[key].latency_s
            rows.append([key.name, duration(step_s), f"hooks {100 * (step_s / own_s - 1):+.1f} %", *[""] * 4])
            rows += [_inside_row(item) for item in groups[key]]
    return rows


def _inside_row(item: GroupTime) -> TableRow:
    rates = ["-"] * 4
    if item.bytes and item.time_s:
        rates = [
            significant(item.flops / item.time_s / 1e12),
            significant(item.bytes / item.time_s / 1e9),
            significant(item.flops / item.bytes),
            percent(item.roof_s / item.time_s),
        ]
    return [f"  {item.group.replace('_', ' ')}", duration(item.time_s), percent(item.share), *rates]


def waiting_rows(run: Run) -> list[TableRow]:
    """Return a row per measured cell: p50, p90 and p99 of the time to first token, and of the time per output token.

    Tokens of one sequence are one decode step apart. A percentile that needs more samples than the cell has is `-`.
    Where new KV lengths cost time (`has_first_uses`), the step at such a length follows.
    """
    evidence, new_lengths = evidence_of(run), has_first_uses(run)
    results: dict[Cell, dict[Phase, CellResult]] = {}
    for result in run.measured:
        results.setdefault(result.key.cell, {})[result.phase] = result
    rows = []
    for cell, phases in results.items():
        first, step = phases.get("prefill"), phases.get("decode")
        ttft_s = (first.ttft_s, first.ttft_p90_s, first.ttft_p99_s) if first else _NO_PERCENTILES
        tpot_s = (step.latency_s, step.p90_s, step.p99_s) if step else _NO_PERCENTILES
        uses = [duration(evidence[step.key].first_use_s or math.nan)] if step and new_lengths else [""] * new_lengths
        samples = [str(each or 0) for each in (first.visits if first else 0, step.samples if step else 0)]
        rows.append([cell.name, *map(duration, ttft_s), *map(duration, tpot_s), *uses, *samples])
    return rows


def has_first_uses(run: Run) -> bool:
    """Whether a decode step of the run takes longer at a KV length that is new to the process."""
    return any(item.first_use_s is not None for item in run.document.evidence)


_NO_PERCENTILES = (math.nan,) * 3


def breakdown_rows(run: Run) -> list[TableRow]:
    """Return the time breakdown of the cells of `selected_cells`: a heading, then a row per term with half-widths."""
    evidence, shown = evidence_of(run), selected_cells(run)
    if not shown:
        return []
    rows = [["", *(result.key.name for result in shown)]]
    rows.append(["measured", *(duration(result.latency_s) for result in shown)])
    return rows + [
        [name, *(_term(term, result, evidence.get(result.key)) for result in shown)]
        for term, name in TERM_NAMES.items()
        if any(getattr(result, term) for result in shown)
    ]


def _term(term: str, result: CellResult, evidence: CellEvidence | None) -> str:
    off_s = evidence.split_half_widths_s.get(term, 0.0) if evidence else 0.0
    text = duration(getattr(result, term))
    return f"{text} ± {duration(off_s)}" if off_s else text


def lever_rows(run: Run) -> list[TableRow]:
    """Return cell, change, time saved (or lost), its share and the reason, for the cells of `selected_cells`."""
    evidence = evidence_of(run)
    return [
        [
            result.key.name,
            lever.change,
            lever.amount,
            percent(lever.saves_s / result.latency_s),
            f"{lever.basis}: {lever.because}",
        ]
        for result in selected_cells(run)
        if result.key in evidence
        for lever in evidence[result.key].levers
        if abs(lever.saves_s) >= WORTH_SHOWING * result.latency_s
    ]


def card_rows(run: Run) -> list[TableRow]:
    """Return the most tokens/s that other GPUs' datasheets allow the cells of `selected_cells`, after a heading.

    A cell that does not fit a GPU gets `does not fit`.
    """
    evidence, shown = evidence_of(run), selected_cells(run)
    cards = list(dict.fromkeys(name for item in evidence.values() for name in item.at_least_s_on))
    if not cards:
        return []
    rows = [["", *(result.key.name for result in shown)]]
    rows.append(["here, measured", *(significant(result.tokens_per_s) for result in shown)])
    return rows + [[card, *(_on_card(card, result, evidence.get(result.key)) for result in shown)] for card in cards]


def _on_card(card: str, result: CellResult, evidence: CellEvidence | None) -> str:
    floor_s = evidence.at_least_s_on.get(card) if evidence else None
    return significant(result.tokens_per_s * result.latency_s / floor_s) if floor_s else "does not fit"


def engine_rows(run: Run) -> list[TableRow]:
    """Return cell, engine, time saved against the first engine, its interval and terms, for each claim."""
    return [
        [
            replace(item.key, cell=replace(item.key.cell, engine=item.against)).name,
            item.engine,
            saving(item.saves_s),
            interval(item),
            ", ".join(where_it_lies(item)),
        ]
        for item in engine_claims(run)
    ]


def roof_rows(run: Run) -> list[TableRow]:
    """Return a row per measured roof: name, median, quartiles, share of the datasheet, clock, method."""
    ceilings, device = run.document.ceilings, run.document.device
    rows = [
        _roof_row(f"memory: {name}", "B/s", roof, device.datasheet_bytes_per_s)
        for name, roof in ceilings.memory.items()
    ]
    for name, roof in ceilings.compute.items():
        peak = device.datasheet_flops_per_s if name == run.model.dtype else None
        rows.append(_roof_row(f"compute: {name}", "FLOP/s", roof, peak))
    if ceilings.weights is not None:
        rows.append(_roof_row("memory: the model's own weights", "B/s", ceilings.weights.roof, None))
        if ceilings.weights.stream is not None:
            rows.append(_roof_row("memory: a stream in the same pieces", "B/s", ceilings.weights.stream, None))
    rows += [_roof_row(f"links: {name}", "B/s", roof, None) for name, roof in ceilings.links.items()]
    return rows


def _roof_row(name: str, unit: str, roof: Roof, peak: float | None) -> TableRow:
    return [
        name,
        scaled(roof.per_s, unit),
        f"{scaled(roof.low_per_s, unit)} to {scaled(roof.high_per_s, unit)}",
        percent(roof.per_s / peak) if peak else "-",
        scaled(roof.clock_hz, "Hz") if roof.clock_hz else "-",
        roof.method,
    ]


def health_rows(run: Run) -> list[TableRow]:
    """Return the device's telemetry during the run and its settings; the last row names what is not available."""
    health = run.document.health
    known: dict[str, str | None] = {}
    if readings := health.readings:
        known = {
            "readings": str(readings.readings),
            "clock": _spread(readings.clock_hz, "Hz"),
            "power": _spread(readings.power_w, "W"),
            "SMs active": _spread(readings.sm_active, ""),
            "memory active": _spread(readings.memory_active, ""),
            "temperature": _spread(readings.temperature_c, "°C"),
            "cores busy with other processes": _spread(readings.busy_cores_elsewhere, ""),
            "other processes on the device": _text(readings.other_processes),
            "throttled by": None if readings.throttle is None else ", ".join(readings.throttle) or "nothing",
        }
    known["power at rest"] = None if health.idle_power_w is None else scaled(health.idle_power_w, "W")
    known |= dict(_setting(name, value) for name, value in health.settings.items())
    unseen = [*(name for name, text in known.items() if text is None), *health.not_seen]
    missing = dict.fromkeys(name.replace("_", " ") for name in unseen)
    rows = [[name, text] for name, text in known.items() if text is not None]
    return [*rows, ["not available here", ", ".join(missing)]] if missing else rows


def _setting(name: str, value: str | float | None) -> tuple[str, str | None]:
    """Return a setting's name in words, and its value with the unit that the name ends with."""
    if name.endswith("_w"):
        return name.removesuffix("_w").replace("_", " "), None if value is None else f"{value} W"
    return name.replace("_", " "), _text(value)


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _spread(spread: ReadingRange | None, unit: str) -> str | None:
    if spread is None:
        return None
    low, middle, high = (_plain(value, unit) for value in (spread.low, spread.median, spread.high))
    return middle if low == high else f"{middle} ({low} to {high})"


def _plain(value: float, unit: str) -> str:
    return scaled(value if value >= 0.005 else 0.0, unit).strip()
