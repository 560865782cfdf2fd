"""Levers: changes, computed or tried, and what each saves on a cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from profiler.counting.floor import floor_on, step_floor
from profiler.data.datasheets import Datasheet
from profiler.facts.measurements import COMPILED, PADDING_MASK
from profiler.facts.operators import COLLECTIVE, Cause
from profiler.judge.cells import JudgedCell, Lever, TrialResult
from profiler.judge.regimes import Flag
from profiler.quant.registry import FORMATS
from profiler.units import duration, scaled

_FOUR_BIT_WEIGHTS = "4-bit weights"
_SIXTEEN_BIT_DTYPE = "a 16-bit dtype"
_STATIC_CACHE = "a static cache"
_PACKED_KERNEL = "a kernel that multiplies the packed weights (int4wo, int8wo), or 16-bit weights"
_OTHER_KERNELS = "other kernels for these shapes (another dtype, format or library)"
_GRAPHS = "CUDA graphs"
_COMPILE = "torch.compile (fuses small operators)"
_FOUR_BITS = 4.5
"""bitsandbytes' 4-bit weights with a float32 scale a block of 64."""
_SIXTEEN_BITS = 16.0
_EIGHT_BITS = 8.0
_IN_16_BITS = frozenset({_SIXTEEN_BIT_DTYPE, _OTHER_KERNELS})
_STANDS_FOR: Mapping[str, frozenset[str]] = {
    "bfloat16": _IN_16_BITS,
    "float16": _IN_16_BITS,
    _STATIC_CACHE: frozenset({_STATIC_CACHE}),
    _GRAPHS: frozenset({_GRAPHS}),
    COMPILED: frozenset({_COMPILE}),
}
"""By a variant other than a format, the computed changes whose place it takes."""
# What saves less of a step than a measurement can tell is no change to name.
_LEAST_SHARE = 1e-3
# An operator that loses so much of what all kernels lose is named.
_MOST_OF_IT = 0.3


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
    measured: bool = True
    """Whether both roofs were measured here; else a datasheet's peak or another dtype's roof stands for one."""
    weights: float = 0.0
    """Weights of the block linears."""
    cache_bits: float = 16.0
    """Bits an element of the KV cache."""
    four_bit_dense_from_rows: int | None = None
    """Rows from which a 4-bit kernel first writes a dense 16-bit copy on this device; None: it never does."""
    sixteen_bit_flops_per_s: float | None = None
    """The highest measured compute roof of a 16-bit dtype, where this model runs in a wider one."""
    cards: tuple[Datasheet, ...] = ()
    busy: bool = False
    """Whether other processes took this machine's cores: what is computed from its times is no advice then."""
    dtype: str = "float16"
    """The dtype that the model runs in, and that `cards` are weighed in."""


def _stands_for(variant: str) -> frozenset[str]:
    """Which computed changes a variant that was tried takes the place of."""
    if variant not in FORMATS:
        return _STANDS_FOR.get(variant, frozenset())
    item = FORMATS[variant]
    found = {_OTHER_KERNELS, _FOUR_BIT_WEIGHTS} if item.bits <= _FOUR_BITS else {_OTHER_KERNELS}
    return frozenset({*found, _PACKED_KERNEL} if item.multiplies_packed else found)


def levers(cell: JudgedCell, setting: Setting, others: Sequence[JudgedCell] = ()) -> list[Lever]:
    """Changes ranked by the seconds that they save on this cell, those that cost last; none too small to tell.

    What was tried stands in the place of what would be computed for it. `others` are the run's cells, among which a
    larger batch is looked for. Empty for a step that is faster than its own terms allow: one of them is wrong then.
    """
    if Flag.ABOVE_ROOF in cell.verdict.flags:
        return []
    device = [
        *_four_bit_weights(cell, setting),
        *_cache(cell, setting),
        *_path(cell),
        *_kernels(cell),
        *_sixteen_bit_dtype(cell, setting),
        *_card(cell, setting),
    ]
    computed = [*_batch(cell, others), *_host(cell, setting), *(_beside_the_host(cell, lever) for lever in device)]
    if setting.busy:
        computed = []
    known = {change for tried in cell.tried for change in _stands_for(tried.form)}
    least_s = _LEAST_SHARE * cell.split.latency_s
    found = [lever for lever in computed if lever.saves_s > least_s and lever.change not in known]
    found += [lever for lever in (*_tried(cell), *cell.ways) if abs(lever.saves_s) > least_s]
    return sorted((lever for lever in found if lever.is_claim), key=lambda lever: -lever.saves_s)


def _tried(cell: JudgedCell) -> list[Lever]:
    """What was tried at this shape, with what it would make of this step. A mask is known by what it costs."""
    latency_s = cell.split.latency_s
    return [
        Lever(
            item.form,
            latency_s * (1 - item.ratio),
            f"{_on_layers(item)}the step takes {duration(latency_s * item.ratio)} then{_caution(item.form)}",
            basis="tried",
            half_width_s=latency_s * item.half_width_at(latency_s),
        )
        for item in cell.tried
        if not (item.form.startswith(PADDING_MASK) and item.ratio < 1)
    ]


