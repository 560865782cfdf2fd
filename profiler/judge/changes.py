"""Changes: computed or tried changes, and the time that each saves on a cell."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from profiler.counting.floor import step_floor
from profiler.facts.change_ids import ChangeId
from profiler.facts.operators import Cause, OperatorWork
from profiler.judge.cell_stages import Judged
from profiler.judge.engine_differences import causes_of, change_of_engine
from profiler.judge.regimes import Flag
from profiler.judge.savings import ChangeEffect, EngineDifference, TrialResult
from profiler.loading.changes import (
    KEPT_PAGES,
    UNWINDOWED,
    Change,
    Circumstances,
    compiled_forward,
    dtype_change,
    format_change,
    possible_changes,
)
from profiler.quant.registry import tried_formats
from profiler.stats import CLAIM_REPETITIONS
from profiler.units import duration, scaled

_FOUR_BITS = 4.5
"""Bits per weight of bitsandbytes' 4-bit weights, with a float32 scale per block of 64."""
_SIXTEEN_BITS = 16.0
_BESIDE_MATMULS = frozenset({"attention", "norm", "embedding", "other"})
"""Groups of operators that are no matmuls of weights."""
WORTH = 0.05
"""The smallest share of a step that a change must save to be advised."""
# The smallest share of a step that a measurement can resolve.
_LEAST_SHARE = 1e-3


@dataclass(frozen=True)
class Setting:
    """The properties of the device and the model on which advice depends."""

    memory_bytes_per_s: float
    compute_flops_per_s: float
    weight_bits: float
    """Stored bits per weight of the blocks' linears, including scales."""
    here: Circumstances
    """What decides which changes work."""
    measured: bool = True
    """Whether both ceilings were measured; otherwise one is a datasheet's peak or another dtype's ceiling."""
    weights: float = 0.0
    """Number of weights of the blocks' linears."""
    cache_bits: float = 16.0
    """Bits per element of the KV cache."""
    four_bit_dense_from_rows: int | None = None
    """Rows from which every 4-bit kernel first writes a dense 16-bit copy on this device; None if it never does."""
    sixteen_bit_flops_per_s: float | None = None
    """The highest measured 16-bit compute ceiling, for a float32 model; None for others, or if none was measured."""
    float32_flops_per_s: float | None = None
    """The measured compute ceiling of float32, if it is above those of the model's dtype and of 16 bits; else None."""
    sixteen_bit_dtype: str = "bfloat16"
    """BF16 or FP16, in which a change computes: the model's own, or that with the highest ceiling."""
    busy: bool = False
    """Whether other processes used this machine's cores. Then no change is computed from its times."""
    sustained_flops_per_s: tuple[float, ...] = ()
    """The ends of a GPU's compute ceiling in this run, under load; empty on a CPU, or if it was not measured."""


def promised_s(judged: Sequence[Judged], setting: Setting) -> dict[tuple[ChangeId, str], float]:
    """Return the largest computed saving of each change in any cell in seconds; none if `setting` is busy."""
    found: dict[tuple[ChangeId, str], float] = {}
    for effect in (each for cell in judged for each in changes(cell, setting)):
        if effect.basis == "computed" and effect.id is not None:
            what = effect.id, effect.value
            found[what] = max(effect.saves_s, found.get(what, 0.0))
    # What bytes promise of the other formats, next to that of four bits.
    four_bits_s = found.get((ChangeId.FORMAT, "nf4"), 0.0)
    for item in tried_formats() if four_bits_s else ():
        found.setdefault(
            (ChangeId.FORMAT, item.name), four_bits_s * (_SIXTEEN_BITS - item.bits) / (_SIXTEEN_BITS - _FOUR_BITS)
        )
    return found


