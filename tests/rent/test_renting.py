"""`rent`: what fits by arithmetic, costs by hand, classes of prices, two GPUs, and bad input."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import astuple, replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from profiler.data.datasheets import gpu_called
from profiler.data.prices import prices
from profiler.errors import RequestError
from profiler.rent.command import RentDocument, precision_words, rent
from profiler.rent.offers import Offer, ranked
from profiler.rent.options import RentOptions
from profiler.rent.text import rent_sentences, rent_table

TODAY = date(2026, 11, 20)
"""After the newest price, as in notebook 06: a price from tomorrow would have a negative age."""
CARDS = "T4,L4,A10G,L40S,H100 SXM"


def rented(model: str, use: str = "chat", today: date = TODAY, **options: Any) -> RentDocument:
    return rent(RentOptions(model, use=use, **{"price_class": "hyperscaler", **options}), today)


@pytest.fixture(scope="module")
def chat() -> RentDocument:
    return rented("mistral-7b-v0.1", cards=CARDS)


@pytest.fixture(scope="module")
def queue() -> RentDocument:
    return rented("mistral-7b-v0.1", "batch", cards=CARDS, quant="none,nf4", engine="compiled,eager")


def cache_bytes(offer: Offer) -> float:
    """Return the bytes of a sequence's cache that an offer names."""
    found = re.search(r"KV cache ([\d.]+) MB", offer.why)
    assert found, offer.why
    return 1e6 * float(found[1])


def test_what_fits_is_arithmetic() -> None:
    """Mistral-7B has 14.48 GB of weights in 16 bits and 131,072 bytes of cache per token."""
    load: dict[str, Any] = {"prompt": 512, "new": 128, "engine": "eager", "price_class": "marketplace"}
    [a100] = rented("mistral-7b-v0.1", "batch", cards="A100 80GB SXM", **load).cards
    assert "14.5 GB" in a100.why
    assert cache_bytes(a100) == pytest.approx(640 * 131_072, rel=1e-3)
    room = 0.98 * (gpu_called("A100 80GB SXM").usable_bytes - 0.45e9) - 14.48e9
    # A prompt of 512 also has four hidden states and three outputs of the MLP; 2.5 more are free, but not in one piece.
    workspace = 512 * (4 * 4096 + 5.5 * 14336) * 2
    assert a100.largest_batch == pytest.approx(room / (640 * 131_072 + workspace), abs=1)
    # Prefilled one at a time, a single prompt has that workspace: the cache of the others takes the room.
    one_by_one = a100.largest_batch_one_by_one
    assert one_by_one == pytest.approx((room - workspace) / (640 * 131_072), rel=0.05)
    assert one_by_one > 1.5 * a100.largest_batch


def test_a_cached_prefix_is_kept_once_and_not_prefilled() -> None:
    """Of 4,096 tokens in, 3,584 are cached: an eighth of the prompt is left, and a sequence keeps 512 + 128 of its own.

    131,072 bytes of cache per token. Plain transformers has a copy of the prefix for each sequence.
    """
    load: dict[str, Any] = {"prompt": 4096, "new": 128, "cards": "A100 80GB SXM", "price_class": "marketplace"}
    [whole] = rented("llama-3.1-8b", "batch", **load).cards
    [cached] = rented("llama-3.1-8b", "batch", prefix=3584, **load).cards
    assert cache_bytes(whole) == pytest.approx(4224 * 131_072, rel=1e-2)
    assert cache_bytes(cached) == pytest.approx(640 * 131_072, rel=1e-2)
    assert cached.largest_batch_one_by_one == pytest.approx(4224 / 640 * whole.largest_batch_one_by_one, rel=0.1)
    inputs = [offer.costs[0].input.typical for offer in (whole, cached)]
    assert inputs[1] == pytest.approx(inputs[0] / 8, rel=0.15)
    [eager] = rented("llama-3.1-8b", "batch", prefix=3584, engine="eager", **load).cards
    assert cache_bytes(eager) == pytest.approx(4224 * 131_072, rel=1e-2)
    with pytest.raises(RequestError, match="use 0 to 4095"):
        rented("llama-3.1-8b", "batch", prefix=4096, **load)


def test_16_bits_are_two_bytes_a_weight() -> None:
    """Gemma-2-9B's checkpoint is in float32. In 16 bits, its weights are 18.5 GB, which fit on an L4.

    They are 9.242 B by arXiv:2408.00118, with its table of 256,000 words.
    """
    [offer] = rented("gemma-2-9b", "batch", cards="L4", prompt=512).cards
    assert offer.fits
    assert "weights 18.5 GB" in offer.why
    # 42 layers of 8 heads of 256, K and V, 640 tokens, 2 bytes.
    assert cache_bytes(offer) == pytest.approx(42 * 2 * 8 * 256 * 640 * 2, rel=2e-3)


def test_weights_that_are_published_packed_are_called_so(roofscope: Callable[..., Any]) -> None:
    """gpt-oss-20b has 4.25 bits per weight of its experts: 13.8 GB, not the 41.8 GB of 20.9 B weights in 16 bits."""
    out = " ".join(roofscope("rent", "gpt-oss-20b", "--cards", "A10G", "--price", "A10G=1", "--plain").out.split())
    assert "A10G in mxfp4" in out
    assert "in 16 bits" not in out.partition("Basis of")[0]
    assert "the ranges have no figure of it" in out


