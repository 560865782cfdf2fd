"""`rent`: what fits by arithmetic, costs by hand, planted crossovers, and bad input."""

from __future__ import annotations

import io
import json
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from profiler.data import prices as price_table
from profiler.data.datasheets import gpus
from profiler.data.prices import prices
from profiler.errors import RequestError
from profiler.predict.costs import Curve, price_crossover
from profiler.predict.published_efficiency import Range
from profiler.rent.command import RentRequest, rent
from profiler.rent.offers import Limits, Rented
from profiler.rent.render import load_table, rent_table
from profiler.report.plots.costs import cost_figure
from profiler.report.terminal import rich_table
from profiler.store.forecasts import read_costs

TODAY = date(2026, 11, 20)
REFERENCE = Path(__file__).parents[2] / "runs" / "reference" / "smollm2-135m-zen4"


@pytest.fixture(scope="module")
def mistral() -> Rented:
    return rent("mistral-7b-v0.1", RentRequest(quants=("none", "nf4"), cards="T4,L4,A100 80GB SXM,H100 SXM"), TODAY)


def test_prices_are_of_cards_in_the_table_and_have_a_source() -> None:
    known = {sheet.gpu for sheet in gpus()}
    for price in prices():
        assert price.card in known
        assert 0.01 < price.usd_per_h < 30
        assert price.source


def test_what_fits_is_arithmetic(mistral: Rented) -> None:
    """Mistral-7B has 14.48 GB of weights in 16 bits and 131,072 bytes of cache per token; a T4 has 16.1 GB."""
    by = {(offer.card, offer.precision): offer for offer in mistral.offers}
    a100 = by["A100 80GB SXM", "none"]
    assert "14.5 GB" in a100.why
    assert "83.9 MB" in a100.why
    assert pytest.approx(83.9e6, rel=1e-3) == 640 * 131_072
    room = 0.95 * 85.9e9 - 0.6e9 - 14.48e9
    # Besides its cache, a prompt of 512 needs up to 512 x (4096 + 5 x 14336) x 2 bytes of activations.
    assert room / (83.9e6 + 512 * (4096 + 5 * 14336) * 2) < a100.largest_batch < room / 83.9e6
    four_bit = by["T4", "nf4"]
    assert four_bit.fits
    assert four_bit.largest_batch > by["T4", "none"].largest_batch


def test_16_bits_are_two_bytes_a_weight() -> None:
    """Gemma-2-9B's checkpoint is in float32. In 16 bits its 9.242 B weights (arXiv:2408.00118 with its table of 256,000
    words) are 18.5 GB, which fit on an L4."""
    rented = rent("gemma-2-9b", RentRequest(cards="RTX 4090,L4", quants=("none", "nf4")), TODAY)
    assert {(offer.card, offer.precision) for offer in rented.offers if offer.fits} == {
        (card, precision) for card in ("RTX 4090", "L4") for precision in ("none", "nf4")
    }
    for offer in rented.offers:
        assert offer.precision == "nf4" or "weights 18.5 GB" in offer.why
        # 42 layers of 8 heads of 256, K and V, 640 tokens, 2 bytes: the cache has 16 bits in every format.
        assert "KV cache 220 MB" in offer.why
    assert pytest.approx(220e6, rel=1e-3) == 42 * 2 * 8 * 256 * 640 * 2


def test_weights_that_are_published_packed_are_called_so(roofscope: Callable[..., Any]) -> None:
    """gpt-oss-20b has 4.25 bits per weight of its experts: 13.8 GB, not the 41.8 GB of 20.9 B weights in 16 bits."""
    out = roofscope("rent", "gpt-oss-20b", "--cards", "RTX 4090", "--plain").out
    assert "RTX 4090 in mxfp4" in out
    assert "16 bits" not in out.partition("card ")[2].partition("in, out")[0]
    assert "the ranges have no figure of it" in out


def test_a_mixture_of_experts_has_a_note(roofscope: Callable[..., Any]) -> None:
    command = ("rent", "qwen3-30b-a3b", "--cards", "A100 80GB SXM")
    assert "No published figure of a mixture of experts" in roofscope(*command, "--plain").out
    assert any("mixture" in note for note in json.loads(roofscope(*command, "--format", "json").out)["notes"])
    assert not any("mixture" in note for note in rent("qwen3-8b", RentRequest(cards="A100 80GB SXM"), TODAY).notes)


def test_a_prompt_beyond_the_models_positions_is_refused() -> None:
    """GPT-2 has 1024 positions (its paper's context)."""
    rent("gpt2", RentRequest(prompt_len=1000, new_tokens=24, cards="L4"), TODAY)
    with pytest.raises(RequestError, match=r"1025 tokens, but this model's limit is 1024; use a shorter --prompt"):
        rent("gpt2", RentRequest(prompt_len=1000, new_tokens=25, cards="L4"), TODAY)


