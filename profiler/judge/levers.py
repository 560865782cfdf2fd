"""Levers: computed or tried changes, and the time that each saves on a cell."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from profiler.counting.floor import floor_on, step_floor
from profiler.data.datasheets import Datasheet
from profiler.facts.measurements import (
    COMPILED,
    DYNAMIC_CACHE,
    EIGHT_BIT_CACHE,
    GRAPHED,
    PADDING_MASK,
    REPEATED_HEADS,
    STATIC_CACHE,
    WITHOUT_CUDNN,
)
from profiler.facts.operators import COLLECTIVE, Cause, OperatorWork
from profiler.judge.cells import CellEvidence, EngineDifference, JudgedCell, Lever
from profiler.judge.engine_differences import causes_of, engine_change
from profiler.judge.how_to import FOUR_BIT_WEIGHTS, SIXTEEN_BIT_DTYPE, UNWINDOWED, how_to
from profiler.judge.regimes import Flag
from profiler.quant.registry import FORMATS
from profiler.stats import CLAIM_VISITS
from profiler.units import duration, scaled

_PACKED_KERNEL = "a kernel that multiplies the packed weights, or 16-bit weights"
_OTHER_KERNELS = "other kernels for these shapes (another format or library)"
_FUSED_ATTENTION = "a fused attention kernel"
_OTHER_ATTENTION = "another attention kernel"
_ANOTHER_GPU = "another GPU"
_BATCH = "batch "
_FEWER_LAUNCHES = "fewer launches in the prefill (torch.compile)"
_FUSING = "fusing element-wise kernels (torch.compile)"
_NOT_TRIED_CACHE = (
    "not tried here, only if attention reads it as stored; others measured slower ones (transformers #34096,"
    " sglang #30815, vLLM #48786)"
)
_FOUR_BITS = 4.5
"""Bits per weight of bitsandbytes' 4-bit weights, with a float32 scale per block of 64."""
_SIXTEEN_BITS = 16.0
_EIGHT_BITS = 8.0
_DTYPE_BITS = {"float32": 32.0, "bfloat16": _SIXTEEN_BITS, "float16": _SIXTEEN_BITS}
_IN_16_BITS = frozenset({SIXTEEN_BIT_DTYPE, _OTHER_KERNELS})
_REPLACED_BY: Mapping[str, frozenset[str]] = {
    "bfloat16": _IN_16_BITS,
    "float16": _IN_16_BITS,
    STATIC_CACHE: frozenset({STATIC_CACHE}),
    EIGHT_BIT_CACHE: frozenset({EIGHT_BIT_CACHE}),
    GRAPHED: frozenset({GRAPHED, STATIC_CACHE}),
    DYNAMIC_CACHE: frozenset({DYNAMIC_CACHE}),
    COMPILED: frozenset({COMPILED}),
    REPEATED_HEADS: frozenset({_FUSED_ATTENTION, _OTHER_ATTENTION}),
    WITHOUT_CUDNN: frozenset({_OTHER_ATTENTION}),
}
"""By tried variant other than a format: the computed changes that it replaces."""
_WEIGHTS = frozenset({*FORMATS, *_DTYPE_BITS})
"""Ways to hold the weights, of which a model has one."""
_REPLACED_BY_ENGINE: Mapping[str, frozenset[str]] = {
    "static": frozenset({STATIC_CACHE}),
    "graph": frozenset({GRAPHED}),
    "compile": frozenset({COMPILED}),
}
"""By engine of the run: the computed changes that its measurement replaces."""
_BESIDE_PRODUCTS = frozenset({"attention", "norm", "embedding", "other"})
"""Groups of operators that are no products of weights."""
WORTH = 0.05
"""The smallest share of a step that a change must save to be advised."""
# The smallest share of a step that a measurement can resolve.
_LEAST_SHARE = 1e-3
# Products that show a fixed cost: how many, over which range of bytes, and how far from one line.
_LEAST_PRODUCTS, _LEAST_RANGE, _OFF_THE_LINE = 4, 4.0, 0.2
# An operator with at least this share of all kernel losses is named.
_NAMED_LOSS_SHARE = 0.3


