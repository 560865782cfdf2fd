"""Changes that a trial applies to a call: cache, gradients, kernels, dtype, logits, threads."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from profiler.device.clock import now_s
from profiler.device.device import describe
from profiler.device.machine import machine_for
from profiler.device.memory import available_bytes
from profiler.errors import RequestError, first_line
from profiler.measure.dense_twins import (
    dense_twins,
    kernel_of,
    packed_linears,
    replaced,
    times_by_batch,
)
from profiler.report.changes import paying_batches
from profiler.units import scaled, several
from profiler.why_slow.adapters import unmerged_adapters
from profiler.why_slow.call_settings import is_spread, pipelined_devices
from profiler.why_slow.dispatch_changes import captured_forward, compiled_step, is_bound_by_host, static_cache_change
from profiler.why_slow.findings import CallFloor
from profiler.why_slow.floor import at_roofs_s, made_s, with_all_logits
from profiler.why_slow.hub_kernels import attention_kernel, with_attention, with_layers
from profiler.why_slow.loop_changes import (
    batching_change,
    grows_by_a_token,
    loop_without_cache,
    padding_change,
    paged_batch_change,
    prefix_change,
    without_reads,
)
from profiler.why_slow.observations import Call
from profiler.why_slow.placement import COPY_SHARE, gathered, has_room_for_all
from profiler.why_slow.plain_models import is_plain
from profiler.why_slow.recorder import Recorder
from profiler.why_slow.repeat_call import CallGroup, CallsToChange, Candidate, RepeatedCall, repeat


@dataclass(frozen=True)
class Change:
    """A kind of change: the calls that it may apply to, and the trial; None if on closer look it does not apply.

    A trial raises RequestError if the change applies, but cannot be tried on this machine.
    """

    id: str
    applies: Callable[[CallsToChange], bool]
    trial: Callable[[CallsToChange], Candidate | None]


def candidates(
    group: CallGroup,
    recorder: Recorder,
    floor: CallFloor | None = None,
    without_trial: Callable[[str, str], object] = lambda _name, _reason: None,
) -> Iterator[Candidate]:
    """The changes that apply to a group of calls; `without_trial` gets those that cannot be tried, and the reason."""
    calls = CallsToChange(group, recorder, floor)
    for change in CHANGES:
        try:
            candidate = change.trial(calls) if change.applies(calls) else None
        except RequestError as error:
            without_trial(f"{change.id} ({calls.call.where})", first_line(error))
            continue
        if candidate is not None:
            yield candidate


def _switch(
    name: str,
    applies: Callable[[CallsToChange], bool],
    evidence: str | Callable[[CallsToChange], str],
    change: str,
    within: Callable[[CallsToChange], contextlib.AbstractContextManager[None]] | None = None,
    *,
    at_load: bool = False,
    instead: Callable[[Call], Call] | None = None,
    **options: object,
) -> Change:
    """A change to `options` of the call, or to what is set within a context; `at_load` at the line of the load.

    `instead` gives the changed call, from whose shape the saving can be estimated.
    """

    def trial(calls: CallsToChange) -> Candidate:
        words = evidence if isinstance(evidence, str) else evidence(calls)
        more: dict[str, Any] = {"about": calls.saved_share([calls.call], [instead(calls.call)]) if instead else 0.0}
        more |= {"within": lambda: within(calls)} if within else {}
        more |= {"where": calls.group.loaded_at} if at_load else {}
        return calls.candidate(name, words, change, calls.with_options(**options), **more)

    return Change(name, applies, trial)


def _grad_on(calls: CallsToChange) -> Candidate:
    return calls.candidate(
        "grad-on", "gradients are recorded, and nothing is differentiated", "call it within torch.inference_mode()",
        repeat(calls.middle[1], calls.call, calls.model, inference=True),
    )  # fmt: skip


def _frozen_weights(calls: CallsToChange) -> Candidate | None:
    if (weight := _frozen_head(calls.model)) is None:
        return None
    return calls.candidate(
        "frozen-weights", "weights are frozen, so the LM head copies its weight for each last position",
        "leave out requires_grad_(False): within torch.inference_mode() no gradient is recorded",
        within=lambda: _switched(weight.requires_grad_, True, False),
    )  # fmt: skip


def _extra_outputs(calls: CallsToChange) -> Candidate:
    names = calls.settings.outputs
    return calls.candidate(
        "extra-outputs", f"{', '.join(names)} are requested", "request them only where they are used",
        calls.with_options(**dict.fromkeys(names, False)),
    )  # fmt: skip


def _without_callbacks(calls: CallsToChange) -> Candidate | None:
    if not (names := " and ".join(calls.middle[1].callbacks)):
        return None
    return calls.candidate(
        "host-sync", f"{names} read every token on the host, which waits for the device",
        "read every few tokens, or leave it out", alone=True,
    )  # fmt: skip


def _more_threads(calls: CallsToChange) -> Candidate:
    threads, cores = calls.settings.threads, _cores()
    return calls.candidate(
        "threads", f"torch computes with {several(threads, 'thread', 'threads')} on {cores} cores",
        f"torch.set_num_threads({cores})", within=lambda: _switched(torch.set_num_threads, cores, threads),
    )  # fmt: skip


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _other_copy(calls: CallsToChange) -> Candidate | None:
    """A change that needs a copy of the model."""
    other = other_copy(calls.model, calls.settings.dtype)
    if other is None:
        return None
    changed = RepeatedCall(calls.middle[1], calls.call, functools.cache(other.make)).as_run
    where = calls.group.loaded_at
    about = 0.0
    if other.id == "wide-dtype" and (subject := calls.subject) is not None:
        # Half of the bytes, of what is at the roofs: dispatch and slow kernels may take as long in any dtype.
        at_roofs = min(1.0, at_roofs_s(calls.call, subject) / max(calls.call.steady_s, 1e-9))
        about = other.bytes_saved * at_roofs
    return calls.candidate(other.id, other.evidence, other.change, changed, where=where, about=about)


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


def _runs_experts_in_turn(calls: CallsToChange) -> bool:
    if calls.settings.experts != "eager":
        return False
    config = calls.model.config.get_text_config()
    return any(getattr(config, name, 0) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def _dense_weights(calls: CallsToChange) -> Candidate | None:
    """A change to dense weights, on dense linears of random values in place of the packed ones."""
    call, model = calls.call, calls.model
    linears = packed_linears(model)
    if not linears or is_spread(model):
        return None
    own = torch.bfloat16 if is_plain(model) else model.dtype
    dtype = own if own.itemsize > 1 else torch.bfloat16
    device = torch.device(call.settings.device)
    twins = functools.cache(lambda: dense_twins(linears, dtype, COPY_SHARE * available_bytes(device)))
    formats = " and ".join(dict.fromkeys(each.format for each in linears))

    def explain(until_s: float) -> str:
        first, twin = linears[0].module, twins()[0]
        x = torch.randn(call.batch_size, 1, first.in_features, dtype=dtype, device=twin.weight.device)
        times = times_by_batch(linears, twins(), machine_for(device), min(until_s, now_s() + _BATCHES_S))
        batches = f", and in a decode step {paying_batches(times)}" if times else ""
        return f", their kernel is {kernel_of(first, x)}{batches}"

    return calls.candidate(
        "slow-format", f"weights are packed ({formats})",
        "leave out the quantisation if the model fits without it", within=lambda: replaced(linears, twins()),
        where=calls.group.loaded_at, explain=explain,
    )  # fmt: skip


# Seconds to time packed and dense linears at further batches.
_BATCHES_S = 5.0


_WIDE = ("float32", "float64")
_HALVES = ("bfloat16", "float16")


@dataclass(frozen=True)
class Copy:
    """A copy of a model that may be faster, and the change to the script that gives it."""

    id: str
    evidence: str
    change: str
    make: Callable[[], Any]
    bytes_saved: float = 0.0
    """Share of the weights' bytes that it saves; 0 if the device has no units for its dtype."""


