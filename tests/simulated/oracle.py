"""The truth: plain calls of transformers run each cell on a separate card, and the card's log gives its figures.

The profiler only loads quantised models here. None of its measuring, counting or judging is used.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from . import attention
from .card import Card, Kernel, Region, duration_s
from .pricing import BATCHED, BY_EXPERTS, MATMULS, PACKED, aten, matmul_dtype
from .truth import Truth
from .world import World

_LOOKING = tuple(str(func) for func in (aten.abs.default, aten.ge.Scalar, aten.any.default))
"""Kernels that look for columns with outliers, before LLM.int8() writes its inputs in 8 bits."""
_CONVERTING = ("dequantize", "int8_vectorwise_quant", "int8_mm_dequant")
_DEQUANTISING = (*(f"bitsandbytes.{name}" for name in _CONVERTING), *_LOOKING)
"""Kernels that write a dense copy of a packed weight, or LLM.int8()'s inputs in 8 bits and its matmuls in 16."""
_ATTENTION = tuple(attention.NAMES.values())
_BYTES = {"float32": 4, "tfloat32": 4, "float16": 2, "bfloat16": 2}
_FASTER = 1.25
_ALIKE = 1.25
_LOST = 0.5
_IDLE = 0.5
TOLERANCE = 0.05
"""Share of a step by which a profiler's terms may differ from the truth."""


@dataclass(frozen=True)
class Phase:
    """The truth of one step of one cell."""

    engine: str
    phase: str
    batch_size: int
    prompt_len: int
    latency_s: float
    regime: str
    """The resource that limits the step most; `slow-kernels` if kernels lose half of it, and half of that can be saved.

    The host sets the pace only while the card idles for it. If the card idles for less than half of the step, no faster
    host doubles the speed, and the step is `mixed`.
    """
    border: set[str]
    """The regimes of all steps whose terms are within `TOLERANCE` of this one's: terms do not tell them apart.

    Bytes that the algorithm does not need are moved, and its kernels lose their time: either name is right.
    """
    awaits: bool
    """Whether the host waits for the card between the matmuls of the step, which no capture of its kernels allows."""
    device_s: float
    """Time of the kernels."""
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
    """Time of kernels that write dense copies of packed weights."""
    beside_s: float
    """The other kernel time: losses, and work that the algorithm does not need."""
    link_s: float
    peak_bytes: int

    @property
    def hides_small_kernels(self) -> bool:
        """Whether the loss of small kernels is known only together with the unexplained rest: a trace is not simulated,
        and neither compiled code nor a decode step that waits can be captured kernel by kernel."""
        return self.phase == "decode" and (self.engine == "compile" or self.awaits)

    @property
    def regimes(self) -> set[str]:
        """The right labels; `inconclusive` is right if what is hidden takes half of the step."""
        hidden = self.hides_small_kernels and self.beside_s > (_LOST - TOLERANCE) * self.latency_s
        return self.border | ({"inconclusive"} if hidden else set())


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
    requested = _Requested(
        config.num_attention_heads // getattr(config, "num_key_value_heads", config.num_attention_heads),
        matmul_dtype(torch.empty(0, dtype=model.dtype)),
        _kept_share(config),
        batch,
    )
    of = partial(Phase, engine, batch_size=batch, prompt_len=prompt, peak_bytes=peak)
    return [
        of(phase=phase, **_figures(logs, card.truth, requested, queries))
        for phase, logs, queries in (("prefill", [log], prompt), ("decode", steps, 1))
    ]


@dataclass(frozen=True)
class _Requested:
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

    def needed_s(self, kernel: Kernel, queries: int, truth: Truth) -> float:
        """Return the seconds of a kernel that the algorithm needs: at most its time."""
        if _part(kernel) is None:
            return kernel.link_s
        return min(kernel.duration_s, max(self.ceilings_s(kernel, queries, truth, {}, truth.bytes_per_s)))


@contextlib.contextmanager
def _logged(card: Card) -> Iterator[list[Kernel]]:
    """Collect the card's kernels within the block."""
    card.log = log = []
    yield log
    card.log = None


