"""Changes that a trial applies to a call: cache, gradients, kernels, dtype, logits, threads."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from profiler.device.clock import clock_for, now_s
from profiler.device.device import describe
from profiler.device.memory import available_bytes
from profiler.errors import RequestError
from profiler.measure.dense_twins import (
    dense_twins,
    kernel_of,
    packed_linears,
    replaced,
    times_by_batch,
)
from profiler.report.sentences import paying_batches
from profiler.units import scaled, several
from profiler.why_slow.call_record import CallRecord
from profiler.why_slow.call_settings import is_spread, pipelined_devices
from profiler.why_slow.dispatch_changes import dispatch_changes
from profiler.why_slow.findings import CallFloor
from profiler.why_slow.loop_changes import (
    batching_change,
    grows_by_a_token,
    loop_without_cache,
    padding_changes,
    prefix_change,
    without_reads,
)
from profiler.why_slow.observations import Call
from profiler.why_slow.placement import COPY_SHARE, gathered, has_room_for_all
from profiler.why_slow.plain_models import is_plain
from profiler.why_slow.recorder import Recorder
from profiler.why_slow.repeat_call import CallGroup, Candidate, RepeatedCall, RepeatedRun, repeat

_SAVES_IN_PROMPT = {"wide-dtype", "emulated-dtype", "slow-attention", "slow-experts", "slow-format"}


def candidates(group: CallGroup, recorder: Recorder, floor: CallFloor | None = None) -> Iterator[Candidate]:
    """The changes that apply to a group of calls; without a `floor` no step is known to be bound by the GPU."""
    call, noted = group.middle
    model, settings = group.model, call.settings
    unchanged = repeat(noted, call, model)

    def with_options(**options: object) -> RepeatedRun:
        return repeat(noted, call, model, options)

    def candidate(name: str, evidence: str, change: str, changed: RepeatedRun = unchanged, **more: Any) -> Candidate:
        where = more.pop("where", call.where)
        more |= {"new_tokens": call.new_tokens, "prompt_s": call.steady_prompt_s}
        more["prompts"] = 3 if settings["cache"] == "off" else 2
        more["saves_in_prompt"] = name in _SAVES_IN_PROMPT
        return Candidate(name, evidence, change, where, unchanged, changed, group.like(call), **more)

    if call.kind == "generate" and settings["cache"] == "off":
        yield candidate(
            "cache-off", "use_cache=False computes the whole prompt again at every token", "remove use_cache=False",
            with_options(use_cache=True),
        )  # fmt: skip
    if call.kind == "forward" and (loop := loop_without_cache(group)):
        yield loop
    if call.kind == "forward" and len(group.calls) > 1 and (reads := recorder.reads.by_line(call.where)):
        yield without_reads(group, reads[0])
    if call.kind == "forward" and settings["gradients"] == "on" and not recorder.trained:
        yield candidate(
            "grad-on", "gradients are recorded, and nothing is differentiated", "call it within torch.inference_mode()",
            repeat(noted, call, model, inference=True),
        )  # fmt: skip
    if settings["mode"] == "train" and not recorder.trained:
        yield candidate(
            "train-mode", "the model is in train mode", "call model.eval() after loading",
            within=lambda: _switched(model.train, False, True),
        )  # fmt: skip
    if settings["gradients"] == "off" and (weight := _frozen_head(model)) is not None:
        yield candidate(
            "frozen-weights", "weights are frozen, so the LM head copies its weight for each last position",
            "leave out requires_grad_(False): within torch.inference_mode() no gradient is recorded",
            within=lambda: _switched(weight.requires_grad_, True, False),
        )  # fmt: skip
    yield from padding_changes(call, noted, model, unchanged, group.like(call))
    if call.kind == "forward" and _only_last_is_used(group, recorder):
        yield candidate(
            "all-logits", f"logits of all {call.prompt_len} positions are computed", "pass logits_to_keep=1",
            with_options(logits_to_keep=1),
        )  # fmt: skip
    if settings["outputs"] != "-":
        yield candidate(
            "extra-outputs", f"{settings['outputs']} are requested", "request them only where they are used",
            with_options(**dict.fromkeys(settings["outputs"].split(", "), False)),
        )  # fmt: skip
    yield from _in_other_kernels(group, candidate)
    if settings["beams"] not in ("-", "1"):
        yield candidate(
            "beams", f"{settings['beams']} beams are followed", "num_beams=1, if its answers are good enough",
            with_options(num_beams=1, num_return_sequences=1),
        )  # fmt: skip
    if noted.callbacks and settings["device"] != "cpu":
        yield candidate(
            "host-sync", f"{' and '.join(noted.callbacks)} read every token on the host, which waits for the device",
            "read every few tokens, or leave it out", alone=True,
        )  # fmt: skip
    if settings["assistant"] == "yes":
        yield candidate(
            "assistant", "an assistant model drafts", "leave out assistant_model", with_options(assistant_model=None)
        )
    yield from dispatch_changes(group, floor.decode.get(call.number) if floor else None, candidate)
    yield from _dense_weights(group, call, candidate)
    yield from _with_copies(group, call, noted, candidate)
    is_loop = call.kind == "forward" and (grows_by_a_token(group.calls) or recorder.used_cache)
    if not is_loop and (batch := batching_change(group)):
        yield batch
    if prefix := prefix_change(group):
        yield prefix
    # Last, since threads that wait for each other may take very long on a busy machine.
    yield from _threads(call, candidate)


def _in_other_kernels(group: CallGroup, candidate: Callable[..., Candidate]) -> Iterator[Candidate]:
    """Changes to fused kernels for attention and experts."""
    model, settings = group.model, group.middle[0].settings
    if settings["attention"] == "eager" and getattr(model, "_supports_sdpa", False):
        yield candidate(
            "slow-attention", "attention is eager: its scores are written out", 'attn_implementation="sdpa"',
            within=lambda: _switched(model.set_attn_implementation, "sdpa", "eager"), where=group.loaded_at,
        )  # fmt: skip
    if settings["attention"] == "sdpa" and settings["kernel"] == "math":
        yield candidate(
            "slow-attention", "SDPA's fused kernels are disabled: its scores are written out",
            "leave out sdpa_kernel(SDPBackend.MATH) and enable_flash_sdp(False)", within=_fused,
        )  # fmt: skip
    if settings["experts"] == "eager" and _has_experts(model):
        yield candidate(
            "slow-experts", "experts run one after the other in a loop", 'experts_implementation="grouped_mm"',
            within=lambda: _switched(model.set_experts_implementation, "grouped_mm", "eager"), where=group.loaded_at,
        )  # fmt: skip


def _fused() -> contextlib.AbstractContextManager[None]:
    """A context in which SDPA may use all of its kernels."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    every = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH)
    fused: contextlib.AbstractContextManager[None] = sdpa_kernel(list(every))
    return fused


