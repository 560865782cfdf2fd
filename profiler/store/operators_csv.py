"""operators.csv: every operator of every cell, with its work, its ceiling and its replayed time."""

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from sys import intern

from profiler.counting.floor import floor_s
from profiler.errors import RunError
from profiler.facts.operators import NO_AMOUNTS, Amount, Cause, GemmShape, OperatorWork
from profiler.facts.run_facts import Facts
from profiler.grid.cells import PHASES, CellKey, Phase
from profiler.store.document import content_now, name_now
from profiler.units import each_text, visible

OPERATORS_FILE = "operators.csv"
OPERATOR_COLUMN_MEANINGS = {
    "phase": "`prefill` or `decode`.",
    "batch_size": "Sequences at once.",
    "prompt_len": "Prompt tokens per sequence; 0 if the cache was filled directly.",
    "context_len": "Cached tokens at the step.",
    "engine": "The engine that stepped the model.",
    "operator": "The operator's name in the model, the same for all layers.",
    "group": "The part of the model, such as attention or mlp.",
    "count": "Calls of the operator per step; every figure of the row is their sum.",
    "flops": "FLOPs that the algorithm needs.",
    "weight_bytes": "Bytes of weights read, as stored.",
    "kv_bytes": "Bytes of the KV cache read and written.",
    "activation_bytes": "Bytes of activations read and written.",
    "redundant_bytes": "Bytes that the library's path moves beyond what the algorithm needs.",
    "ceiling_s": "Lower bound of the time by the measured ceilings.",
    "replayed_s": "Time when replayed in isolation; empty if it was not.",
    "dequantise_s": "Time to convert the weights, measured in isolation; empty if it was not.",
    "new_tokens": "Tokens decoded after the prompt.",
    "dtype": "The dtype of the computation.",
    "redundant_bytes_by_cause": "The redundant bytes as JSON, by cause; empty if there are none.",
    "redundant_flops_by_cause": "FLOPs beyond the algorithm's as JSON, by cause; empty if there are none.",
    "bus_bytes": "Bytes that cross the link between GPUs, if the model is split over several.",
    "gemms": "Matmuls with weights: calls * rows x columns x inner size, such as `32*16x4096x1024`.",
}
OPERATOR_COLUMNS = tuple(OPERATOR_COLUMN_MEANINGS)
_PHASES: dict[str, Phase] = {phase: phase for phase in PHASES}
_AMOUNTS = ("flops", "weight_bytes", "kv_bytes", "activation_bytes", "bus_bytes")


def table_rows(facts: Facts) -> Iterator[dict[str, object]]:
    """Yield the rows of operators.csv, with the values of `OPERATOR_COLUMNS` by name."""
    memory_bytes_per_s = facts.ceilings.memory_bytes_per_s
    compute_flops_per_s = cache(facts.ceilings.compute_flops_per_s)
    for key, operators in facts.operators.items():
        replays = facts.replays.get(key, {})
        cell_columns = key.columns
        for item in operators:
            replay = replays.get(item.operator)
            yield {
                **cell_columns,
                "operator": item.operator,
                "group": item.group,
                **{name: getattr(item, name) for name in ("count", "dtype", "gemms", *_AMOUNTS)},
                "redundant_bytes": sum(item.redundant_bytes.values()),
                "ceiling_s": floor_s(
                    float(item.flops), float(item.model_bytes), compute_flops_per_s(item.dtype), memory_bytes_per_s
                ),
                "replayed_s": "" if replay is None else replay.whole.times(item.count).median_s,
                "dequantise_s": "" if replay is None else replay.conversion.times(item.count).median_s,
                "redundant_bytes_by_cause": json.dumps(item.redundant_bytes) if item.redundant_bytes else "",
                "redundant_flops_by_cause": json.dumps(item.redundant_flops) if item.redundant_flops else "",
            }


def read_operators(folder: Path) -> dict[CellKey, Sequence[OperatorWork]]:
    """Read operators.csv: each cell's operators with their work. Raises RunError if it is missing or damaged."""
    operators: dict[CellKey, list[OperatorWork]] = {}
    for key, operator, _ in operator_rows(folder):
        operators.setdefault(key, []).append(operator)
    return dict(operators)


def operator_rows(folder: Path) -> Iterator[tuple[CellKey, OperatorWork, float]]:
    """Yield each operator with its cell and its replayed seconds per step, or 0. Raises RunError for a damaged file."""
    path = folder / OPERATORS_FILE
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for raw in csv.DictReader(file):
                row = {name_now(name): text for name, text in each_text(raw, visible).items()}
                yield _key(row), _operator(row), float(row["replayed_s"] or 0)
    except FileNotFoundError:
        raise RunError(
            f"{folder} cannot be judged again, since it has no {OPERATORS_FILE}; cells.csv has its verdicts."
        ) from None
    except (OSError, UnicodeDecodeError, csv.Error, KeyError, ValueError, TypeError, RecursionError) as error:
        raise RunError(f"{path} is damaged: {error}.") from None


def _key(row: Mapping[str, str]) -> CellKey:
    sizes = {name: int(row[name]) for name in ("batch_size", "prompt_len", "context_len", "new_tokens")}
    return CellKey.at(_PHASES[row["phase"]], **sizes, engine=row["engine"])


def _operator(row: Mapping[str, str]) -> OperatorWork:
    return OperatorWork(
        operator=intern(row["operator"]),
        group=intern(row["group"]),
        count=int(row["count"]),
        dtype=intern(row["dtype"]),
        **{name: int(row[name]) if row[name].isdigit() else float(row[name]) for name in _AMOUNTS},
        gemms=intern(_gemms(row.get("gemms") or "", row["dtype"])),
        redundant_flops=_causes(row["redundant_flops_by_cause"]),
        redundant_bytes=_causes(row["redundant_bytes_by_cause"]),
    )


def _gemms(text: str, dtype: str) -> str:
    """The text itself. Raises ValueError if it does not list matmuls."""
    return " ".join(str(GemmShape.parse(each, dtype)) for each in text.split())


def _causes(text: str) -> Mapping[Cause, Amount]:
    if not text:
        return NO_AMOUNTS
    values = content_now(json.loads(text))
    if not isinstance(values, dict) or not all(isinstance(value, int | float) for value in values.values()):
        raise ValueError(f"{text[:40]!r} is not an object of amounts by cause")
    return {Cause(name): value for name, value in values.items()}
