"""Count the FLOPs, bytes and memory of one step on the meta device, without weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn

from profiler.counting.attention import AttentionCore
from profiler.counting.chosen_kernel import SdpaStep, attention_path
from profiler.counting.crosscheck import Crosscheck, crosscheck
from profiler.counting.floor import GpuRow, floor_on, pays_from
from profiler.counting.memory_need import cache_bytes, memory_need, need_in_chunks, path_on
from profiler.counting.model_numbers import ModelNumbers
from profiler.counting.operators import Collective, ModelWork, Operator, as_value
from profiler.counting.preset_counts import CountedModel
from profiler.counting.requested_step import requested_step
from profiler.counting.stored_bits import in_bits, stored_note
from profiler.counting.tensor_parallel import check_cut, replicated_kv_heads, walk_rank
from profiler.counting.walk import walk
from profiler.data.datasheets import Datasheet, gpu_called
from profiler.data.links import bus_share
from profiler.device.device import resolve_device
from profiler.errors import ModelError, RequestError, first_line
from profiler.facts.operators import Amount, Cause, GemmShape
from profiler.facts.step import Count, ExecutionPath, Step, Work, bytes_by_kind, plain_number
from profiler.grid.cells import Phase
from profiler.grid.ranges import beyond_positions
from profiler.json_document import Document
from profiler.loading.config import load_config
from profiler.loading.device_map import planned_weight_bytes
from profiler.loading.meta_model import build_on_meta, quiet_libraries
from profiler.loading.request import dtype_name, model_dtype, most_positions
from profiler.loading.source import ModelSource, resolve
from profiler.options import listed
from profiler.quant.checkpoints import Gguf, as_dense_config, counted_config, gguf_format, published_format
from profiler.quant.registry import Quant, known_quant, stored_format


@dataclass(frozen=True)
class Exchange:
    """The collectives after one operator of a step."""

    name: str
    kind: str
    count: int
    bytes: int
    """Bytes of the whole result of one collective, S of nccl-tests."""


@dataclass(frozen=True)
class RankShare:
    """The weights, KV cache and messages of one rank of a tensor parallel group."""

    ranks: int
    weight_bytes: int
    """All parameters and buffers of the rank that has most."""
    cache_bytes: int
    """Bytes of its KV cache at the end of the step."""
    replicated_kv_heads: int
    """KV heads with a copy on several ranks, as there are more ranks than heads; 0 if there are none."""
    link_bytes: int
    """Bytes of all messages of a step."""
    bus_bytes: int
    """Bytes that a rank's link carries for them, by nccl-tests' factors."""
    collectives: tuple[Exchange, ...]


@dataclass(frozen=True)
class SharedPrefix:
    """The first tokens of every prompt, which are cached once for all sequences."""

    tokens: int
    saved_flops: float
    """FLOPs of the prompts' prefill that it saves."""
    saved_share: float
    """The same as a share of that prefill."""
    cache_bytes: int
    """Bytes of the KV cache of all sequences."""
    unshared_cache_bytes: int
    """The same if each sequence had its own copy of the prefix."""


@dataclass(frozen=True)
class OperatorRow:
    """The work of one operator in the step."""

    name: str
    group: str
    count: int
    """Equal operators in the model; the figures are their sum."""
    dtype: str
    model_flops: Amount
    executed_flops: Amount
    vector_flops: Amount
    weight_bytes: Amount
    kv_read_bytes: Amount
    kv_write_bytes: Amount
    model_bytes: Amount
    executed_bytes: Amount
    link_bytes: Amount


@dataclass(frozen=True)
class ExecutedBytes:
    """Executed bytes beyond model bytes."""

    activations: Amount
    redundant: Mapping[str, Amount]
    """By cause."""
    total: Amount