def _caution(variant: str) -> str:
    four_bits = variant in FORMATS and FORMATS[variant].bits <= _FOUR_BITS
    return f"; {_other_answers(variant)}" if four_bits else ""


def _other_answers(variant: str) -> str:
    return f"answers change: --quant {variant} --check-quality measures how much"


def _on_layers(item: TrialResult) -> str:
    return "" if item.layers == item.of_layers else f"on {item.layers} of {item.of_layers} layers; "


def _beside_the_host(cell: JudgedCell, lever: Lever) -> Lever:
    """A change of the device's work saves no more than what the host's pace leaves, where it runs ahead."""
    return replace(lever, saves_s=min(lever.saves_s, max(0.0, cell.split.busy_s - cell.host_pace_s)))


def _batch(cell: JudgedCell, others: Sequence[JudgedCell]) -> list[Lever]:
    """The measured larger batch of the same series that gives the most tokens/s."""
    larger = [
        other
        for other in others
        if other.key.cell.batch_size > cell.key.cell.batch_size and other.key.series == cell.key.series
    ]
    if not larger:
        return []
    best = max(larger, key=lambda other: other.tokens_per_s)
    share_s = best.split.latency_s * cell.key.cell.batch_size / best.key.cell.batch_size
    knee = f"; by the counts the knee lies at batch {cell.knee:.3g}" if cell.knee is not None else ""
    return [
        Lever(
            f"batch {best.key.cell.batch_size}",
            cell.split.latency_s - share_s,
            f"as many tokens then cost {duration(share_s)}, though a step takes {duration(best.split.latency_s)}{knee}",
            basis="measured",
        )
    ]


def _bound(change: str, saves_s: float, because: str, half_width_s: float = 0.0) -> Lever:
    """A computed lever that saves at most `saves_s`."""
    return Lever(change, saves_s, because, half_width_s=half_width_s, at_most=True)


def _four_bit_weights(cell: JudgedCell, setting: Setting) -> list[Lever]:
    bits = setting.weight_bits
    if bits < _SIXTEEN_BITS:
        return []
    dense_from, dense_s = setting.four_bit_dense_from_rows, 0.0
    because = "if their kernel reaches the memory roof"
    if dense_from is not None and cell.key.tokens >= dense_from:
        dense_s = 2 * setting.weights * _SIXTEEN_BITS / 8 / setting.memory_bytes_per_s
        because = f"with {duration(dense_s)} taken off for the dense copy that their kernel writes and reads"
    saves_s = cell.split.weights_s * _in_linears(cell, setting) * (1 - _FOUR_BITS / bits)
    return [_bound(_FOUR_BIT_WEIGHTS, saves_s - dense_s, f"{because}; {_other_answers('nf4')}")]


def _in_linears(cell: JudgedCell, setting: Setting) -> float:
    """Share of the weights read in the blocks' linears: no format here packs embeddings, heads or banks of experts."""
    read_bytes = float(sum(item.weight_bytes for item in cell.operators))
    return min(1.0, setting.weights * setting.weight_bits / 8 / read_bytes) if read_bytes else 1.0


def _cache(cell: JudgedCell, setting: Setting) -> list[Lever]:
    static = Cause.UNFILLED_SLOTS in cell.avoidable_s  # it rolls its windows all the same
    copies_s = 0.0 if static else cell.avoidable_s.get(Cause.CACHE_COPIES, 0.0)
    share = max(0.0, 1 - _EIGHT_BITS / setting.cache_bits)
    return [
        _bound(_STATIC_CACHE, copies_s, "which is not copied at every step"),
        _bound("an 8-bit KV cache", cell.split.kv_s * share, "if attention reads it as stored"),
    ]


def _host(cell: JudgedCell, setting: Setting) -> list[Lever]:
    how, because = _GRAPHS, "the host's share of this step"
    if not setting.can_graph:
        how = _COMPILE
        because = "all of the host's share of this step; --engine eager,compile measures how much remains"
    faults_s = cell.avoidable_s.get(Cause.PAGE_FAULTS, 0.0)
    # A twin that was measured in a worse minute may dispatch for longer than the step takes.
    most_s = max(0.0, cell.split.latency_s - cell.split.device_s)
    return [
        _bound(how, min(cell.split.dispatch_s, most_s), because, cell.split.half_widths_s.get("dispatch_s", 0.0)),
        Lever(
            "keeping freed memory (MALLOC_TRIM_THRESHOLD_ and MALLOC_MMAP_THRESHOLD_, or tcmalloc)",
            faults_s,
            "fresh pages would not be taken again and again",
        ),
    ]


