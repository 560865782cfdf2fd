"""What is asked of `rent`: the load to serve, precisions, engines, GPUs and prices."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar, get_args

from profiler.errors import RequestError
from profiler.grid.ranges import MOST, check_prefix
from profiler.options import argument, listed, option
from profiler.quant.registry import quant_help

if TYPE_CHECKING:
    from profiler.data.prices import Price
    from profiler.data.published_results import EngineKind

MOST_BATCH = 4096


@dataclass(frozen=True)
class Limits:
    """The user's limits of mean latencies; None: no limit."""

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
    prefix: int = 0
    """The first tokens of every prompt, which are the same and cached."""


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
class RentOptions:
    """The options of `roofscope rent`, and of `profiler.rent.rent`. Raises RequestError for an impossible value."""

    model: str = argument("Hub id, folder, .gguf file, or a preset's name.")
    use: str = option("chat", "chat, batch or agents: lengths, rate and limits.", flag="for")
    rate: str = option("", "Requests per second, such as 0.5/s, 30/min or 2000/h.")
    prompt: int | None = option(None, "Tokens per prompt.")
    prefix: int = option(0, "The first of them, which are the same in every prompt, and cached.")
    new: int | None = option(None, "New tokens per answer.")
    batch: int | None = option(None, "Sequences always in flight, in place of a rate.")
    max_ttft_ms: float | None = option(None, "Most milliseconds to the first token: the mean of all requests, not p95.")
    max_tpot_ms: float | None = option(None, "Most milliseconds per further token: the mean of all requests, not p95.")
    quant: str = option("none", f"{quant_help()}; or several: none,nf4.")
    engine: str = option("compiled", "compiled (vLLM, TensorRT-LLM), eager (plain transformers), or both.")
    price_class: str = option("", "Only prices of: hyperscaler, 'GPU cloud', marketplace or community.", flag="class")
    provider: str = option("", "Only this provider's prices, such as AWS.")
    spot: bool = option(False, "Spot prices in place of prices on demand.")
    price: str = option("", "Your own prices in USD per hour: 'T4=0.35,H100 SXM=2.99'.")
    cards: str = option("", "Only these GPUs, such as 'T4,L4,H100 SXM'.")
    host_index: float | None = option(None, "Your host's dispatch time over the reference, from `roofscope ceilings`.")

    def __post_init__(self) -> None:
        from profiler.data.prices import PriceClass, prices  # imported late: `--help` needs no tables

        if self.batch is not None and self.rate:
            raise RequestError("--batch and --rate exclude each other: a rate gives the number of sequences in flight.")
        for value, flag, least, most in (
            (self.prompt, "--prompt", 1, MOST),
            (self.new, "--new", 2, MOST),
            (self.batch, "--batch", 1, MOST_BATCH),
        ):
            if value is not None and not least <= value <= most:
                raise RequestError(f"{flag}: {value} is not possible; give {least} to {most}.")
        for limit, flag in ((self.max_ttft_ms, "--max-ttft-ms"), (self.max_tpot_ms, "--max-tpot-ms")):
            if limit is not None and not 0 < limit < math.inf:
                raise RequestError(f"{flag}: {limit:g} is not possible; give milliseconds above 0.")
        if self.host_index is not None and not 0 < self.host_index < math.inf:
            raise RequestError("--host-index: give a number above 0, as `roofscope ceilings` prints it.")
        providers = sorted({price.provider for price in prices()}, key=str.lower)
        classes = [kind for kind in get_args(PriceClass) if kind != "own"]
        known = {"use": list(WORKLOADS), "price_class": classes, "provider": providers}
        for name, flag in (("use", "--for"), ("price_class", "--class"), ("provider", "--provider")):
            if value := getattr(self, name):
                object.__setattr__(self, name, _one_of(flag, value, known[name]))

    @cached_property
    def load(self) -> Workload:
        """The workload of the use, with the values that are given in place of its own."""
        usual = WORKLOADS[self.use]
        check_prefix(self.prefix, self.prompt or usual.prompt_len)
        rate_per_s = parse_rate(self.rate) if self.rate else usual.rate_per_s
        return Workload(
            self.use,
            self.prompt or usual.prompt_len,
            self.new or usual.new_tokens,
            None if self.batch else rate_per_s,
            Limits(
                usual.limits.ttft_s if self.max_ttft_ms is None else self.max_ttft_ms / 1e3,
                usual.limits.tpot_s if self.max_tpot_ms is None else self.max_tpot_ms / 1e3,
            ),
            self.prefix,
        )

    @cached_property
    def quants(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(listed(self.quant))) or ("none",)

    @cached_property
    def engines(self) -> tuple[EngineKind, ...]:
        known: tuple[EngineKind, ...] = ("compiled", "eager")
        return tuple(_one_of("--engine", name, known) for name in dict.fromkeys(listed(self.engine))) or ("compiled",)

    @cached_property
    def gpu_names(self) -> tuple[str, ...]:
        """The rows of gpus.csv that `cards` names; empty for all."""
        from profiler.data.datasheets import gpu_called

        return tuple(gpu_called(name).gpu for name in listed(self.cards))

    @cached_property
    def own_prices(self) -> dict[str, Price]:
        return parse_prices(self.price)

    @property
    def of_whom(self) -> str:
        """Whose prices are requested, such as ` of AWS`."""
        kind = f"{self.price_class}s".replace("communitys", "community hosts") if self.price_class else ""
        return f" of {self.provider or kind or 'any provider'}"


Name = TypeVar("Name", bound=str)


def _one_of(flag: str, name: str, known: Sequence[Name]) -> Name:
    """The known name that equals `name` in any case. Raises RequestError if there is none."""
    for each in known:
        if each.lower() == name.lower():
            return each
    raise RequestError(f"{flag} {name!r} is unknown; use {', '.join(known)}.")


def parse_prices(text: str) -> dict[str, Price]:
    """Parse `T4=0.35,H100 SXM=2.99` to prices by GPU. Raises RequestError for an unknown GPU or an invalid price."""
    from profiler.data.datasheets import gpu_called
    from profiler.data.prices import OWN, Price

    own: dict[str, Price] = {}
    for part in listed(text):
        name, equals, value = part.rpartition("=")
        if not equals:
            raise RequestError(f"--price {part!r} has no price; give GPU=USD_PER_HOUR, such as 'T4=0.35'.")
        card = gpu_called(name.strip()).gpu
        try:
            usd = float(value.strip().removeprefix("$").removesuffix("USD").strip())
        except ValueError:
            raise RequestError(
                f"--price {part!r}: {value.strip()!r} is not a number of USD per hour; convert it."
            ) from None
        if not 0 < usd < math.inf:
            raise RequestError(f"--price {part!r}: a price must be above 0; leave the GPU out to use the table.")
        own[card] = Price(card, OWN, "own", usd, price_source="--price")
    return own


_RATE = re.compile(r"^\s*([0-9.eE+-]+)\s*(?:/\s*(s|min|h))?\s*$")
_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}


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