@dataclass(frozen=True)
class CountDocument(Document):
    """`roofscope count --format json`."""

    model: str
    params: int
    dtype: str
    quant: Quant
    published: str | None
    """The packed format of the published checkpoint, in which weights are counted; null: dense, or as requested."""
    gguf: Gguf | None
    """The formats in a GGUF file; its weights are counted dense, as transformers loads them."""
    note: str
    """Of the model's preset, on the format of the weights, and on a sequence beyond the model's own limit."""
    phase: Phase
    batch: Amount
    query_tokens: Amount
    context_tokens: Amount
    model_flops: Amount
    executed_flops: Amount
    vector_flops: Amount
    bytes: Mapping[str, Amount]
    """Model bytes by kind, and their total."""
    executed_bytes: ExecutedBytes
    redundant_flops: Mapping[str, Amount]
    """By cause."""
    intensity: float
    """Model FLOPs per model byte."""
    coverage: float
    """Share of the parameters that the count understands."""
    unknown: Sequence[str]
    path: ExecutionPath
    operators: Sequence[OperatorRow]
    tp: RankShare | None = None
    """Only with `--tp`: the share of one rank, of which all other figures are then."""
    gemms: Sequence[GemmShape] | None = None
    """Only with `--gemm-census`."""
    gpus: Sequence[GpuRow] | None = None
    """Only with `--gpu`: the floor on each GPU, or why there is none."""
    crosscheck: Crosscheck | None = None
    """Only with `--crosscheck`."""
    prefix: SharedPrefix | None = None
    """Only with `--prefix`."""
    numbers: ModelNumbers | None = None
    """The architecture, the KV cache, and what each GPU allows; not with `--tp`."""


@dataclass(frozen=True, kw_only=True)
class StepCount(CountDocument):
    step: Step
    work: Work
    whole: CountedModel | None
    """The counted model, for figures of other steps; None for one rank of several."""


def model_work(model: str, dtype: str = "auto", quant: str = "none", *, trust_remote_code: bool = False) -> ModelWork:
    """Return the operators of a model from its config. Raises RequestError or ModelError."""
    return counted_on_meta(resolve(model), dtype, quant, trust_remote_code=trust_remote_code).work


def count(
    model: str,
    *,
    phase: str = "decode",
    batch: int = 1,
    prompt: int = 512,
    context: int | None = None,
    prefix: int = 0,
    verify: int = 0,
    dtype: str = "auto",
    quant: str = "none",
    attn: str = "auto",
    census: bool = False,
    gpu_names: str = "",
    second_opinion: bool = False,
    tp: int = 1,
    trust_remote_code: bool = False,
) -> StepCount:
    """Count one step of `model` on the meta device, without weights or a device.

    A prefill runs `prompt` new tokens after `context` cached ones (default 0). A decode step runs one after `context`
    (default `prompt`), or verifies `verify` drafted ones besides. The first `prefix` tokens of all prompts are cached
    before. Executed work is that of `generate` with `attn` (`auto`: its default), for `sdpa` by the kernel that torch
    chooses here. With `tp` above 1 it is that of the rank that has most. Raises RequestError or ModelError.
    """
    step = requested_step(phase, batch, prompt, context, prefix, verify)
    stored_as = known_quant(quant, counted=True)
    gpus = [gpu_called(name) for name in listed(gpu_names)]
    source = resolve(model)
    if tp != 1 and second_opinion:
        raise RequestError(f"--crosscheck counts the whole model; omit --tp {tp}.")
    config, kind, module = _on_meta(source, dtype, stored_as, tp, trust_remote_code)
    replicated = replicated_kv_heads(module, tp)
    counted = counted_module(module, config, kind, stored_as, tp)
    work, attention = counted.work, counted.attention
    if attn == "sdpa" != attention:
        raise RequestError(f"--attn sdpa: transformers does not support it for {source.name}; use {attention}.")
    path = _generate_path(work, attention if attn == "auto" else attn, kind, step)
    # A decode step needs the memory of the prefill that filled its cache.
    first = Step(batch, max(1, (prompt if phase == "prefill" else int(step.context)) - prefix), prefix, prefix)
    whole = work.work(step, path)
    longest = int(step.context) + (int(step.query) if phase == "prefill" else 0)
    return StepCount(
        model=source.name,
        params=work.params,
        dtype=counted.dtype,
        quant=stored_as,
        published=counted.published,
        gguf=gguf_format(source.path) if source.kind == "gguf" and source.path else None,
        note=_note(source, published_format(config), counted, stored_as, longest),
        phase="prefill" if phase == "prefill" else "decode",
        batch=plain_number(step.batch),
        query_tokens=plain_number(step.query),
        context_tokens=plain_number(step.context),
        model_flops=plain_number(whole.model_flops),
        executed_flops=plain_number(whole.executed_flops),
        vector_flops=plain_number(whole.vector_flops),
        bytes=bytes_by_kind(whole),
        executed_bytes=ExecutedBytes(
            plain_number(whole.activation_bytes), _plain(whole.redundant_bytes), plain_number(whole.executed_bytes)
        ),
        redundant_flops=_plain(whole.redundant_flops),
        intensity=float(whole.intensity),
        coverage=work.coverage,
        unknown=work.unknown,
        path=path,
        operators=[_operator_row(operator, operator.work(step, path)) for operator in work.operators],
        tp=None if tp == 1 else _share(counted, tp, replicated, step, path),
        gemms=work.gemm_census(step) if census else None,
        gpus=[_gpu_row(gpu, counted, first, step, path, phase, verify) for gpu in gpus] or None,
        crosscheck=_second_opinion(config, kind, stored_as, step) if second_opinion else None,
        prefix=_prefix(work, first, step) if prefix else None,
        step=step,
        work=whole,
        whole=counted if tp == 1 else None,
    )


