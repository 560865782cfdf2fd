"""`batch-test`: choose the batch sizes before anything is measured."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

from profiler.counting.attention_kernel import path_here
from profiler.counting.memory_need import memory_need
from profiler.counting.model_numbers import compute_bound_from_batch, floor_under
from profiler.counting.walk import walk
from profiler.device.machine import machine_for
from profiler.errors import RequestError
from profiler.facts.step import Step
from profiler.grid.cells import PHASES, Cell, CellKey
from profiler.loading.device_map import planned_weight_bytes, room_here_bytes
from profiler.loading.meta_model import plan, quiet_libraries
from profiler.loading.request import dtype_name
from profiler.measure.rounds import USUAL_ATTAINED
from profiler.options import one_of
from profiler.run.options import Options
from profiler.run.setup import measure_ceilings
from profiler.run.stages import SWEEP_SHARE
from profiler.run.validate import PreparedRun, prepare

MOST_SEQUENCES = 4096
# The test continues for two doublings past the batch from which compute limits, so that the slope shows.
_PAST_COMPUTE_BOUND = 4
# A slope needs two batches.
_LEAST_BATCHES = 2


def prepare_batch_test(options: Options, phase: str) -> PreparedRun:
    """Return a checked run over doubled batch sizes.

    The largest batch is limited by predicted memory, by two doublings past the batch from which a step is
    compute-bound, and by what the budget is expected to visit once. `options` gives one prompt length (or one context
    length for decode); its batch sizes are replaced. If the budget cuts batches off, a warning says so. Raises
    RequestError, as `prepare` does, and if the budget is too small for two batches.
    """
    one_of(phase, "--phase", PHASES)
    first = prepare(replace(options, batch_sizes=[1]))
    depths = [*first.grid.prompt_lens, *first.grid.context_lens]
    if len(depths) != 1 or first.grid.ragged:
        raise RequestError("a batch test needs one length: give --prompt or --context one number.")
    request, machine = first.request, machine_for(first.request.device)
    with quiet_libraries():
        module = plan(request, first.config)
        work = walk(module)
        weights = planned_weight_bytes(module)
        ceilings = measure_ceilings(request, machine, work, fresh=options.fresh)
    roofs, dtype = ceilings.roof_set(machine.device.type), dtype_name(request.dtype)

    def visit_s(cell: Cell) -> float:
        """Expected seconds of a first visit: two prefills, one of them to warm up, and the decode steps."""
        floors_s = {key: floor_under(work, Step.of(key), roofs, dtype).total_s for key in cell.keys}
        times = {"prefill": 2, "decode": cell.decode_steps}
        return sum(floor_s * times[key.phase] for key, floor_s in floors_s.items()) / USUAL_ATTAINED

    cells = first.grid.cells
    step = Step.of(CellKey("prefill" if phase == "prefill" else "decode", cells[0]))
    knee = compute_bound_from_batch(work, step, roofs, dtype)
    most = MOST_SEQUENCES if knee is None else min(MOST_SEQUENCES, max(8, _PAST_COMPUTE_BOUND * knee))
    room = room_here_bytes(machine.device)
    path = path_here(module, work, machine.device, request.dtype, depths[0])
    batches = [1]
    while (batch := 2 * batches[-1]) <= most:
        need = memory_need(work, weights, Step(batch, depths[0], 0), options.new_tokens, path)
        if (need.safe_bytes if machine.may_spill else need.peak_bytes) > room:
            break
        batches.append(batch)
    expected_s = [sum(visit_s(replace(cell, batch_size=batch)) for cell in cells) for batch in batches]
    affordable, warnings = _affordable(first.budget_s, batches, expected_s)
    return replace(prepare(replace(options, batch_sizes=affordable)), warnings=warnings, ascending=True)


def _affordable(
    budget_s: float, batches: Sequence[int], expected_s: Sequence[float]
) -> tuple[Sequence[int], tuple[str, ...]]:
    """The batches that a budget visits once, and a warning if it cuts some off. Raises RequestError."""
    total_s = [seconds / SWEEP_SHARE for seconds in itertools.accumulate(expected_s)]
    affordable = [batch for batch, seconds in zip(batches, total_s, strict=True) if seconds <= budget_s]
    if len(affordable) < (least := min(_LEAST_BATCHES, len(batches))):
        raise RequestError(
            f"--budget {budget_s:g} is too small: batches of up to {batches[least - 1]} need about"
            f" --budget {math.ceil(total_s[least - 1])}. Use that, a shorter prompt or fewer --new-tokens."
        )
    if len(affordable) == len(batches):
        return affordable, ()
    return affordable, (
        f"--budget {budget_s:g} ends this test at batch {affordable[-1]}: up to {batches[-1]} it needs about"
        f" --budget {math.ceil(total_s[-1])}.",
    )
