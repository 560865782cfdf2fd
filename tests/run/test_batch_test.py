"""The batch-doubling command, from its request to its table."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from profiler.errors import RequestError
from profiler.facts.roofs import READ, Ceilings, Roof
from profiler.run import batch_test
from profiler.run.options import Options


def roof(per_s: float) -> Roof:
    return Roof(per_s, per_s, per_s, 9, "given")


def test_batches_go_two_doublings_past_the_knee_of_the_dtype_that_runs(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The knee follows the roof of the dtype that runs.

    Without a cache, a float32 decode reads 4 bytes for two FLOPs per weight. At 30 FLOPs per byte the knee is at 60
    sequences; by bfloat16's roof it is at 600. The cache and head of this model also move it, but by less than ten
    times.
    """
    roofs = Ceilings({"float32": roof(30e9), "bfloat16": roof(300e9)}, {READ: roof(1e9)}, 1, True)
    monkeypatch.setattr(batch_test, "measure_ceilings", lambda *_, **__: roofs)
    options = Options(model=str(tiny_folder), context_lens=[1], new_tokens=4, dtype="float32", device="cpu")
    sizes = batch_test.prepare_batch_test(options, "decode").grid.batch_sizes
    assert 60 < sizes[-1] <= 256


def test_a_knee_that_is_far_is_no_reason_to_pass_the_budget(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the knee is too far for the budget, the warning names a budget that is enough for all batches.

    At 10 MB/s, every visit reads the weights of 5 steps, so few batches fit. The knee is past 4096.
    """
    weights = 4 * 10_000  # the model has many more
    roofs = Ceilings({"float32": roof(1e12)}, {READ: roof(1e7)}, 1, True)
    monkeypatch.setattr(batch_test, "measure_ceilings", lambda *_, **__: roofs)
    options = Options(model=str(tiny_folder), prompt_lens=[16], new_tokens=4, device="cpu", budget_s=2.0)
    capped = batch_test.prepare_batch_test(options, "decode")
    most = capped.grid.batch_sizes[-1]
    assert 2 <= most < batch_test.MOST_SEQUENCES
    assert len(capped.grid.batch_sizes) * 5 * weights / 1e7 < options.budget_s
    [warning] = capped.warnings
    [whole, enough] = re.findall(r"up to (\d+) .* --budget (\d+)", warning)[0]
    assert f"at batch {most}:" in warning
    more = batch_test.prepare_batch_test(replace(options, budget_s=float(enough)), "decode")
    assert (more.grid.batch_sizes[-1], more.warnings) == (int(whole), ())
    with pytest.raises(RequestError, match=r"--budget 0\.01 is too small: batches of up to 2 .* --budget \d+"):
        batch_test.prepare_batch_test(replace(options, budget_s=0.01), "decode")
