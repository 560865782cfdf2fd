"""Doubling tests from first principles: known regimes, a KV-dominated decode, and the knee of Llama-2-7B."""

import math
from dataclasses import replace

import pytest
from machines import ceiling

from profiler.counting.cache import counted_model
from profiler.counting.model_numbers import model_numbers
from profiler.counting.operators import as_value
from profiler.facts.ceilings import READ, Ceilings
from profiler.facts.operators import OperatorWork
from profiler.facts.step import ExecutionPath, Step
from profiler.grid.cells import Cell, CellKey, Phase
from profiler.judge.cell_stages import Timed
from profiler.judge.scaling import compute_bound_by_counts, doubling_tests, scaling
from profiler.loading.source import resolve
from profiler.stats import CLAIM_REPETITIONS, Estimate

A100_P, A100_W = 312e12, 2.039e12
# Llama-2-7B in fp16: parameters without the embedding table, and the cache of a token.
WEIGHTS = 6_738_415_616 - 32_000 * 4096
KV_TOKEN_BYTES = 524_288
ATTENTION_FLOPS = 4 * 32 * 4096


def decode(batch: int, context: int) -> tuple[float, float]:
    flops = batch * (2 * WEIGHTS + ATTENTION_FLOPS * context)
    return flops, 2 * WEIGHTS + batch * KV_TOKEN_BYTES * context


def stepped(batch: int, time_s: float, width: float, flops: float, nbytes: float) -> Timed:
    """Return a decode step of three repetitions, whose interval extends by the factor `width` to both sides."""
    key, time = CellKey("decode", Cell(batch, 0, 8, 12)), Estimate(time_s, time_s / width, time_s * width, 9)
    work = OperatorWork("all", "mlp", 1, "float16", flops, nbytes, 0, 0)
    return Timed(key, [work], "ok", batch, time, time, samples=[(time_s,)] * CLAIM_REPETITIONS)


def steps(context: int, batches: list[int]) -> list[Timed]:
    found = []
    for batch in batches:
        flops, bytes_ = decode(batch, context)
        found.append(stepped(batch, max(flops / A100_P, bytes_ / A100_W), 1.01, flops, bytes_))
    return found


def by_batch(model: str, context: int, batches: list[int], phase: Phase = "decode") -> dict[int, list[OperatorWork]]:
    """Return the operators of a preset's step at some batches, as a run records them."""
    work, query = counted_model(resolve(model)).work, context if phase == "prefill" else 1
    steps = {batch: Step(batch, query, 0 if phase == "prefill" else context) for batch in batches}
    return {
        batch: [as_value(item, item.name, item.work(step, ExecutionPath())) for item in work.operators]
        for batch, step in steps.items()
    }


A100 = Ceilings({"float16": ceiling(A100_P)}, {READ: ceiling(A100_W)}, 1, True)


def test_a_layer_of_16_bits_is_compute_bound_from_the_ridge_on_and_a_cache_moves_that() -> None:
    """Llama-2-7B on an A100: 2 FLOPs per weight of 2 bytes cross at P / W = 153.02 rows, so from 154 on.

    Each sequence adds 2 x 6.6e9 FLOPs, or 42.4 µs, and per cached token 524,288 bytes, or 0.257 µs. So the cache takes
    the larger part from 165 tokens on. Twice the batch reads the same weights, so P / W is what only weights give.
    """
    found = {tokens: compute_bound_by_counts(by_batch("llama-2-7b", tokens, [1, 2]), A100) for tokens in (1, 128, 170)}
    assert found == {1: 154, 128: 154, 170: None}


@pytest.mark.parametrize("model", ["llama-2-7b", "mixtral-8x7b", "qwen3-30b-a3b", "gemma-2-9b", "deepseek-v2-lite"])
@pytest.mark.parametrize(("context", "batches"), [(16, [1, 16]), (128, [1, 2, 4, 8]), (2048, [2, 5])])
def test_a_run_says_the_same_batch_as_count(model: str, context: int, batches: list[int]) -> None:
    """The judge has a run's operators at some batches only; `count` counts each batch. Experts are not linear in it."""
    under = A100.ceiling_set("an A100")
    counted = model_numbers(counted_model(resolve(model)), context, (under,))
    assert compute_bound_by_counts(by_batch(model, context, batches), A100) == counted.gpus[0].compute_bound_from_batch


def test_a_prefill_is_compute_bound_from_the_ridge_in_tokens() -> None:
    """One layer's matmul passes P / W = 153 FLOP/byte at 154 tokens, whatever the sequences they belong to."""
    for prompt, batch in ((16, 10), (64, 3)):
        assert compute_bound_by_counts(by_batch("llama-2-7b", prompt, [1, 4], "prefill"), A100) == batch