@dataclass(frozen=True)
class Setting:
    """The properties of the device and the model on which advice depends."""

    memory_bytes_per_s: float
    compute_flops_per_s: float
    weight_bits: float
    """Stored bits per weight of the blocks' linears, including scales."""
    can_graph: bool
    """Whether the device has CUDA graphs."""
    packs: bool = True
    """Whether the loader can pack the weights; it does not pack those of a GGUF file."""
    packed_kernels: tuple[str, ...] = ()
    """Formats whose kernels multiply packed weights on this device."""
    measured: bool = True
    """Whether both roofs were measured; otherwise one is a datasheet's peak or another dtype's roof."""
    weights: float = 0.0
    """Number of weights of the blocks' linears."""
    cache_bits: float = 16.0
    """Bits per element of the KV cache."""
    four_bit_dense_from_rows: int | None = None
    """Rows from which every 4-bit kernel first writes a dense 16-bit copy on this device; None if it never does."""
    sixteen_bit_flops_per_s: float | None = None
    """The highest measured 16-bit compute roof, for a float32 model; None for others, or if none was measured."""
    sixteen_bit_dtype: str = "bfloat16"
    """The 16-bit dtype in which a change computes: the model's own, or that with the highest roof."""
    cards: tuple[Datasheet, ...] = ()
    """Other GPUs to compare with."""
    busy: bool = False
    """Whether other processes used this machine's cores. Then no lever is computed from its times."""
    dtype: str = "float16"
    """The dtype of the model, which also decides the peaks of `cards`."""
    sustained_flops_per_s: tuple[float, ...] = ()
    """The ends of a GPU's compute roof in this run, under load; empty on a CPU, or if it was not measured."""


def _replaced_by(variant: str) -> frozenset[str]:
    """The computed changes that a tried variant replaces."""
    if variant not in FORMATS:
        return _REPLACED_BY.get(variant, frozenset())
    item = FORMATS[variant]
    changes = {_OTHER_KERNELS, FOUR_BIT_WEIGHTS} if item.bits <= _FOUR_BITS else {_OTHER_KERNELS}
    return frozenset({*changes, _PACKED_KERNEL} if item.multiplies_packed else changes)


def promised_s(evidence: Sequence[CellEvidence]) -> dict[str, float]:
    """The largest computed saving, in any cell, that a trial of each variant would replace, in seconds."""
    computed = [lever for item in evidence for lever in item.levers if lever.basis == "computed"]
    return {
        variant: max((lever.saves_s for lever in computed if lever.change in _replaced_by(variant)), default=0.0)
        for variant in (*FORMATS, *_REPLACED_BY)
    }


