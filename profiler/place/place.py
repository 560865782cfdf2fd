"""The share of the roofline that each figure attains, its regime, and doubts about it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Literal

import numpy as np

from profiler.judge.regimes import COMPUTE_SHARE, MEMORY_SHARE, ROOF_TOLERANCE, Regime
from profiler.predict.operator_arrays import Array
from profiler.readers.columns import Row, Table
from profiler.readers.figures import Covers

RoofSide = Literal["compute", "memory"]

# A first repetition that is so much longer than each of some others was cold.
_LEAST_OTHERS = 2
_MUCH_LONGER = 1.5


@dataclass(frozen=True, slots=True)
class Placed:
    """One figure under the roofs."""

    phase: Covers
    """What its time covers."""
    batch_size: int
    prompt_len: int
    context_len: int
    new_tokens: int | None
    latency_s: float
    tokens_per_s: float
    """New tokens a second: those of the prompts in a prefill, generated ones else."""
    floor_s: float
    bound: RoofSide
    attained: float
    """Floor over time."""
    regime: Regime | None
    """None for a figure that proves nothing."""
    note: str
    settings: str = ""
    """What it was measured with, where that differs from other figures of its file."""


def placed(figures: Table[Row], compute_s: Array, memory_s: Array) -> Table[Placed]:
    """Place figures whose shapes are all known over their floors, of which so many seconds are by each side."""
    seconds, batch, prompt, context = (
        figures.numbers(name) for name in ("seconds", "batch_size", "prompt_len", "context_len")
    )
    phases = np.array(figures.column("covers"))
    of_step, of_whole = figures.numbers("step_tokens"), figures.numbers("new_tokens")
    new_tokens = np.select([phases == "prefill", phases == "decode"], [prompt, of_step], of_whole)
    floor_s, by_compute = compute_s + memory_s, compute_s > memory_s
    attained = floor_s / seconds
    columns: dict[str, Sequence[object]] = {
        "phase": figures.column("covers"),
        "batch_size": batch.astype(int).tolist(),
        "prompt_len": prompt.astype(int).tolist(),
        "context_len": context.astype(int).tolist(),
        "new_tokens": figures.column("new_tokens"),
        "latency_s": seconds.tolist(),
        "tokens_per_s": (batch * new_tokens / seconds).tolist(),
        "floor_s": floor_s.tolist(),
        "bound": np.where(by_compute, "compute", "memory").tolist(),
        "attained": attained.tolist(),
        "regime": _regimes(attained, by_compute),
        "note": _notes(figures, attained),
        "settings": [", ".join(map(" ".join, told)) for told in figures.column("settings")],
    }
    return Table(Placed, columns)


def _regimes(attained: Array, by_compute: Array) -> list[Regime | None]:
    """A figure alone has no split: what is far from its roof may be anything."""
    near = attained >= np.where(by_compute, COMPUTE_SHARE, MEMORY_SHARE)
    names: list[Regime | None] = ["inconclusive", "memory-bound", "compute-bound", None]
    return [names[code] for code in np.select([_above(attained), near & by_compute, near], [3, 2, 1], 0).tolist()]


def _above(attained: Array) -> Array:
    return np.asarray(attained > 1 + ROOF_TOLERANCE)


def _notes(figures: Table[Row], attained: Array) -> list[str]:
    """What is to be said of each: of most what their file says alone, before it of some that they are too good."""
    covers, notes = figures.column("covers"), figures.column("notes")
    found = list(map("; ".join, notes))
    remarkable = figures.told("chunk_tokens") | figures.told("weight_bytes") | figures.told("samples_s")
    told = [figures.column(name) for name in ("covers", "prompt_len", "chunk_tokens", "weight_bytes", "samples_s")]
    for index in np.flatnonzero(remarkable).tolist():
        found[index] = "; ".join([*notes[index], *_remarks(*(each[index] for each in told))])
    for index in np.flatnonzero(_above(attained)).tolist():
        behind = f"; {found[index]}" if found[index] else ""
        found[index] = f"{attained[index]:.3g} times what the roof allows: {_suspect(covers[index])}{behind}"
    return found


def _remarks(
    covers: Covers,
    prompt_len: int | None,
    chunk_tokens: int | None,
    weight_bytes: float | None,
    samples_s: Sequence[float],
) -> list[str]:
    found = []
    if covers == "prefill" and chunk_tokens and (prompt_len or 0) > chunk_tokens:
        chunks = math.ceil((prompt_len or 0) / chunk_tokens)
        found.append(f"the prompt ran in {chunks} chunks of {chunk_tokens}: weights were read {chunks} times")
    if weight_bytes:
        found.append(f"{8 * weight_bytes:.2f} bits a weight as stored")
    first, *others = samples_s or (0.0,)
    if len(others) >= _LEAST_OTHERS and first > _MUCH_LONGER * max(others):
        times = first / statistics.median(others)
        found.append(f"its first repetition took {times:.1f} times as long as the others: warm-up may be inside")
    return found


def _suspect(covers: str) -> str:
    """What makes a figure too good, by what it covers."""
    if covers == "prefill":
        return "the prompt may have come from a cache, or another card or precision ran"
    if covers == "decode":
        return (
            "prompt tokens may be counted, several tokens a step speculated, or another card, precision or several"
            " cards ran"
        )
    return "prompt tokens may be counted as generated, or another card or precision ran"


def doubts(rows: Table[Placed]) -> list[str]:
    """What a whole file suggests: figures above the roof, and decodes that grow with the prompt as a prefill does."""
    found = []
    above = int(_above(rows.numbers("attained")).sum())
    if above:
        found.append(f"{above} of {len(rows)} figures lie above the roof and prove nothing.")
    mixed = _mixed(rows)
    if mixed:
        found.append(
            f"decode steps at batch {mixed} grow with the prompt far more than the cache does: the prompt's time"
            " seems to be in them."
        )
    return found


# A decode step over a prompt four times as long takes this much longer only where the prefill is in it.
_LONGER_PROMPT = 4.0
_FAR_MORE = 1.5


def _mixed(rows: Table[Placed]) -> int | None:
    """The batch at which decode steps grow with the prompt by far more than their floors do, or None."""
    names = ("phase", "batch_size", "new_tokens", "settings", "prompt_len", "latency_s", "floor_s")
    series: dict[tuple[int, int | None, str], list[tuple[int, float, float]]] = {}
    for phase, batch, new_tokens, settings, *member in zip(*(rows.column(name) for name in names), strict=True):
        if phase == "decode" and member[0]:
            series.setdefault((batch, new_tokens, settings), []).append((member[0], member[1], member[2]))
    for (batch, *_), members in series.items():
        first, last = min(members, key=itemgetter(0)), max(members, key=itemgetter(0))
        if last[0] >= _LONGER_PROMPT * first[0]:
            grew, allowed = last[1] / first[1], last[2] / first[2]
            if grew > _FAR_MORE * allowed:
                return batch
    return None
