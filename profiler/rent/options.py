"""The options of `rent`: lengths, limits, the engine, the format of the weights, and own prices."""

import math
from dataclasses import dataclass

from profiler.data.datasheets import gpu_called
from profiler.data.prices import OWN, Price
from profiler.data.published_results import EngineKind
from profiler.errors import RequestError
from profiler.grid.ranges import MOST
from profiler.options import listed, model_argument, one_of, option
from profiler.quant.registry import known_quant, quant_help

MOST_BATCH = 1024


@dataclass(frozen=True)
class RentOptions:
    """The options of `roofscope rent`, and of `profiler.rent.rent`. Raises RequestError for an impossible value."""

    model: str = model_argument()
    prompt: int = option(512, "Tokens per prompt.")
    new: int = option(128, "New tokens after each prompt.")
    max_ttft_ms: float | None = option(None, "Most milliseconds to the first token, which the whole batch waits for.")
    max_tpot_ms: float | None = option(None, "Most milliseconds per further token.")
    price: str = option("", "Only these GPUs, at your prices in USD per hour: 'T4=0.35,H100 SXM=2.99'.")
    quant: str = option("none", f"{quant_help()}.")
    engine: str = option("compiled", "compiled (vLLM, TensorRT-LLM) or eager (plain transformers).")

    def __post_init__(self) -> None:
        for value, flag, least in ((self.prompt, "--prompt", 1), (self.new, "--new", 2)):
            if not least <= value <= MOST:
                raise RequestError(f"{flag}: {value} is not possible; give {least} to {MOST}.")
        for limit, flag in ((self.max_ttft_ms, "--max-ttft-ms"), (self.max_tpot_ms, "--max-tpot-ms")):
            if limit is not None and not 0 < limit < math.inf:
                raise RequestError(f"{flag}: {limit:g} is not possible; give milliseconds above 0.")
        known_quant(self.quant)
        one_of(self.engine, "--engine", ("compiled", "eager"))

    @property
    def limits_s(self) -> tuple[float | None, float | None]:
        """Most seconds to the first token, and per further one; None without a limit."""
        return self.max_ttft_ms and self.max_ttft_ms / 1e3, self.max_tpot_ms and self.max_tpot_ms / 1e3

    @property
    def kind(self) -> EngineKind:
        """The kind of engine whose published results the ranges use."""
        return "eager" if self.engine == "eager" else "compiled"

    @property
    def own_prices(self) -> list[Price]:
        """The prices of `price`, the last of each GPU. Raises RequestError for an unknown GPU or an invalid price."""
        return list({price.gpu: price for price in map(_own_price, listed(self.price))}.values())


def _own_price(part: str) -> Price:
    name, equals, value = part.rpartition("=")
    if not equals:
        raise RequestError(f"--price {part!r} has no price; give GPU=USD_PER_HOUR, such as 'T4=0.35'.")
    gpu = gpu_called(name.strip()).gpu
    try:
        usd = float(value.strip().removeprefix("$").removesuffix("USD").strip())
    except ValueError:
        raise RequestError(f"--price {part!r}: {value.strip()!r} is not USD per hour; convert it.") from None
    if not 0 < usd < math.inf:
        raise RequestError(f"--price {part!r}: a price must be above 0; leave the GPU out to use the table.")
    return Price(gpu, OWN, usd, price_source="--price")