def test_costs_are_price_times_time_over_tokens(mistral: Rented) -> None:
    for offer in mistral.offers:
        if not offer.fits:
            continue
        assert offer.tpot_s is not None
        assert offer.ttft_s is not None
        full = offer.costs[0]
        second = offer.usd_per_h / 3600
        assert full.output.typical == pytest.approx(1e6 * second * offer.tpot_s.typical / offer.batch)
        assert full.input.typical == pytest.approx(1e6 * second * offer.ttft_s.typical / (512 * offer.batch))
        assert offer.tpot_s.low <= offer.tpot_s.typical <= offer.tpot_s.high
        # With less in flight the same hour yields fewer tokens.
        usd = [cost.output.typical for cost in offer.costs]
        assert usd == sorted(usd)
        assert [cost.batch for cost in offer.costs] == sorted((cost.batch for cost in offer.costs), reverse=True)


def test_the_range_holds_a_figure_that_was_published_since() -> None:
    """Mistral-7B in 16 bits streams 14.2 GB per token, at least 7.0 ms on an A100 of 2039 GB/s. There transformers took
    30.4 ms for the 40 layers of Llama-2-13B (huggingface/optimum, tests/benchmark/README.md), or 24 ms for 32."""
    [offer] = rent("mistral-7b-v0.1", RentRequest(batch=1, cards="A100 80GB SXM"), TODAY).offers
    assert offer.tpot_s is not None
    assert 7.0e-3 < offer.tpot_s.low < 24.3e-3 < offer.tpot_s.high


def test_ranges_that_overlap_cannot_tell(mistral: Rented) -> None:
    fitting = [offer for offer in mistral.offers if offer.fits]
    best = fitting[0].request_usd
    assert best is not None
    for offer in fitting[1:]:
        assert offer.request_usd is not None
        assert (offer.verdict == "cannot tell") == offer.request_usd.overlaps(best)


def curve(card: str, usd_per_h: float, fixed_s: float, each_s: float, largest: int) -> Curve:
    """A GPU whose step takes `fixed_s` plus `each_s` per sequence."""
    seconds = fixed_s + each_s * np.arange(1, largest + 1)
    exact = Range(seconds, seconds, seconds)
    return Curve(card, usd_per_h / 3600, exact, exact, largest)


def test_a_planted_crossover_is_found() -> None:
    """1 USD/h: 10 ms + 1 ms per sequence. 3 USD/h: 10 ms + 0.2 ms. Equal at (10 + b) = 3 (10 + 0.2 b): b = 50."""
    cheaper, dearer = curve("small", 1, 0.010, 0.001, 500), curve("large", 3, 0.010, 0.0002, 500)
    assert price_crossover(dearer, cheaper) == 51
    # 20 fit on the small GPU. Sequences that wait cost as much per token as its largest batch, 1 x 30 ms / 20 = 3 x b'.
    assert price_crossover(dearer, curve("small", 1, 0.010, 0.001, 20)) == next(
        batch for batch in range(1, 500) if 3 * (10 + 0.2 * batch) / batch < min(10 + batch, 30) / min(batch, 20)
    )
    assert price_crossover(curve("large", 30, 0.010, 0.0009, 500), cheaper) is None


def test_limits_choose_the_batch_and_your_price_the_order() -> None:
    request = RentRequest(cards="L4,A100 80GB SXM", limits=Limits(tpot_s=0.060))
    for offer in rent("mistral-7b-v0.1", request, TODAY).offers:
        assert offer.tpot_s is not None
        assert offer.tpot_s.typical <= 0.060 or offer.meets == "no"
    first = rent("mistral-7b-v0.1", replace(request, prices="A100 80GB SXM=0.01"), TODAY).offers[0]
    assert (first.card, first.provider) == ("A100 80GB SXM", "yours")


def test_a_slower_host_makes_eager_steps_dearer() -> None:
    request = RentRequest(batch=1, cards="H100 SXM")
    plain, slow = (
        rent("mistral-7b-v0.1", replace(request, host_index=index), TODAY).offers[0].tpot_s for index in (1.0, 3.0)
    )
    assert plain is not None
    assert slow is not None
    assert slow.typical == pytest.approx(3 * plain.typical, rel=0.01)


def test_a_card_without_a_price_is_named() -> None:
    """The table has no price of an RTX 2080 Ti, and a note says so."""
    rented = rent("smollm2-135m", RentRequest(cards="T4,RTX 2080 Ti"), TODAY)
    assert {offer.card for offer in rented.offers} == {"T4"}
    unpriced = "no price is known for RTX 2080 Ti: give one, --price 'RTX 2080 Ti=USD_PER_HOUR'."
    assert unpriced in rented.notes
    assert unpriced not in rent("smollm2-135m", RentRequest(cards="T4"), TODAY).notes