def other_copy(model: Any, dtype: str) -> Copy | None:
    """The copy that is worth a trial. `dtype` is that of the script's calls; `make` may raise RequestError."""
    weights = sum(parameter.numel() for parameter in model.parameters())
    device = next(model.parameters()).device if is_plain(model) else model.device
    room_bytes = COPY_SHARE * available_bytes(device)
    if is_spread(model):
        if not has_room_for_all(model):
            return None
        places = sorted({str(place) for place in model.hf_device_map.values()})
        turns = pipelined_devices(model)
        return Copy(
            "offload",
            f"weights are spread over {', '.join(places)}"
            + (f": {turns}" if turns else ", and cross a link at every step"),
            f'device_map={{"": "{model.device}"}}: there is room for all of them',
            lambda: gathered(model),
        )
    if packed_linears(model) or (name := _faster_dtype(device, dtype)) is None:
        return None
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

    return Copy(
        "wide-dtype" if wide else "emulated-dtype",
        f"weights are {dtype}{'' if wide else ', for which this device has no matmul units'}",
        f"dtype=torch.{name}{auto}",
        converted,
        1 - faster.itemsize / getattr(torch, dtype).itemsize if device.type == "cuda" or _has_units(name) else 0.0,
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
    return any(getattr(torch.cpu, name, lambda: False)() for name in names.get(dtype, ()))


def _unread_logits(calls: CallsToChange) -> Candidate | None:
    """A change to the last positions, if the script reads one of each row, or at most half of them from the end."""
    reads = [noted.read for noted in calls.group.notes if noted.arguments]
    known = [each for each in reads if each is not None and each.places]
    if not known or len(known) < len(reads):
        return None
    tokens = calls.call.prompt_len
    if all(each.at_most_one_per_row for each in known):
        keep, which = 1, "the script reads one of each row"
    else:
        keep = max(each.last for each in known)
        which = f"the script reads at most the last {keep}"
    if keep > tokens / 2:
        return None
    on_the_left = "pad on the left, and " if keep == 1 and any(each.last > 1 for each in known) else ""
    return calls.candidate(
        "all-logits", f"logits of all {tokens} positions are computed, and {which}",
        f"{on_the_left}pass logits_to_keep={keep}", calls.with_options(logits_to_keep=keep),
        about=(tokens - keep) / max(1, tokens - 1) * _share_of_head(calls),
    )  # fmt: skip


def _merged_adapters(calls: CallsToChange) -> Candidate | None:
    """A change to linears without their adapters, whose products take as long as merged ones."""
    found = unmerged_adapters(calls.model)
    if not found:
        return None
    kinds = " and ".join(dict.fromkeys(type(each.module).__name__ for each, _ in found))
    return calls.candidate(
        "unmerged-adapters", f"{len(found)} linears compute an adapter next to their weight ({kinds})",
        "merge them once after loading: model.merge_and_unload() with peft, else add the product to the weight",
        within=lambda: replaced([each for each, _ in found], [base for _, base in found]), where=calls.group.loaded_at,
    )  # fmt: skip


def _share_of_head(calls: CallsToChange) -> float:
    """Share of a forward at the roofs that the LM head takes for all positions but one; 0 if the roofs are unknown."""
    if (subject := calls.subject) is None:
        return 0.0
    return 1 - made_s([calls.call], subject) / made_s([calls.call], with_all_logits(subject))


def _has_hub_kernels(calls: CallsToChange) -> bool:
    """Whether the model could run kernels of the hub: on a GPU, or on a CPU with the package, as few are for a CPU."""
    model, settings = calls.model, calls.settings
    possible = not (is_plain(model) or is_spread(model) or calls.trains or getattr(model, "use_kernels", True))
    return possible and (not settings.on_cpu or importlib.util.find_spec("kernels") is not None)


def _hub_attention(calls: CallsToChange) -> Candidate | None:
    name = attention_kernel(calls.model) if calls.settings.attention == "sdpa" else None
    if name is None or calls.settings.dtype not in _HALVES:
        return None
    with with_attention(calls.model, name):  # raises if it is not on this machine
        pass
    return calls.candidate(
        "hub-attention", "attention runs the kernels of torch", f'attn_implementation="{name}"',
        within=lambda: with_attention(calls.model, name), where=calls.group.loaded_at,
    )  # fmt: skip


def _hub_layers(calls: CallsToChange) -> Candidate:
    with with_layers(calls.model):
        pass
    return calls.candidate(
        "hub-layers", "layers run operators of torch, and the hub has kernels for some", "use_kernels=True",
        within=lambda: with_layers(calls.model), where=calls.group.loaded_at,
    )  # fmt: skip


def _is_loop(calls: CallsToChange) -> bool:
    return not calls.generates and (grows_by_a_token(calls.group.calls) or calls.recorder.used_cache)


def _reads(calls: CallsToChange) -> Candidate | None:
    reads = calls.recorder.reads.by_line(calls.call.where)
    return without_reads(calls.group, reads[0]) if reads else None


CHANGES = (
    _switch(
        "cache-off", lambda calls: calls.generates and calls.settings.cache is False,
        "use_cache=False computes the whole prompt again at every token", "remove use_cache=False", use_cache=True,
        instead=lambda call: replace(call, settings=replace(call.settings, cache=True)),
    ),
    Change("cache-off", lambda calls: not calls.generates, loop_without_cache),
    Change("host-sync", lambda calls: not calls.generates and len(calls.group.calls) > 1, _reads),
    Change("grad-on", lambda calls: not calls.generates and calls.settings.gradients and not calls.trains, _grad_on),
    _switch(
        "train-mode", lambda calls: calls.settings.training and not calls.trains,
        "the model is in train mode", "call model.eval() after loading",
        lambda calls: _switched(calls.model.train, False, True),
    ),
    Change("frozen-weights", lambda calls: not calls.settings.gradients, _frozen_weights),
    Change("padding", lambda calls: calls.call.padding > 0, padding_change),
    Change("all-logits", lambda calls: not calls.generates, _unread_logits),
    Change("extra-outputs", lambda calls: bool(calls.settings.outputs), _extra_outputs),
    _switch(
        "slow-attention",
        lambda calls: calls.settings.attention == "eager" and getattr(calls.model, "_supports_sdpa", False),
        "attention is eager: its scores are written out", 'attn_implementation="sdpa"',
        lambda calls: _switched(calls.model.set_attn_implementation, "sdpa", "eager"), at_load=True,
    ),
    _switch(
        "slow-attention", lambda calls: calls.settings.attention == "sdpa" and calls.settings.math_attention,
        "SDPA's fused kernels are disabled: its scores are written out",
        "leave out sdpa_kernel(SDPBackend.MATH) and enable_flash_sdp(False)", lambda _: _fused(),
    ),
    _switch(
        "slow-experts", _runs_experts_in_turn,
        "experts run one after the other in a loop", 'experts_implementation="grouped_mm"',
        lambda calls: _switched(calls.model.set_experts_implementation, "grouped_mm", "eager"), at_load=True,
    ),
    _switch(
        "beams", lambda calls: calls.settings.beams > 1, lambda calls: f"{calls.settings.beams} beams are followed",
        "num_beams=1, if its answers are good enough",
        instead=lambda call: replace(call, batch_size=call.batch_size // call.settings.times_computed),
        num_beams=1, num_return_sequences=1,
    ),
    Change("host-sync", lambda calls: not calls.settings.on_cpu, _without_callbacks),
    _switch(
        "assistant", lambda calls: calls.settings.assistant,
        "an assistant model drafts", "leave out assistant_model", assistant_model=None,
    ),
    Change("uncompiled", lambda calls: is_plain(calls.model), captured_forward),
    Change("growing-cache", is_bound_by_host, static_cache_change),
    Change("uncompiled", is_bound_by_host, compiled_step),
    Change("hub-attention", _has_hub_kernels, _hub_attention),
    Change("hub-layers", _has_hub_kernels, _hub_layers),
    Change("unmerged-adapters", lambda _: True, _merged_adapters),
    Change("slow-format", lambda _: True, _dense_weights),
    Change("wide-dtype", lambda _: True, _other_copy),
    Change("one-by-one", lambda calls: calls.middle[1].batched, paged_batch_change),
    Change("one-by-one", lambda calls: not _is_loop(calls), batching_change),
    Change("shared-prefix", lambda calls: calls.generates, prefix_change),
    # Last, since threads that wait for each other may take very long on a busy machine.
    Change("threads", lambda calls: calls.settings.on_cpu and calls.settings.threads != _cores(), _more_threads),
)  # fmt: skip
"""The changes that are tried."""
