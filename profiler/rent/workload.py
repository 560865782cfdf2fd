"""What is asked of `rent`: the load to serve, precisions, engines, GPUs and prices."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from profiler.data.published_results import EngineKind
from profiler.errors import RequestError
from profiler.grid.ranges import MOST


@dataclass(frozen=True)
class Limits:
    """The user's latency limits; None: no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None


@dataclass(frozen=True)
class Workload:
    """Requests of one kind."""

    use: str
    """`chat`, `batch` or `agents`, from which the values come that the user did not give."""
    prompt_len: int
    new_tokens: int
    rate_per_s: float | None
    """Requests per second; None: a queue that is never empty."""
    limits: Limits


WORKLOADS = {
    "chat": Workload("chat", 1024, 128, 1.0, Limits(ttft_s=0.5, tpot_s=0.05)),
    "batch": Workload("batch", 2048, 128, None, Limits()),
    "agents": Workload("agents", 8192, 192, 0.2, Limits(ttft_s=2.0, tpot_s=0.05)),
}
"""Lengths of chat: about the medians of Azure's conversation trace of November 2023, 1020 tokens in and 129 out over
19,366 requests (github:Azure/AzurePublicDataset@b469a11 data/AzureLLMInferenceTrace_conv.csv; P. Patel et al.,
"Splitwise", arXiv:2311.18677). Lengths of agents: about the means of Kimi's tool and agent trace, 8596 in and 182 out
over 23,608 requests (github:kvcache-ai/Mooncake@3b5a594 FAST25-release/README.md; R. Qin et al., "Mooncake", FAST
2025). Batch: documents of a few pages, each summarised."""


@dataclass(frozen=True)
class RentRequest:
    """The load to serve, the precisions and engines, and the GPUs with their prices."""

    load: Workload = WORKLOADS["chat"]
    batch: int | None = None
    """Sequences always in flight, in place of a rate."""
    quants: tuple[str, ...] = ("none",)
    engines: tuple[EngineKind, ...] = ("compiled",)
    price_class: str = ""
    """Only prices of this kind of provider; empty: of all."""
    provider: str = ""
    """Only this provider's prices; empty: of all."""
    spot: bool = False
    prices: str = ""
    """The user's own prices, such as `T4=0.35,H100 SXM=2.99`."""
    cards: str = ""
    host_index: float | None = None


_RATE = re.compile(r"^\s*([0-9.eE+-]+)\s*(?:/\s*(s|min|h))?\s*$")
_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}


def workload_of(
    use: str,
    prompt_len: int | None = None,
    new_tokens: int | None = None,
    rate: str = "",
    ttft_ms: float | None = None,
    tpot_ms: float | None = None,
) -> Workload:
    """The workload of a use, with the values that are given in place of its own.

    Raises RequestError for an unknown use or an impossible value.
    """
    if use not in WORKLOADS:
        raise RequestError(f"--for {use!r} is unknown; use {', '.join(WORKLOADS)}.")
    load = WORKLOADS[use]
    for value, option, least in ((prompt_len, "--prompt", 1), (new_tokens, "--new", 2)):
        if value is not None and not least <= value <= MOST:
            raise RequestError(f"{option}: {value} is not possible; give {least} to {MOST}.")
    for limit, option in ((ttft_ms, "--max-ttft-ms"), (tpot_ms, "--max-tpot-ms")):
        if limit is not None and not 0 < limit < math.inf:
            raise RequestError(f"{option}: {limit:g} is not possible; give milliseconds above 0.")
    return replace(
        load,
        prompt_len=prompt_len or load.prompt_len,
        new_tokens=new_tokens or load.new_tokens,
        rate_per_s=parse_rate(rate) if rate else load.rate_per_s,
        limits=Limits(
            load.limits.ttft_s if ttft_ms is None else ttft_ms / 1e3,
            load.limits.tpot_s if tpot_ms is None else tpot_ms / 1e3,
        ),
    )


def parse_rate(text: str) -> float:
    """Parse `0.5/s`, `30/min` or `2` to requests per second. Raises RequestError for anything else."""
    match = _RATE.match(text)
    try:
        rate = float(match[1]) / _SECONDS[match[2] or "s"] if match else math.nan
    except ValueError:
        rate = math.nan
    if not 0 < rate < math.inf:
        raise RequestError(f"--rate {text!r} is not possible; give requests above 0, such as 0.5/s, 30/min or 2000/h.")
    return rate
