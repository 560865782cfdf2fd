"""The tokens-per-second table, for the terminal and for files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from profiler.diagnosis.step_time import TERMS
from profiler.record.run import CELL_KEY, Run
from profiler.units import duration, percent, scaled, significant

# What a flag is called in the table; the evidence in run.json has their full names.
# These say why a roof is far away, which needs no word where one binds.
_CAUSES = ("inefficient-kernels", "wasteful-path")
_SHORT_FLAGS = {
    "inefficient-kernels": "kernels",
    "wasteful-path": "copies",
    "kv-bound": "KV",
    "above-roof": "above roof",
}


def regimes(run: Run) -> dict[tuple[Any, ...], str]:
    """Each cell's regime, by CELL_KEY, with its weightiest flag in a word behind it."""
    return {tuple(item[name] for name in CELL_KEY): _regime(item) for item in run.document.evidence}


def _regime(item: dict[str, Any]) -> str:
    words = (
        word
        for flag, word in _SHORT_FLAGS.items()
        if flag in item["flags"] and not (flag in _CAUSES and item["regime"] == "compute-bound")
    )
    word = next(words, "")
    return f"{item['regime']} ({word})" if word else str(item["regime"])


def roofs_lines(run: Run) -> list[str]:
    """The measured roofs in words, with the datasheet beside them where there is one."""
    ceilings, device = run.document.ceilings, run.document.device
    dtype = run.document.model["dtype"]
    compute = ceilings["compute"].get(dtype)
    lines = [
        f"memory {scaled(ceilings['memory_bytes_per_s'], 'B/s')}{_of(ceilings['memory_bytes_per_s'], device, 'bytes')}"
    ]
    if compute:
        lines.append(f"compute {scaled(compute['per_s'], 'FLOP/s')} in {dtype}{_of(compute['per_s'], device, 'flops')}")
    dispatch_s = ceilings["dispatch_s"].get(run.document.engine["names"][0], {}).get("decode", {})
    smallest = min(dispatch_s, key=int, default=None)
    lines.append(f"dispatch {duration(dispatch_s[smallest])} a decode step" if smallest else "dispatch not measured")
    return lines


def breakdown_rows(run: Run) -> list[list[str]]:
    """A line for the step and one for each group in it, for the smallest and the largest cell of each phase."""
    cells: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for item in run.document.breakdown:
        cells.setdefault(tuple(item[name] for name in CELL_KEY), []).append(item)
    measured = run.cells.set_index(list(CELL_KEY))["latency_s"]
    rows = []
    for phase in ("prefill", "decode"):
        keys = sorted((key for key in cells if key[0] == phase), key=lambda key: key[1] * (key[2] or key[3]))
        for key in dict.fromkeys([*keys[:1], *keys[-1:]]):
            step_s, own_s = cells[key][0]["step_s"], float(measured.loc[key])
            name = f"{phase}, batch {key[1]} x {key[2] or key[3]}"
            rows.append([name, duration(step_s), f"hooks {100 * (step_s / own_s - 1):+.1f} %", *[""] * 4])
            rows += [_inside_row(item) for item in cells[key]]
    return rows


def _inside_row(item: dict[str, Any]) -> list[str]:
    time_s, flops, bytes_ = item["time_s"], item["flops"], item["bytes"]
    rates = ["-"] * 4
    if bytes_ and time_s:
        rates = [
            significant(flops / time_s / 1e12),
            significant(bytes_ / time_s / 1e9),
            significant(flops / bytes_),
            percent(item["roof_s"] / time_s),
        ]
    return [f"  {item['group'].replace('_', ' ')}", duration(time_s), percent(item["share"]), *rates]


def shown_cells(run: Run) -> list[dict[Any, Any]]:
    """The smallest and the largest measured cell of each phase of the first engine, as rows."""
    cells = run.cells[(run.cells["status"] == "ok") & (run.cells["engine"] == run.document.engine["names"][0])]
    found = []
    for phase in ("decode", "prefill"):
        of_phase = cells[cells["phase"] == phase]
        ordered = of_phase.sort_values(["batch_size", "prompt_len", "context_len"]).to_dict("records")
        found += [ordered[index] for index in dict.fromkeys((0, len(ordered) - 1)) if ordered]
    return found


def cell_name(row: Mapping[Any, Any]) -> str:
    """`decode 1 x 64 (static)`: phase, batch, prompt or context, and the engine unless it is the plain one."""
    engine = "" if row["engine"] == "eager" else f" ({row['engine']})"
    return f"{row['phase']} {row['batch_size']} x {row['prompt_len'] or row['context_len']}{engine}"


def split_rows(run: Run) -> list[list[str]]:
    """Name, time, and each term with how far it may be off, for the cells that `shown_cells` picks."""
    evidence = _evidence(run)
    rows = []
    for row in shown_cells(run):
        off = evidence.get(tuple(row[name] for name in CELL_KEY), {}).get("split_half_widths_s", {})
        terms = [
            f"{duration(row[term])} ± {duration(off[term])}" if off.get(term) else duration(row[term]) for term in TERMS
        ]
        rows.append([cell_name(row), duration(row["latency_s"]), *terms])
    return rows


def lever_rows(run: Run) -> list[list[str]]:
    """Cell, change, what it saves at most and why, for the cells that `shown_cells` picks; the largest first."""
    evidence = _evidence(run)
    return [
        [
            cell_name(row),
            lever["change"],
            duration(lever["saves_s"]),
            percent(lever["saves_s"] / row["latency_s"]),
            lever["because"],
        ]
        for row in shown_cells(run)
        for lever in evidence.get(tuple(row[name] for name in CELL_KEY), {}).get("levers", [])
        if lever["saves_s"] >= _WORTH_SHOWING * row["latency_s"]
    ]


