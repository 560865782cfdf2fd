"""Words for what `rent` assumes, as they stand on screens, in pictures and in notes."""

from __future__ import annotations

from profiler.data.prices import OWN, PriceClass
from profiler.data.published_results import EngineKind
from profiler.rent.command import RankedOffers, RentRequest
from profiler.units import duration, significant

_ENGINES: dict[EngineKind, str] = {
    "compiled": "compiled engines (vLLM, TensorRT-LLM)",
    "eager": "plain transformers (eager)",
}
CLASSES: dict[PriceClass, str] = {
    "hyperscaler": "hyperscalers",
    "GPU cloud": "GPU clouds",
    "marketplace": "marketplaces",
    "community": "community hosts",
}


def precision_words(precision: str) -> str:
    """Such as `16 bits` or `nf4`."""
    return "16 bits" if precision == "none" else precision


def assumptions(rented: RankedOffers) -> str:
    """Model, engine, precision, lengths, load, limits and class of prices, as one sentence."""
    request, load = rented.request, rented.request.load
    engines = " and ".join(_ENGINES[engine] for engine in request.engines)
    precisions = " and ".join(dict.fromkeys(precision_words(offer.precision) for offer in rented.offers))
    if request.batch is not None:
        rate = f"always {request.batch} in flight"
    elif load.rate_per_s is None:
        rate = "a queue that is never empty"
    else:
        rate = rate_words(load.rate_per_s)
    limits = [
        f"{name} at most {duration(limit)}"
        for name, limit in (("TTFT", load.limits.ttft_s), ("TPOT", load.limits.tpot_s))
        if limit is not None
    ]
    are_own = {offer.provider == OWN for offer in rented.offers}
    whose = price_words(request)
    prices = "your prices" if are_own == {True} else f"prices of {whose}{', and your own' if True in are_own else ''}"
    return (
        f"{rented.model} with {engines} in {precisions}; {load.use}: {load.prompt_len} tokens in,"
        f" {load.new_tokens} out, {rate}, {', '.join(limits) or 'no latency limit'}; {prices}."
    )


def price_words(request: RentRequest) -> str:
    """Whose prices are compared, and of which kind, such as `hyperscalers, on demand`."""
    return f"{request.provider or CLASSES[request.price_class]}, {'spot' if request.spot else 'on demand'}"


def rate_words(rate_per_s: float) -> str:
    """Such as `0.5 requests/s`, or `36 requests/h` for a small rate."""
    rate, unit = (rate_per_s, "s") if rate_per_s >= 0.1 else (3600 * rate_per_s, "h")
    number = f"{float(significant(rate, 2)):g}"
    return f"{number} {'request' if number == '1' else 'requests'}/{unit}"
