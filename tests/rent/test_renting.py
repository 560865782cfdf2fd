"""`rent`: what fits and what it costs by hand, ranges equal to those of `forecast --on`, limits, and the comparison."""

import json
from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import pytest

from profiler.data.datasheets import gpu_called
from profiler.data.prices import prices
from profiler.errors import RequestError
from profiler.forecast.command import ForecastRequest, forecast_on
from profiler.rent import RentOptions, rent, rent_sentences
from profiler.rent.command import Meets, Offer, RentDocument, Span

MODEL = "mistral-7b-v0.1"


def offer_of(gpu: str, model: str = MODEL, **options: Any) -> Offer:
    [offer] = rent(RentOptions(model, price=f"{gpu}=3.6", **options)).gpus
    return offer


def ends(span: Span | None) -> tuple[float, ...]:
    assert span is not None
    return astuple(span)


def test_what_fits_is_arithmetic() -> None:
    """Mistral-7B has 14.48 GB of weights in 16 bits and 131,072 bytes of cache per token.

    A prompt of 512 also has four hidden states and three outputs of the MLP; 2.5 more are free, but not in one piece.
    Gemma-2-9B's checkpoint is in float32. In 16 bits its 9.242 B weights (arXiv:2408.00118) are 18.5 GB, for an L4. Its
    cache has 42 layers of 8 heads of 256, K and V, 640 tokens, 2 bytes: 220 MB.
    """
    offer = offer_of("A100 80GB SXM")
    room = 0.98 * (gpu_called("A100 80GB SXM").usable_bytes - 0.45e9) - 14.48e9
    workspace = 512 * (4 * 4096 + 5.5 * 14336) * 2
    assert offer.batch == pytest.approx(room / (640 * 131_072 + workspace), abs=1)
    assert offer.why == "weights 14.5 GB, KV cache 83.9 MB per sequence"
    assert offer_of("L4", "gemma-2-9b").why == "weights 18.5 GB, KV cache 220 MB per sequence"


def test_weights_that_are_published_packed_are_called_so() -> None:
    """gpt-oss-20b has 4.25 bits per weight of its experts: 13.8 GB, not the 41.8 GB of 20.9 B weights in 16 bits."""
    answer = rent(RentOptions("gpt-oss-20b", price="A10G=1"))
    assert answer.gpus[0].why.startswith("weights 13.8 GB")
    assert answer.precision == "mxfp4"
    assert "mixtures of experts" in answer.notes[0]
    assert not any("the ranges have no figure of it" in note for note in answer.notes), "SGLang's of gpt-oss are"
    of_eager = rent(RentOptions("gpt-oss-20b", price="H100 SXM=1", engine="eager")).notes
    assert any("the ranges have no figure of it" in note for note in of_eager)


@pytest.mark.parametrize(
    ("model", "gpu", "options"),
    [
        (MODEL, "H100 SXM", {"engine": "compiled"}),
        (MODEL, "T4", {"engine": "eager", "quant": "nf4", "prompt": 1024, "new": 32}),
        pytest.param("deepseek-v2-lite", "A100 80GB SXM", {"engine": "eager"}, marks=pytest.mark.slow),
        pytest.param("llama-3.1-8b", "L4", {"quant": "fp8"}, marks=pytest.mark.slow),
    ],
)
def test_ranges_are_those_of_forecast(model: str, gpu: str, options: dict[str, Any]) -> None:
    """The first token is that of the batch's prefill, and a token that of its decode step, at the batch of the row."""
    requested = RentOptions(model, price=f"{gpu}=3.6", **options)
    [offer] = rent(requested).gpus
    assert offer.batch > 1
    how = {name: getattr(requested, name) for name in ("engine", "quant")}
    wanted = ForecastRequest(str(requested.prompt), str(offer.batch), new_tokens=requested.new, **how)
    prefill, decode = forecast_on(model, gpu, wanted).cells
    assert ends(offer.ttft_s) == (prefill.low_s, prefill.latency_s, prefill.high_s)
    assert ends(offer.tpot_s) == (decode.low_s, decode.latency_s, decode.high_s)


def test_a_million_tokens_cost_the_hours_that_they_take() -> None:
    """At 3.60 USD/h a second costs a thousandth: 1000 tokens/s are 1 USD per million.

    128 new tokens of each sequence take the prefill, which gives the first, and 127 decode steps.
    """
    for engine in ("compiled", "eager"):
        offer = offer_of("L40S", engine=engine)
        low, typical, high = ends(offer.tokens_per_s)
        assert ends(offer.usd_per_million_tokens) == pytest.approx((1e3 / high, 1e3 / typical, 1e3 / low))
        seconds = [ttft + 127 * tpot for ttft, tpot in zip(ends(offer.ttft_s), ends(offer.tpot_s), strict=True)]
        assert [high, typical, low] == pytest.approx([offer.batch * 128 / each for each in seconds])


