"""A counted model with its weights in the bits in which others store them."""

from dataclasses import replace

from profiler.counting.floor import DENSE_BYTES, bytes_per_weight
from profiler.counting.operators import Collective, Experts, Linear, Operator
from profiler.counting.preset_counts import CountedModel, Dtype
from profiler.quant.registry import StoredFormat, stored_format


def in_bits(counted: CountedModel, form: StoredFormat) -> CountedModel:
    """Return a model with its weights in `form`, but for those left dense; as it was if it is published so.

    Published experts keep their bits in a named format of all weights, and in a mean of all if that leaves 4 to 16 bits
    to each other weight.
    """
    if counted.published == form.name:
        return counted
    work, experts, others = counted.work, counted.work.of_kind(Experts), form
    kept = _published_experts(counted) if form.packs == "all" else None
    if kept and form.is_mean:
        split = split_mean(counted, form.bits / 8, (0.5, 2.0))
        kept, others = (kept, replace(form, bits=8 * split[1])) if split else (None, form)
    operators = [
        each if kept and each in experts else _packed(each, others, counted.dtype, is_mixture=bool(experts))
        for each in work.operators
    ]
    weight_bytes = counted.weight_bytes - sum(map(_own_bytes, work.operators)) + sum(map(_own_bytes, operators))
    if form.packs == "all":
        kept_bytes, kept_weights = kept or (0.0, 0.0)
        weight_bytes = round(kept_bytes + (_params(counted) - kept_weights) * others.bits / 8)
    return replace(counted, work=replace(work, operators=tuple(operators)), weight_bytes=weight_bytes, published=None)


def split_mean(counted: CountedModel, mean: float, possible: tuple[float, float]) -> tuple[float, float] | None:
    """(bytes per weight of published experts, bytes that a `mean` of all leaves to each other weight).

    None without such experts, or if the latter are not within the `possible` ones.
    """
    if (published := _published_experts(counted)) is None:
        return None
    packed, weights = published
    left = (_params(counted) * mean - packed) / (_params(counted) - weights)
    return (packed / weights, left) if possible[0] <= left <= possible[1] else None


def _published_experts(counted: CountedModel) -> tuple[float, float] | None:
    """(bytes, weights) of the experts of a model that is published packed; None without such experts."""
    banks = counted.work.of_kind(Experts)
    weights = sum(_own_bytes(bank) / bytes_per_weight(bank) for bank in banks)
    is_packed = counted.published and 0 < weights < _params(counted)
    return (float(sum(map(_own_bytes, banks))), weights) if is_packed else None


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
        kept = f"the experts keep their published {bits:.3g}" if abs(bits / form.bits - 1) > 0.01 else ""
        if kept and not form.is_mean:
            return f"weights in {form.bits:.3g} bits, but {kept}"
        which, of = "experts" if packs == "experts" else "weights", f": {kept}" if kept else ""
        return f"{which} in {form.bits:.3g} bits, {_OTHERS[packs]}{of}"
    if quant != "none" and any(bytes_per_weight(bank) >= DENSE_BYTES for bank in experts):
        return f"{quant} leaves the experts in {counted.dtype}, as transformers does; nvfp4, awq or --bits packs them"
    return ""
