"""Cross-check executed FLOPs with torch's FlopCounterMode, which runs the model on meta tensors."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from profiler.counting.attention import Compressor
from profiler.counting.module_kinds import has_state
from profiler.counting.operators import ModelWork
from profiler.counting.walk import collapse_numbers, walk
from profiler.facts.step import ExecutionPath, Step
from profiler.loading.cache_argument import argument_name, cache_of, keeps_last_logits


@dataclass(frozen=True)
class CounterDifference:
    """A part of the model on which the two counters disagree."""

    module: str
    walk_flops: int
    counter_flops: int


@dataclass(frozen=True)
class Crosscheck:
    """The FLOPs of the same step by torch's own counter."""

    counter: str
    flops: int
    walk_flops: int
    """FLOPs of roofscope's walk over the modules."""
    equal: bool
    """Whether both counts are exactly equal in every part."""
    differences: tuple[CounterDifference, ...]
    left_out: tuple[CounterDifference, ...]
    """Modules whose matmuls are not model work, and what the second counter has for them. Recurrences and convolutions
    run in chunks with padding. transformers (5.17 and before) computes the angles of rotary embeddings as a matmul."""


def crosscheck(model: Any, step: Step) -> Crosscheck:
    """Count one step of scalars twice: by the walk, and by running the model under FlopCounterMode.

    The model must have eager attention: the counter does not see every fused kernel, and up to torch 2.11 it fails on
    grouped heads (PyTorch PR #177188). On meta nothing is computed; a model that reads a tensor's value must be on a
    CPU. Raises whatever the model raises.
    """
    by_module = _counter_flops(model, step)
    work = walk(model)
    path = ExecutionPath(attention="eager", all_logits=not work.keeps_last_logits)
    mixers = {name: module for name, module in model.named_modules() if has_state(module)}
    # xLSTM's recurrence runs in a part without parameters.
    parts = [(f"{name}.{part}", module) for name in mixers for part, module in mixers[name].named_children()]
    apart = mixers.keys() | {name for name, module in parts if not list(module.parameters())}
    counter_flops = _by_name((name, flops) for name, flops in by_module.items() if name not in apart)
    states = _by_name((name, flops) for name, flops in by_module.items() if name in apart)
    # A mixer may multiply by the weight of its linear instead of calling it (Mamba's `dt_proj`).
    of_mixers = tuple(collapse_numbers(name) + "." for name in mixers)
    walk_flops = {
        name: flops
        for name, flops in _walk_flops(work, step, path).items()
        if name in counter_flops or not name.startswith(of_mixers)
    }
    rotary = {collapse_numbers(name) for name, module in model.named_modules() if hasattr(module, "inv_freq")}
    states |= {name: counter_flops.pop(name) for name in rotary & counter_flops.keys() - walk_flops.keys()}
    left_out = tuple(CounterDifference(name, 0, flops) for name, flops in sorted(states.items()))
    differences = tuple(
        CounterDifference(name, walk_flops.get(name, 0), counter_flops.get(name, 0))
        for name in sorted({*walk_flops, *counter_flops})
        if walk_flops.get(name, 0) != counter_flops.get(name, 0)
    )
    flops, of_walk = sum(counter_flops.values()), sum(walk_flops.values())
    return Crosscheck(
        "torch.utils.flop_counter.FlopCounterMode", flops, of_walk, not differences, differences, left_out
    )


def _walk_flops(work: ModelWork, step: Step, path: ExecutionPath) -> dict[str, int]:
    totals = Counter[str]()
    for operator in work.operators:
        if operator.group != "state":
            name = operator.name.removesuffix(".core")
            if isinstance(operator, Compressor):
                name = name.rpartition(".")[0]  # attention runs over its own keys and those of the compressor at once
            totals[name] += int(operator.work(step, path).executed_flops)
    return +totals


def _counter_flops(model: Any, step: Step) -> dict[str, int]:
    device = next(model.parameters()).device
    batch, query, context = int(step.batch), int(step.query), int(step.context)
    options: dict[str, Any] = {"use_cache": True, **({"logits_to_keep": 1} if keeps_last_logits(model) else {})}
    with torch.no_grad():
        if context:
            output = model(input_ids=torch.zeros(batch, context, dtype=torch.long, device=device), **options)
            cache = cache_of(output)
            if cache is None:
                raise ValueError(f"{type(model).__name__} has no cache, so it has no decode step")
            options[argument_name(model)] = cache
        places = ((torch.ops.aten, "_grouped_mm"), (torch.ops.transformers, "grouped_mm_fallback"))
        formulas = {getattr(of, name): _grouped_flops for of, name in places if hasattr(of, name)}
        with FlopCounterMode(display=False, custom_mapping=formulas) as counter:
            model(input_ids=torch.zeros(batch, query, dtype=torch.long, device=device), **options)
    totals = {name: sum(ops.values()) for name, ops in counter.get_flop_counts().items() if name != "Global"}
    root = type(model).__name__
    return {name.removeprefix(root).lstrip("."): flops for name, flops in _without_children(totals).items() if flops}


def _grouped_flops(input_shape: Any, weight_shape: Any, *_args: Any, **_kwargs: Any) -> int:
    """FLOPs of [rows, in] x [experts, in, out], for which FlopCounterMode has no formula."""
    return 2 * int(input_shape[0]) * int(weight_shape[-2]) * int(weight_shape[-1])


def _without_children(totals: Mapping[str, int]) -> dict[str, int]:
    own = dict(totals)
    for name, flops in totals.items():
        parent = name.rpartition(".")[0]
        # A list of layers does not run as a module, so it has no entry.
        while parent and parent not in own:
            parent = parent.rpartition(".")[0]
        if parent:
            own[parent] -= flops
    return own


def _by_name(by_module: Iterable[tuple[str, int]]) -> dict[str, int]:
    result = Counter[str]()
    for name, flops in by_module:
        result[collapse_numbers(name)] += flops
    return result
