"""The numbers that people compute by hand: a model's architecture, its KV cache, and where its bottleneck changes."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from profiler.counting.attention import AttentionCore, Compressor
from profiler.counting.floor import MOST, StepFloor, ceiling_times, least
from profiler.counting.memory_need import MemoryNeed, cache_bytes, memory_need, need_in_chunks, path_on, state_bytes
from profiler.counting.operators import Embedding, Experts, Linear, ModelWork
from profiler.counting.preset_counts import CountedModel
from profiler.data.ceiling_set import CeilingSet
from profiler.facts.step import Step


@dataclass(frozen=True)
class Architecture:
    """The sizes of a model, from its operators; 0 for parts that it does not have."""

    layers: int
    """Layers with attention or a state."""
    attention_layers: int
    hidden_size: int
    query_heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    experts: int
    experts_per_token: float
    heads: tuple[tuple[int, int, int], ...] = ()
    """(query heads, KV heads, width of a head) of each kind of attention layers; those above are the first's."""


@dataclass(frozen=True)
class GpuNumbers:
    """Limits of a model on one GPU, by its ceilings and its memory."""

    gpu: str
    bytes_per_s: float
    """Bandwidth by the datasheet."""
    sustained_bytes_per_s: float | None
    """What copies of a healthy one attain of the datasheet's bandwidth, as others measured it; None if unknown."""
    tokens_per_s_at_most: float | None
    """Tokens per second of one sequence: 1 / floor of a decode step. None if the model does not fit."""
    linears_compute_bound_from_batch: int | None
    """The smallest batch at which compute limits the matmuls with weights in a decode step."""
    compute_bound_from_batch: int | None
    """The smallest batch whose whole decode step is compute-bound; None if the KV cache keeps it memory-bound."""
    largest_batch: int
    """Sequences that fit with their prefill, in whatever pieces free memory is; 0 if the model does not fit so."""
    largest_batch_one_by_one: int
    """The same if prompts are prefilled one at a time and in chunks with fused attention, as servers do."""
    longest_prompt: int
    """Tokens of one sequence that fit with their prefill in one step, whatever the model's own limit."""
    longest_context: int
    """Tokens of one sequence that fit if its prompt is prefilled in such chunks."""


@dataclass(frozen=True)
class ModelNumbers:
    """A model at a context length."""

    architecture: Architecture
    max_positions: int | None
    """The longest sequence that the model supports, in tokens; None if its config does not say."""
    used_params: int
    """Parameters that a token of text uses: all but those of towers and of experts that are not chosen."""
    used_params_but_table: int
    """The same without an embedding table that only looks rows up; one that is the LM head as well is used."""
    params_by_group: Mapping[str, int]
    """Weights of matrices; norms, biases, and an embedding apart from the LM head are `other`."""
    context_len: int
    kv_bytes_per_token: int
    """Bytes per token of one sequence in all layers, while no window is full."""
    windows_full_at: int
    """Tokens that fill every window; 0 if no layer has one that is shorter than what the model supports."""
    kv_bytes_per_later_token: int
    """Bytes per token of one sequence beyond `windows_full_at`."""
    kv_bytes_per_sequence: int
    """Bytes of one sequence's KV cache at `context_len`."""
    state_bytes_per_sequence: int
    """Bytes of one sequence's recurrent and convolution states, whatever its length."""
    kv_equals_weights_at: int | None
    """Tokens of one sequence whose KV cache is as large as the weights; None beyond 2^24 or without end."""
    attention_is_half_at: int | None
    """Cached tokens at which attention is half of a decode step's FLOPs; None as above."""
    gpus: tuple[GpuNumbers, ...]