def changes(cell: Judged, setting: Setting) -> list[ChangeEffect]:
    """Changes ranked by the seconds that they save on this cell, without those too small to measure.

    Changes that cost time come last. A tried change or a measured engine replaces the computed saving of its kind.
    Empty for a step above its ceiling, since one of its terms must be wrong.
    """
    if Flag.ABOVE_CEILING in cell.verdict.flags:
        return []
    of_device = (_four_bit_weights, _cache, _attention, _window, _sixteen_bit_dtype, _float32)
    # A host that runs ahead of the device limits the savings of the device's work.
    most_s = max(0.0, cell.terms.busy_s - cell.host_pace_s)
    computed = [*_host(cell, setting), *(item.limited_to(most_s) for each in of_device for item in each(cell, setting))]
    timed = [item for item in cell.engines if item.repetitions >= CLAIM_REPETITIONS]
    replaced = {item.trial.what for item in cell.tried} | {(change_of_engine(item), "") for item in timed}
    least_s = _LEAST_SHARE * cell.terms.latency_s
    worth = [] if setting.busy else [item for item in computed if item.saves_s > least_s]
    found = [item for item in worth if (item.id, item.value) not in replaced]
    found += [effect for effect in (*_tried(cell), *_engines(timed, cell)) if abs(effect.saves_s) > least_s]
    claims = [effect for effect in found if effect.is_claim]
    return sorted(claims, key=lambda effect: (effect.saves_s < 0, -effect.saves_s))


def saves_clearly(cell: Judged, result: TrialResult) -> bool:
    """Whether a tried change saves `WORTH` of a step or more by the lower end of its interval."""
    return 1 - result.ratio - result.half_width_at(cell.terms.latency_s, cell.timed.half_width_s) >= WORTH


def not_tried(cell: Judged) -> list[ChangeEffect]:
    """Return the computed savings of at least `WORTH` of a step that have a line, by the middle of what they save.

    An 8-bit KV cache is none of them: its bytes promise a saving, and others measured losses.
    """
    computed = [item for item in cell.changes if item.basis == "computed" and item.id is not ChangeId.EIGHT_BIT_CACHE]
    worth = [item for item in computed if item.how and item.saves_s >= WORTH * cell.terms.latency_s]
    return sorted(worth, key=lambda item: -item.middle_s)


def _tried(cell: Judged) -> Iterator[ChangeEffect]:
    latency_s = cell.terms.latency_s
    for item in cell.tried:
        if item.change is not None or item.ratio > 1:
            trial, (before_s, after_s) = item.trial, item.steps_s(latency_s)
            few = "" if trial.layers == trial.of_layers else f", by {trial.layers} of {trial.of_layers} layers"
            yield ChangeEffect(
                trial.form,
                before_s - after_s,
                f"the step then takes {duration(after_s)}{few}",
                "tried",
                before_s * item.half_width_at(latency_s, cell.timed.half_width_s),
                how=trial.line,
                id=item.change,
                value=trial.what[1] if trial.what else "",
            )


def _computed(
    change: Change | None, saves_s: float, because: str, half_width_s: float = 0.0, at_least_s: float | None = None
) -> list[ChangeEffect]:
    """A computed change: a range from `at_least_s` on, or else at most `saves_s`; empty without a change."""
    if change is None:
        return []
    return [
        ChangeEffect(
            change.phrase,
            saves_s,
            because,
            "computed",
            half_width_s,
            at_most=at_least_s is None,
            at_least_s=at_least_s,
            how=change.line,
            id=change.id,
            value=change.value,
            preparing_s=change.preparing_s,
        )
    ]


def _possible(setting: Setting, *ids: ChangeId) -> Change | None:
    return next((change for change in possible_changes(setting.here) if change.id in ids), None)


def _engines(differences: Sequence[EngineDifference], cell: Judged) -> list[ChangeEffect]:
    return [
        ChangeEffect(
            f"the engine {item.engine}",
            item.saves_s,
            f"the step then takes {duration(cell.terms.latency_s - item.saves_s)}"
            f"{f'; {causes}' if (causes := causes_of(item)) else ''}",
            basis="measured",
            half_width_s=max(item.high_s - item.saves_s, item.saves_s - item.low_s),
        )
        for item in differences
    ]


