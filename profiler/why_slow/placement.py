"""Weights on several devices or on the disk: what crosses a link, what would fit, and GPUs that work in turn."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

from profiler.counting.floor import least
from profiler.counting.memory_need import memory_need, path_on
from profiler.counting.operators import Linear, ModelWork
from profiler.counting.walk import walk
from profiler.data.datasheets import Datasheet, gpus
from profiler.data.prices import prices
from profiler.data.room import idle_room_bytes
from profiler.device.device import compute_capability
from profiler.device.machine import Machine, machine_for
from profiler.device.memory import available_bytes, total_bytes
from profiler.errors import RequestError, first_line
from profiler.facts.step import Attention, Step
from profiler.loading.device_map import DeviceMap, offloaded_bytes
from profiler.quant.bitsandbytes import bitsandbytes_bytes
from profiler.roofs.bandwidth import measure_links
from profiler.units import duration, scaled
from profiler.why_slow.call_settings import gpus_in_turn, is_spread, pipelined_devices
from profiler.why_slow.findings import Finding, Untried, new_finding
from profiler.why_slow.observations import Call
from profiler.why_slow.plain_models import is_plain
from profiler.why_slow.repeat_call import CallGroup

# Seconds to measure one link.
_LINK_S = 1.0
# Formats of bitsandbytes to load a model in, by their words, the largest first.
_PACKED: dict[str, Literal["int8", "nf4"]] = {
    "8 bits (bitsandbytes' int8)": "int8",
    "4 bits (bitsandbytes' nf4)": "nf4",
}


def placement_findings(groups: Sequence[CallGroup], untried: Untried) -> Iterator[Finding]:
    """What placement costs calls at most, where no trial can show it; `untried` gets what cannot be measured."""
    for group in groups:
        if is_plain(group.model) or not is_spread(group.model):
            continue
        try:
            yield from _over_the_link(group)
        except Exception as error:  # a user's model may fail in any way, and the answer is useful without a bound
            untried.add(f"offload ({group.loaded_at})", first_line(error))
        if (count := gpus_in_turn(group.model)) > 1:
            yield new_finding(
                "gpus-in-turn", (1 - 1 / count) * group.seconds, group.loaded_at, pipelined_devices(group.model),
                f"pass distributed_config=DistributedConfig(tp_size={count}) to from_pretrained, and start with"
                f" torchrun --nproc-per-node {count}: each GPU then computes a part of every layer",
                f"at most: 1 - 1/{count} of the calls, if {count} GPUs shared every layer and sent nothing",
            )  # fmt: skip


def _over_the_link(group: CallGroup) -> Iterator[Finding]:
    """The time in which offloaded weights cross their link, by its measured bandwidth, unless a trial shows it."""
    model = group.model
    if has_room_for_all(model):
        return
    places = {name: f"cuda:{place}" if isinstance(place, int) else str(place)
              for name, place in model.hf_device_map.items()}  # fmt: skip
    crossing = offloaded_bytes(model, DeviceMap(places, None))
    machine = machine_for(model.device)
    if not crossing:
        return
    links, missing = measure_links(tuple(crossing), machine, _LINK_S)
    if missing:
        raise RequestError("; ".join(missing.values()))
    step_s = sum(nbytes / links[name].per_s for name, nbytes in crossing.items())
    forwards = sum(call.forwards for call in group.calls)
    rates = " and ".join(f"{scaled(links[name].per_s, 'B/s')} from the {name}" for name in crossing)
    yield new_finding(
        "offload", min(group.seconds, forwards * step_s), group.loaded_at,
        f"{scaled(sum(crossing.values()), 'B')} of {scaled(_weight_bytes(model), 'B')} of weights cross a link in"
        f" each of {forwards} forwards, {duration(step_s)} at {rates}",
        what_fits(walk(model), _weight_bytes(model), group.call, machine),
        "at most: the bytes that cross the link, at its measured bandwidth",
    )  # fmt: skip


def what_fits(work: ModelWork, weight_bytes: int, call: Call, machine: Machine) -> str:
    """What would fit on one device for a call, by the rule for room of `count --gpu`."""
    device = machine.device
    room = idle_room_bytes(device.type, total_bytes(device))
    attention: Attention = "eager" if call.settings.attention == "eager" else "sdpa"
    path = path_on(work, attention, fuses_grouped_heads=not machine.is_cuda or compute_capability(device) >= (8, 0))
    path = replace(path, gathers_experts=machine.is_cuda)

    def needs(weights: float, prompt_len: int) -> float:
        step = Step(call.batch_size, max(1, prompt_len), 0)
        return float(memory_need(work, int(weights), step, max(1, call.new_tokens), path).safe_bytes)

    prompt_len = call.prompt_len + call.context_len
    dense = needs(weight_bytes, prompt_len)
    has = f"this {'GPU' if machine.is_cuda else 'machine'} has room for {scaled(room, 'B')}"
    if dense <= room:
        return f'device_map={{"": "{device}"}}: all of it needs {scaled(dense, "B")}, and {has}'
    options = []
    for words, quant in _PACKED.items():
        need = needs(_packed_bytes(work, weight_bytes, quant), prompt_len)
        if machine.is_cuda and need <= room:
            options.append(f"load it in {words}, which needs {scaled(need, 'B')}")
            break
    if needs(weight_bytes, 1) <= room:
        too_long = least(lambda tokens: needs(weight_bytes, tokens) > room) or prompt_len
        options.append(f"keep prompts to {too_long - 1:,} tokens")
    if larger := _smallest_gpu(dense):
        options.append(f"use a GPU with room for {scaled(dense, 'B')}, such as the {larger.gpu}")
    return f"{', or '.join(options) or 'use a smaller model'}: {has}"


def _packed_bytes(work: ModelWork, weight_bytes: int, quant: Literal["int8", "nf4"]) -> float:
    """Bytes of the weights with all linears but the LM head in a format of bitsandbytes, with its scales."""
    saved = 0.0
    for item in work.operators:
        if isinstance(item, Linear) and item.group not in ("lm_head", "experts"):
            packed = bitsandbytes_bytes(quant, item.weight.in_features, item.weight.out_features)
            saved += (item.count - item.repeats) * max(0.0, item.weight.weight_bytes - packed)
    return weight_bytes - saved


def _smallest_gpu(needs_bytes: float) -> Datasheet | None:
    """The GPU with the least room that is enough, among those that are rented out; None if all are too small."""
    rented = {price.card for price in prices()}
    enough = [gpu for gpu in gpus() if gpu.gpu in rented and gpu.room_bytes >= needs_bytes]
    return min(enough, key=lambda gpu: (gpu.room_bytes, -gpu.year), default=None)


# The trial's copy of a model may take at most this share of the free memory.
COPY_SHARE = 0.8


def has_room_for_all(model: Any) -> bool:
    """Whether a copy of all weights fits next to the model on the device that computes, so that a trial can run it."""
    return _weight_bytes(model) <= COPY_SHARE * available_bytes(model.device)


def _weight_bytes(model: Any) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def gathered(model: Any) -> Any:
    """A copy with all weights on the device that computes, without accelerate's hooks."""
    from accelerate.hooks import remove_hook_from_module
    from accelerate.utils import set_module_tensor_to_device

    device, whole = model.device, copy.deepcopy(model)
    for module in whole.modules():
        hooks = getattr(module, "_hf_hook", None)
        for hook in getattr(hooks, "hooks", (hooks,)):
            offloaded = getattr(hook, "weights_map", None) or {}
            for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
                if tensor.is_meta:
                    set_module_tensor_to_device(module, name, device, value=offloaded[name])
    remove_hook_from_module(whole, recurse=True)
    whole.__dict__.pop("hf_device_map", None)
    return whole.to(device)
