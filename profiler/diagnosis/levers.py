"""What would change a cell, each change with the seconds that it can save on this very cell: computed, never canned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from profiler.diagnosis.regimes import Verdict
from profiler.diagnosis.step_time import Split
from profiler.units import duration, scaled

_FOUR_BITS = 4.5
"""bitsandbytes' 4-bit weights with a float32 scale a block of 64."""
_SIXTEEN_BITS = 16.0
_EIGHT_BITS = 8.0
# What saves less of a step than a measurement can tell is no change to name.
_LEAST_SHARE = 1e-3

PAGE_FAULTS = "page faults"
"""The avoidable cause that is counted in pages, not in bytes."""


@dataclass(frozen=True)
class JudgedCell:
    """A cell that was measured and judged."""

    phase: str
    batch_size: int
    depth: int
    """Prompt tokens of a prefill; tokens in the cache when a decode begins."""
    tokens_per_s: float
    flops_per_s: float
    bytes_per_s: float
    split: Split
    verdict: Verdict
    engine: str = "eager"
    rows: int = 1
    """Tokens that go through a linear layer in one step."""
    memory_bytes: float = 0.0
    """Predicted peak memory: what another card must have."""
    avoidable_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the avoidable work by cause: traffic at the measured bandwidth, and PAGE_FAULTS."""
    knee: float | None = None
    """The batch at which, by the counts, FLOPs overtake bytes; None where none does or one batch alone was run."""


@dataclass(frozen=True)
class Card:
    """Another device that could be rented, by its datasheet."""

    name: str
    memory_bytes: float
    bandwidth_bytes_per_s: float
    peak_flops_per_s: float
    """Dense, in the model's dtype."""


@dataclass(frozen=True)
class Setting:
    """What advice needs to know of the device and the model."""

    device_name: str
    memory_bytes_per_s: float
    compute_flops_per_s: float
    weight_bits: float
    """Stored bits a weight of the block linears, scales included."""
    can_graph: bool
    """Whether CUDA graphs exist on this device."""
    weights: float = 0.0
    """Weights of the block linears."""
    cache_bits: float = 16.0
    """Bits an element of the KV cache."""
    four_bit_dense_from_rows: int | None = None
    """Rows from which a 4-bit kernel first writes a dense 16-bit copy on this device; None: it never does."""
    sixteen_bit_flops_per_s: float | None = None
    """The measured compute roof of a 16-bit dtype, where this model runs in a wider one and it is known."""
    cards: tuple[Card, ...] = ()
    dtype: str = "float16"
    """The dtype that the model runs in, and that `cards` are weighed in."""


@dataclass(frozen=True)
class Lever:
    """A change and the most it can save on one cell."""

    change: str
    saves_s: float
    because: str


def levers(cell: JudgedCell, setting: Setting, others: Sequence[JudgedCell] = ()) -> list[Lever]:
    """Changes ranked by the seconds that they can save at most on this cell; none without a figure worth naming.

    `others` are the run's cells, among which a larger batch is looked for. Empty for a step that is faster than its own
    terms allow: one of them is wrong then.
    """
    if "above-roof" in cell.verdict.flags:
        return []
    found = [
        *_batch(cell, others),
        *_weights(cell, setting),
        *_cache(cell, setting),
        *_path(cell, setting),
        *_arithmetic(cell, setting),
        *_card(cell, setting),
    ]
    least_s = _LEAST_SHARE * cell.split.latency_s
    return sorted((lever for lever in found if lever.saves_s > least_s), key=lambda lever: -lever.saves_s)


def on_card(cell: JudgedCell, card: Card, setting: Setting) -> float | None:
    """The least seconds of a cell's step on another card, by its datasheet; None where it does not fit its memory."""
    if cell.memory_bytes > card.memory_bytes:
        return None
    s = cell.split
    streamed_s = (s.weights_s + s.kv_s) * setting.memory_bytes_per_s / card.bandwidth_bytes_per_s
    return streamed_s + s.compute_s * setting.compute_flops_per_s / card.peak_flops_per_s