def test_a_price_without_its_host_says_so(roofscope: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    partial = [price for price in prices() if price.card == "L4" and price.without]
    monkeypatch.setattr(price_table, "prices", lambda: tuple(partial))
    out = " ".join(roofscope("rent", "smollm2-135m", "--cards", "L4", "--plain").out.split())
    assert "L4 0.240 (TensorDock, vCPU and RAM are billed on top, " in out


def test_bad_requests_are_one_line(roofscope: Callable[..., Any]) -> None:
    cases = [
        (("--cards", "L4O"), "L4"),
        (("--price", "T4=0"), "above 0"),
        (("--price", "T4=0.35EUR"), "USD per hour"),
        (("--price", "T4"), "CARD=USD_PER_HOUR"),
        (("--quant", "int3"), "--quant"),
        (("--max-tpot-ms", "0.1"), "the fastest"),
        (("--max-tpot-ms", "-1"), "above 0"),
        (("--batch", "0"), "--batch"),
        (("--engine", "fast"), "--engine"),
    ]
    for arguments, words in cases:
        outcome = roofscope("rent", "smollm2-135m", *arguments)
        assert outcome.code == 2, (arguments, outcome.out)
        assert words in outcome.err, outcome.err
        assert len(outcome.err.strip().splitlines()) == 1
    outcome = roofscope("rent", "llama-3.1-70b", "--cards", "T4,L4")
    assert outcome.code == 2
    assert "fits no card" in outcome.err
    assert "nf4" in outcome.err


def test_the_table_shows_loads_ages_and_fits(roofscope: Callable[..., Any], tmp_path: Any) -> None:
    picture = tmp_path / "cost.png"
    cards = "T4,L4,A100 80GB SXM,V100 PCIe 16GB"
    outcome = roofscope("rent", "mistral-7b-v0.1", "--cards", cards, "--plain", "--out", str(picture))
    assert outcome.code == 0, outcome.err
    assert max(map(len, outcome.out.splitlines())) <= 100
    assert "days old!" in outcome.out
    assert "10 %" in outcome.out
    assert picture.stat().st_size > 20_000
    folder = tmp_path / "run"
    shutil.copytree(REFERENCE, folder)
    command = ("rent", "mistral-7b-v0.1", "--cards", cards, "--keep", str(folder), "--format", "json")
    document = json.loads(roofscope(*command).out)
    assert {row["card"] for row in document["cards"]} == set(cards.split(","))
    page = (folder / "report.html").read_text()
    assert "What a token would cost" in page
    for row in document["cards"]:
        assert (f"{row['card']}, 16 bits" in page) == row["fits"]


@pytest.mark.parametrize("width", [100, 80])
def test_no_cell_is_cut(width: int) -> None:
    """Every character of every cell is printed, even of `never (RTX PRO 6000 Blackwell Server)`."""
    offers = rent("smollm2-135m", RentRequest(), TODAY).offers
    console = Console(file=io.StringIO(), width=width)
    for table in (rent_table(offers), load_table(offers)):
        for row in table.rows:
            with console.capture() as shown:
                console.print(rich_table(replace(table, rows=[row])))
            missing = Counter("".join((*(column.heading for column in table.columns), *row))) - Counter(shown.get())
            assert not missing, (row, missing)


def test_a_line_of_costs_is_price_times_time_over_tokens(mistral: Rented) -> None:
    costs = mistral.over_load
    for line in costs.lines:
        batch, span = line.batches[-1], line.usd_per_million[-1]
        step_s = mistral.curves[line.card, line.precision].tpot.typical_s[batch - 1]
        assert span.typical == pytest.approx(1e6 * line.usd_per_h / 3600 * step_s / batch)
        assert span.low <= span.typical <= span.high


def test_a_picture_explains_the_marks_that_it_draws_and_no_other(mistral: Rented) -> None:
    """The title explains the crossover mark only if a line has one, and always the marks at the ends."""
    [line, *_] = mistral.over_load.lines
    for batch, crosses in ((None, 0), (line.batches[1], 1)):
        [axes] = cost_figure(replace(mistral.over_load, lines=(replace(line, crossover_batch=batch),))).axes
        assert sum(drawn.get_marker() == "+" for drawn in axes.lines) == crosses
        assert ("+: crossover" in axes.get_title(loc="left")) == bool(crosses)
        assert "marks: the largest batch" in axes.get_title(loc="left")


@pytest.mark.parametrize("batches", [[], [0], [1, 2], ["a"]])
def test_kept_costs_that_cannot_be_drawn_are_none(batches: list[Any], tmp_path: Path) -> None:
    span = {"low": 1.0, "typical": 2.0, "high": 3.0}
    line = {"card": "T4", "precision": "none", "usd_per_h": 1.0, "batches": batches, "usd_per_million": [span],
            "crossover_batch": None}  # fmt: skip
    costs = {"model": "a model", "prompt_len": 1, "new_tokens": 1, "lines": [line]}
    (tmp_path / "costs.json").write_text(json.dumps(costs))
    assert read_costs(tmp_path) is None
    line["batches"] = [4]
    (tmp_path / "costs.json").write_text(json.dumps(costs))
    assert read_costs(tmp_path) is not None