def levers(cell: JudgedCell, setting: Setting, others: Sequence[JudgedCell] = ()) -> list[Lever]:
    """Changes ranked by the seconds that they save on this cell, without those too small to measure.

    Another GPU comes after all that save time on this one, and changes that cost time come last. A tried variant or a
    measured engine replaces the computed changes of its kind. `others` are the run's cells, among which a larger batch
    is searched. Empty for a step above its roof, since one of its terms must be wrong.
    """
    if Flag.ABOVE_ROOF in cell.verdict.flags:
        return []
    device = [
        *_four_bit_weights(cell, setting),
        *_cache(cell, setting),
        *_path(cell),
        *_window(cell),
        *_kernels(cell, setting),
        *_sixteen_bit_dtype(cell, setting),
        *_card(cell, setting),
    ]
    # A host that runs ahead of the device limits the savings of the device's work.
    most_s = max(0.0, cell.split.busy_s - cell.host_pace_s)
    computed = [
        *_batch(cell, others),
        *_host(cell, setting),
        *(lever.limited_to(most_s) for lever in device),
    ]
    nearby = _tried_nearby(cell, setting)
    if setting.busy:
        computed, nearby = [], []
    forms = {trial.form for trial in cell.tried} | {result.form for _, result in cell.tried_nearby}
    replaced = {change for form in forms for change in _replaced_by(form)}
    visited = [item for item in cell.engines if item.visits >= CLAIM_VISITS]
    replaced |= {change for item in visited for change in _REPLACED_BY_ENGINE.get(item.engine, ())}
    least_s = _LEAST_SHARE * cell.split.latency_s
    changes = [lever for lever in computed if lever.saves_s > least_s and lever.change not in replaced]
    changes += [lever for lever in (*_tried(cell), *nearby, *_engines(visited, cell)) if abs(lever.saves_s) > least_s]
    ranked = []
    for lever in sorted((lever for lever in changes if lever.is_claim), key=_rank):
        how = how_to(lever.change, setting.can_graph, setting.sixteen_bit_dtype)
        measured_by = "" if lever.basis == "measured" or _is_split(cell) else how.options
        ranked.append(replace(lever, how=how.line, measured_by=measured_by))
    return ranked


def best_lever(cell: JudgedCell) -> Lever | None:
    """Return the change to advise for a cell: the run one that saves most, or else the one of the highest middle.

    A change is advised only if it saves a twentieth of the step. Neither another GPU nor another batch changes the step
    itself. An 8-bit KV cache that was not tried is not advised: bytes promise a saving there, and the measurements that
    its reason cites found a loss.
    """
    worth = [
        item
        for item in cell.levers
        if item.saves_s >= WORTH * cell.split.latency_s and not item.change.startswith((_ANOTHER_GPU, _BATCH))
    ]
    run = [item for item in worth if item.basis != "computed"]
    computed = [item for item in worth if item.basis == "computed" and item.change != EIGHT_BIT_CACHE]
    return next(iter([*run, *sorted(computed, key=lambda item: -item.middle_s)]), None)


def _rank(lever: Lever) -> tuple[bool, bool, float]:
    return lever.saves_s < 0, lever.change.startswith(_ANOTHER_GPU), -lever.saves_s


def next_tried(cell: JudgedCell, best: Lever) -> Lever | None:
    """Return the tried change that saves most after `best` and is neither a part of it nor in its place.

    It saves at least `WORTH` of the step by the lower end of its interval. Several trials are made on a disturbed host,
    and one of them may seem to save.
    """
    least_s, parts = WORTH * cell.split.latency_s, _REPLACED_BY.get(best.change, frozenset())
    if best.change in _WEIGHTS:
        parts = _WEIGHTS
    others = (
        item
        for item in cell.levers
        if item.basis == "tried" and item.change not in {best.change, *parts}
        if item.saves_s - item.half_width_s >= least_s and item.how not in ("", best.how)
    )
    return next(others, None)


def _tried(cell: JudgedCell) -> list[Lever]:
    """The variants that a trial at this shape found faster or slower, applied to this step. A mask only costs time."""
    found, latency_s = [], cell.split.latency_s
    for item in cell.tried:
        if item.is_claim and not (item.form.startswith(PADDING_MASK) and item.ratio < 1):
            step_s, half_width_s = item.step_s(latency_s), latency_s * item.half_width_at(latency_s)
            few = "" if item.layers == item.of_layers else ", extrapolated from a few layers"
            because = f"the step takes {duration(step_s)} then{few}{_caution(item.form)}"
            found.append(Lever(item.form, latency_s - step_s, because, basis="tried", half_width_s=half_width_s))
    return found


