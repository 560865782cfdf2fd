"""Changes that a trial applies to a call: cache, dtype, attention, padding, logits."""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from profiler.device.memory import available_bytes
from profiler.why_slow.call_record import CallRecord
from profiler.why_slow.call_settings import pipelined_devices
from profiler.why_slow.loop_changes import (
    batching_changes,
    grows_by_a_token,
    loop_without_cache,
    padding_changes,
    without_reads,
)
from profiler.why_slow.observations import Call
from profiler.why_slow.recorder import Recorder
from profiler.why_slow.repeat_call import CallGroup, Candidate, RepeatedRun, repeat


def candidates(group: CallGroup, recorder: Recorder) -> Iterator[Candidate]:
    """What may be changed about some calls, each only where it applies."""
    call, noted = group.middle
    model, settings = group.model, call.settings
    again = repeat(noted, call, model)

    def with_options(**options: object) -> RepeatedRun:
        return repeat(noted, call, model, options)

    def candidate(name: str, evidence: str, change: str, changed: RepeatedRun = again, **more: Any) -> Candidate:
        return Candidate(
            name, evidence, change, more.pop("where", call.where), again, changed, group.like(call), **more
        )

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
            "train-mode", "the model is in train mode", "model.eval() behind the load", within=lambda: _eval_mode(model)
        )  # fmt: skip
    if settings["gradients"] == "off" and (weight := _frozen_head(model)) is not None:
        yield candidate(
            "frozen-weights", "weights are frozen, so that the LM head copies its weight for each last position",
            "leave requires_grad_(False) out: within torch.inference_mode() no gradient is recorded",
            within=lambda: _trainable(weight),
        )  # fmt: skip
    yield from padding_changes(call, noted, model, again, group.like(call))
    if call.kind == "forward" and _only_last_is_used(group, recorder):
        yield candidate(
            "all-logits", f"logits of all {call.prompt_len} positions are computed", "pass logits_to_keep=1",
            with_options(logits_to_keep=1),
        )  # fmt: skip
    if settings["outputs"] != "-":
        yield candidate(
            "extra-outputs", f"{settings['outputs']} are asked for", "ask for them only where they are used",
            with_options(**dict.fromkeys(settings["outputs"].split(", "), False)),
        )  # fmt: skip
    yield from _in_other_kernels(group, candidate)
    if settings["beams"] not in ("-", "1"):
        yield candidate(
            "beams", f"{settings['beams']} beams are followed", "num_beams=1, where its answers are good enough",
            with_options(num_beams=1, num_return_sequences=1),
        )  # fmt: skip
    if noted.callbacks and settings["device"] != "cpu":
        yield candidate(
            "host-sync", f"{_joined(noted.callbacks)} read every token on the host, which waits for the device",
            "read every few tokens, or leave it out", alone=True,
        )  # fmt: skip
    if settings["assistant"] == "yes":
        yield candidate(
            "assistant", "an assistant model drafts", "leave assistant_model out", with_options(assistant_model=None)
        )
    yield from _with_copies(group, call, noted, candidate)
    if call.kind == "generate":
        yield from batching_changes(group)
    # Threads that wait for each other may take very long on a busy machine.
    yield from _threads(call, candidate)


def _in_other_kernels(group: CallGroup, candidate: Callable[..., Candidate]) -> Iterator[Candidate]:
    """Attention and experts by the kernels that the model was not told to take."""
    model, settings = group.model, group.middle[0].settings
    if settings["attention"] == "eager" and getattr(model, "_supports_sdpa", False):
        yield candidate(
            "slow-attention", "attention is eager: its scores are written out", 'attn_implementation="sdpa"',
            within=lambda: _switched(model.set_attn_implementation, "sdpa", "eager"), where=group.loaded_at,
        )  # fmt: skip
    if settings["attention"] == "sdpa" and settings["kernel"] == "math":
        yield candidate(
            "slow-attention", "SDPA's fused kernels are switched off: its scores are written out",
            "leave sdpa_kernel(SDPBackend.MATH) and enable_flash_sdp(False) out", within=_fused,
        )  # fmt: skip
    if settings["experts"] == "eager" and _has_experts(model):
        yield candidate(
            "slow-experts", "experts run one after the other in a loop", 'experts_implementation="grouped_mm"',
            within=lambda: _switched(model.set_experts_implementation, "grouped_mm", "eager"), where=group.loaded_at,
        )  # fmt: skip