@pytest.mark.parametrize("limits", [{"max_ttft_ms": 500}, {"max_tpot_ms": 30}, {"max_ttft_ms": 900, "max_tpot_ms": 30}])
def test_the_batch_is_the_largest_within_the_limits(limits: dict[str, float]) -> None:
    """Its slow end is within them, and that of one sequence more is not."""
    offer = offer_of("L40S", **limits)
    assert offer.meets == "yes"
    for batch, is_within in ((offer.batch, True), (offer.batch + 1, False)):
        cells = forecast_on(MODEL, "L40S", ForecastRequest("512", str(batch), new_tokens=128, engine="compiled")).cells
        high = {cell.phase: 1e3 * cell.high_s for cell in cells}
        within = high["prefill"] <= limits.get("max_ttft_ms", 9e9) and high["decode"] <= limits.get("max_tpot_ms", 9e9)
        assert within == is_within


def test_limits_that_no_gpu_meets_still_have_rows(roofscope: Callable[..., Any]) -> None:
    """A step of Mistral-7B streams 14.2 GB: at 3.35 TB/s 4.2 ms on an H100, at 300 GB/s 47 ms on an L4.

    Published engines take up to a third more than at their typical share of the bandwidth, so that 50 ms may be missed.
    """
    assert offer_of("H100 SXM", max_tpot_ms=4.2).meets == "no"
    assert offer_of("L4", max_tpot_ms=50).meets == "cannot tell"
    out = roofscope("rent", MODEL, "--max-tpot-ms", "4.2", "--price", "H100 SXM=3,T4=1", "--plain").out
    assert "No GPU is within the limits over its whole range" in " ".join(out.split())
    rows = [line.split()[:-1] for line in out.splitlines() if "! 1" in line]
    assert {row[0] for row in rows} == {"H100", "T4"}


def test_a_gpu_without_room_or_kernels_says_why(roofscope: Callable[..., Any]) -> None:
    """Llama-3.1-70B has 141 GB in 16 bits. A P100's compute capability is 6.0, and vLLM needs 7.0."""
    answer = rent(RentOptions("llama-3.1-70b", price="H100 SXM=2,H200 SXM=3"))
    assert [(offer.gpu, offer.fits) for offer in answer.gpus] == [("H200 SXM", True), ("H100 SXM", False)]
    assert answer.gpus[1].why == "needs 142 GB, has 82.8 GB free"
    assert any("No figure of a model of its size is published" in note for note in answer.notes)
    out = " ".join(roofscope("rent", MODEL, "--price", "P100 PCIe 16GB=1,L4=1", "--plain").out.split())
    assert "No row, needs compute capability 7.0 for compiled engines, and has 6.0: P100 PCIe 16GB." in out
    with pytest.raises(RequestError, match="fits no GPU that has a price: T4 needs 142 GB"):
        rent(RentOptions("llama-3.1-70b", price="T4=1"))


def test_every_gpu_with_a_price_has_a_row(roofscope: Callable[..., Any]) -> None:
    document = json.loads(roofscope("rent", MODEL, "--format", "json").out)
    assert {row["gpu"] for row in document["gpus"]} == {price.gpu for price in prices()}
    assert all(row["provider"] and row["price_source"] for row in document["gpus"])
    fitting = [row for row in document["gpus"] if row["fits"]]
    costs = [row["usd_per_million_tokens"]["typical"] for row in fitting]
    assert costs == sorted(costs)
    assert document["engine"] == "compiled"
    assert (document["prompt_len"], document["new_tokens"], document["max_tpot_s"]) == (512, 128, None)
    screen = roofscope("rent", MODEL, "--plain", "--full").out
    assert "undated" in screen
    assert "github:" in screen, "the whole source of each price"


def made(gpu: str, low: float, high: float, meets: Meets = "yes") -> Offer:
    """An offer with a range of cost."""
    one = Span(1.0, 1.0, 1.0)
    cost = Span(low, (low + high) / 2, high)
    return Offer(gpu, "yours", 1.0, fits=True, why="", meets=meets, batch=1, ttft_s=one, tpot_s=one, tokens_per_s=one,
                 usd_per_million_tokens=cost)  # fmt: skip


def comparison(*offers: Offer) -> str:
    return rent_sentences(RentDocument(MODEL, "16 bits", "compiled", 512, 128, 0.5, None, offers, ()))[1]


def test_no_gpu_is_the_cheapest_inside_another_range() -> None:
    apart, inside = made("T4", 1.3, 2.0), made("L4", 1.2, 2.0)
    assert comparison(made("A10G", 1.0, 1.25), apart).startswith("Cheapest: A10G at 1.00 USD/h (yours), 1.0 to 1.2 USD")
    found = comparison(made("A10G", 1.0, 1.25), inside, apart)
    assert found.startswith("No GPU is the cheapest")
    assert found.endswith("overlaps those of L4.")
    unsure = comparison(made("A10G", 1.0, 1.25), made("T4", 0.1, 0.2, "cannot tell"), made("L4", 0.1, 0.2, "no"))
    assert unsure.startswith("Cheapest: A10G")
    assert unsure.endswith("T4 may cost less, but may miss the limits.")
    assert comparison(made("L4", 1.2, 2.0)).startswith("The only GPU within the limits: L4"), "no comparison"
    assert comparison(made("T4", 0.1, 0.2, "cannot tell")).endswith("even with one sequence; T4 may be.")