def _tried_nearby(cell: JudgedCell, setting: Setting) -> list[Lever]:
    """What variants save here, from their trials at another depth of the same batch.

    The products are the same, and so is what a variant saves on them. What a deeper step takes longer is its cache: a
    narrower one saves up to its share of that, and a static one up to the copies.
    """
    found = []
    for there, result in cell.tried_nearby:
        if not result.is_claim:
            continue
        form = result.form
        longer_s = cell.split.latency_s - there.split.latency_s
        if form in FORMATS or form in _DTYPE_BITS:
            more_s = (1 - _DTYPE_BITS.get(form, _SIXTEEN_BITS) / setting.cache_bits) * longer_s
        elif form in (STATIC_CACHE, GRAPHED, COMPILED):
            more_s = _copies_s(cell) - _copies_s(there)
        else:
            continue
        saves_s = there.split.latency_s - result.step_s(there.split.latency_s)
        off_s = there.split.latency_s * result.half_width_at(there.split.latency_s)
        low_s, high_s = saves_s + min(0.0, more_s) - off_s, saves_s + max(0.0, more_s) + off_s
        because = f"tried at {there.key.name}, whose products are the same{_caution(form)}"
        found.append(Lever(form, high_s, because, at_least_s=low_s))
    return found


def _copies_s(cell: JudgedCell) -> float:
    return cell.avoidable_s.get(Cause.CACHE_COPIES, 0.0)


def _engines(differences: Sequence[EngineDifference], cell: JudgedCell) -> list[Lever]:
    """The run's other engines, on this step."""
    return [
        Lever(
            engine_change(item),
            item.saves_s,
            f"the step takes {duration(cell.split.latency_s - item.saves_s)} then"
            f"{f'; {causes}' if (causes := causes_of(item)) else ''}",
            basis="measured",
            half_width_s=max(item.high_s - item.saves_s, item.saves_s - item.low_s),
        )
        for item in differences
    ]


def _caution(variant: str) -> str:
    """What to say of a variant whose answers differ, after its reason."""
    if variant not in FORMATS or FORMATS[variant].bits > _FOUR_BITS:
        return ""
    return f"; answers change: --quant {variant} --check-quality measures how much"


def _batch(cell: JudgedCell, others: Sequence[JudgedCell]) -> list[Lever]:
    """The measured larger batch of the same series with the most tokens/s."""
    larger = [
        other
        for other in others
        if other.key.cell.batch_size > cell.key.cell.batch_size and other.key.series == cell.key.series
    ]
    if not larger:
        return []
    best = max(larger, key=lambda other: other.tokens_per_s)
    share_s = best.split.latency_s * cell.key.cell.batch_size / best.key.cell.batch_size
    knee = f"; by the counts compute-bound from batch {cell.knee:.0f}" if cell.knee is not None else ""
    return [
        Lever(
            f"{_BATCH}{best.key.cell.batch_size}",
            cell.split.latency_s - share_s,
            f"the same number of tokens costs {duration(share_s)} there, in steps of"
            f" {duration(best.split.latency_s)}{knee}",
            basis="measured",
        )
    ]


def _bound(change: str, saves_s: float, because: str, half_width_s: float = 0.0) -> Lever:
    """A computed lever that saves at most `saves_s`."""
    return Lever(change, saves_s, because, half_width_s=half_width_s, at_most=True)


