"""A counted model with its weights in the bits in which others store them."""

from dataclasses import replace

from profiler.counting.floor import DENSE_BYTES, bytes_per_weight
from profiler.counting.operators import Collective, Experts, Linear, Operator
from profiler.counting.preset_counts import CountedModel, Dtype
from profiler.quant.registry import StoredFormat, stored_format


def in_bits(counted: CountedModel, form: StoredFormat) -> CountedModel:
    """Return a model with its weights in `form`, but for those left dense; as it was if it is published so.

    Published experts keep their bits in a mean of all, if that leaves 4 to 16 bits to each other weight.
    """
    if counted.published == form.name:
        return counted
    work, experts, others = counted.work, counted.work.of_kind(Experts), form
    if split := form.packs == "all" and split_mean(counted, form.bits / 8, (0.5, 2.0)):
        others = replace(form, bits=8 * split[1])
    operators = [
        each if split and each in experts else _packed(each, others, counted.dtype, is_mixture=bool(experts))
        for each in work.operators
    ]
    saved = sum(map(_own_bytes, work.operators)) - sum(map(_own_bytes, operators))
    weight_bytes = round(_params(counted) * form.bits / 8) if form.packs == "all" else counted.weight_bytes - saved
    return replace(counted, work=replace(work, operators=tuple(operators)), weight_bytes=weight_bytes, published=None)


def split_mean(counted: CountedModel, mean: float, possible: tuple[float, float]) -> tuple[float, float] | None:
    """(bytes per weight of published experts, bytes that a `mean` of all leaves to each other weight).

    None without such experts, or if the latter are not within the `possible` ones.
    """
    params, banks = _params(counted), counted.work.of_kind(Experts)
    packed, weights = sum(map(_own_bytes, banks)), sum(_own_bytes(bank) / bytes_per_weight(bank) for bank in banks)
    if not counted.published or not 0 < weights < params:
        return None
    left = (params * mean - packed) / (params - weights)
    return (packed / weights, left) if possible[0] <= left <= possible[1] else None


def _params(counted: CountedModel) -> float:
    """The parameters that are counted: of one rank, those in its bytes, as its `work.params` are the whole model's."""
    work, itemsize = counted.work, Dtype(counted.dtype).itemsize
    if not work.of_kind(Collective):
        return work.params
    matrices = (*work.of_kind(Linear), *work.of_kind(Experts))
    unpacked = (_own_bytes(each) * (itemsize / bytes_per_weight(each) - 1) for each in matrices)
    return (counted.weight_bytes + sum(unpacked)) / itemsize


def _packed(operator: Operator, form: StoredFormat, dtype: str, *, is_mixture: bool) -> Operator:
    matmuls = Dtype(form.matmuls or dtype)
    if isinstance(operator, Experts):
        weights = sum(ins * outs for ins, outs in operator.matrices)
        return replace(operator, expert_bytes=round(weights * form.bits / 8), dtype=matmuls)
    stays = operator.group == "lm_head" or (form.packs == "experts" and is_mixture)
    if not isinstance(operator, Linear) or (form.packs != "all" and stays):
        return operator
    stored = operator.weight
    nbytes = round(stored.in_features * stored.out_features * form.bits / 8)
    weight = replace(stored, format=form.name, weight_bytes=nbytes, dense_from_rows=None, fused_rows=())
    return replace(operator, weight=weight, dtype=matmuls)


def _own_bytes(operator: Operator) -> int:
    own = operator.count - operator.repeats
    if isinstance(operator, Experts):
        return own * operator.num_experts * operator.expert_bytes
    return own * operator.weight.weight_bytes if isinstance(operator, Linear) else 0


_OTHERS = {"all": "a mean of all", "linears": "the head and the embedding tables in 16", "experts": "all others in 16"}


def stored_note(quant: str, counted: CountedModel) -> str:
    """What the name of a format does not say: its bits and what they leave out, or that it leaves experts dense."""
    experts = counted.work.of_kind(Experts)
    if form := stored_format(quant):
        packs = "linears" if form.packs == "experts" and not experts else form.packs
        bits = 8 * bytes_per_weight(experts[0]) if experts and packs == "all" else form.bits
        kept = f": the experts keep their published {bits:.3g}" if abs(bits / form.bits - 1) > 0.01 else ""
        return f"{'experts' if packs == 'experts' else 'weights'} in {form.bits:.3g} bits, {_OTHERS[packs]}{kept}"
    if quant != "none" and any(bytes_per_weight(bank) >= DENSE_BYTES for bank in experts):
        return f"{quant} leaves the experts in {counted.dtype}, as transformers does; nvfp4, awq or --bits packs them"
    return ""