def served(offers: RentDocument) -> list[Offer]:
    return [offer for offer in offers.cards if offer.request_usd is not None]


def test_a_full_queue_costs_the_hour_over_its_requests(queue: RentDocument) -> None:
    """With n in flight, n prompts and 127 shared steps give n answers."""
    for offer in served(queue):
        assert offer.request_usd.typical == pytest.approx(offer.usd_per_h / 3600 / offer.capacity_per_s.typical)
        assert offer.capacity_per_s.typical < offer.batch / (127 * offer.step_s.typical)
        assert offer.request_usd.low <= offer.request_usd.typical <= offer.request_usd.high
        full, half, tenth = offer.costs
        assert half.output.typical == pytest.approx(2 * full.output.typical)
        assert tenth.input.typical == pytest.approx(10 * full.input.typical)
        both = 2048 * full.input.typical + 128 * full.output.typical
        assert both == pytest.approx(1e6 * offer.request_usd.typical)


def test_at_a_rate_the_idle_time_is_paid(chat: RentDocument) -> None:
    """At 1 request per second, a GPU of any speed costs its hour over 3600 requests."""
    singles = [offer for offer in served(chat) if offer.rented_gpus == 1]
    assert singles
    for offer in singles:
        assert astuple(offer.request_usd) == pytest.approx((offer.usd_per_h / 3600,) * 3)
        assert offer.utilisation.typical == pytest.approx(1 / offer.capacity_per_s.typical)
        assert offer.idle_usd_per_day == pytest.approx(24 * offer.usd_per_h)


def test_an_offer_that_meets_the_limits_meets_them_over_its_range(chat: RentDocument) -> None:
    ends = {"yes": "high", "cannot tell": "typical"}
    judged = [(offer, ends[offer.meets]) for offer in served(chat) if offer.meets in ends]
    assert "high" in {end for _, end in judged}
    for offer, end in judged:
        assert getattr(offer.ttft_s, end) <= 0.5
        assert getattr(offer.tpot_s, end) <= 0.05


def test_engines_are_never_mixed_without_a_column(queue: RentDocument) -> None:
    table = rent_table([offer for offer in queue.cards if offer.fits])
    column = [heading.heading for heading in table.columns].index("as")
    assert {row[column].rpartition(", ")[2] for row in table.rows} == {"compiled", "eager"}
    assert "plain transformers" in rent_sentences(queue)[0]


def test_what_no_figure_covers_has_no_basis(queue: RentDocument) -> None:
    """nf4 is a format of bitsandbytes, which runs in plain transformers; no figure of it with vLLM is published."""
    verdicts = {(offer.precision, offer.engine): offer.verdict for offer in queue.cards if offer.card == "L40S"}
    assert verdicts["nf4", "compiled"] == "no basis"
    assert verdicts["nf4", "eager"] != "no basis"
    with pytest.raises(RequestError, match="no basis: no figure of fp8 in plain transformers"):
        rented("mistral-7b-v0.1", quant="fp8", engine="eager", cards="L4")


def test_every_gpu_with_a_price_has_a_rank() -> None:
    """Whatever the age of the price and whoever rents the GPU out; a P100 is too old for vLLM."""
    answer = rented("mistral-7b-v0.1", today=date(2036, 1, 1), price_class="", max_ttft_ms=9e5, max_tpot_ms=9e5)
    assert {offer.card for offer in answer.cards} == {price.card for price in prices() if not price.spot}
    assert max(price.price_date for price in prices()) <= TODAY.isoformat(), "set TODAY here and in notebook 06"
    verdicts = {offer.card: offer.verdict for offer in answer.cards}
    assert verdicts.pop("P100 PCIe 16GB") == "does not fit"
    assert set(verdicts.values()) <= {"cheapest", "typically cheapest", "cannot tell", "dearer"}
    costs = [offer.request_usd.typical for offer in answer.cards if offer.request_usd and offer.meets == "yes"]
    assert costs == sorted(costs)
    oldest = max(offer.price_age_days or 0 for offer in answer.cards)
    assert any(f" to {oldest} days old" in sentence for sentence in rent_sentences(answer))


def test_your_price_wins() -> None:
    answer = rented("mistral-7b-v0.1", cards="L4,L40S", price="L40S=0.01")
    assert (answer.cards[0].card, answer.cards[0].provider, answer.cards[0].usd_per_h) == ("L40S", "yours", 0.01)
    assert answer.cards[0].verdict == "cheapest"
    assert rent_sentences(answer)[0].endswith("the lowest on-demand prices of hyperscalers and yours.")


def test_a_gpu_that_is_rented_in_eights_has_the_price_of_its_host() -> None:
    """AWS rents eight H200 for 8 x 7.912 = 63.3 USD/h, and for one request per second all eight are paid."""
    [offer] = rented("mistral-7b-v0.1", cards="H200 SXM", provider="AWS").cards
    assert (offer.usd_per_h, offer.machine_cards, offer.rented_gpus) == (7.912, 8, 8)
    assert offer.request_usd.typical == pytest.approx(8 * 7.912 / 3600)
    [row] = rent_table([offer]).rows
    assert {"7.91\n8: 63.3", "2026-07-20"} <= set(row)