def _joined(names: Mapping[str, float]) -> str:
    return " and ".join(names)


def _fused() -> contextlib.AbstractContextManager[None]:
    """Within, SDPA takes whichever of its kernels is quickest."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    every = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH)
    fused: contextlib.AbstractContextManager[None] = sdpa_kernel(list(every))
    return fused


@contextlib.contextmanager
def _eval_mode(model: Any) -> Iterator[None]:
    model.eval()
    try:
        yield
    finally:
        model.train()


def _frozen_head(model: Any) -> torch.Tensor | None:
    """The weight of a plain LM head that could not be trained. Of one that could, torch folds the last positions of a
    batch into one product; else it makes a batched one of copies of the weight (should_fold in torch's
    aten/src/ATen/native/LinearAlgebra.cpp)."""
    head = model.get_output_embeddings()
    if type(head) is not torch.nn.Linear or head.weight.requires_grad:
        return None
    return head.weight if head.weight.is_floating_point() and not head.weight.is_inference() else None


@contextlib.contextmanager
def _trainable(weight: torch.Tensor) -> Iterator[None]:
    weight.requires_grad_(True)
    try:
        yield
    finally:
        weight.requires_grad_(False)


@contextlib.contextmanager
def _switched(switch: Callable[[str], object], to: str, back: str) -> Iterator[None]:
    switch(to)
    try:
        yield
    finally:
        switch(back)


def _has_experts(model: Any) -> bool:
    config = model.config.get_text_config()
    return any(getattr(config, name, 0) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def _only_last_is_used(group: CallGroup, recorder: Recorder) -> bool:
    """Whether these forwards are prompts of a loop, which goes on with their cache or without, and could be told so."""
    call, noted = group.middle
    arguments = noted.arguments[1] if noted.arguments else {}
    takes = "logits_to_keep" in inspect.signature(type(group.model).forward).parameters
    if not takes or call.prompt_len < 2 or "labels" in arguments or "logits_to_keep" in arguments:
        return False
    goes_on = any(other.shape[2] and other.model() is group.model for other in recorder.notes)
    return bool(call.context_len == 0 and (goes_on or grows_by_a_token(group.calls)))


def _threads(call: Call, candidate: Callable[..., Candidate]) -> Iterator[Candidate]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    own = int(call.settings["threads"])
    if call.settings["device"] != "cpu" or own == cores:
        return

    @contextlib.contextmanager
    def on_all() -> Iterator[None]:
        with _switched(torch.set_num_threads, cores, own):  # type: ignore[arg-type]
            yield

    yield candidate(
        "threads", f"torch computes with {own} thread{'s' if own != 1 else ''} on {cores} cores",
        f"torch.set_num_threads({cores})", within=on_all,
    )  # fmt: skip


def _with_copies(
    group: CallGroup, call: Call, noted: CallRecord, candidate: Callable[..., Candidate]
) -> Iterator[Candidate]:
    """Candidates that run the call on a copy of the model, where there is room for one."""
    for other in other_copies(group.model, call.settings["dtype"]):
        made: list[Any] = []

        def changed(other: Copy = other, made: list[Any] = made) -> object:
            if not made:
                made.append(other.make())
            return repeat(noted, call, made[0])()

        yield candidate(other.id, other.evidence, other.change, changed, where=group.loaded_at)


# A copy may take this share of the free memory.
_MEMORY_SHARE = 0.8
_WIDE = ("float32", "float64")
_HALVES = ("bfloat16", "float16")


@dataclass(frozen=True)
class Copy:
    """A copy that may be faster, and how it is asked for."""

    id: str
    evidence: str
    change: str
    make: Callable[[], Any]


def other_copies(model: Any, dtype: str) -> Iterator[Copy]:
    """The copies that are worth a trial and that there is room for. `dtype` is what the script's calls ran in."""
    weights = sum(parameter.numel() for parameter in model.parameters())
    room_bytes = _MEMORY_SHARE * available_bytes(model.device)
    if _is_spread(model):
        if weights * model.dtype.itemsize <= room_bytes:
            places = sorted({str(place) for place in model.hf_device_map.values()})
            spread = f"weights are spread over {', '.join(places)}"
            yield Copy(
                "offload",
                f"{spread}: {turns}"
                if (turns := pipelined_devices(model))
                else f"{spread}, and cross a link at every step",
                f'device_map={{"": "{model.device}"}}: there is room for all of them',
                lambda: _gathered(model),
            )
        return
    if getattr(model, "hf_quantizer", None) is not None:
        if weights * _dense_ratio(model) * 2 <= room_bytes:
            yield Copy(
                "slow-format",
                "weights are unpacked, or their products scaled, at every step",
                "leave the quantisation out where the model fits without: this kernel costs more than its bytes save",
                lambda: copy.deepcopy(model).dequantize(),
            )
        return
    name = _faster_dtype(model.device, dtype)
    if name and weights * getattr(torch, name).itemsize <= room_bytes:
        wide = dtype in _WIDE
        auto = ' or dtype="auto" for the checkpoint\'s own' if wide else ""
        yield Copy(
            "wide-dtype" if wide else "emulated-dtype",
            f"weights are {dtype}{'' if wide else ', for whose products this device has no units'}",
            f"dtype=torch.{name}{',' if auto else ''}{auto}",
            lambda: copy.deepcopy(model).to(getattr(torch, name)),
        )


