"""KV lengths that are new to the process: cuDNN builds an attention plan for each of them."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from profiler.counting.attention import AttentionCore
from profiler.counting.walk import walk
from profiler.device.clock import first_and_second_s
from profiler.device.machine import machine_for
from profiler.errors import first_line
from profiler.units import duration
from profiler.why_slow.findings import GROWING_CACHES, Finding, new_finding
from profiler.why_slow.observations import Call
from profiler.why_slow.plain_models import is_plain
from profiler.why_slow.repeat_call import CallGroup

_DecodeShape = tuple[int, int]
"""Batch size and KV length of a decode step."""

# New lengths at which attention is measured; the first one loads the kernel.
_LENGTHS = 4


def plan_findings(groups: Sequence[CallGroup]) -> tuple[list[Finding], list[str]]:
    """(findings, reasons why others are unknown): the plans that cuDNN builds for the KV lengths of `generate`.

    cuDNN builds one for each exact shape (PyTorch, aten/src/ATen/native/cudnn/MHA.cpp), which torch 2.11 and later
    prefer on Hopper and Blackwell. Its time is measured at lengths that the script did not use, with cuDNN and without.
    """
    findings: list[Finding] = []
    unknown: dict[str, None] = {}
    for model in {id(group.model): group.model for group in groups if _grows(group)}.values():
        own = [group for group in groups if group.model is model and _grows(group)]
        shapes = {shape for group in own for call in group.calls for shape in _decode_shapes(call)}
        if not shapes:
            continue
        try:
            plan_s = _plan_s(model, shapes, masked=any(call.padding for group in own for call in group.calls))
        except Exception as error:  # a user's model may fail in any way, and the answer is useful without this
            unknown[f"attention-plans ({own[0].loaded_at}): {first_line(error)}"] = None
            continue
        saves_s = min(len(shapes) * plan_s, sum(call.seconds for group in own for call in group.calls))
        findings.append(
            new_finding(
                identity="attention-plans",
                saves_s=saves_s,
                where=max(own, key=lambda group: group.seconds).calls[0].where,
                evidence=(
                    f"{len(shapes)} KV lengths are new to the process, and cuDNN builds an attention plan for each,"
                    f" {duration(plan_s)}"
                ),
                change=(
                    "call torch.backends.cuda.enable_cudnn_sdp(False) first: the other kernels need no plan;"
                    ' cache_implementation="static" has one length'
                ),
                basis="measured: attention at new KV lengths, with cuDNN and without, times their number",
                once=True,
            )
        )
    return findings, list(unknown)


def _grows(group: CallGroup) -> bool:
    """Whether a group's decode steps attend to one more key each, on a GPU."""
    call = group.calls[0]
    return (
        call.kind == "generate"
        and not is_plain(group.model)
        and call.settings.device.startswith("cuda")
        and call.settings.attention == "sdpa"
        and call.settings.cache_class in GROWING_CACHES
    )


def _decode_shapes(call: Call) -> set[_DecodeShape]:
    """The shapes of a call's decode steps; the first new token comes from the prompt's forward."""
    first = call.context_len + call.prompt_len
    return {(call.batch_size, first + number) for number in range(1, call.new_tokens)}


def _plan_s(model: Any, shapes: set[_DecodeShape], *, masked: bool) -> float:
    """Seconds that the first attention at a KV length takes longer with cuDNN than without it."""
    machine = machine_for(model.device)
    core = next(item for item in walk(model).operators if isinstance(item, AttentionCore))
    batch = statistics.mode(batch for batch, _ in shapes)
    beyond = max(length for _, length in shapes) + 1
    attention = _attention(core, model, batch, masked=masked)
    with torch.inference_mode():
        first_s, second_s = first_and_second_s(machine.clock, attention, range(beyond, beyond + _LENGTHS))
        with _without_cudnn():
            others = first_and_second_s(machine.clock, attention, range(beyond + _LENGTHS, beyond + 2 * _LENGTHS))
    return max(0.0, (first_s - second_s) - (others[0] - others[1]))


def _attention(core: AttentionCore, model: Any, batch: int, *, masked: bool) -> Callable[[int], Callable[[], object]]:
    """A decode step's attention of one layer at a KV length, as transformers calls it."""
    groups = core.query_heads // core.kv_heads
    kv_heads = core.query_heads if masked else core.kv_heads

    def attention_at(length: int) -> Callable[[], object]:
        shape = {"device": model.device, "dtype": model.dtype}
        query = torch.zeros(batch, core.query_heads, 1, core.qk_dim, **shape)
        key = torch.zeros(batch, kv_heads, length, core.qk_dim, **shape)
        value = torch.zeros(batch, kv_heads, length, core.v_dim, **shape)
        mask = torch.ones(batch, 1, 1, length, device=model.device, dtype=torch.bool) if masked else None
        grouped = groups > 1 and not masked
        return partial(F.scaled_dot_product_attention, query, key, value, attn_mask=mask, enable_gqa=grouped)

    return attention_at


@contextlib.contextmanager
def _without_cudnn() -> Iterator[None]:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