def test_the_load_decides_between_hosts_of_two_and_of_eight() -> None:
    """GCP rents two H100 for 2 x 11.06 USD/h, AWS eight for 8 x 6.88: a quarter of the chats is cheaper on two."""
    few, many = (rented("llama-3.1-70b", rate=rate, cards="H100 SXM").cards[0] for rate in ("0.2/s", "2/s"))
    assert (few.provider, few.machine_cards, few.rented_gpus) == ("GCP", 2, 2)
    assert (many.provider, many.machine_cards) == ("AWS", 8)
    assert many.rented_gpus * 6.88 < 2 * many.replicas * 11.06


def test_limits_that_no_gpu_meets_still_have_a_table(roofscope: Callable[..., Any]) -> None:
    """A step of Mistral-7B streams 14.2 GB, which takes an H100 of 3.35 TB/s 4.2 ms."""
    outcome = roofscope("rent", "mistral-7b-v0.1", "--max-tpot-ms", "1", "--cards", "L4,H100 SXM", "--plain")
    assert outcome.code == 0
    assert "No GPU meets the limits: the best, H100 SXM in 16 bits, typically takes" in outcome.out
    rows = [line for line in outcome.out.splitlines() if line.startswith("! ")]
    assert {row[2:10].strip() for row in rows} == {"L4", "H100 SXM"}
    picture = roofscope("rent", "mistral-7b-v0.1", "--max-tpot-ms", "1", "--cards", "L4", "--out", "none.svg")
    assert "no GPU meets the limits" in picture.err


def test_where_no_gpu_certainly_meets_the_limits_that_is_in_doubt(chat: RentDocument, queue: RentDocument) -> None:
    """Others are cheaper only in the ranges of a queue: at a rate, a GPU costs the same however fast it is."""
    for found, cheaper in ((chat, False), (queue, True)):
        may_miss = [replace(offer, meets="cannot tell") if offer.meets == "yes" else offer for offer in found.cards]
        doubtful = replace(found, cards=ranked(may_miss))
        _, cheapest, _, doubt, *_ = rent_sentences(doubtful)
        assert cheapest.startswith("None certainly meets the limits; ")
        first = doubtful.cards[0]
        name = f"{first.name} in {precision_words(first.precision)}"
        assert doubt.startswith(f"In doubt: whether {name} meets the limits")
        assert f"on one {first.card} takes a minute" in doubt
        assert ("may be cheaper" in doubt, "(its range overlaps)" in doubt) == (cheaper, cheaper)


def test_a_model_that_one_gpu_does_not_hold_is_split() -> None:
    """Llama-3.1-70B has 141 GB of weights in 16 bits: 70.6 GB on each of two H100 of 80 GB."""
    [offer] = rented("llama-3.1-70b", cards="H100 SXM", provider="AWS").cards
    assert offer.name == "2 x H100 SXM"
    assert "weights 70.6 GB" in offer.why
    # Each streams its half, without half of the table of 128,256 words, at 3.35 TB/s at most.
    assert offer.step_s.low > (70.6e9 - 128_256 * 8192) / 3.35e12
    assert offer.idle_usd_per_day == pytest.approx(24 * 8 * offer.usd_per_h)


def test_a_slower_host_makes_eager_steps_dearer() -> None:
    load: dict[str, Any] = {"batch": 1, "engine": "eager", "cards": "H100 SXM", "max_ttft_ms": 9e3, "max_tpot_ms": 9e3}
    one, three = (rented("mistral-7b-v0.1", host_index=index, **load).cards[0].step_s for index in (1.0, 3.0))
    assert three.typical == pytest.approx(3 * one.typical, rel=0.01)


def test_the_screen_the_picture_and_the_document(roofscope: Callable[..., Any], tmp_path: Path) -> None:
    picture = tmp_path / "cost.svg"
    arguments = ("rent", "mistral-7b-v0.1", "--cards", CARDS, "--class", "hyperscaler")
    outcome = roofscope(*arguments, "--by-utilisation", "--plain", "--out", str(picture))
    assert outcome.code == 0, outcome.err
    assert "10 %" in outcome.out
    texts = re.findall(r"<text[^>]*>(.*?)</text>", picture.read_text("utf-8"))
    assert {"requests per second", "USD per thousand requests", "1", "0.5"} <= set(texts)
    assert not any("$" in text for text in texts), "powers of ten would need TeX, which is off"
    document = json.loads(roofscope(*arguments, "--format", "json").out)
    assert {row["card"] for row in document["cards"]} == set(CARDS.split(","))
    assert document["load"]["rate_per_s"] == 1.0
    assert document["load"]["limits"] == {"ttft_s": 0.5, "tpot_s": 0.05}
    assert document["engines"] == ["compiled"]
    assert all(row["price_source"] and row["price_class"] == "hyperscaler" for row in document["cards"])
