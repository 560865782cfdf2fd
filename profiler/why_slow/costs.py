"""Findings without a trial: weights on several devices, cuDNN's plans for KV lengths, loads that convert weights."""

import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from profiler.counting.attention import AttentionCore
from profiler.counting.memory_need import memory_need, path_on
from profiler.counting.operators import ModelWork
from profiler.counting.walk import walk
from profiler.data.free_memory import idle_room_bytes
from profiler.device.clock import first_and_second_s, now_s
from profiler.device.device import compute_capability
from profiler.device.machine import Machine, machine_for
from profiler.device.memory import total_bytes
from profiler.errors import RequestError, first_line
from profiler.facts.step import Attention, Step
from profiler.loading.device_map import DeviceMap, offloaded_bytes
from profiler.patching import switched
from profiler.roofs.bandwidth import measure_links
from profiler.units import duration, scaled
from profiler.why_slow.findings import Finding, Untried
from profiler.why_slow.model_changes import has_room_for_all
from profiler.why_slow.observations import Call, Observations
from profiler.why_slow.plain_models import is_plain
from profiler.why_slow.repeat_call import CallGroup
from profiler.why_slow.watched_calls import device_map_of, gpus_in_turn, is_spread

# Seconds to measure one link.
_LINK_S = 1.0


def placement_findings(groups: Sequence[CallGroup], untried: Untried) -> Iterator[Finding]:
    """What placement costs calls at most, where no trial can show it; `untried` gets what cannot be measured."""
    for group in [each for each in groups if not is_plain(each.model) and is_spread(each.model)]:
        try:
            yield from _over_the_link(group)
        except Exception as error:  # a user's model may fail in any way, and the answer is useful without a bound
            untried.add(f"offload ({group.loaded_at})", first_line(error))
        if (count := gpus_in_turn(group.model)) > 1:
            yield Finding(
                "gpus-in-turn", (1 - 1 / count) * group.seconds, group.loaded_at, group.settings.placement,
                f"pass distributed_config=DistributedConfig(tp_size={count}) to from_pretrained, and start with"
                f" torchrun --nproc-per-node {count}: each GPU then computes a part of every layer",
                "at most", f"1 - 1/{count} of the calls, if {count} GPUs shared every layer and sent nothing",
            )  # fmt: skip


def _over_the_link(group: CallGroup) -> Iterator[Finding]:
    """The time in which offloaded weights cross their link, by its measured bandwidth, unless a trial shows it."""
    model, weight_bytes = group.model, group.model.get_memory_footprint(return_buffers=False)
    machine = machine_for(model.device)
    if has_room_for_all(model) or not (crossing := offloaded_bytes(model, DeviceMap(device_map_of(model), None))):
        return
    links, missing = measure_links(tuple(crossing), machine, _LINK_S)
    if missing:
        raise RequestError("; ".join(missing.values()))
    step_s = sum(nbytes / links[name].per_s for name, nbytes in crossing.items())
    forwards = sum(call.forwards for call in group.calls)
    rates = " and ".join(f"{scaled(links[name].per_s, 'B/s')} from the {name}" for name in crossing)
    yield Finding(
        "offload", min(group.seconds, forwards * step_s), group.loaded_at,
        f"{scaled(sum(crossing.values()), 'B')} of {scaled(weight_bytes, 'B')} of weights cross a link in"
        f" each of {forwards} forwards, {duration(step_s)} at {rates}",
        what_fits(walk(model), weight_bytes, group.call, machine),
        "at most", "the bytes that cross the link, at its measured bandwidth",
    )  # fmt: skip


def what_fits(work: ModelWork, weight_bytes: int, call: Call, machine: Machine) -> str:
    """What to do if weights are not on the device that computes, by the rule for free memory of `count --gpu`."""
    device = machine.device
    free_bytes = idle_room_bytes(device.type, total_bytes(device))
    attention: Attention = "eager" if call.settings.attention == "eager" else "sdpa"
    path = path_on(work, attention, fuses_grouped_heads=not machine.is_cuda or compute_capability(device) >= (8, 0))
    path = replace(path, gathers_experts=machine.is_cuda)
    step = Step(call.batch_size, max(1, call.prompt_len + call.context_len), 0)
    needs = float(memory_need(work, weight_bytes, step, max(1, call.new_tokens), path).safe_bytes)
    other = f"load it in {'8 or 4 bits, or on a GPU with more memory' if machine.is_cuda else 'fewer bits'}"
    change = other if needs > free_bytes else f'device_map={{"": "{device}"}}'
    return f"{change}: all of it needs {scaled(needs, 'B')}, and this device has {scaled(free_bytes, 'B')} free"


# New lengths at which attention is measured; the first one loads the kernel.
_LENGTHS = 4