def _four_bit_weights(cell: JudgedCell, setting: Setting) -> list[Lever]:
    bits = setting.weight_bits
    if bits < _SIXTEEN_BITS or not setting.packs or _is_split(cell):
        return []
    dense_from, dense_s = setting.four_bit_dense_from_rows, 0.0
    because = "if their kernel reaches the memory roof"
    if dense_from is not None and cell.key.tokens >= dense_from:
        dense_s = 2 * setting.weights * _SIXTEEN_BITS / 8 / setting.memory_bytes_per_s
        because = f"with {duration(dense_s)} taken off for the dense copy that their kernel writes and reads"
    split, packed = cell.split, _in_linears(cell, setting)
    if setting.sixteen_bit_flops_per_s is not None:
        kept = (packed * _FOUR_BITS + (1 - packed) * _SIXTEEN_BITS) / bits
        saves_s = _saved_in_16_bits_s(cell, setting, kept, setting.sixteen_bit_flops_per_s)
        because = f"{because}, with products in {setting.sixteen_bit_dtype}"
    else:
        streamed = split.weights_s / (split.weights_s + split.compute_s) if split.weights_s else 0.0
        saves_s = packed * (split.weights_s * (1 - _FOUR_BITS / bits) + streamed * _lost_in_products(cell))
        saves_s += _offloaded_s(cell)  # smaller weights may all fit
    return [_bound(FOUR_BIT_WEIGHTS, saves_s - dense_s, because + _caution("nf4"))]


def _offloaded_s(cell: JudgedCell) -> float:
    """Seconds in which offloaded weights cross a link."""
    return 0.0 if _is_split(cell) else cell.split.link_s


def _is_split(cell: JudgedCell) -> bool:
    """Whether several ranks compute the step."""
    return any(item.group == COLLECTIVE for item in cell.operators)


def _in_linears(cell: JudgedCell, setting: Setting) -> float:
    """The blocks' linears as a share of all weights read. No format packs embeddings, heads or banks of experts."""
    read_bytes = float(sum(item.weight_bytes for item in cell.operators))
    return min(1.0, setting.weights * setting.weight_bits / 8 / read_bytes) if read_bytes else 1.0


def _cache(cell: JudgedCell, setting: Setting) -> list[Lever]:
    """A cache that is not copied, and one of 8 bits; for a quantised cache one that is not converted."""
    quantized_s = cell.avoidable_s.get(Cause.CACHE_CONVERSION, 0.0)
    if quantized_s:
        more_s = quantized_s + cell.avoidable_s.get(Cause.CONVERTED_READS, 0.0)
        return [_bound(DYNAMIC_CACHE, more_s, "which is not converted at every step")]
    share = max(0.0, 1 - _EIGHT_BITS / setting.cache_bits)
    return [
        _bound(STATIC_CACHE, _copies_s(cell), "which is not copied at every step"),
        _bound(EIGHT_BIT_CACHE, cell.split.kv_s * share, _NOT_TRIED_CACHE),
    ]


def _host(cell: JudgedCell, setting: Setting) -> list[Lever]:
    """What the host's share of a step costs: fewer launches save it, and fused kernels save small kernels too."""
    faults_s = cell.avoidable_s.get(Cause.PAGE_FAULTS, 0.0)
    # On a machine of varying speed, the measured dispatch may be longer than the step.
    most_s = max(0.0, cell.split.latency_s - cell.split.device_s)
    host_s, half_width_s = min(cell.split.dispatch_s, most_s), cell.split.half_widths_s.get("dispatch_s", 0.0)
    small_s = min(cell.small_kernels_s or 0.0, most_s)
    found = [
        Lever(
            "keeping freed memory (MALLOC_TRIM_THRESHOLD_ and MALLOC_MMAP_THRESHOLD_, or tcmalloc)",
            faults_s,
            "fresh pages would not be taken again and again",
        )
    ]
    # No graph replays a moving window, since the host counts its tokens.
    rolls = cell.key.phase == "decode" and cell.avoidable_s.get(Cause.ROLLED_WINDOWS, 0.0) > 0
    if not setting.can_graph or rolls:
        because = "all of the host's share of this step, and of what its small kernels lose"
        return [*found, _bound(COMPILED, min(host_s + small_s, most_s), because, half_width_s)]
    if cell.key.phase == "prefill":
        return [*found, _bound(_FEWER_LAUNCHES, host_s, "the host's share of this prefill", half_width_s)]
    if cell.waits:
        return found
    graphed = _bound(GRAPHED, host_s, "the host submits one launch per step instead of one per kernel", half_width_s)
    return [*found, graphed, *_compiled(cell, half_width_s)]


