"""Requests per second by Little's law, compared with a simulated queue."""

from __future__ import annotations

import numpy as np
import pytest

from profiler.rent.options import WORKLOADS, Limits, RentOptions, parse_rate
from profiler.rent.serving import Fleet, StepTimes


def times(prompt_s: float, fixed_s: float, each_s: float, largest: int, new_tokens: int = 101) -> StepTimes:
    """A GPU whose decode step takes `fixed_s` plus `each_s` per sequence."""
    return StepTimes(prompt_s, fixed_s + each_s * np.arange(1, largest + 1), new_tokens)


def simulated(gpu: StepTimes, rate_per_s: float, requests: int, seed: int = 0) -> tuple[float, float]:
    """(mean sequences in flight, mean seconds per output token) of a simulated GPU with random arrivals.

    Between two steps it processes the prompts that have arrived; then every sequence in flight gets one token.
    """
    arrivals = np.cumsum(np.random.default_rng(seed).exponential(1 / rate_per_s, requests)).tolist()
    now, held, started, done = 0.0, 0.0, 0, 0
    left: list[tuple[int, float]] = []
    per_token: list[float] = []
    while done < requests:
        if not left and now < arrivals[started]:
            now = arrivals[started]
        if started < requests and arrivals[started] <= now:
            now += gpu.prompt_s
            held += len(left) * gpu.prompt_s
            started += 1
            left.append((gpu.new_tokens - 1, now))
            continue
        step_s = float(gpu.step_s[len(left) - 1])
        held += len(left) * step_s
        now += step_s
        finished = [since for tokens, since in left if tokens == 1]
        per_token += [(now - since) / (gpu.new_tokens - 1) for since in finished]
        left = [(tokens - 1, since) for tokens, since in left if tokens > 1]
        done += len(finished)
    return held / now, float(np.mean(per_token))


@pytest.mark.parametrize("rate_per_s", [4.0, 12.0])
def test_littles_law_agrees_with_a_simulated_queue(rate_per_s: float) -> None:
    """Steps of 10 ms plus 0.2 ms per sequence, prompts of 20 ms, 101 tokens: as on a fast GPU with a model of 8 B."""
    gpu = times(0.020, 0.010, 0.0002, 256)
    in_flight, tpot_s = simulated(gpu, rate_per_s, 3000)
    operation = gpu.at_rate(rate_per_s)
    assert operation.in_flight == pytest.approx(in_flight, rel=0.1, abs=1.0)
    assert operation.tpot_s == pytest.approx(tpot_s, rel=0.1)


def test_the_rate_of_a_batch_by_hand() -> None:
    """10 in flight: 100 steps of 12 ms and 10 prompts of 20 ms give 10 answers in 1.4 s."""
    gpu = times(0.020, 0.010, 0.0002, 10)
    full = gpu.with_in_flight(10)
    assert full.rate_per_s == pytest.approx(10 / 1.4)
    # Prompts take 10 x 20 ms of every 1.4 s, so a step of 12 ms takes 12 ms x 1.4 / 1.2.
    assert full.tpot_s == pytest.approx(0.012 * 1.4 / 1.2)
    # Little's law: sequences in flight = rate x seconds of decoding.
    assert full.rate_per_s * 100 * full.tpot_s == pytest.approx(10)
    assert gpu.at_rate(7.2).rate_per_s == pytest.approx(10 / 1.4)
    assert gpu.at_rate(7.1).rate_per_s == 7.1


def test_limits_bound_the_sequences_in_flight() -> None:
    gpu = times(0.020, 0.010, 0.0002, 100)
    most = int((gpu.shares_within(Limits(tpot_s=0.020)) == 1).sum())
    assert 0 < most < 100
    assert gpu.with_in_flight(most).tpot_s <= 0.020 < gpu.with_in_flight(most + 1).tpot_s
    assert not gpu.shares_within(Limits(tpot_s=0.005)).any()
    assert (gpu.shares_within(Limits()) == 1).all()
    assert not gpu.shares_within(Limits(ttft_s=0.019)).any()


def test_a_gpu_that_idles_meets_limits_that_a_busy_one_exceeds() -> None:
    """Answers of two tokens after prompts of 0.3 s: one sequence always in flight keeps prompts waiting for 4.5 s.

    At 3/4 of the time a prompt waits for 3/4 / (2 x 1/4) = 1.5 others, so for 0.45 s: 0.3 + 0.45 + a step of 10 ms.
    """
    gpu = StepTimes(0.3, np.full(8, 0.01), 2)
    assert gpu.with_in_flight(1).ttft_s > 4.5
    limits = Limits(ttft_s=0.76, tpot_s=0.05)
    shares = gpu.shares_within(limits)
    assert shares * gpu.rates_per_s * 0.3 == pytest.approx(0.75)
    assert gpu.with_in_flight(1, float(shares[0])).ttft_s == pytest.approx(0.76)


def test_the_cost_of_one_gpu_depends_on_its_rate_alone() -> None:
    """It is 1/U: at 1 request per second, a GPU that can serve 20 costs 20 times its lowest price per request.

    On one H100, arXiv:2606.11690 measures costs per token at low rates of 2.5 to 36 times those at saturation.
    """
    fleet = Fleet(20.0, 1, 1, 3.6)
    assert fleet.usd_per_request(20.0) == pytest.approx(3.6 / 3600 / 20)
    assert fleet.usd_per_request(1.0) / fleet.usd_per_request(20.0) == pytest.approx(20)
    assert fleet.rented_gpus(20.1) == 2
    # 8 at once are paid even if one is enough; 9 need a second machine.
    machine = Fleet(20.0, 1, 8, 3.6)
    assert [machine.rented_gpus(rate) for rate in (1.0, 160.0, 161.0)] == [8, 8, 16]


def test_a_use_sets_what_is_not_given() -> None:
    assert WORKLOADS["chat"].limits == Limits(0.5, 0.05)
    load = RentOptions("gpt2", prompt=100, rate="30/min", max_tpot_ms=20).load
    assert (load.prompt_len, load.new_tokens, load.rate_per_s) == (100, 128, 0.5)
    assert load.limits == Limits(0.5, 0.02)
    assert RentOptions("gpt2", use="batch").load.rate_per_s is None


@pytest.mark.parametrize(("text", "per_s"), [("0.5/s", 0.5), ("2", 2.0), ("90/min", 1.5), ("3600 / h", 1.0)])
def test_rates(text: str, per_s: float) -> None:
    assert parse_rate(text) == pytest.approx(per_s)
