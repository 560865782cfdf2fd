"""The tokens-per-second table, for the terminal and for files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
from rich import box
from rich.table import Table
from rich.text import Text

from profiler.diagnosis.step_time import TERM_NAMES, TERMS
from profiler.runstore import CELL_KEY, Run
from profiler.units import duration, percent, scaled, significant

TOKENS_TABLE_COLUMNS = (
    "phase",
    "batch_size",
    "prompt_len",
    "context_len",
    "status",
    "latency_s",
    "latency_low_s",
    "latency_high_s",
    "tokens_per_s",
    "tokens_per_s_per_seq",
    "flops_per_s",
    "bytes_per_s",
    "mfu",
    "mbu",
    "attained",
    "regime",
    "confidence",
    "engine",
    "ttft_s",
    "p90_s",
    "p99_s",
)


def tokens_table(run: Run) -> pd.DataFrame:
    """The columns of the tokens-per-second table, one row a phase and cell, as numbers with their units in names."""
    return run.cells[list(TOKENS_TABLE_COLUMNS)]


def terminal_table(run: Run) -> Table:
    """The same as a rich table that fits 100 columns."""
    has_datasheet = bool(run.cells["mfu"].notna().any() or run.cells["mbu"].notna().any())
    engines = run.cells["engine"].nunique() > 1
    # 100 characters have to do: further columns push the gaps out, and then the rates that MFU and MBU repeat.
    padding = (0, 0 if has_datasheet or engines else 1, 0, 0)
    rates = not (has_datasheet and engines)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=padding)
    for name in ("phase", *(["engine"] if engines else [])):
        table.add_column(name, no_wrap=True)
    numbers = ["batch", "tokens", "time", "±", "tok/s", *(["TFLOP/s", "GB/s"] if rates else [])]
    for name in (*numbers, *(["MFU", "MBU"] if has_datasheet else []), "roof"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("regime", "sure"):
        table.add_column(name, no_wrap=True)
    words = regimes(run)
    last_phase = None
    for row in run.cells.to_dict("records"):
        if last_phase is not None and row["phase"] != last_phase:
            table.add_section()
        last_phase = row["phase"]
        cell = tuple(row[name] for name in CELL_KEY)
        table.add_row(
            *_terminal_row(row, words.get(cell, ""), has_datasheet=has_datasheet, engines=engines, rates=rates)
        )
    return table


_SHORT_CONFIDENCE = {"high": "high", "medium": "med", "low": "low"}
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


def _terminal_row(row: dict[Any, Any], regime: str, *, has_datasheet: bool, engines: bool, rates: bool) -> list[str]:
    tokens = row["prompt_len"] if row["phase"] == "prefill" else row["context_len"]
    head = [row["phase"], *([row["engine"]] if engines else []), str(row["batch_size"]), str(tokens)]
    if row["status"] != "ok":
        return [*head, *["-"] * (4 + 2 * rates + 2 * has_datasheet), f"({row['status']})", ""]
    half_width = (row["latency_high_s"] - row["latency_low_s"]) / 2 / row["latency_s"]
    noise = "" if row["noise"] == "quiet" else "~"
    interval = f"{noise}{100 * half_width:.1f}%" if row["samples"] > 1 else "n=1"
    return [
        *head,
        duration(row["latency_s"]),
        interval,
        significant(row["tokens_per_s"]),
        *([significant(row["flops_per_s"] / 1e12), significant(row["bytes_per_s"] / 1e9)] if rates else []),
        *([_share(row["mfu"]), _share(row["mbu"])] if has_datasheet else []),
        percent(row["attained"]),
        regime,
        _SHORT_CONFIDENCE.get(row["confidence"], ""),
    ]


def _share(value: float) -> str:
    return "-" if pd.isna(value) else percent(value)


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


def breakdown_table(run: Run) -> Table:
    """Where the time inside a step goes: for the smallest and the largest cell of each phase."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("inside", no_wrap=True)
    for name in ("time", "share", "TFLOP/s", "GB/s", "FLOP/byte", "roof"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in breakdown_rows(run):
        if not row[0].startswith(" ") and table.row_count:
            table.add_section()
        table.add_row(*row)
    return table


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


_BAR_WIDTH = 48
_MOST_BARS_A_PHASE = 8
# A letter and a colour each, so that the bars read the same without colours.
_BAR_STYLE = {
    "weights_s": ("w", "blue"),
    "kv_s": ("v", "cyan"),
    "compute_s": ("a", "yellow"),
    "dequantise_s": ("q", "green"),
    "kernel_s": ("k", "red"),
    "avoidable_s": ("x", "bright_yellow"),
    "dispatch_s": ("d", "magenta"),
    "unexplained_s": ("?", "bright_black"),
}
BAR_LEGEND = ", ".join(f"{letter} {TERM_NAMES[term]}" for term, (letter, _) in _BAR_STYLE.items())


def split_bars(run: Run) -> list[tuple[str, Text, str]]:
    """Each cell's time as a bar of its terms, with what is negative beside it; of many cells those that span them."""
    cells = run.cells[(run.cells["status"] == "ok") & (run.cells["engine"] == run.document.engine["names"][0])]
    shown = []
    for phase in ("prefill", "decode"):
        rows = cells[cells["phase"] == phase].to_dict("records")
        steps = min(_MOST_BARS_A_PHASE, len(rows))
        shown += [rows[round(index * (len(rows) - 1) / max(1, steps - 1))] for index in range(steps)]
    return [(cell_name(row), _bar(row), _below_zero(row)) for row in shown]


def _bar(row: Mapping[Any, Any]) -> Text:
    """As many letters as a term's share of the positive terms; edges are rounded, so that the bar is always full."""
    shares = {term: max(0.0, row[term]) for term in _BAR_STYLE}
    whole, reached, bar = sum(shares.values()) or 1.0, 0.0, Text()
    for term, (letter, color) in _BAR_STYLE.items():
        start = round(_BAR_WIDTH * reached / whole)
        reached += shares[term]
        bar.append(letter * (round(_BAR_WIDTH * reached / whole) - start), style=color)
    return bar


def _below_zero(row: Mapping[Any, Any]) -> str:
    below = {TERM_NAMES[term]: row[term] / row["latency_s"] for term in _BAR_STYLE if row[term] < 0}
    name = min(below, key=lambda key: below[key], default="")
    return f"{name} {percent(below[name])}" if name and below[name] <= -_WORTH_SHOWING else ""


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


def markdown_table(frame: pd.DataFrame) -> str:
    """A GitHub-flavoured Markdown table of any frame; numbers with four significant digits."""
    lines = ["| " + " | ".join(map(str, frame.columns)) + " |", "|" + "---|" * len(frame.columns)]
    for row in frame.itertuples(index=False):
        lines.append("| " + " | ".join(_markdown_cell(value) for value in row) + " |")
    return "\n".join(lines) + "\n"


def _markdown_cell(value: object) -> str:
    if isinstance(value, float):
        return "" if pd.isna(value) else f"{value:.4g}"
    return str(value).replace("|", "\\|")