def plan_findings(groups: Sequence[CallGroup], untried: Untried) -> Iterator[Finding]:
    """The plans that cuDNN builds for the KV lengths of `generate`; `untried` gets those that cannot be measured.

    cuDNN builds one for each exact shape (PyTorch, aten/src/ATen/native/cudnn/MHA.cpp), which torch 2.11 and later
    prefer on Hopper and Blackwell. Its time is measured at lengths that the script did not use, with cuDNN and without.
    """
    by_model = defaultdict[int, list[CallGroup]](list)
    for group in groups:
        if group.calls[0].grows_a_cache and group.calls[0].settings.attention == "sdpa":
            by_model[id(group.model)].append(group)
    for own in by_model.values():
        calls = [call for group in own for call in group.calls]
        # The first new token comes from the prompt's forward.
        shapes = {(call.batch_size, call.context_len + call.prompt_len + number)
                  for call in calls for number in range(1, call.new_tokens)}  # fmt: skip
        if not shapes:
            continue
        try:
            plan_s = _plan_s(own[0].model, shapes, masked=any(call.padding for call in calls))
            yield Finding(
                "attention-plans", min(len(shapes) * plan_s, sum(call.seconds for call in calls)),
                max(own, key=lambda group: group.seconds).calls[0].where,
                f"{len(shapes)} KV lengths are new to the process, and cuDNN builds an attention plan for each,"
                f" {duration(plan_s)}",
                "call torch.backends.cuda.enable_cudnn_sdp(False) first: the other kernels need no plan;"
                ' cache_implementation="static" has one length',
                "measured", "attention at new KV lengths, with cuDNN and without, times their number", once=True,
            )  # fmt: skip
        except Exception as error:  # a user's model may fail in any way, and the answer is useful without this
            untried.add(f"attention-plans ({own[0].loaded_at})", first_line(error))


def _plan_s(model: Any, shapes: set[tuple[int, int]], *, masked: bool) -> float:
    """Seconds that the first attention at a KV length takes longer with cuDNN, at these (batch sizes, KV lengths)."""
    machine = machine_for(model.device)
    core = next(item for item in walk(model).operators if isinstance(item, AttentionCore))
    batch = statistics.mode(batch for batch, _ in shapes)
    beyond = max(length for _, length in shapes) + 1
    attention = partial(_attention, core, model, batch, masked)
    with torch.inference_mode():
        first_s, second_s = first_and_second_s(machine.clock, attention, range(beyond, beyond + _LENGTHS))
        with switched(torch.backends.cuda.enable_cudnn_sdp, False, torch.backends.cuda.cudnn_sdp_enabled()):
            others = first_and_second_s(machine.clock, attention, range(beyond + _LENGTHS, beyond + 2 * _LENGTHS))
    return max(0.0, (first_s - second_s) - (others[0] - others[1]))


def _attention(core: AttentionCore, model: Any, batch: int, masked: bool, length: int) -> Callable[[], object]:
    """A decode step's attention of one layer at a KV length, as transformers calls it."""
    kv_heads = core.query_heads if masked else core.kv_heads
    of_model = {"device": model.device, "dtype": model.dtype}
    query = torch.zeros(batch, core.query_heads, 1, core.qk_dim, **of_model)
    key = torch.zeros(batch, kv_heads, length, core.qk_dim, **of_model)
    value = torch.zeros(batch, kv_heads, length, core.v_dim, **of_model)
    mask = torch.ones(batch, 1, 1, length, device=model.device, dtype=torch.bool) if masked else None
    grouped = kv_heads < core.query_heads
    return partial(F.scaled_dot_product_attention, query, key, value, attn_mask=mask, enable_gqa=grouped)


# A part of the weights of at most so many bytes is written and read.
_MOST_BYTES = 512 << 20


def conversion_findings(seen: Observations, models: Sequence[Any]) -> Iterator[Finding]:
    """Time of the first load of each model whose weights are converted; later ones are reloads.

    `models` are those of the loads, or None. The time to read as many bytes is subtracted; without a model the finding
    is a bound.
    """
    known: set[str] = set()
    for load, model in zip(seen.loads, models, strict=True):
        if load.conversion and load.source not in known:
            known.add(load.source)
            read_s = None if model is None else read_weights_s(model)
            yield Finding(
                "slow-load", max(0.0, load.seconds - (read_s or 0.0)), load.where,
                f"{load.conversion} at every start", load.instead,
                *(("at most", "the time of this load") if read_s is None
                  else ("measured", "the load, less the time to write its weights to a file and read them")),
            )  # fmt: skip


def read_weights_s(model: Any) -> float | None:
    """Seconds to write as many bytes as a model's weights have to a file, and to read them; None if that fails.

    Of more than 512 MiB, a part is written and read, and represents all.
    """
    weights = [tensor for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta]
    whole: int = sum(tensor.nbytes for tensor in weights)
    part = min(whole, _MOST_BYTES)
    try:
        with tempfile.TemporaryDirectory() as folder:
            file, start_s = Path(folder) / "weights", now_s()
            file.write_bytes(bytes(part))
            file.read_bytes()
            return (now_s() - start_s) * whole / max(1, part)
    except OSError:  # a full disk
        return None