def _note(source: ModelSource, published: str | None, counted: CountedModel, quant: Quant, longest: int) -> str:
    own = source.preset.note if source.preset and not stored_format(quant) else ""
    if not source.preset and quant == "none" and published and not counted.published:
        own = f"the weights are stored as {published}, and counted as transformers runs them: in {counted.dtype}"
    return "; ".join(filter(None, (own, stored_note(quant, counted), beyond_positions(counted.max_positions, longest))))


def _generate_path(work: ModelWork, attention: str, dtype: torch.dtype, step: Step) -> ExecutionPath:
    device, query = resolve_device("auto"), int(step.query)
    sdpa_step = SdpaStep(device, dtype, query, query + int(step.context))
    return replace(
        attention_path(attention, work.of_kind(AttentionCore), sdpa_step),
        all_logits=not work.keeps_last_logits,
        upcasts_logits=True,
        gathers_experts=device.type != "cpu",
    )


def _gpu_row(
    gpu: Datasheet, counted: CountedModel, first: Step, step: Step, path: ExecutionPath, phase: str, verify: int
) -> GpuRow:
    """Return a step, whose cache was filled by the prefill `first`, on a GPU; if it verifies drafts, when they pay."""
    work, nbytes = counted.work, counted.weight_bytes
    there = path_on(work, path.attention, fuses_grouped_heads=gpu.fuses_grouped_heads)
    need = memory_need(work, nbytes, first, int(step.query + step.context - first.query - first.context), there)
    needs_bytes, safe_bytes, how = float(need.peak_bytes), float(need.safe_bytes), ""
    if phase == "decode" and needs_bytes > gpu.room_bytes:
        served = need_in_chunks(work, nbytes, step.batch, max(1, int(step.context)), first.shared).safe_bytes
        if served < needs_bytes:
            needs_bytes, safe_bytes, how = float(served), 0.0, " even in chunks"

    def row_of(step: Step) -> GpuRow:
        operators = [as_value(operator, operator.name, operator.work(step, path)) for operator in work.operators]
        row = floor_on(gpu, operators, counted.dtype, needs_bytes, safe_bytes, how)
        return replace(row, in_chunks=bool(how) and row.needs_bytes <= row.room_bytes)

    row, one_s = row_of(step), row_of(replace(step, query=1, requested=1)).floor_s
    if not verify or row.floor_s is None or one_s is None:
        return row
    return replace(row, one_token_floor_s=one_s, pays_from=pays_from(row.floor_s / one_s, verify))


def _plain(amounts: Mapping[Cause, Count]) -> dict[str, Amount]:
    return {cause: plain_number(value) for cause, value in amounts.items()}


def _operator_row(operator: Operator, work: Work) -> OperatorRow:
    amounts = (plain_number(getattr(work, item.name)) for item in fields(OperatorRow)[4:])
    return OperatorRow(operator.name, operator.group, operator.count, operator.dtype_name, *amounts)


