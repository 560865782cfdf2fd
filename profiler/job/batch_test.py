"""The batch-doubling test: which batches to measure, before any is."""

from __future__ import annotations

from dataclasses import replace

from profiler.diagnosis.scaling import crossover
from profiler.errors import RequestError
from profiler.job.foundation import measure_ceilings
from profiler.job.options import Options
from profiler.job.request import Prepared, prepare
from profiler.loading.placement import planned_weight_bytes
from profiler.loading.request import dtype_name
from profiler.loading.skeleton import plan, quiet_libraries
from profiler.machine.machine import machine_for
from profiler.work.footprint import predicted_peak_bytes
from profiler.work.operators import ModelWork
from profiler.work.step import ExecutionPath, Step
from profiler.work.walk import walk

MOST_SEQUENCES = 4096
# The test goes on for two doublings past the predicted knee, where the slope has had time to show.
_PAST_THE_KNEE = 4
_MEMORY_SHARE = 0.9


def prepare_batch_test(options: Options, phase: str) -> Prepared:
    """A run over doubled batches, up to what memory is predicted to hold or two doublings past the predicted knee.

    `options` gives one prompt length (or one context length for a decode); its batch sizes are replaced. Raises
    RequestError, as `prepare` does.
    """
    if phase not in ("prefill", "decode"):
        raise RequestError(f"--phase {phase!r} is unknown; use prefill or decode.")
    first = prepare(replace(options, batch_sizes=[1]))
    depths = [*first.grid.prompt_lens, *first.grid.context_lens]
    if len(depths) != 1 or first.grid.ragged:
        raise RequestError("a batch test doubles the batch at one length; give a single --prompt-len or --context-len.")
    request, machine = first.request, machine_for(first.request.device)
    with quiet_libraries():
        module = plan(request, first.config)
        work = walk(module)
        weights = planned_weight_bytes(module)
        roofs = measure_ceilings(request, machine, work, fresh=options.fresh)
    flops_per_s = roofs.compute_flops_per_s(dtype_name(request.dtype))
    knee = predicted_knee(work, phase, depths[0], options.new_tokens, flops_per_s, roofs.memory_bytes_per_s)
    most = MOST_SEQUENCES if knee is None else min(MOST_SEQUENCES, max(8, int(_PAST_THE_KNEE * knee)))
    room = weights + _MEMORY_SHARE * (machine.available_bytes() - weights)
    batches = [1]
    while (batch := 2 * batches[-1]) <= most:
        if predicted_peak_bytes(work, weights, batch, depths[0], options.new_tokens, ExecutionPath()) > room:
            break
        batches.append(batch)
    return prepare(replace(options, batch_sizes=batches))


def predicted_knee(
    work: ModelWork, phase: str, depth: int, new_tokens: int, flops_per_s: float, bytes_per_s: float
) -> float | None:
    """The batch from which FLOPs overtake bytes at these roofs; None when none does."""

    def step(batch: int) -> Step:
        return Step(batch, depth, 0) if phase == "prefill" else Step(batch, 1, depth + new_tokens // 2)

    one, two = work.work(step(1)), work.work(step(2))
    return crossover(
        float(one.model_flops),
        float(one.model_bytes),
        float(two.model_flops - one.model_flops),
        float(two.model_bytes - one.model_bytes),
        flops_per_s,
        bytes_per_s,
        1.0,
    )