def _figures(steps: Sequence[list[Kernel]], truth: Truth, requested: _Requested, queries: int) -> dict[str, Any]:
    """Return the figures of a phase from its kernels, with some queries per sequence."""
    middle = steps[len(steps) // 2]
    latency_s = timeline_s(steps, truth)
    device_s = _device_s(steps)
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
        computing_s, moving_s = requested.ceilings_s(kernel, queries, truth, stored, bytes_per_s)
        if computing_s > moving_s:
            compute_s += computing_s
        elif part == "weights":
            weights_s += moving_s
        else:
            kv_s += moving_s
    link_s = sum(kernel.link_s for kernel in middle)
    lost_s = [_lost_s(kernel, truth) for step in steps for kernel in step]
    needless_s = [kernel.duration_s - requested.needed_s(kernel, queries, truth) for step in steps for kernel in step]
    gains_s = _gains_s(steps, truth, lost_s)
    # With the needless bytes as a loss of kernels, only the others are memory's.
    otherwise_s = _gains_s(steps, truth, needless_s)
    otherwise_s["memory-bound"] = min(gains_s["memory-bound"], (1 - 1 / _FASTER) * (weights_s + kv_s))
    return {
        "latency_s": latency_s, "device_s": device_s, "exposed_overhead_s": gains_s["idle"], "weights_s": weights_s,
        "kv_s": kv_s, "compute_s": compute_s, "dequantise_s": dequantise_s, "link_s": link_s,
        "beside_s": device_s - weights_s - kv_s - compute_s - link_s,
        "regime": _label(gains_s, latency_s), "border": _border(gains_s, latency_s) | _border(otherwise_s, latency_s),
        "awaits": any(kernel.awaited and not kernel.name.startswith(_DEQUANTISING) for kernel in middle),
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


def timeline_s(steps: Sequence[list[Kernel]], truth: Truth, saved_s: Iterable[float] = ()) -> float:
    """Return the seconds of a step on a card; `saved_s` are seconds that each kernel takes less.

    One step counts from its first launch; several give the median time between their ends. The host launches in order.
    A kernel starts after its launch and after the end of the previous kernel.
    """
    host_s = ready_s = 0.0
    ends, saved = [], itertools.chain(saved_s, itertools.repeat(0.0))
    for step in steps:
        for kernel, following in itertools.zip_longest(step, step[1:]):
            host_s += kernel.host_operators * truth.host_operator_s
            if kernel.launched:
                replays = following is not None and not following.launched
                host_s += truth.graph_launch_s if replays else truth.launch_s
            ready_s = max(host_s, ready_s) + duration_s(kernel, truth) - next(saved)
            if kernel.awaited:
                host_s = ready_s
        host_s += truth.event_s
        ends.append(ready_s)
    if len(ends) == 1:
        return ends[0]
    return statistics.median(after - before for before, after in itertools.pairwise(ends[1:]))


def _device_s(steps: Sequence[list[Kernel]]) -> float:
    """Return the time of the kernels in the median step, of those whose ends `timeline_s` compares."""
    return statistics.median(sum(kernel.duration_s for kernel in step) for step in steps[2:] or steps)


def _gains_s(steps: Sequence[list[Kernel]], truth: Truth, lost_s: Sequence[float]) -> dict[str, float]:
    """Return the seconds that a step saves if a resource is a quarter faster, by regime.

    `slow-kernels` has what kernels lose, as far as the step saves half of it or more; `idle` all time in which the card
    idles.
    """
    latency_s = timeline_s(steps, truth)
    gains_s = {name: latency_s - timeline_s(steps, faster) for name, faster in _faster(truth).items()}
    linked = [[replace(kernel, link_s=kernel.link_s / _FASTER) for kernel in step] for step in steps]
    gains_s["link-bound"] = latency_s - timeline_s(linked, truth)
    device_s = _device_s(steps)
    lost_a_step_s, saved_s = sum(lost_s) / len(steps), latency_s - timeline_s(steps, truth, lost_s)
    whole = {"slow-kernels": min(lost_a_step_s, saved_s / _LOST), "idle": max(0.0, latency_s - device_s)}
    return gains_s | whole


def _label(gains_s: Mapping[str, float], latency_s: float) -> str:
    if gains_s["slow-kernels"] > _LOST * latency_s:
        return "slow-kernels"
    parts = {**gains_s, "slow-kernels": (1 - 1 / _FASTER) * gains_s["slow-kernels"]}
    del parts["idle"]
    (first, most), (_, second), *_ = sorted(parts.items(), key=lambda item: -item[1])
    if first == "slow-kernels" or (first == "overhead-bound" and gains_s["idle"] < _IDLE * latency_s):
        return "mixed"
    return first if most > _ALIKE * second else "mixed"


def _border(gains_s: Mapping[str, float], latency_s: float) -> set[str]:
    """Return the labels if each term is longer or shorter by `TOLERANCE` of the step.

    A term that is longer by that gains a fifth of it if its resource is a quarter faster. If no gain is as long as the
    tolerance of the step's own time, no resource can be seen to limit it.
    """
    off_s, found = TOLERANCE * latency_s, set()
    resources = [name for name in gains_s if name not in ("slow-kernels", "idle")]
    for signs in itertools.product((-1, 0, 1), repeat=len(resources) + 1):
        sign = dict(zip([*resources, "slow-kernels"], signs, strict=True))
        moved = {name: gains_s[name] + sign[name] * off_s * (1 - 1 / _FASTER) for name in resources}
        moved["slow-kernels"] = gains_s["slow-kernels"] + sign["slow-kernels"] * off_s
        moved["idle"] = gains_s["idle"] + sign["overhead-bound"] * off_s
        found.add(_label(moved, latency_s))
    if max(gains_s[name] for name in (*resources, "slow-kernels")) < off_s:
        found.add("mixed")
    return found


def _lost_s(kernel: Kernel, truth: Truth) -> float:
    """Return a kernel's time above its own bytes and FLOPs, or all time of a kernel that converts a weight."""
    if kernel.name.startswith(_DEQUANTISING):
        return kernel.duration_s
    return kernel.duration_s - duration_s(kernel, truth.but(kernel_share={}, smallest_kernel_s=0.0))


def _faster(truth: Truth) -> dict[str, Truth]:
    return {
        "memory-bound": truth.but(
            bytes_per_s=truth.bytes_per_s * _FASTER, l2_bytes_per_s=truth.l2_bytes_per_s * _FASTER
        ),
        "compute-bound": truth.but(flops_per_s={name: speed * _FASTER for name, speed in truth.flops_per_s.items()}),
        "overhead-bound": truth.but(
            **{name: getattr(truth, name) / _FASTER for name in ("launch_s", "graph_launch_s", "host_operator_s")}
        ),
    }


Step = Callable[[torch.Tensor], torch.Tensor]


def _stepped(model: Any, new_cache: Callable[[], Any], *, kept: bool = False) -> tuple[Step, Step]:
    """Step with a new cache for each prompt; `kept`: with one cache, which is reset."""
    held: dict[str, Any] = {}

    def stepped(ids: torch.Tensor, cache: Any) -> torch.Tensor:
        output = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        held["cache"] = output.past_key_values
        return output.logits[:, -1:].argmax(-1)

    def prefill(ids: torch.Tensor) -> torch.Tensor:
        if kept and held:
            held["cache"].reset()
            return stepped(ids, held["cache"])
        held.clear()
        return stepped(ids, new_cache())

    return prefill, lambda token: stepped(token, held["cache"])


def _static(model: Any, batch: int, slots: int, *, kept: bool = False) -> tuple[Step, Step]:
    from transformers import StaticCache

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
    from transformers import AutoModelForCausalLM

    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def pairs(found: Sequence[Phase], cells: Any) -> Iterator[tuple[Phase, Any]]:
    """Yield each phase with the profiler's row for it."""
    keys = ["engine", "phase", "batch_size", "prompt_len"]
    rows = dict(zip(cells[keys].itertuples(index=False, name=None), cells.to_dict("records"), strict=True))
    for phase in found:
        yield phase, rows[tuple(getattr(phase, key) for key in keys)]
