"""Steps that verify drafts: their work, their expected tokens, and when they pay."""

from __future__ import annotations

import pytest

from profiler.counting.cache import counted_model
from profiler.counting.count import count
from profiler.counting.floor import expected_tokens, pays_from, verifying
from profiler.counting.operators import Experts
from profiler.errors import RequestError
from profiler.facts.step import ExecutionPath, Step
from profiler.loading.source import resolve

PATH = ExecutionPath()


@pytest.mark.parametrize(
    ("acceptance", "drafted", "tokens"),
    # (1 - a^(k+1)) / (1 - a), by hand.
    [(0.0, 5, 1.0), (0.5, 1, 1.5), (0.5, 2, 1.75), (0.8, 4, 3.3616), (0.9, 10, 6.8619), (1.0, 7, 8.0)],
)
def test_expected_tokens(acceptance: float, drafted: int, tokens: float) -> None:
    assert expected_tokens(acceptance, drafted) == pytest.approx(tokens, abs=1e-4)


def test_it_pays_where_the_expected_tokens_are_worth_the_step() -> None:
    """With one draft a step gives 1 + a tokens, so a step of cost 1.25 pays from an acceptance of a quarter."""
    assert pays_from(1.25, 1) == pytest.approx(0.25, abs=1e-6)
    assert pays_from(3.3616, 4) == pytest.approx(0.8, abs=1e-4)
    assert pays_from(1.0, 4) == 0.0
    assert pays_from(5.0, 4) == pytest.approx(1.0, abs=1e-6)
    assert pays_from(5.01, 4) is None


def test_it_is_a_prefill_of_its_tokens_with_all_logits() -> None:
    """k + 1 tokens after a context, and the LM head on each of them: 2 x 4096 x 128,256 FLOPs a token."""
    work = counted_model(resolve("llama-3.1-8b")).work
    verified, prefill = work.work(verifying(2, 4, 1000)), work.work(Step(2, 5, 1000))
    assert verified.model_flops - prefill.model_flops == 2 * 4 * 2 * 4096 * 128_256
    assert verified.logits_bytes == 5 * prefill.logits_bytes
    assert verified.weight_bytes == prefill.weight_bytes == work.work(Step(2, 1, 1000)).weight_bytes
    assert vars(work.work(verifying(2, 0, 1000))) == vars(work.work(Step(2, 1, 1000)))


def test_a_mixture_reads_the_experts_of_all_drafts() -> None:
    """Mixtral uses 2 of 8 experts a token; five tokens use 8 (1 - (3/4)^5) = 6.10, three times as many."""
    [experts] = counted_model(resolve("mixtral-8x7b")).work.of_kind(Experts)
    one, five = (experts.work(verifying(1, drafted, 512), PATH).weight_bytes for drafted in (0, 4))
    assert five / one == pytest.approx(8 * (1 - 0.75**5) / 2)
    assert [round(float(experts.touched(tokens)), 2) for tokens in (1, 2, 4, 8)] == [2.0, 3.5, 5.47, 7.2]


def test_on_a_gpu() -> None:
    """A dense model of 8 B streams its weights either way; a mixture of experts must accept most drafts."""
    [dense], [mixture] = (
        count(model, verify=4, gpu_names=gpu).gpus
        for model, gpu in (("llama-3.1-8b", "H100 SXM"), ("mixtral-8x7b", "H200 SXM"))
    )
    costs = [row.floor_s / row.one_token_floor_s for row in (dense, mixture)]  # type: ignore[operator]
    worth = [expected_tokens(row.pays_from, 4) for row in (dense, mixture)]  # type: ignore[arg-type]
    assert worth == pytest.approx(costs)
    assert 1 < costs[0] < 1.02
    assert 2.5 < costs[1] < 3.05
    [plain] = count("llama-3.1-8b", gpu_names="H100 SXM").gpus
    assert plain.floor_s == dense.one_token_floor_s
    assert plain.one_token_floor_s is None
    with pytest.raises(RequestError, match="leave out --phase"):
        count("llama-3.1-8b", phase="prefill", verify=4)