def _four_bit_weights(cell: Judged, setting: Setting) -> list[ChangeEffect]:
    bits = setting.weight_bits
    if bits < _SIXTEEN_BITS or not setting.here.packs or cell.timed.is_on_ranks:
        return []
    dense_from, dense_s = setting.four_bit_dense_from_rows, 0.0
    because = "if their kernel reaches the memory ceiling"
    if dense_from is not None and cell.key.tokens >= dense_from:
        dense_s = 2 * setting.weights * _SIXTEEN_BITS / 8 / setting.memory_bytes_per_s
        because = f"with {duration(dense_s)} taken off for the dense copy that their kernel writes and reads"
    terms, read_bytes = cell.terms, float(sum(item.weight_bytes for item in cell.timed.operators))
    # No format packs embeddings, heads or banks of experts.
    packed = min(1.0, setting.weights * bits / 8 / read_bytes) if read_bytes else 1.0
    if setting.sixteen_bit_flops_per_s is not None:
        kept = (packed * _FOUR_BITS + (1 - packed) * _SIXTEEN_BITS) / bits
        saves_s = _saved_at_most_s(cell, setting, kept, setting.sixteen_bit_flops_per_s)
        because = f"{because}, with matmuls in {setting.sixteen_bit_dtype}"
    else:
        streamed = terms.weights_s / (terms.weights_s + terms.compute_s) if terms.weights_s else 0.0
        lost_s = min(terms.kernel_s, sum(cell.lost_s.values()), max(0.0, terms.latency_s - terms.floor_s))
        in_matmuls_s = max(0.0, lost_s - _lost_in(cell, "attention"))
        saves_s = packed * (terms.weights_s * (1 - _FOUR_BITS / bits) + streamed * in_matmuls_s)
        saves_s += terms.link_s  # smaller weights may all fit
    return _computed(format_change("nf4", setting.sixteen_bit_dtype, setting.here), saves_s - dense_s, because)


def _cache(cell: Judged, setting: Setting) -> list[ChangeEffect]:
    static, narrow = _possible(setting, ChangeId.STATIC_CACHE), _possible(setting, ChangeId.EIGHT_BIT_CACHE)
    copies_s, share = cell.redundant_s.get(Cause.CACHE_COPIES, 0.0), max(0.0, 1 - 8 / setting.cache_bits)
    return [
        *_computed(static, copies_s, "it is not copied at every step"),
        *_computed(
            narrow, cell.terms.kv_s * share, "only if attention reads it as stored; others measured slower steps"
        ),
    ]


def _host(cell: Judged, setting: Setting) -> list[ChangeEffect]:
    """What the host's share of a step costs: fewer launches save it, and fused kernels save small kernels too."""
    terms = cell.terms
    # On a machine of varying speed, the measured overhead may be longer than the step.
    most_s = max(0.0, terms.latency_s - terms.device_s)
    host_s, half_width_s = min(terms.overhead_s, most_s), terms.half_widths_s.get("overhead_s", 0.0)
    faults_s = cell.redundant_s.get(Cause.PAGE_FAULTS, 0.0)
    because = "its pages would not be taken from the system again at every step"
    found = _computed(KEPT_PAGES, faults_s, because, at_least_s=faults_s)
    compiled = _possible(setting, ChangeId.COMPILED_STEP, ChangeId.COMPILED_FORWARD)
    if compiled is None:
        return found
    if not setting.here.on_gpu:
        small_s, because = cell.small_kernels_s or 0.0, "all of the host's share, and all that small kernels lose"
        return found + _computed(compiled, min(host_s + small_s, most_s), because, half_width_s)
    if cell.key.phase == "decode":
        waits = cell.ceilings.overhead is not None and cell.ceilings.overhead.waits  # no CUDA graph can record that
        return found if waits else found + _compiled(cell, compiled, host_s, half_width_s)
    matmuls = (item for item in cell.timed.operators if item.weight_bytes and item.group not in _BESIDE_MATMULS)
    # A fused kernel still reads and writes its operands between matmuls.
    moved_s = sum(float(item.activation_bytes) for item in matmuls) / cell.ceilings.memory_bytes_per_s
    fused_s = max(0.0, cell.traced_small_s - moved_s)
    parts = [(host_s, "of the host"), (fused_s, "of small kernels that would be fused")]
    because = " and ".join(f"{duration(seconds)} {words}" for seconds, words in parts if seconds)
    return found + _computed(compiled_forward(setting.here), host_s + fused_s, because, half_width_s)


