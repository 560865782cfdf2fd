"""The page's expressions are the operators' own formulas: equal at random settings, for every preset."""

from __future__ import annotations

import json
import random

import pytest

from profiler.counting.cache import counted_model
from profiler.explore.document import model_entry
from profiler.explore.expressions import Expression, evaluate
from profiler.facts.step import ExecutionPath, Step
from profiler.loading.source import preset_names, resolve

SETTINGS = 1000


@pytest.mark.parametrize("model", preset_names())
def test_expressions_equal_the_count(model: str) -> None:
    """Dense, grouped, windowed, latent-attention and mixture-of-experts models, in full and in 4 bits."""
    rng = random.Random(model)
    source = resolve(model)
    quants = ("none", "nf4") if model in ("smollm2-135m", "mistral-7b-v0.1") else ("none",)
    for quant in quants:
        counted = counted_model(source, quant=quant)
        # Through JSON, as the page gets it.
        operators = [json.loads(json.dumps(vars(item))) for item in model_entry(counted, quant).operators]
        assert len(operators) == len(counted.work.operators)
        for _ in range(SETTINGS // len(preset_names()) + 1):
            symbols = {
                "batch": rng.randint(1, 512),
                "query": rng.choice([1, rng.randint(1, 8192)]),
                "context": rng.choice([0, rng.randint(0, 32768)]),
            }
            step = Step(**symbols)
            for operator, entry in zip(counted.work.operators, operators, strict=True):
                work = operator.work(step, ExecutionPath())
                assert evaluate(entry["flops"], symbols) == work.model_flops
                moved = sum(evaluate(entry[name], symbols) for name in ("weight_bytes", "kv_bytes", "other_bytes"))
                assert float(moved) == pytest.approx(float(work.model_bytes), rel=1e-15)


def test_what_is_not_an_operation_is_refused() -> None:
    """A formula that the page cannot evaluate must not become a wrong one."""
    import numpy as np

    with pytest.raises(TypeError):
        np.sin(Expression("batch"))
    with pytest.raises(TypeError):
        np.cumsum(Expression("batch"))