def _prefix(work: ModelWork, first: Step, step: Step) -> SharedPrefix:
    whole_flops = float(work.work(Step(first.batch, first.context + first.query, 0)).model_flops)
    saved_flops, tokens = whole_flops - float(work.work(first).model_flops), step.context + step.query
    return SharedPrefix(
        tokens=int(first.shared),
        saved_flops=saved_flops,
        saved_share=saved_flops / whole_flops,
        cache_bytes=int(cache_bytes(work, step.batch, tokens, shared=first.shared)),
        unshared_cache_bytes=int(cache_bytes(work, step.batch, tokens)),
    )


def _share(counted: CountedModel, ranks: int, replicated: int, step: Step, path: ExecutionPath) -> RankShare:
    collectives = counted.work.of_kind(Collective)
    sizes = {operator: int(operator.each(step, path).link_bytes) for operator in collectives}
    return RankShare(
        ranks=ranks,
        weight_bytes=counted.weight_bytes,
        cache_bytes=int(cache_bytes(counted.work, step.batch, step.context + step.query, shared=step.shared)),
        replicated_kv_heads=replicated,
        link_bytes=sum(op.count * sizes[op] for op in collectives),
        bus_bytes=round(sum(op.count * sizes[op] * bus_share(op.kind, ranks) for op in collectives)),
        collectives=tuple(Exchange(op.name, op.kind, op.count, sizes[op]) for op in collectives),
    )


def _second_opinion(config: Any, dtype: torch.dtype, quant: Quant, step: Step) -> Crosscheck:
    if quant != "none":
        raise RequestError("--crosscheck: torch's counter does not see quantised matmuls; use --quant none.")
    try:
        return crosscheck(build_on_meta(as_dense_config(config), dtype, attn="eager"), step)
    except Exception as error:
        raise ModelError(f"--crosscheck: this model does not run on the meta device: {first_line(error)}.") from error


def counted_on_meta(
    source: ModelSource,
    dtype: str,
    quant: str,
    *,
    rented: bool = False,
    ranks: int = 1,
    trust_remote_code: bool = False,
) -> CountedModel:
    """Count a model from its config; `rented`: in 16 bits if its own dtype is wider. Raises as `counted_model`."""
    quant = known_quant(quant, counted=True)
    config, kind, module = _on_meta(source, dtype, quant, ranks, trust_remote_code, rented=rented)
    return counted_module(module, config, kind, quant, ranks)


def _on_meta(
    source: ModelSource, dtype: str, quant: Quant, ranks: int, trust_remote_code: bool, *, rented: bool = False
) -> tuple[Any, torch.dtype, nn.Module]:
    """Return the config of a model in the form that is counted, its dtype, and the whole model on meta."""
    if stored_format(quant):  # its weights are dense there, in 16 bits if the model's own dtype is wider
        quant, rented = "none", True
    if ranks != 1:
        check_cut(ranks, source)
    config = counted_config(load_config(source, trust_remote_code), dtype != "auto")
    if ranks != 1 and quant != "none":  # a rank's weights are packed once they are cut
        config, quant = as_dense_config(config), "none"
    kind = model_dtype(dtype, config)
    if rented and dtype == "auto" and kind is torch.float32:
        kind = torch.bfloat16
    return config, kind, build_on_meta(config, kind, quant)


def counted_module(module: nn.Module, config: Any, dtype: torch.dtype, quant: Quant, ranks: int = 1) -> CountedModel:
    """Count a model on meta; with `ranks`, it becomes the largest share. Raises RequestError if it cannot be cut."""
    form = stored_format(quant)
    with quiet_libraries(), torch.device("meta"):
        work = walk(module) if ranks == 1 else walk_rank(module, ranks, quant="none" if form else quant)
    weight_bytes = planned_weight_bytes(module)
    # Weights that take clearly less than their bytes in the model's dtype were not unpacked.
    is_packed = (quant == "none" or form) and weight_bytes < 0.95 * work.params * dtype.itemsize
    counted = CountedModel(
        work,
        weight_bytes,
        dtype_name(dtype),
        published_format(config) if is_packed else None,
        # Models whose scores need more than `sdpa` computes do not support it: caps (Gemma-2), sinks (gpt-oss).
        "sdpa" if getattr(module, "_supports_sdpa", True) else "eager",
        most_positions(config),
    )
    return in_bits(counted, form) if form else counted
