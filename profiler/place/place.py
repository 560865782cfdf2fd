"""The share of the roofline that each figure attains, its regime, and warnings about it."""

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

# A first repetition was cold if it took this many times as long as each of at least so many others.
_LEAST_OTHERS = 2
_MUCH_LONGER = 1.5


@dataclass(frozen=True, slots=True)
class PlacedFigure:
    """One figure, compared with its floor."""

    phase: Covers
    """What `latency_s` covers: a prefill, one decode step, or a whole `generate`."""
    batch_size: int
    prompt_len: int
    context_len: int
    new_tokens: int | None
    latency_s: float
    tokens_per_s: float
    """Tokens of all sequences per second: prompt tokens for a prefill, otherwise generated tokens."""
    floor_s: float
    bound: RoofSide
    attained: float
    """`floor_s` / `latency_s`: the share of the roofline."""
    regime: Regime | None
    """None for a figure above the roof, which is not a valid measurement of this work."""
    note: str
    settings: str = ""
    """The settings in which the figure differs from others of its file."""


def placed(figures: Table[Row], compute_s: Array, memory_s: Array) -> Table[PlacedFigure]:
    """The figures with their shares of the roofline, regimes and notes, in the same order.

    `compute_s` and `memory_s`, each float[figures], are the compute-bound and the memory-bound seconds of their floors.
    All shapes must be known.
    """
    seconds, batch, prompt, context = (
        figures.numbers(name) for name in ("seconds", "batch_size", "prompt_len", "context_len")
    )
    phases = np.array(figures.column("covers"))
    tokens = np.select(
        [phases == "prefill", phases == "decode"],
        [prompt, figures.numbers("step_tokens")],
        figures.numbers("new_tokens"),
    )
    floor_s, by_compute = compute_s + memory_s, compute_s > memory_s
    attained = floor_s / seconds
    columns: dict[str, Sequence[object]] = {
        "phase": figures.column("covers"),
        "batch_size": batch.astype(int).tolist(),
        "prompt_len": prompt.astype(int).tolist(),
        "context_len": context.astype(int).tolist(),
        "new_tokens": figures.column("new_tokens"),
        "latency_s": seconds.tolist(),
        "tokens_per_s": (batch * tokens / seconds).tolist(),
        "floor_s": floor_s.tolist(),
        "bound": np.where(by_compute, "compute", "memory").tolist(),
        "attained": attained.tolist(),
        "regime": _regimes(attained, by_compute),
        "note": _notes(figures, attained),
        "settings": [", ".join(map(" ".join, settings)) for settings in figures.column("settings")],
    }
    return Table(PlacedFigure, columns)


def _regimes(attained: Array, by_compute: Array) -> list[Regime | None]:
    """Regimes from the share of the roofline only: a foreign figure has no time breakdown, so a low share is
    inconclusive. None if the figure is above the roof."""
    near = attained >= np.where(by_compute, COMPUTE_SHARE, MEMORY_SHARE)
    names: list[Regime | None] = ["inconclusive", "memory-bound", "compute-bound", None]
    return [names[code] for code in np.select([_above(attained), near & by_compute, near], [3, 2, 1], 0).tolist()]


def _above(attained: Array) -> Array:
    """bool[n]: which figures are above the roof by more than its tolerance."""
    return np.asarray(attained > 1 + ROOF_TOLERANCE)


def _notes(figures: Table[Row], attained: Array) -> list[str]:
    """One note per figure: a suspicion if it is above the roof, then the notes of its file, then remarks."""
    covers, file_notes = figures.column("covers"), figures.column("notes")
    notes = list(map("; ".join, file_notes))
    # Only rows with something to remark are visited in Python: a file may have 100,000 rows.
    remarkable = figures.filled("chunk_tokens") | figures.filled("weight_bytes") | figures.filled("samples_s")
    columns = [figures.column(name) for name in ("covers", "prompt_len", "chunk_tokens", "weight_bytes", "samples_s")]
    for index in np.flatnonzero(remarkable).tolist():
        notes[index] = "; ".join([*file_notes[index], *_remarks(*(column[index] for column in columns))])
    for index in np.flatnonzero(_above(attained)).tolist():
        suspicion = f"{attained[index]:.3g} times what the roof allows: {_SUSPICIONS[covers[index]]}"
        notes[index] = "; ".join(filter(None, (suspicion, notes[index])))
    return notes


def _remarks(
    covers: Covers,
    prompt_len: int | None,
    chunk_tokens: int | None,
    weight_bytes: float | None,
    samples_s: Sequence[float],
) -> list[str]:
    remarks = []
    if covers == "prefill" and chunk_tokens and (prompt_len or 0) > chunk_tokens:
        chunks = math.ceil((prompt_len or 0) / chunk_tokens)
        remarks.append(f"the prompt ran in {chunks} chunks of {chunk_tokens}: weights were read {chunks} times")
    if weight_bytes:
        remarks.append(f"{8 * weight_bytes:.2f} bits per weight as stored")
    first, *others = samples_s or (0.0,)
    if len(others) >= _LEAST_OTHERS and first > _MUCH_LONGER * max(others):
        ratio = first / statistics.median(others)
        remarks.append(f"its first repetition took {ratio:.1f} times as long as the others: it may include warm-up")
    return remarks


_SUSPICIONS: dict[Covers, str] = {
    "prefill": "the prompt may have come from a cache, or the file is of another GPU or precision",
    "decode": "prompt tokens may be counted, several tokens per step speculated, or the file is of several GPUs or of"
    " another GPU or precision",
    "generate": "prompt tokens may be counted as generated, or the file is of another GPU or precision",
}
"""Likely reasons for a figure above the roof, by what it covers."""


def doubts(rows: Table[PlacedFigure]) -> list[str]:
    """Warnings about a whole file: figures above the roof, and decode steps that seem to include the prefill."""
    warnings = []
    above = int(_above(rows.numbers("attained")).sum())
    if above:
        warnings.append(f"{above} of {len(rows)} figures {'is' if above == 1 else 'are'} above the roof, so not valid.")
    batch = _batch_with_prefill_in_decode(rows)
    if batch:
        warnings.append(
            f"decode steps at batch {batch} grow with the prompt far more than the cache does: they seem to include the"
            " prompt's time."
        )
    return warnings


# With a prompt at least four times as long, a decode step grows to 1.5 times what its floor allows only if the prefill
# is in it.
_LONGER_PROMPT = 4.0
_FAR_MORE = 1.5


def _batch_with_prefill_in_decode(rows: Table[PlacedFigure]) -> int | None:
    """The first batch size whose decode steps grow with the prompt by far more than their floors; None if there is
    none."""
    names = ("phase", "batch_size", "new_tokens", "settings", "prompt_len", "latency_s", "floor_s")
    series: dict[tuple[int, int | None, str], list[tuple[int, float, float]]] = {}
    for phase, batch, new_tokens, settings, *point in zip(*(rows.column(name) for name in names), strict=True):
        if phase == "decode" and point[0]:
            series.setdefault((batch, new_tokens, settings), []).append((point[0], point[1], point[2]))
    for (batch, *_), points in series.items():
        first_len, first_s, first_floor_s = min(points, key=itemgetter(0))
        last_len, last_s, last_floor_s = max(points, key=itemgetter(0))
        if last_len >= _LONGER_PROMPT * first_len and last_s / first_s > _FAR_MORE * last_floor_s / first_floor_s:
            return batch
    return None