def _batch(cell: JudgedCell, others: Sequence[JudgedCell]) -> list[Lever]:
    """The measured larger batch of the same series that gives the most tokens/s."""
    larger = [
        other
        for other in others
        if (other.phase, other.depth, other.engine) == (cell.phase, cell.depth, cell.engine)
        and other.batch_size > cell.batch_size
    ]
    if not larger:
        return []
    best = max(larger, key=lambda other: other.tokens_per_s)
    share_s = best.split.latency_s * cell.batch_size / best.batch_size
    knee = f"; by the counts the knee lies at batch {cell.knee:.3g}" if cell.knee is not None else ""
    return [
        Lever(
            f"batch {best.batch_size}",
            cell.split.latency_s - share_s,
            f"measured: as many tokens then cost {duration(share_s)}, though a step takes"
            f" {duration(best.split.latency_s)}{knee}",
        )
    ]


def _weights(cell: JudgedCell, setting: Setting) -> list[Lever]:
    s, bits = cell.split, setting.weight_bits
    found = []
    if bits > _SIXTEEN_BITS:
        found.append(
            Lever("16-bit weights", s.weights_s * (1 - _SIXTEEN_BITS / bits), "fewer bytes at the measured bandwidth")
        )
    if bits >= _SIXTEEN_BITS:
        dense_from = setting.four_bit_dense_from_rows
        dense_s = 0.0
        because = "if their kernel reaches the memory roof"
        if dense_from is not None and cell.rows >= dense_from:
            dense_s = 2 * setting.weights * _SIXTEEN_BITS / 8 / setting.memory_bytes_per_s
            because = f"with {duration(dense_s)} taken off for the dense copy that their kernel writes and reads"
        found.append(Lever("4-bit weights", s.weights_s * (1 - _FOUR_BITS / bits) - dense_s, because))
    return found


def _cache(cell: JudgedCell, setting: Setting) -> list[Lever]:
    copies_s = cell.avoidable_s.get("cache copies", 0.0)
    share = max(0.0, 1 - _EIGHT_BITS / setting.cache_bits)
    return [
        Lever("a static cache", copies_s, "which is not copied at every step"),
        Lever("an 8-bit KV cache", cell.split.kv_s * share, "if attention reads it as stored"),
    ]


def _path(cell: JudgedCell, setting: Setting) -> list[Lever]:
    unfused_s = cell.avoidable_s.get("attention matrix", 0.0) + cell.avoidable_s.get("repeat_kv copies", 0.0)
    how = "CUDA graphs" if setting.can_graph else "torch.compile (many small operators become few)"
    return [
        Lever("a fused attention kernel", unfused_s, "scores and repeated heads would stay on chip"),
        Lever(how, cell.split.dispatch_s, "the host's share of this step"),
        Lever(
            "keeping freed memory (MALLOC_TRIM_THRESHOLD_ and MALLOC_MMAP_THRESHOLD_, or tcmalloc)",
            cell.avoidable_s.get(PAGE_FAULTS, 0.0),
            "fresh pages would not be taken again and again",
        ),
    ]


def _arithmetic(cell: JudgedCell, setting: Setting) -> list[Lever]:
    faster = setting.sixteen_bit_flops_per_s
    if faster is None or faster <= setting.compute_flops_per_s:
        return []
    return [
        Lever(
            "a 16-bit dtype",
            cell.split.compute_s * (1 - setting.compute_flops_per_s / faster),
            f"its products reach {scaled(faster, 'FLOP/s')} here",
        )
    ]


def _card(cell: JudgedCell, setting: Setting) -> list[Lever]:
    """The card that would save the most, if it reached its datasheet and the host stayed as it is."""
    times = [(time_s, card) for card in setting.cards if (time_s := on_card(cell, card, setting)) is not None]
    if not times:
        return []
    least_s, card = min(times, key=lambda item: item[0])
    return [
        Lever(
            f"another card ({card.name})",
            cell.split.device_s - least_s,
            f"at its datasheet's roofs for {setting.dtype}",
        )
    ]