_WORTH_SHOWING = 0.01


def card_rows(run: Run) -> list[list[str]]:
    """The most tokens/s that other cards' datasheets allow for the cells that `shown_cells` picks; `-`: no room."""
    evidence, rows = _evidence(run), []
    shown = shown_cells(run)
    found = [evidence.get(tuple(row[name] for name in CELL_KEY), {}).get("at_least_s_on", {}) for row in shown]
    for card in dict.fromkeys(name for times in found for name in times):
        figures = [
            significant(row["tokens_per_s"] * row["latency_s"] / times[card]) if times.get(card) else "-"
            for row, times in zip(shown, found, strict=True)
        ]
        rows.append([card, *figures])
    here = ["here, measured", *(significant(row["tokens_per_s"]) for row in shown)]
    heads = ["", *(cell_name(row) for row in shown)]
    return [heads, here, *rows] if rows else []


def _evidence(run: Run) -> dict[tuple[Any, ...], dict[str, Any]]:
    return {tuple(item[name] for name in CELL_KEY): item for item in run.document.evidence}


def engine_lines(run: Run) -> list[str]:
    """What each further engine does to a step against the first, with its interval."""
    lines = []
    for item in run.document.engine.get("differences", []):
        verb = "saves" if item["saves_s"] >= 0 else "costs"
        low_s, high_s = sorted((abs(item["low_s"]), abs(item["high_s"])))
        clear = item["low_s"] * item["high_s"] > 0
        interval = f"{duration(low_s)} to {duration(high_s)}" if clear else "not more than noise"
        if item["low_s"] == item["high_s"]:
            interval = "from a single time each"
        depth = item["prompt_len"] or item["context_len"]
        lines.append(
            f"{item['engine']} {verb} {duration(abs(item['saves_s']))} ({interval}) a {_UNIT[item['phase']]} against"
            f" {item['against']} at batch {item['batch_size']} x {depth}"
        )
    return lines


_UNIT = {"prefill": "prefill", "decode": "step"}


def instrument_line(run: Run) -> str:
    """What the instrument itself costs a step."""
    engine, cells = run.document.engine, run.cells[run.cells["phase"] == "decode"]
    mark_s, fastest_s = engine.get("instrument_s_per_step"), cells["latency_s"].min()
    if mark_s is None or pd.isna(fastest_s):
        return "what the instrument costs is not known"
    return f"the instrument costs {duration(mark_s)} a step, {100 * mark_s / fastest_s:.2g} % of the fastest one"


def unexplained_lines(run: Run) -> list[str]:
    """Which groups of operators carry what a cell's split does not explain, where that is a fifth of its time."""
    latency_s = run.cells.set_index(list(CELL_KEY))["latency_s"]
    left_s = run.cells.set_index(list(CELL_KEY))["unexplained_s"]
    lines = []
    for item in run.document.evidence:
        groups = item.get("unexplained_in_s")
        if not groups:
            continue
        key = tuple(item[name] for name in CELL_KEY)
        most = [f"{name.replace('_', ' ')} ({duration(excess)})" for name, excess in list(groups.items())[:2]]
        lines.append(
            f"{cell_name(item)}: {percent(left_s.loc[key] / latency_s.loc[key])} of its time is not explained;"
            f" under hooks most of it lies in {' and '.join(most)}"
        )
    return lines


def activity_lines(run: Run) -> list[str]:
    """Kernels, gaps and busy share of the steps that were traced, and what to type to look deeper."""
    on_cuda = run.document.device["kind"] == "cuda"
    what = "kernels" if on_cuda else "operators"
    lines = [
        f"{cell_name(item)}: {item['kernels']} {what}, one of them running {percent(item['busy_share'])} of the time;"
        f" {item['gaps']} gaps of {duration(item['gap_s'] / item['gaps']) if item['gaps'] else '0'} on average"
        for item in run.document.activity
    ]
    for name, breaks in run.document.engine.get("graph_breaks", {}).items():
        lines.append(f"{name}: {breaks} graph breaks")
    if lines and on_cuda:
        command = f"{run.document.command} --breakdown"
        lines.append(f"with NVTX ranges a group: nsys profile --trace=cuda,nvtx -o step {command}")
        lines.append(
            "bytes a kernel: ncu --nvtx --metrics dram__bytes_read.sum,dram__bytes_write.sum --clock-control none"
            f" {command}"
        )
    return lines


def quality_line(run: Run) -> str | None:
    """How far a quantised model's answers are from the unquantised one's, where that was asked for."""
    found = run.document.quality
    if not found:
        return None
    return (
        f"against the unquantised model, over {found['tokens']} tokens: mean KL divergence"
        f" {significant(found['mean_kl_nats'], 2)} nats, the same first choice at {percent(found['top1_agreement'])}"
        " of them (a sanity figure, not a benchmark)"
    )


def noise_lines(run: Run) -> list[str]:
    """Why the figures of some cells are not quiet."""
    return [
        f"{item['phase']} batch {item['batch_size']} x {item['prompt_len'] or item['context_len']}"
        f" ({item['engine']}): {', '.join(item['noise_reasons'])}"
        for item in run.document.evidence
        if item.get("noise_reasons")
    ]


def _of(value: float, device: dict[str, Any], kind: str) -> str:
    peak = device.get(f"datasheet_{kind}_per_s")
    return f" ({percent(value / peak)} of the datasheet)" if peak else ""