_LEFT_BY_FUSING = (0.1, 1 / 3)
"""Share of their time that small kernels keep once inductor has fused them. It is assumed, around the only case known:
about a fifth in a step of Mistral-7B on an H100, as the rest of 6.72 ms after products and attention."""
_MASKED_ATTENTION = 3.0
"""A static cache has a mask, with which attention takes up to this many times as long. transformers 5.17 repeats keys
and values per head there: 0.61 ms instead of 0.20 in a step of Mistral-7B on an H100."""


def _compiled(cell: JudgedCell, half_width_s: float) -> list[Lever]:
    """A compiled step on a static cache, replayed as a graph: no host, no copies, and fused small kernels."""
    if cell.small_kernels_s is None:
        return []
    split, few, many = cell.split, *_LEFT_BY_FUSING
    copies_s = _copies_s(cell)
    masked_s = (_MASKED_ATTENTION - 1) * (_lost_in(cell, "attention") + cell.split.kv_s)
    fastest_s = split.busy_s - (1 - few) * cell.small_kernels_s - copies_s
    slowest_s = split.busy_s - (1 - many) * cell.small_kernels_s - copies_s + masked_s + max(0.0, split.unexplained_s)
    graphs_s = [split.latency_s - item.saves_s for item in cell.engines if item.engine == "graph"]
    graphs_s += [item.step_s(split.latency_s) for item in cell.tried if item.form == GRAPHED]
    slowest_s = max(fastest_s, min([slowest_s, *graphs_s]))  # a graph is the same step, not compiled
    most_s, least_s = split.latency_s - fastest_s, split.latency_s - slowest_s
    if least_s <= 0:
        return []
    because = (
        f"the step takes {duration(fastest_s)} to {duration(slowest_s)} then: its kernels without the host, and small"
        f" kernels, which lose {duration(cell.small_kernels_s)}, fused"
    )
    return [Lever(COMPILED, most_s, because, half_width_s=half_width_s, at_least_s=least_s)]


def _lost_in(cell: JudgedCell, group: str) -> float:
    """Seconds that the replayed operators of a group lose against their roofs."""
    names = {item.operator for item in cell.operators if item.group == group}
    return max(0.0, sum(seconds for name, seconds in cell.lost_s.items() if name in names))


def _lost_in_products(cell: JudgedCell) -> float:
    """Seconds that products of weights lose against their roofs, at most the step's time beyond its floor.

    Replays on a disturbed machine may take longer.
    """
    lost_s = min(cell.split.kernel_s, sum(cell.lost_s.values()), max(0.0, cell.split.latency_s - cell.split.floor_s))
    return max(0.0, lost_s - _lost_in(cell, "attention"))


def _path(cell: JudgedCell) -> list[Lever]:
    def seconds(*causes: Cause) -> float:
        return sum(cell.avoidable_s.get(cause, 0.0) for cause in causes)

    unfused_s, attention_s = seconds(Cause.ATTENTION_MATRIX, Cause.REPEATED_HEADS), _lost_in(cell, "attention")
    # A fused kernel still reads what a product wrote, and writes what the next one reads.
    products = (item for item in cell.operators if item.weight_bytes and item.group not in _BESIDE_PRODUCTS)
    moved_s = sum(float(item.activation_bytes) for item in products) / cell.roof_bytes_per_s
    link = ("memory for all weights on the device", "none would cross the link at every step")
    if _is_split(cell):
        link = ("a faster link, or fewer GPUs", "ranks would not wait for each other's results")
    return [
        Lever(_FUSED_ATTENTION, unfused_s, "scores and repeated heads would stay on chip"),
        _bound(
            _OTHER_ATTENTION,
            attention_s - min(unfused_s, attention_s),
            "what attention loses against its roof when run by itself",
        ),
        _bound(
            _FUSING,
            cell.traced_small_s - moved_s,
            f"of its trace, small kernels take {duration(cell.traced_small_s)}; once fused, bytes {duration(moved_s)}",
        ),
        _bound(
            "attention on the latent itself (absorbed MLA)",
            seconds(Cause.LATENT_EXPANDED),
            "keys and values would not be expanded again",
        ),
        _bound(link[0], cell.split.link_s, link[1]),
    ]