def _path(cell: JudgedCell) -> list[Lever]:
    def seconds(*causes: Cause) -> float:
        return sum(cell.avoidable_s.get(cause, 0.0) for cause in causes)

    unfused_s = seconds(Cause.ATTENTION_MATRIX, Cause.REPEATED_HEADS)
    return [
        Lever("a fused attention kernel", unfused_s, "scores and repeated heads would stay on chip"),
        _bound(
            "fusing element-wise kernels (torch.compile)",
            seconds(Cause.OPERANDS),
            "intermediates would not be written and read between them",
        ),
        _bound(
            "attention on the latent itself (absorbed MLA)",
            seconds(Cause.LATENT_EXPANDED),
            "keys and values would not be expanded again",
        ),
        _link(cell),
    ]


def _link(cell: JudgedCell) -> Lever:
    """What crosses a link: results between cards, or weights that wait elsewhere."""
    link_s = cell.split.link_s
    if any(item.group == COLLECTIVE for item in cell.operators):
        return _bound("a faster link, or fewer cards", link_s, "ranks would not wait for each other's results")
    return _bound("memory for all weights on the device", link_s, "none would cross the link at every step")


def _kernels(cell: JudgedCell) -> list[Lever]:
    """What the kernels themselves lose: measured by running them alone, so that better ones could recover it; no more
    than what the step takes beyond its floor, which a replay in a bad minute may exceed."""
    most_s = max(0.0, cell.split.latency_s - cell.split.floor_s)
    return [
        _bound(
            _PACKED_KERNEL,
            min(cell.split.dequantise_s, most_s),
            "nothing would be converted first",
            cell.split.half_widths_s.get("dequantise_s", 0.0),
        ),
        _bound(
            _OTHER_KERNELS,
            min(cell.split.kernel_s, most_s) - _unfused_s(cell),
            f"what these lose against their roofs when run alone{_most_of_it(cell)}",
            cell.split.half_widths_s.get("kernel_s", 0.0),
        ),
    ]


def _unfused_s(cell: JudgedCell) -> float:
    """Of what kernels lose, the seconds of unfused attention for its scores and repeated heads: another change saves
    those."""
    attention = {item.operator for item in cell.operators if item.group == "attention"}
    lost_s = sum(seconds for name, seconds in cell.lost_s.items() if name in attention)
    written_s = sum(cell.avoidable_s.get(cause, 0.0) for cause in (Cause.ATTENTION_MATRIX, Cause.REPEATED_HEADS))
    return min(written_s, max(0.0, lost_s))


def _most_of_it(cell: JudgedCell) -> str:
    """The operator that loses far more than its share, where there is one."""
    name = max(cell.lost_s, key=lambda each: cell.lost_s[each], default="")
    if not name or cell.lost_s[name] < _MOST_OF_IT * cell.split.kernel_s:
        return ""
    return f", {duration(cell.lost_s[name])} of it {name.rpartition('*.')[2]}"


def _sixteen_bit_dtype(cell: JudgedCell, setting: Setting) -> list[Lever]:
    """What the floors of all operators differ by: fewer bytes, under the narrower dtype's compute roof."""
    roof = setting.sixteen_bit_flops_per_s
    if roof is None:
        return []
    weights, cache = (min(1.0, _SIXTEEN_BITS / bits) for bits in (setting.weight_bits, setting.cache_bits))
    wide, narrow = (
        step_floor(
            ((op.flops, weights * op.weight_bytes + cache * op.kv_bytes, flops_per_s) for op in cell.operators),
            cell.roof_bytes_per_s,
        ).total_s
        for weights, cache, flops_per_s in ((1.0, 1.0, setting.compute_flops_per_s), (weights, cache, roof))
    )
    because = f"half the bytes, and its products reach {scaled(roof, 'FLOP/s')} here"
    return [Lever(_SIXTEEN_BIT_DTYPE, wide - narrow, because)]


def _card(cell: JudgedCell, setting: Setting) -> list[Lever]:
    """The card that would save the most, if it reached its datasheet and the host stayed as it is; none for a CPU."""
    if not setting.can_graph:
        return []
    floors = {card: floor_s for card, floor_s in floors_on(cell, setting).items() if floor_s is not None}
    if not floors:
        return []
    name = min(floors, key=lambda card: floors[card])
    saves_s = cell.split.device_s - floors[name]
    return [_bound(f"another card ({name})", saves_s, f"at its datasheet's roofs for {setting.dtype}")]


def floors_on(cell: JudgedCell, setting: Setting) -> dict[str, float | None]:
    """The least seconds of a cell's step on each card, None on one that cannot hold it.

    Empty where the cell's operators are not known.
    """
    if not cell.operators:
        return {}
    found = (floor_on(card, cell.operators, setting.dtype, cell.memory_bytes) for card in setting.cards)
    return {floor.gpu: floor.floor_s for floor in found}
