"""operators.csv: every operator of every cell, with its work, its roof and its replayed time."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from sys import intern

from profiler.counting.floor import floor_s
from profiler.errors import RunError
from profiler.facts.operators import NO_AMOUNTS, Amount, Cause, OperatorWork
from profiler.facts.run_facts import Facts
from profiler.grid.cells import CellKey
from profiler.judge.cells import columns_of
from profiler.units import escape_formula, unescape_formula, visible_in

OPERATORS_FILE = "operators.csv"
OPERATOR_COLUMN_MEANINGS = {
    "phase": "`prefill` or `decode`.",
    "batch_size": "Sequences at once.",
    "prompt_len": "Prompt tokens of a sequence; 0 where the cache was filled directly.",
    "context_len": "Cached tokens at the step.",
    "engine": "How the model was stepped.",
    "operator": "Its name in the model, one for all layers.",
    "group": "What it belongs to, such as attention or mlp.",
    "count": "How many of it are in the step; every figure of the row is of all of them together.",
    "flops": "FLOPs that the algorithm needs.",
    "weight_bytes": "Bytes of weights read, as stored.",
    "kv_bytes": "Bytes of the KV cache read and written.",
    "activation_bytes": "Bytes of activations read and written.",
    "avoidable_bytes": "Bytes that the library's path moves beyond what the algorithm needs.",
    "roof_s": "The least time by the measured roofs.",
    "replayed_s": "Its time when run alone; empty where it was not.",
    "dequantise_s": "What converting its weights takes, run alone; empty where it was not.",
    "new_tokens": "Tokens decoded after the prompt.",
    "dtype": "The dtype it computes in.",
    "avoidable_bytes_by_cause": "The avoidable bytes as JSON, by cause; empty where there are none.",
    "avoidable_flops_by_cause": "FLOPs beyond the algorithm's as JSON, by cause; empty where there are none.",
    "bus_bytes": "Bytes that cross the link between cards, where the model is spread over several.",
}
OPERATOR_COLUMNS = tuple(OPERATOR_COLUMN_MEANINGS)
"""The columns of operators.csv, in their order."""


def operators_csv(facts: Facts) -> Iterator[str]:
    """The table of a run, line by line: a large run has hundreds of thousands."""
    writer = csv.writer(_Line, lineterminator="\n")
    memory_bytes_per_s = facts.ceilings.memory_bytes_per_s
    compute_flops_per_s = cache(facts.ceilings.compute_flops_per_s)
    yield writer.writerow(OPERATOR_COLUMNS)
    for key, operators in facts.operators.items():
        replays = facts.replays.get(key, {})
        of_cell = {**columns_of(key), "engine": escape_formula(key.cell.engine)}
        for item in operators:
            alone = replays.get(item.operator)
            row = {
                **of_cell,
                "operator": escape_formula(item.operator),
                "group": escape_formula(item.group),
                "count": item.count,
                "flops": item.flops,
                "weight_bytes": item.weight_bytes,
                "kv_bytes": item.kv_bytes,
                "activation_bytes": item.activation_bytes,
                "avoidable_bytes": sum(item.avoidable_bytes.values()),
                "roof_s": floor_s(
                    float(item.flops), float(item.model_bytes), compute_flops_per_s(item.dtype), memory_bytes_per_s
                ),
                "replayed_s": "" if alone is None else alone.whole.times(item.count).median_s,
                "dequantise_s": "" if alone is None else alone.conversion.times(item.count).median_s,
                "dtype": item.dtype,
                "avoidable_bytes_by_cause": _by_cause(item.avoidable_bytes),
                "avoidable_flops_by_cause": _by_cause(item.avoidable_flops),
                "bus_bytes": item.bus_bytes,
            }
            yield writer.writerow(row[name] for name in OPERATOR_COLUMNS)


class _Line:
    """What csv writes a row into: the row is what comes back."""

    @staticmethod
    def write(text: str) -> str:
        return text


def read_operators(folder: Path) -> dict[CellKey, Sequence[OperatorWork]]:
    """The work of every cell's operators. Raises RunError when the file is missing or damaged."""
    path = folder / OPERATORS_FILE
    found: dict[CellKey, list[OperatorWork]] = {}
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for raw in csv.DictReader(file):
                # Hardly any name is anything but plain, and there may be a million rows.
                row = raw if all(map(_is_plain, raw.values())) else visible_in(raw)
                found.setdefault(_key(row), []).append(_operator(row))
    except FileNotFoundError:
        raise RunError(f"{folder} has no {OPERATORS_FILE}.") from None
    except (OSError, UnicodeDecodeError, csv.Error, KeyError, ValueError, TypeError, RecursionError) as error:
        raise RunError(f"{path} is damaged: {error}.") from None
    return dict(found)


def _is_plain(value: object) -> bool:
    return isinstance(value, str) and value.isprintable()


def _key(row: Mapping[str, str]) -> CellKey:
    phase = row["phase"]
    if phase not in ("prefill", "decode"):
        raise ValueError(f"{phase!r} is no phase")
    return CellKey.at(
        "prefill" if phase == "prefill" else "decode",
        int(row["batch_size"]),
        int(row["prompt_len"]),
        int(row["context_len"]),
        int(row["new_tokens"]),
        unescape_formula(row["engine"]),
    )


def _operator(row: Mapping[str, str]) -> OperatorWork:
    return OperatorWork(
        operator=intern(unescape_formula(row["operator"])),
        group=intern(unescape_formula(row["group"])),
        count=int(row["count"]),
        dtype=intern(row["dtype"]),
        flops=_amount(row["flops"]),
        weight_bytes=_amount(row["weight_bytes"]),
        kv_bytes=_amount(row["kv_bytes"]),
        activation_bytes=_amount(row["activation_bytes"]),
        bus_bytes=_amount(row.get("bus_bytes") or "0"),
        avoidable_flops=_causes(row["avoidable_flops_by_cause"]),
        avoidable_bytes=_causes(row["avoidable_bytes_by_cause"]),
    )


def _amount(text: str) -> Amount:
    """Whole numbers stay whole."""
    return int(text) if text.isdigit() else float(text)


def _by_cause(amounts: Mapping[Cause, Amount]) -> str:
    return json.dumps(amounts) if amounts else ""


def _causes(text: str) -> Mapping[Cause, Amount]:
    if not text:
        return NO_AMOUNTS
    values = json.loads(text)
    if not isinstance(values, dict) or not all(isinstance(value, int | float) for value in values.values()):
        raise ValueError(f"{text[:40]!r} tells no amounts by their cause")
    return {Cause(name): value for name, value in values.items()}