def _window(cell: JudgedCell) -> list[Lever]:
    """What full windows of all layers cost: at most their copies, and those of heads that transformers repeats."""
    cores = [item.avoidable_bytes for item in cell.operators if item.group == "attention" and item.kv_bytes]
    if not all(item.get(Cause.ROLLED_WINDOWS) for item in cores):
        return []
    copies_s = sum(kernel.seconds for kernel in cell.longest if kernel.name.startswith("direct_copy"))
    repeats = any(item.get(Cause.REPEATED_HEADS) for item in cores)
    repeated_s = min(_lost_in(cell, "attention"), copies_s or math.inf) if repeats else 0.0
    rolled_s = cell.avoidable_s.get(Cause.ROLLED_WINDOWS, 0.0)
    because = f"{duration(rolled_s)} copy windows, {duration(repeated_s)} repeat heads; attention then sees all tokens"
    return [_bound(UNWINDOWED, rolled_s + repeated_s, because)]


def _kernels(cell: JudgedCell, setting: Setting) -> list[Lever]:
    """The losses of products in isolation, which better kernels could recover."""
    packed = "".join(f"; {name} has one here" for name in setting.packed_kernels[:1])
    most_s = max(0.0, cell.split.latency_s - cell.split.floor_s)
    return [
        _bound(
            _PACKED_KERNEL,
            min(cell.split.dequantise_s, most_s),
            f"nothing would be converted first{packed}",
            cell.split.half_widths_s.get("dequantise_s", 0.0),
        ),
        _bound(
            _OTHER_KERNELS,
            _lost_in_products(cell),
            f"what products lose against their roofs when run one by one{_fixed_costs(cell)}{_largest_loss(cell)}",
            cell.split.half_widths_s.get("kernel_s", 0.0),
        ),
    ]


def _fixed_costs(cell: JudgedCell) -> str:
    """Words for what the products of a decode step take besides their bytes, a fixed time for each.

    It is the intercept of their times over their bytes, if these lie on a line: on an H100, 5.0 us + n / 3.2 TB/s.
    """
    products = [item for item in cell.operators if item.operator in cell.lost_s and item.weight_bytes]
    if cell.key.phase != "decode" or len(products) < _LEAST_PRODUCTS:
        return ""
    counts = np.array([item.count for item in products])
    nbytes = np.array([float(item.weight_bytes) for item in products]) / counts
    calls_s = np.array([cell.lost_s[item.operator] for item in products]) / counts + nbytes / cell.roof_bytes_per_s
    if nbytes.max() < _LEAST_RANGE * nbytes.min():
        return ""
    s_per_byte, fixed_s = np.polyfit(nbytes, calls_s, 1, w=np.sqrt(counts))
    off_s = np.average(np.abs(fixed_s + s_per_byte * nbytes - calls_s), weights=counts)
    if fixed_s <= 0 or off_s > _OFF_THE_LINE * fixed_s:
        return ""
    total = int(counts.sum())
    total_s = min(total * fixed_s, _lost_in_products(cell))
    return f", {duration(total_s)} of it the fixed {duration(fixed_s)} of each of {total}: fewer, wider ones save it"


def _largest_loss(cell: JudgedCell) -> str:
    """Words that name the operator with the largest kernel loss, if that is at least 30 % of all losses."""
    name = max(cell.lost_s, key=lambda each: cell.lost_s[each], default="")
    if not name or cell.lost_s[name] < _NAMED_LOSS_SHARE * cell.split.kernel_s:
        return ""
    return f", {duration(cell.lost_s[name])} of it {name.rpartition('*.')[2]}"


