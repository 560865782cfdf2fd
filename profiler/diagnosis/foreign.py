"""Another tool's figures under the roofs: the share that each attains, the regime that follows, and what is wrong."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from profiler.diagnosis.regimes import COMPUTE_SHARE, MEMORY_SHARE, ROOF_TOLERANCE, Regime
from profiler.diagnosis.step_time import Floor

Side = Literal["compute", "memory"]

# A first repetition that is so much longer than each of some others was cold.
_LEAST_OTHERS = 2
_MUCH_LONGER = 1.5


class Told(Protocol):
    """A figure, as far as placing it needs."""

    @property
    def covers(self) -> Literal["prefill", "decode", "generate"]: ...
    @property
    def seconds(self) -> float: ...
    @property
    def batch_size(self) -> int | None: ...
    @property
    def prompt_len(self) -> int | None: ...
    @property
    def context_len(self) -> int | None: ...
    @property
    def new_tokens(self) -> int | None: ...
    @property
    def tokens(self) -> int | None: ...
    @property
    def samples_s(self) -> tuple[float, ...]: ...
    @property
    def chunk_tokens(self) -> int | None: ...
    @property
    def notes(self) -> tuple[str, ...]: ...


@dataclass(frozen=True, slots=True)
class Placed:
    """One figure under the roofs."""

    phase: Literal["prefill", "decode", "generate"]
    """What its time covers."""
    batch_size: int
    prompt_len: int
    context_len: int
    new_tokens: int | None
    latency_s: float
    tokens_per_s: float
    """New tokens a second: those of the prompts in a prefill, generated ones else."""
    floor_s: float
    bound: Side
    attained: float
    """Floor over time."""
    regime: Regime | None
    """None for a figure that proves nothing."""
    note: str


def placed(figure: Told, floor: Floor, weight_bits: float | None = None) -> Placed:
    """Place a figure whose shapes are all known; `weight_bits` are those of a weight as its file stores it."""
    attained = floor.total_s / figure.seconds
    above = attained > 1 + ROOF_TOLERANCE
    tokens = figure.tokens or 0
    return Placed(
        phase=figure.covers,
        batch_size=figure.batch_size or 1,
        prompt_len=figure.prompt_len or 0,
        context_len=figure.context_len or 0,
        new_tokens=figure.new_tokens,
        latency_s=figure.seconds,
        tokens_per_s=tokens / figure.seconds,
        floor_s=floor.total_s,
        bound=floor.bound,
        attained=attained,
        regime=None if above else _regime(attained, floor.bound),
        note="; ".join(_notes(figure, attained, above, weight_bits)),
    )


def _regime(attained: float, bound: Side) -> Regime:
    """A figure alone has no split: what is far from its roof may be anything."""
    if bound == "memory" and attained >= MEMORY_SHARE:
        return "memory-bound"
    if bound == "compute" and attained >= COMPUTE_SHARE:
        return "compute-bound"
    return "inconclusive"


def _notes(figure: Told, attained: float, above: bool, weight_bits: float | None) -> list[str]:
    found = list(figure.notes)
    if above:
        found.insert(0, f"{attained:.3g} times what the roof allows: {_suspect(figure.covers)}")
    if figure.covers == "prefill" and figure.chunk_tokens and (figure.prompt_len or 0) > figure.chunk_tokens:
        chunks = math.ceil((figure.prompt_len or 0) / figure.chunk_tokens)
        found.append(f"the prompt ran in {chunks} chunks of {figure.chunk_tokens}: weights were read {chunks} times")
    if weight_bits is not None:
        found.append(f"{weight_bits:.2f} bits a weight as stored")
    first, *others = figure.samples_s or (0.0,)
    if len(others) >= _LEAST_OTHERS and first > _MUCH_LONGER * max(others):
        times = first / statistics.median(others)
        found.append(f"its first repetition took {times:.1f} times as long as the others: warm-up may be inside")
    return found


def _suspect(covers: str) -> str:
    """What makes a figure too good, by what it covers."""
    if covers == "prefill":
        return "the prompt may have come from a cache, or another card or precision ran"
    if covers == "decode":
        return "prompt tokens may be counted, or another card, precision or several cards ran"
    return "prompt tokens may be counted as generated, or another card or precision ran"


def doubts(placed_rows: Sequence[Placed]) -> list[str]:
    """What a whole file suggests: figures above the roof, and decodes that grow with the prompt as a prefill does."""
    found = []
    above = [row for row in placed_rows if row.attained > 1 + ROOF_TOLERANCE]
    if above:
        found.append(f"{len(above)} of {len(placed_rows)} figures lie above the roof and prove nothing.")
    mixed = _mixed(placed_rows)
    if mixed:
        found.append(
            f"decode steps at batch {mixed} grow with the prompt far more than the cache does: the prompt's time"
            " seems to be in them."
        )
    return found


# A decode step over a prompt four times as long takes this much longer only where the prefill is in it.
_LONGER_PROMPT = 4.0
_FAR_MORE = 1.5


def _mixed(rows: Sequence[Placed]) -> int | None:
    """The batch at which decode steps grow with the prompt by far more than their floors do, or None."""
    series: dict[tuple[int, int | None], list[Placed]] = {}
    for row in rows:
        if row.phase == "decode" and row.prompt_len:
            series.setdefault((row.batch_size, row.new_tokens), []).append(row)
    for (batch, _), members in series.items():
        first, last = min(members, key=lambda row: row.prompt_len), max(members, key=lambda row: row.prompt_len)
        if last.prompt_len >= _LONGER_PROMPT * first.prompt_len:
            grew, allowed = last.latency_s / first.latency_s, last.floor_s / first.floor_s
            if grew > _FAR_MORE * allowed:
                return batch
    return None