def _frozen_head(model: Any) -> torch.Tensor | None:
    """The weight of a plain LM head that does not require a gradient, else None.

    If the weight requires a gradient, torch folds the last positions of a batch into one matmul. Otherwise it makes a
    batched matmul from copies of the weight (should_fold in torch's aten/src/ATen/native/LinearAlgebra.cpp).
    """
    head: Any = None if is_plain(model) else model.get_output_embeddings()
    if type(head) is not torch.nn.Linear or head.weight.requires_grad:
        return None
    return head.weight if head.weight.is_floating_point() and not head.weight.is_inference() else None


@contextlib.contextmanager
def _switched(switch: Callable[[Any], object], to: Any, back: Any) -> Iterator[None]:
    """A context that begins with `switch(to)` and ends with `switch(back)`."""
    switch(to)
    try:
        yield
    finally:
        switch(back)


def _has_experts(model: Any) -> bool:
    config = model.config.get_text_config()
    return any(getattr(config, name, 0) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def _only_last_is_used(group: CallGroup, recorder: Recorder) -> bool:
    """Whether these forwards are prompts of a decode loop and their model takes `logits_to_keep`."""
    call, noted = group.middle
    arguments = noted.arguments[1] if noted.arguments else {}
    accepts = "logits_to_keep" in inspect.signature(type(group.model).forward).parameters
    if not accepts or call.prompt_len < 2 or "labels" in arguments or "logits_to_keep" in arguments:
        return False
    uses_cache = any(other.shape[2] and other.model() is group.model for other in recorder.notes)
    return bool(call.context_len == 0 and (uses_cache or grows_by_a_token(group.calls)))


def _threads(call: Call, candidate: Callable[..., Candidate]) -> Iterator[Candidate]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = int(call.settings["threads"])
    if call.settings["device"] != "cpu" or threads == cores:
        return
    yield candidate(
        "threads", f"torch computes with {several(threads, 'thread', 'threads')} on {cores} cores",
        f"torch.set_num_threads({cores})", within=lambda: _switched(torch.set_num_threads, cores, threads),
    )  # fmt: skip


def _dense_weights(group: CallGroup, call: Call, candidate: Callable[..., Candidate]) -> Iterator[Candidate]:
    """A change to dense weights, on dense linears of random values in place of the packed ones."""
    model = group.model
    linears = packed_linears(model)
    if not linears or is_spread(model):
        return
    own = torch.bfloat16 if is_plain(model) else model.dtype
    dtype = own if own.itemsize > 1 else torch.bfloat16
    device = torch.device(call.settings["device"])
    twins = functools.cache(lambda: dense_twins(linears, dtype, COPY_SHARE * available_bytes(device)))
    formats = " and ".join(dict.fromkeys(each.format for each in linears))

    def explain(until_s: float) -> str:
        first, twin = linears[0].module, twins()[0]
        x = torch.randn(call.batch_size, 1, first.in_features, dtype=dtype, device=twin.weight.device)
        times = times_by_batch(linears, twins(), clock_for(device), min(until_s, now_s() + _BATCHES_S))
        batches = f", and in a decode step {paying_batches(times)}" if times else ""
        return f", their kernel is {kernel_of(first, x)}{batches}"

    yield candidate(
        "slow-format", f"weights are packed ({formats})",
        "leave out the quantisation if the model fits without it", within=lambda: replaced(linears, twins()),
        where=group.loaded_at, explain=explain,
    )  # fmt: skip


# Seconds to time packed and dense linears at further batches.
_BATCHES_S = 5.0


def _with_copies(
    group: CallGroup, call: Call, noted: CallRecord, candidate: Callable[..., Candidate]
) -> Iterator[Candidate]:
    """Changes that need a copy of the model, if there is room for one."""
    for other in other_copies(group.model, call.settings["dtype"]):
        changed = RepeatedCall(noted, call, functools.cache(other.make))
        yield candidate(other.id, other.evidence, other.change, changed, where=group.loaded_at)


_WIDE = ("float32", "float64")
_HALVES = ("bfloat16", "float16")


@dataclass(frozen=True)
class Copy:
    """A copy of a model that may be faster, and the change to the script that gives it."""

    id: str
    evidence: str
    change: str
    make: Callable[[], Any]


def other_copies(model: Any, dtype: str) -> Iterator[Copy]:
    """The copies that are worth a trial. `dtype` is that of the script's calls; `make` may raise RequestError."""
    weights = sum(parameter.numel() for parameter in model.parameters())
    device = next(model.parameters()).device if is_plain(model) else model.device
    room_bytes = COPY_SHARE * available_bytes(device)
    if is_spread(model):
        if has_room_for_all(model):
            places = sorted({str(place) for place in model.hf_device_map.values()})
            turns = pipelined_devices(model)
            yield Copy(
                "offload",
                f"weights are spread over {', '.join(places)}"
                + (f": {turns}" if turns else ", and cross a link at every step"),
                f'device_map={{"": "{model.device}"}}: there is room for all of them',
                lambda: gathered(model),
            )
        return
    if packed_linears(model):
        return
    if name := _faster_dtype(device, dtype):
        wide, faster = dtype in _WIDE, getattr(torch, name)
        auto = ', or dtype="auto" for the checkpoint\'s own' if wide and name == "bfloat16" else ""

        def converted() -> Any:
            if (needs := weights * faster.itemsize) > room_bytes:
                raise RequestError(
                    f"its copy in {name} needs {scaled(needs, 'B')}, and there is room for {scaled(room_bytes, 'B')}"
                )
            # Converted one by one, so that there is never a second model in the wide dtype.
            narrow = {id(each): torch.nn.Parameter(each.detach().to(faster), each.requires_grad)
                      for each in model.parameters() if each.is_floating_point()}  # fmt: skip
            return copy.deepcopy(model, narrow).to(faster)

        yield Copy(
            "wide-dtype" if wide else "emulated-dtype",
            f"weights are {dtype}{'' if wide else ', for which this device has no matmul units'}",
            f"dtype=torch.{name}{auto}",
            converted,
        )


def _faster_dtype(device: torch.device, dtype: str) -> str | None:
    """The dtype to try: 16 bits for wide ones; for 16 bits that a device emulates, a dtype that it has units for."""
    native = describe(device).sixteen_bit_dtype
    if dtype in _WIDE:
        return native
    if dtype not in _HALVES:
        return None
    if device.type == "cuda":  # only GPUs before Ampere lack a 16-bit dtype
        return native if (dtype, native) == ("bfloat16", "float16") else None
    if _has_units(dtype):
        return None
    return "bfloat16" if _has_units("bfloat16") else "float32"


def _has_units(dtype: str) -> bool:
    """Whether this CPU has instructions to multiply matrices of this 16-bit dtype, according to torch."""
    names = {
        "bfloat16": ("_is_avx512_bf16_supported", "_is_amx_tile_supported"),
        "float16": ("_is_amx_fp16_supported",),
    }
    return any(getattr(torch.cpu, name, lambda: False)() for name in names[dtype])