def _sixteen_bit_dtype(cell: JudgedCell, setting: Setting) -> list[Lever]:
    """What a 16-bit dtype saves of a float32 step: half the bytes, and another compute roof.

    At least the floors of all but attention differ by that much, if kernels lose as many seconds against their roofs;
    attention computes its softmax in float32 in any dtype. At most kernels lose none, and all other work takes half the
    time. Kernels for few rows may be far from their roofs in one dtype and close in the other: then the lower end is
    unknown, and the saving a bound.
    """
    roof = setting.sixteen_bit_flops_per_s
    if roof is None:
        return []
    kept = min(1.0, _SIXTEEN_BITS / setting.weight_bits)
    most_s = _saved_in_16_bits_s(cell, setting, kept, roof)
    because = f"half the bytes, and its products reach {scaled(roof, 'FLOP/s')} here"
    if not setting.can_graph and cell.key.phase == "decode":
        return [_bound(SIXTEEN_BIT_DTYPE, most_s, f"{because}; few rows may reach less")]
    others = [item for item in cell.operators if item.group != "attention"]
    wide_s = _floor_s(cell, others, setting.compute_flops_per_s)
    least_s = wide_s - _floor_s(cell, others, roof, kept, min(1.0, _SIXTEEN_BITS / setting.cache_bits))
    least_s += _offloaded_s(cell) / 2  # at most half of the bytes still cross
    return [Lever(SIXTEEN_BIT_DTYPE, max(most_s, least_s), because, at_least_s=least_s)]


def _saved_in_16_bits_s(cell: JudgedCell, setting: Setting, kept: float, flops_per_s: float) -> float:
    """What a float32 step saves at most in 16 bits: kernels at their roofs, and half of what is no kernel's time.

    `kept` is the share of the weights' bytes that is still read.
    """
    split, cache_kept = cell.split, min(1.0, _SIXTEEN_BITS / setting.cache_bits)
    other_s = split.avoidable_s + max(0.0, split.unexplained_s)
    floor_s = _floor_s(cell, cell.operators, flops_per_s, kept, cache_kept)
    return split.latency_s - split.dispatch_s - floor_s - _SIXTEEN_BITS / _DTYPE_BITS["float32"] * other_s


def _floor_s(
    cell: JudgedCell,
    operators: Sequence[OperatorWork],
    flops_per_s: float,
    weights_kept: float = 1.0,
    cache_kept: float = 1.0,
) -> float:
    """Seconds of operators at the roofs, with shares of the bytes of their weights and of their cache."""
    parts = ((op.flops, weights_kept * op.weight_bytes + cache_kept * op.kv_bytes, flops_per_s) for op in operators)
    return step_floor(parts, cell.roof_bytes_per_s).total_s


def _card(cell: JudgedCell, setting: Setting) -> list[Lever]:
    """The GPU that would save the most if it reached its datasheet, with the same host; empty on a CPU."""
    if not setting.can_graph:
        return []
    floors = {card: floor_s for card, floor_s in floors_on(cell, setting).items() if floor_s is not None}
    if not floors:
        return []
    name = min(floors, key=lambda card: floors[card])
    saves_s = cell.split.busy_s - floors[name]
    return [_bound(f"{_ANOTHER_GPU} ({name})", saves_s, f"at its datasheet's roofs for {setting.dtype}")]


def floors_on(cell: JudgedCell, setting: Setting) -> dict[str, float | None]:
    """The lower bound in seconds of a cell's step on each of `setting.cards`; None if the memory is too small.

    Empty if the cell's operators are unknown.
    """
    if not cell.operators:
        return {}
    floors = (floor_on(card, cell.operators, setting.dtype, cell.memory_bytes) for card in setting.cards)
    return {floor.gpu: floor.floor_s for floor in floors}