_LEFT_BY_FUSING = (0.1, 1 / 3)
"""Share of their time that small kernels keep once inductor has fused them. It is assumed, around the only case known:
about a fifth in a step of Mistral-7B on an H100, as the rest of 6.72 ms after matmuls and attention."""
_MASKED_ATTENTION = 3.0
"""A static cache has a mask, with which attention takes up to this many times as long. transformers 5.17 repeats keys
and values per head there: 0.61 ms instead of 0.20 in a step of Mistral-7B on an H100."""


def _compiled(cell: Judged, change: Change, host_s: float, half_width_s: float) -> list[ChangeEffect]:
    """A compiled step on a static cache, replayed as a graph: no host, no copies, and fused small kernels."""
    terms, small_s = cell.terms, cell.small_kernels_s
    if small_s is None:
        return _computed(change, host_s, "all of the host's share", half_width_s)
    few, many = _LEFT_BY_FUSING
    copies_s = cell.redundant_s.get(Cause.CACHE_COPIES, 0.0)
    masked_s = (_MASKED_ATTENTION - 1) * (_lost_in(cell, "attention") + terms.kv_s)
    fastest_s = terms.busy_s - (1 - few) * small_s - copies_s
    slowest_s = terms.busy_s - (1 - many) * small_s - copies_s + masked_s + max(0.0, terms.unexplained_s)
    graphs_s = [terms.latency_s - item.saves_s for item in cell.engines if item.engine == "graph"]
    graphs_s += [item.steps_s(terms.latency_s)[1] for item in cell.tried if item.change is ChangeId.GRAPH]
    slowest_s = max(fastest_s, min([slowest_s, *graphs_s]))  # a graph is the same step, not compiled
    most_s, least_s = terms.latency_s - fastest_s, terms.latency_s - slowest_s
    if least_s <= 0:
        return []
    because = (
        f"the step then takes {duration(fastest_s)} to {duration(slowest_s)}: its kernels without the host, with small"
        f" kernels, which lose {duration(small_s)}, fused"
    )
    return _computed(change, most_s, because, half_width_s, least_s)


def _lost_in(cell: Judged, group: str) -> float:
    names = {item.operator for item in cell.timed.operators if item.group == group}
    return max(0.0, sum(seconds for name, seconds in cell.lost_s.items() if name in names))


def _attention(cell: Judged, setting: Setting) -> list[ChangeEffect]:
    unfused_s = sum(cell.redundant_s.get(cause, 0.0) for cause in (Cause.ATTENTION_MATRIX, Cause.REPEATED_HEADS))
    fused = _possible(setting, ChangeId.SDPA, ChangeId.REPEATED_HEADS)
    return _computed(fused, unfused_s, "scores and repeated heads would stay on chip")