def _faster_dtype(device: torch.device, dtype: str) -> str | None:
    """The dtype to try: 16 bits for 32, and for 16 bits that a CPU emulates what it has units for."""
    if dtype in _WIDE:
        return "bfloat16"
    if device.type != "cpu" or dtype not in _HALVES or _has_units(dtype):
        return None
    return "bfloat16" if _has_units("bfloat16") else "float32"


def _has_units(dtype: str) -> bool:
    """Whether this CPU multiplies matrices of these 16 bits by itself, as torch tells."""
    names = {
        "bfloat16": ("_is_avx512_bf16_supported", "_is_amx_tile_supported"),
        "float16": ("_is_amx_fp16_supported",),
    }
    return any(getattr(torch.cpu, name, lambda: False)() for name in names[dtype])


def _is_spread(model: Any) -> bool:
    places = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
    return len(places) > 1 or bool(places & {"disk"})


def _dense_ratio(model: Any) -> float:
    """Weights that an element of a packed parameter stands for, at most: two of 4 bits in a byte."""
    return 2.0 if any(parameter.dtype == torch.uint8 for parameter in model.parameters()) else 1.0


def _gathered(model: Any) -> Any:
    """A copy with all weights where it computes, and nothing of accelerate's hooks."""
    from accelerate.hooks import remove_hook_from_module
    from accelerate.utils import set_module_tensor_to_device

    device, whole = model.device, copy.deepcopy(model)
    for module in whole.modules():
        hooks = getattr(module, "_hf_hook", None)
        for hook in getattr(hooks, "hooks", (hooks,)):
            waiting = getattr(hook, "weights_map", None) or {}
            for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
                if tensor.is_meta:
                    set_module_tensor_to_device(module, name, device, value=waiting[name])
    remove_hook_from_module(whole, recurse=True)
    whole.__dict__.pop("hf_device_map", None)
    return whole.to(device)