def test_a_flat_series_is_memory_bound_and_a_proportional_one_compute_bound() -> None:
    result = scaling(steps(16, [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]), "batch")
    sides = [item.side for item in result.doublings]
    assert sides[:5] == ["memory"] * 5
    assert sides[-1] == "compute"
    assert result.knee_measured in (128, 256)
    assert result.best == 256  # from the knee on, larger batches give no more


def test_a_slope_of_one_proves_nothing_where_the_cache_rules() -> None:
    """At 32k tokens the cache of each sequence is larger than the weights, so bytes predict a slope near 1 too."""
    result = scaling(steps(32_768, [8, 16, 32]), "batch")
    assert all(item.slope > 0.8 for item in result.doublings)
    assert {item.side for item in result.doublings} == {"undecided"}
    assert any("no batch makes a step compute-bound" in sentence for sentence in result.sentences)


@pytest.mark.parametrize(
    ("slopes", "knee", "between"),
    [
        ([0.1, 0.2, 0.9, 1.0], 4, None), ([0.9, 1.0], 1, None), ([0.1, 0.2], None, None), ([0.9, 0.1, 0.9], 4, None),
        ([0.1, None, 0.9], None, (2, 4)), ([0.1, 0.9, None], None, (2, 8)), ([None, 0.9, 1.0], None, (1, 2)),
    ],
)  # fmt: skip
def test_a_knee_is_a_claim_of_whole_intervals(
    slopes: list[float | None], knee: int | None, between: tuple[int, int] | None
) -> None:
    """Sizes start at 1 and double. None is a slope of 0.5 inside its interval."""
    found, size, time_s = [], 1, 1.0
    widths = [1.01, *(1.2 if slope is None else 1.01 for slope in slopes)]
    for slope, width in zip([0.0, *slopes], widths, strict=True):
        time_s *= 2 ** (0.5 if slope is None else slope)
        found.append(stepped(size, time_s, width, size * 1e9, 1e9))
        size *= 2
    result = scaling(found, "batch")
    assert (result.knee_measured, result.knee_between) == (knee, between)
    assert any("knee is unknown" in sentence for sentence in result.sentences) == (between is not None)


def test_drift_between_sizes_makes_best_and_knee_uncertain() -> None:
    """Each size of Llama-2-7B is timed once, while the machine drifts by 50 %.

    Tokens/s grow by up to 2 with each doubling to 64, by 1.7 to 128, and not at all from 256 on. So the best of the
    last sizes is unknown, and so is the knee, with log2(1.5) = 0.58 on each slope. Both are known if sizes are timed
    in turn.
    """
    known = steps(16, [1, 2, 4, 8, 16, 32, 64, 128, 256, 512])
    still = scaling(known, "batch")
    drifted = scaling([replace(step, samples=step.samples[:1]) for step in known], "batch", drift=0.5)
    in_turn = scaling([replace(step, samples=step.samples[:1] * 3) for step in known], "batch", drift=0.5)
    assert still == in_turn
    assert still.best == 256
    assert still.knee_measured is not None
    assert drifted.knee_measured is None
    text = " ".join(drifted.sentences)
    assert "knee is unknown" in text
    assert "The machine drifted by 50 % meanwhile, so the most may also be at batch 128, 512." in text


def decoded(prompt_len: int, context_len: int, latency_s: float) -> Timed:
    """Return a decode of one sequence and eight new tokens."""
    key, known = CellKey("decode", Cell(1, prompt_len, 8, context_len)), stepped(1, latency_s, 1.0, 1000, 500)
    return replace(known, key=key)


def test_prompts_and_contexts_are_separate_series() -> None:
    """A step takes 1 s and 2 s after prompts of 64 and 128 tokens; 2 s and 4 s after contexts of 64 and 256.

    They are two series, with slopes of log 2 / log(132 / 68) and log 2 / log(260 / 68).
    """
    prompted, filled = [decoded(64, 0, 1.0), decoded(128, 0, 2.0)], [decoded(0, 64, 2.0), decoded(0, 256, 4.0)]
    assert [test.fixed["filled"] for test in doubling_tests([*prompted, filled[0]], A100)] == ["by a prompt"]
    tests = doubling_tests([*prompted, *filled], A100)
    slopes = {test.fixed["filled"]: [step.slope for step in test.doublings] for test in tests}
    assert slopes == {
        "by a prompt": [pytest.approx(math.log(2) / math.log(132 / 68))],
        "directly": [pytest.approx(math.log(2) / math.log(260 / 68))],
    }
    assert [cell for cell in filled if tests[0].holds(cell.key)] == []