def _window(cell: Judged, _: Setting) -> list[ChangeEffect]:
    """What full windows of all layers cost: at most their copies, and those of heads that transformers repeats."""
    cores = [item.redundant_bytes for item in cell.timed.operators if item.group == "attention" and item.kv_bytes]
    if not all(item.get(Cause.ROLLED_WINDOWS) for item in cores):
        return []
    copies_s = sum(kernel.seconds for kernel in cell.longest if kernel.name.startswith("direct_copy"))
    repeats = any(item.get(Cause.REPEATED_HEADS) for item in cores)
    repeated_s = min(_lost_in(cell, "attention"), copies_s or math.inf) if repeats else 0.0
    rolled_s = cell.redundant_s.get(Cause.ROLLED_WINDOWS, 0.0)
    because = (
        f"{duration(rolled_s)} to copy windows, {duration(repeated_s)} to repeat heads; attention then sees all tokens"
    )
    return _computed(UNWINDOWED, rolled_s + repeated_s, because)


def _sixteen_bit_dtype(cell: Judged, setting: Setting) -> list[ChangeEffect]:
    """What BF16 or FP16 saves of a float32 step: half the bytes, and another compute ceiling.

    At least the floors of all but attention differ by that much, if kernels lose as many seconds against their
    ceilings; attention computes its softmax in float32 in any dtype. At most kernels lose none, and all other work
    takes half the time. Kernels for few rows may be far from their ceilings in one dtype and close in the other: then
    the lower end is unknown, and the saving a bound.
    """
    ceiling = setting.sixteen_bit_flops_per_s
    if ceiling is None:
        return []
    kept = min(1.0, _SIXTEEN_BITS / setting.weight_bits)
    most_s = _saved_at_most_s(cell, setting, kept, ceiling)
    because = f"half the bytes, and its matmuls reach {scaled(ceiling, 'FLOP/s')} here"
    change = dtype_change(setting.sixteen_bit_dtype)
    if not setting.here.on_gpu and cell.key.phase == "decode":
        return _computed(change, most_s, f"{because}; few rows may reach less")
    others = [item for item in cell.timed.operators if item.group != "attention"]
    wide_s = _floor_s(cell, others, setting.compute_flops_per_s)
    least_s = wide_s - _floor_s(cell, others, ceiling, kept, min(1.0, _SIXTEEN_BITS / setting.cache_bits))
    least_s += 0.0 if cell.timed.is_on_ranks else cell.terms.link_s / 2  # at most half of the bytes still cross
    return _computed(change, max(most_s, least_s), because, at_least_s=least_s)


def _float32(cell: Judged, setting: Setting) -> list[ChangeEffect]:
    """What float32 saves at most of a step whose 16-bit matmuls are emulated: it reads twice the weights."""
    ceiling = setting.float32_flops_per_s
    if ceiling is None or setting.weight_bits < _SIXTEEN_BITS:  # packed weights stay packed
        return []
    because = f"its matmuls reach {scaled(ceiling, 'FLOP/s')} here, with twice the bytes"
    return _computed(dtype_change("float32"), _saved_at_most_s(cell, setting, 2.0, ceiling), because)


def _saved_at_most_s(cell: Judged, setting: Setting, kept: float, flops_per_s: float) -> float:
    """What a step saves at most in another dtype, which reads `kept` times the weights' bytes."""
    terms, cache_kept = cell.terms, min(1.0, _SIXTEEN_BITS / setting.cache_bits)
    other_s = terms.redundant_s + max(0.0, terms.unexplained_s)
    floor_s = _floor_s(cell, cell.timed.operators, flops_per_s, kept, cache_kept)
    return terms.latency_s - terms.overhead_s - floor_s - other_s / 2


def _floor_s(
    cell: Judged,
    operators: Sequence[OperatorWork],
    flops_per_s: float,
    weights_kept: float = 1.0,
    cache_kept: float = 1.0,
) -> float:
    parts = ((op.flops, weights_kept * op.weight_bytes + cache_kept * op.kv_bytes, flops_per_s) for op in operators)
    return float(step_floor(parts, cell.ceilings.memory_bytes_per_s).floor_s)
