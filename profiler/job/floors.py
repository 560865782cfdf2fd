"""What the calls of a script need at least on this machine: their steps counted, under its measured roofs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import nn

from profiler.diagnosis.why import Call
from profiler.errors import RequestError
from profiler.job.placing import Under, here_roofs, least
from profiler.loading.request import dtype_name
from profiler.work.step import Step
from profiler.work.walk import ModelWork, walk


def floor_of_calls(calls: Sequence[tuple[Call, nn.Module | None]]) -> float:
    """Seconds of all calls together, by the sum of their operators' roofs; dispatch is not in it.

    A call whose model is gone is counted on another of the same class. Raises RequestError where there is none.
    """
    alive = {call.model.split(" (")[0]: model for call, model in calls if model is not None}
    counted: dict[str, tuple[ModelWork, Under, str]] = {}
    total_s = 0.0
    for call, _ in calls:
        name = call.model.split(" (")[0]
        if name not in alive:
            raise RequestError(f"{name} is gone, so that its calls cannot be counted.")
        if name not in counted:
            model = alive[name]
            work, dtype = walk(model), dtype_name(next(model.parameters()).dtype)
            counted[name] = work, here_roofs(work, dtype), dtype
        total_s += _call_floor_s(call, *counted[name])
    return total_s


def _call_floor_s(call: Call, work: ModelWork, under: Under, dtype: str) -> float:
    """A prompt with its real tokens alone, and a step a further token; the last one is not stepped again."""
    tokens = max(1, round(call.prompt_len * (1 - call.padding)))
    queries = np.array([tokens, *[1] * (call.new_tokens - 1)])
    contexts = np.array([call.context_len, *range(tokens, tokens + call.new_tokens - 1)])
    step = Step(np.full(len(queries), call.batch_size), queries, contexts)
    none = np.zeros(len(queries))
    return sum(float(np.sum(side)) for side in least(work, step, under, dtype, none, none))
