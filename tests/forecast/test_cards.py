"""Forecasts by number of GPUs, compared with arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from profiler.errors import RequestError, RunError
from profiler.forecast import tensor_parallel as cards
from profiler.forecast.command import ForecastRequest
from profiler.forecast.options import RankOptions
from profiler.forecast.screen import rank_rows, worse_lines
from profiler.forecast.tensor_parallel import RankRow, across, forecast_ranks, parse_ranks
from profiler.judge.device_health import DeviceRun, healths
from profiler.predict.result import ForecastCell
from profiler.report.device import health_lines
from profiler.report.progress import QuietListener
from profiler.store.folder import read_document, read_run

EPYC = Path(__file__).parents[2] / "runs" / "reference" / "smollm2-135m-epyc"
NF4 = Path(__file__).parents[1] / "data" / "forecast" / "smollm2-135m-zen4-nf4"
MESSAGES = 2 * 30 + 2
"""SmolLM2-135M has two sums per layer, one after the embedding, and a gather of the logits."""


@pytest.fixture(autouse=True, scope="module")
def _read_once() -> Iterator[None]:
    """Fit the run's forecast once for all tests, and treat its device as another one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cards, "run_facts", cache(cards.run_facts))
        patch.setattr(cards, "machine_of", lambda _: "this is another one")
        yield


def cell_of(link: str, batch: int = 1) -> RankRow:
    wanted = ForecastRequest(batch_sizes=str(batch), prompt_lens="128")
    answer = forecast_ranks(str(EPYC), "", wanted, RankOptions("3", link), QuietListener())
    return next(cell for cell in answer.cells if cell.phase == "decode")


def test_latency_is_paid_once_a_message_and_nothing_else_changes() -> None:
    fast, slow = cell_of("0,1e9"), cell_of("1000,1e9")
    assert fast.times[0] == slow.times[0]
    assert slow.times[1].latency_s - fast.times[1].latency_s == pytest.approx(MESSAGES * 1e-3, rel=1e-6)
    # A rank has a third of every linear, and all of dispatch and of the norms.
    gain = fast.times[1].gain
    assert 1.2 < gain < 3


def test_bandwidth_is_paid_by_the_formulas_of_nccl_tests() -> None:
    batch = 8
    fast, slow = cell_of("0,1e9", batch), cell_of("0,0.5", batch)
    sums = (2 * 30 + 1) * batch * 576 * 4 * (2 * 2 / 3)
    gathered = batch * 49152 * 4 * (2 / 3)
    difference = slow.times[1].latency_s - fast.times[1].latency_s
    assert difference == pytest.approx((sums + gathered) / 0.5e9, rel=1e-3)


@pytest.mark.ci
def test_the_crossover_is_where_messages_cost_what_narrower_kernels_save() -> None:
    fast = cell_of("0,1e9")
    saved_s = fast.times[0].latency_s - fast.times[1].latency_s
    below, above = 0.8e6 * saved_s / MESSAGES, 1.2e6 * saved_s / MESSAGES
    assert cell_of(f"{below},1e9").worse_from is None
    assert cell_of(f"{above},1e9").worse_from == 3
    assert "from 3 GPUs on: decode 1 x 128" in worse_lines([cell_of(f"{above},1e9")])[0]
    alone = replace(fast, times=[replace(fast.times[0], fits=False), *fast.times[1:]])
    assert worse_lines([fast]) == ["Every cell gets faster with each larger number of GPUs."]
    assert worse_lines([fast, alone])[0].startswith("Every cell that fits two of these numbers")
    assert worse_lines([alone]) == []


def test_two_h100_by_their_datasheet_have_a_sentence_and_a_cost() -> None:
    wanted = ForecastRequest(batch_sizes="1,64", prompt_lens="512")
    answer = forecast_ranks("llama-3.1-8b", "H100 SXM", wanted, RankOptions("2", "pcie5x16", 2.0), QuietListener())
    sentence = answer.sentence
    assert sentence.startswith("Two H100 SXM over pcie5x16 give ")
    assert "at batch 1 and" in sentence
    assert sentence.endswith("at batch 64.")
    for cell in answer.cells:
        for time in cell.times:
            assert time.usd_per_million == pytest.approx(time.ranks * 2.0 / 3600 / time.tokens_per_s * 1e6)
    assert len(rank_rows(answer.cells, priced=True)) == 2 * len(answer.cells)


@pytest.mark.slow
def test_a_model_that_needs_two_cards_is_compared_from_there() -> None:
    """70B has 141 GB of weights, and a card 80 GB."""
    wanted = ForecastRequest(batch_sizes="1", prompt_lens="512", dtype="bfloat16")
    answer = forecast_ranks("llama-3.1-70b", "H100 SXM", wanted, RankOptions("2,4", "nvlink4"), QuietListener())
    [decode] = [cell for cell in answer.cells if cell.phase == "decode"]
    assert [time.fits for time in decode.times] == [False, True, True]
    assert decode.base is decode.times[1]
    assert "room for it" in answer.sentence


@pytest.mark.slow
def test_a_run_of_packed_weights_or_of_several_ranks_is_no_basis(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RequestError, match=r"are packed \(nf4\) and cannot be split; use a run of the unquantised"):
        forecast_ranks(str(NF4), "", ForecastRequest(), RankOptions("3", "8,20"), QuietListener())
    document = replace(read_document(EPYC), ranks=2)
    monkeypatch.setattr("profiler.forecast.command.read_document", lambda _: document)
    with pytest.raises(RunError, match="is a run of 2 ranks; use a run on one GPU"):
        forecast_ranks(str(tmp_path), "", ForecastRequest(), RankOptions("3", "8,20"), QuietListener())


def test_numbers_of_gpus_are_compared_where_they_fit() -> None:
    def forecast(seconds: float, fits: bool = True) -> list[ForecastCell]:
        return [ForecastCell("decode", 1, 8, 9, seconds, seconds, seconds, 1 / seconds, "mixed", "", fits)]

    assert parse_ranks("8,2,2") == (2, 8)
    [cell] = across([(1, forecast(9.0, fits=False)), (2, forecast(3.0)), (4, forecast(2.0)), (8, forecast(2.1))], None)
    assert cell.base is cell.times[1]
    assert cell.worse_from == 8
    assert [time.gain for time in cell.times] == [None, 1.0, pytest.approx(1.5), pytest.approx(3.0 / 2.1)]


def test_a_slow_card_is_ill_and_a_noisy_one_is_not() -> None:
    run = read_run(EPYC)

    def card(name: str, slower: float, memory: float, width: float = 0.01) -> DeviceRun:
        ends = {"latency_low_s": 1 - width, "latency_s": 1.0, "latency_high_s": 1 + width}
        rows = [
            replace(row, visits=2, **{end: slower * by * row.latency_s for end, by in ends.items()})
            for row in run.measured
        ]
        return DeviceRun(name, "float32", rows, run.document.ceilings.ceilings.times(memory, 1.0))

    found = healths([card("cuda:0", 1.0, 1.0), card("cuda:1", 1.2, 0.8)])
    assert [item.ill for item in found] == [False, True]
    assert health_lines(found) == [
        "cuda:1 underperforms: its steps take 20 % longer; its memory roof is 20 % below the best."
    ]
    noisy = healths([card("cuda:0", 1.0, 1.0, 0.2), card("cuda:1", 1.1, 1.0, 0.2)])
    assert not any(item.ill for item in noisy)
    assert "No GPU is slower" in health_lines(noisy)[0]
