"""The truth: plain calls of transformers run each cell on a separate card, and the card's log gives its figures.

The profiler only loads quantised models here. None of its measuring, counting or judging is used.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM, StaticCache

from . import attention
from .card import Card, Kernel, Region, duration_s
from .pricing import BATCHED, BY_EXPERTS, MATMULS, PACKED, matmul_dtype
from .truth import Truth
from .world import World

_CONVERTING = ("dequantize", "int8_vectorwise_quant", "int8_mm_dequant")
_DEQUANTISING = tuple(f"bitsandbytes.{name}" for name in _CONVERTING)
"""Kernels that write a dense copy of a packed weight, or LLM.int8()'s inputs in 8 bits and its matmuls in 16."""
_ATTENTION = tuple(attention.NAMES.values())
_BYTES = {"float32": 4, "tfloat32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Phase:
    """The truth of one step of one cell."""

    engine: str
    phase: str
    batch_size: int
    prompt_len: int
    latency_s: float
    device_s: float
    exposed_overhead_s: float
    """Time during which the card idles and waits for the host."""
    launches: int
    weights_s: float
    """Time for the weights of memory-bound matmuls, at the card's bandwidth."""
    kv_s: float
    """Time for keys and values as the cache stores them, if the attention that reads them is memory-bound."""
    compute_s: float
    """Time for the FLOPs of compute-bound matmuls and attention, at the card's peaks.

    Causal attention does not need half of the square, though its matmuls also compute that half.
    """
    dequantise_s: float
    beside_s: float
    """The other kernel time: losses, and work that the algorithm does not need."""
    traffic_s: float
    """The part of it in kernels without arithmetic that are longer than the smallest: they only move bytes."""
    link_s: float
    peak_bytes: int

    @property
    def hides_small_kernels(self) -> bool:
        """Whether the loss of small kernels is known only together with the unexplained rest: a trace is not simulated,
        and compiled code cannot be captured kernel by kernel."""
        return self.phase == "decode" and self.engine == "compile"


def phases(
    world: World, model: Any, engine: str, batch_sizes: Sequence[int], prompt_lens: Sequence[int], new_tokens: int
) -> list[Phase]:
    """Return the truth of each cell's prefill and of the median step of its decode loop."""
    cells = itertools.product(prompt_lens, batch_sizes)
    return [phase for cell in cells for phase in _cell(world, model, engine, *cell, new_tokens)]


def _cell(world: World, model: Any, engine: str, prompt: int, batch: int, new_tokens: int) -> list[Phase]:
    ids = torch.zeros(batch, prompt, dtype=torch.long, device="cuda")
    prefill, decode = _ENGINES[engine](model, batch, prompt + new_tokens)
    card = world.card
    prefill(ids)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    with _logged(card) as log:
        token = prefill(ids)
    torch.cuda.synchronize()
    steps = []
    for _ in range(new_tokens - 1):
        with _logged(card) as step:
            token = decode(token)
        steps.append(step)
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.synchronize()
    del token
    config = model.config.get_text_config()
    needed = _Needed(
        config.num_attention_heads // getattr(config, "num_key_value_heads", config.num_attention_heads),
        matmul_dtype(torch.empty(0, dtype=model.dtype)),
        _kept_share(config),
        batch,
    )
    of = partial(Phase, engine, batch_size=batch, prompt_len=prompt, peak_bytes=peak)
    return [
        of(phase=phase, **_figures(logs, card.truth, needed, queries))
        for phase, logs, queries in (("prefill", [log], prompt), ("decode", steps, 1))
    ]


@dataclass(frozen=True)
class _Needed:
    """The work that the algorithm needs, whatever path a library takes."""

    groups: int
    """Number of query heads that share a key."""
    dtype: str
    kept_share: float
    """The share of the keys and values that attention reads which a cache stores; the rest is expanded from it."""
    batch: int

    def ceilings_s(
        self, kernel: Kernel, queries: int, truth: Truth, stored: Mapping[Region, int], bytes_per_s: float
    ) -> tuple[float, float]:
        """Return the seconds for the FLOPs and for the bytes of a matmul or an attention, with some queries each.

        A weight that is a dense copy counts with its `stored` bytes.
        """
        dtype = kernel.dtype
        if kernel.name.startswith(_ATTENTION):
            flops, nbytes = kernel.flops, self.kept_share * (kernel.reads[1][1] + kernel.reads[2][1])
        elif kernel.name.startswith(BATCHED):  # attention in plain matmuls: scores, then values
            # Math attention repeats keys for the query heads that share them, in float32, over the whole square.
            repeated = self.groups * _BYTES[dtype] / _BYTES[self.dtype]
            flops, nbytes = kernel.flops * (queries + 1) / (2 * queries), kernel.reads[1][1] / repeated
            dtype = self.dtype
        elif kernel.name.startswith(PACKED):  # it unpacks its weight in the kernel
            flops, nbytes = kernel.flops, float(sum(size for _, size in kernel.reads[1:]))
        else:
            by_experts = kernel.name.startswith(BY_EXPERTS)
            weight = kernel.reads[1 if by_experts else -1]
            flops, nbytes = kernel.flops, float(stored.get(weight, weight[1]))
            if not by_experts:  # keys are expanded again for all earlier tokens; an algorithm needs the new ones' rows
                flops = min(flops, 2.0 * self.batch * queries * weight[1] / _BYTES.get(dtype, 1))
        return flops / truth.flops_per_s[dtype], nbytes / bytes_per_s


@contextlib.contextmanager
def _logged(card: Card) -> Iterator[list[Kernel]]:
    card.log = log = []
    yield log
    card.log = None


def _figures(steps: Sequence[list[Kernel]], truth: Truth, needed: _Needed, queries: int) -> dict[str, Any]:
    """Return the figures of a phase from its kernels, with some queries per sequence."""
    middle = steps[len(steps) // 2]
    latency_s = timeline_s(steps, truth)
    device_s = statistics.median(sum(kernel.duration_s for kernel in step) for step in steps[2:] or steps)
    weights_s = kv_s = compute_s = dequantise_s = 0.0
    stored: dict[Region, int] = {}
    matmuls = [kernel for kernel in middle if _part(kernel) == "weights"]
    weight_bytes = sum(kernel.reads[1 if kernel.name.startswith(BY_EXPERTS) else -1][1] for kernel in matmuls)
    resident = 2 * sum(kernel.memory_bytes for kernel in matmuls) < weight_bytes
    bytes_per_s = truth.l2_bytes_per_s if resident else truth.bytes_per_s
    for kernel in middle:
        if kernel.name.startswith(_DEQUANTISING):
            dequantise_s += kernel.duration_s
            stored[kernel.writes[0]] = sum(size for _, size in kernel.reads)
        part = _part(kernel)
        if part is None:
            continue
        computing_s, moving_s = needed.ceilings_s(kernel, queries, truth, stored, bytes_per_s)
        if computing_s > moving_s:
            compute_s += computing_s
        elif part == "weights":
            weights_s += moving_s
        else:
            kv_s += moving_s
    link_s = sum(kernel.link_s for kernel in middle)
    return {
        "latency_s": latency_s, "device_s": device_s, "exposed_overhead_s": max(0.0, latency_s - device_s),
        "weights_s": weights_s, "kv_s": kv_s, "compute_s": compute_s, "dequantise_s": dequantise_s, "link_s": link_s,
        "beside_s": device_s - weights_s - kv_s - compute_s - link_s,
        "traffic_s": sum(
            kernel.duration_s
            for kernel in middle
            if not kernel.flops and not kernel.link_s and kernel.duration_s > truth.smallest_kernel_s
        ),
        "launches": sum(kernel.launched for kernel in middle),
    }  # fmt: skip


def _kept_share(config: Any) -> float:
    rank = getattr(config, "kv_lora_rank", None)
    if rank is None:
        return 1.0
    expanded = config.num_attention_heads * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim)
    return float((rank + config.qk_rope_head_dim) / expanded)


def _part(kernel: Kernel) -> str | None:
    name = kernel.name
    if name.startswith((*_ATTENTION, BATCHED)):
        return "kv"
    return "weights" if name.startswith(tuple(MATMULS)) else None


def timeline_s(steps: Sequence[list[Kernel]], truth: Truth) -> float:
    """Return the seconds of a step on a card.

    One step counts from its first launch; several give the median time between their ends. The host launches in order.
    A kernel starts after its launch and after the end of the previous kernel.
    """
    host_s = ready_s = 0.0
    ends = []
    for step in steps:
        for kernel, following in itertools.zip_longest(step, step[1:]):
            host_s += kernel.host_operators * truth.host_operator_s
            if kernel.launched:
                replays = following is not None and not following.launched
                host_s += truth.graph_launch_s if replays else truth.launch_s
            ready_s = max(host_s, ready_s) + duration_s(kernel, truth)
            if kernel.awaited:
                host_s = ready_s
        host_s += truth.event_s
        ends.append(ready_s)
    if len(ends) == 1:
        return ends[0]
    return statistics.median(after - before for before, after in itertools.pairwise(ends[1:]))


Step = Callable[[torch.Tensor], torch.Tensor]


def _stepped(model: Any, new_cache: Callable[[], Any], *, kept: bool = False) -> tuple[Step, Step]:
    """Step with a new cache for each prompt; `kept`: with one cache, which is reset."""
    state: dict[str, Any] = {}

    def stepped(ids: torch.Tensor, cache: Any) -> torch.Tensor:
        output = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        state["cache"] = output.past_key_values
        return output.logits[:, -1:].argmax(-1)

    def prefill(ids: torch.Tensor) -> torch.Tensor:
        if kept and state:
            state["cache"].reset()
            return stepped(ids, state["cache"])
        state.clear()
        return stepped(ids, new_cache())

    return prefill, lambda token: stepped(token, state["cache"])


def _static(model: Any, batch: int, slots: int, *, kept: bool = False) -> tuple[Step, Step]:
    return _stepped(model, lambda: StaticCache(config=model.config, max_cache_len=slots), kept=kept)


def _graph(model: Any, batch: int, slots: int, *, by_compiler: bool = False) -> tuple[Step, Step]:
    """Return a prefill, and a recorded step that reads and writes a token in its own memory.

    torch.compile's cudagraph trees clear cuBLAS's workspaces after a capture; `torch.cuda.graph` does not.
    """
    prefill, step = _static(model, batch, slots, kept=True)  # a graph contains the address of its cache
    token = prefill(torch.zeros(batch, 1, dtype=torch.long, device="cuda"))
    step(token)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        token.copy_(step(token))
    if by_compiler:
        torch._C._cuda_clearCublasWorkspaces()

    def decode(_: torch.Tensor) -> torch.Tensor:
        graph.replay()
        return token

    return lambda ids: token.copy_(prefill(ids)), decode


_ENGINES: dict[str, Callable[[Any, int, int], tuple[Step, Step]]] = {
    "eager": lambda model, batch, slots: _stepped(model, lambda: None),
    "static": _static,
    "graph": _graph,
    "compile": partial(_graph, by_compiler=True),  # besides two copies of a token
}


def plain_model(config: Any, dtype: torch.dtype) -> Any:
    """Return a model on the current card, as transformers makes it."""
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def pairs(found: Sequence[Phase], cells: Any) -> Iterator[tuple[Phase, Any]]:
    """Yield each phase with the profiler's row for it."""
    keys = ["engine", "phase", "batch_size", "prompt_len"]
    rows = dict(zip(cells[keys].itertuples(index=False, name=None), cells.to_dict("records"), strict=True))
    for phase in found:
        yield phase, rows[tuple(getattr(phase, key) for key in keys)]