def model_numbers(
    counted: CountedModel, context_len: int, gpus: tuple[CeilingSet, ...] = (), prefix: int = 0
) -> ModelNumbers:
    """Return the numbers of a model whose sequences have `context_len` cached tokens, the first `prefix` in common."""
    work = counted.work
    state = state_bytes(work)
    longest, params, architecture = counted.max_positions or MOST, dict(work.group_params), _architecture(work)
    used = work.params - params.get("towers", 0)
    for bank in work.of_kind(Experts):  # shared ones count once
        idle = (bank.num_experts - bank.per_token) * sum(ins * outs for ins, outs in bank.matrices)
        used -= round((bank.count - bank.repeats) * idle)
    table = architecture.vocabulary * architecture.hidden_size if "lm_head" in params else 0
    windows = (core.window for core in work.of_kind(AttentionCore) if not core.caches_all)
    windows_full = max((window for window in windows if window and window < longest), default=0)

    def kv_bytes(tokens: int) -> int:
        return int(cache_bytes(work, 1, tokens)) - state

    def attention_share(cached: int) -> float:
        cores = replace(work, operators=tuple(work.of_kind(AttentionCore)))
        flops, of_all = (float(part.work(Step(1, 1, cached)).model_flops) for part in (cores, work))
        return flops / of_all

    compressed = math.lcm(*(item.rate for item in work.of_kind(Compressor)))
    later = windows_full + compressed
    return ModelNumbers(
        architecture=architecture,
        max_positions=counted.max_positions,
        used_params=used,
        used_params_but_table=used - table,
        params_by_group={**params, "other": work.params - sum(params.values())},
        context_len=context_len,
        kv_bytes_per_token=kv_bytes(compressed) // compressed,
        windows_full_at=windows_full,
        kv_bytes_per_later_token=(kv_bytes(later + compressed) - kv_bytes(later)) // compressed,
        kv_bytes_per_sequence=kv_bytes(context_len),
        state_bytes_per_sequence=state,
        kv_equals_weights_at=least(lambda tokens: kv_bytes(tokens) >= counted.weight_bytes),
        attention_is_half_at=least(lambda cached: attention_share(cached) >= 0.5),
        gpus=tuple(_on_gpu(counted, context_len, ceilings, prefix) for ceilings in gpus),
    )


def _on_gpu(counted: CountedModel, context_len: int, ceilings: CeilingSet, prefix: int) -> GpuNumbers:
    work, one = counted.work, Step(1, 1, context_len, prefix)
    linears = replace(work, operators=tuple(item for item in work.operators if isinstance(item, Linear | Experts)))
    path = path_on(work, counted.attention, fuses_grouped_heads=ceilings.fuses_grouped_heads)

    def at_once(batch: int, tokens: int) -> MemoryNeed:
        common = min(prefix, tokens - 1)
        return memory_need(work, counted.weight_bytes, Step(float(batch), tokens - common, common, common), 1, path)

    def in_chunks(batch: int, tokens: int) -> MemoryNeed:
        return need_in_chunks(work, counted.weight_bytes, float(batch), float(tokens), min(prefix, tokens - 1))

    def most(need_of: Callable[[int], MemoryNeed]) -> int:
        """Return the largest number that fits, 0 if none does; smaller ones fit, too."""
        return (least(lambda number: bool(need_of(number).safe_bytes > ceilings.room_bytes)) or MOST + 1) - 1

    prompt = max(1, context_len)
    largest, served = most(lambda batch: at_once(batch, prompt)), most(lambda batch: in_chunks(batch, prompt))
    floor_s = float(floor_under(work, one, ceilings, counted.dtype).floor_s)
    return GpuNumbers(
        gpu=ceilings.name,
        bytes_per_s=ceilings.bytes_per_s,
        sustained_bytes_per_s=ceilings.sustained_bytes_per_s,
        tokens_per_s_at_most=1 / floor_s if largest or served else None,
        linears_compute_bound_from_batch=compute_bound_from_batch(linears, one, ceilings, counted.dtype),
        compute_bound_from_batch=compute_bound_from_batch(work, one, ceilings, counted.dtype),
        largest_batch=largest,
        largest_batch_one_by_one=served,
        longest_prompt=most(partial(at_once, 1)),
        longest_context=most(partial(in_chunks, 1)),
    )


def floor_under(work: ModelWork, step: Step, ceilings: CeilingSet, dtype: str) -> StepFloor:
    """Return the floor of a step of scalars; `dtype` is the model's."""
    return StepFloor(*ceiling_times(work, step, ceilings, dtype))


def compute_bound_from_batch(work: ModelWork, step: Step, ceilings: CeilingSet, dtype: str) -> int | None:
    """Return the smallest batch from which such a step is compute-bound, or None."""
    return least(lambda batch: floor_under(work, replace(step, batch=float(batch)), ceilings, dtype).bound == "compute")


def _architecture(work: ModelWork) -> Architecture:
    cores = work.of_kind(AttentionCore)
    heads = [operator for operator in work.of_kind(Linear) if operator.group == "lm_head"]
    experts = work.of_kind(Experts)
    widths = [table.width for table in work.of_kind(Embedding)]
    return Architecture(
        layers=work.layers,
        attention_layers=sum(core.count for core in cores),
        hidden_size=heads[0].weight.in_features if heads else max(widths, default=0),
        query_heads=cores[0].query_heads if cores else 0,
        kv_heads=cores[0].kv_heads if cores else 0,
        head_dim=cores[0].qk_dim if cores else 0,
        vocabulary=heads[0].weight.out_features if heads else 0,
        experts=experts[0].num_experts if experts else 0,
        experts_per_token=experts[0].per_token if experts else 0,
        heads=tuple(dict.fromkeys((core.query_heads, core.kv_heads, core.qk_dim) for core in cores)),
    )
