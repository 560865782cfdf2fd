"""`batch-test`: the grids of doubled batches, of which one is chosen when the model is loaded."""

from __future__ import annotations

from dataclasses import replace

from profiler.grid.cells import PHASES
from profiler.grid.ladder import TEST_PROMPTS, doubling_grids
from profiler.options import one_of
from profiler.run.options import Options
from profiler.run.validate import PreparedRun, prepare


def prepare_batch_test(
    options: Options, phase: str, prompt_len: int | None = None, context_len: int | None = None
) -> PreparedRun:
    """Return a checked run that doubles the batch until memory, throughput or the budget ends it.

    Without a length of the prompt or of the cache, the prompt is as long as three doublings leave time for. Raises
    RequestError, as `prepare` does.
    """
    one_of(phase, "--phase", PHASES)
    prompt_lens = [prompt_len] if prompt_len else TEST_PROMPTS
    grids = doubling_grids([] if context_len else prompt_lens, [context_len] if context_len else [], options.new_tokens)
    return replace(prepare(options, grids), ascending=True, doubled="prefill" if phase == "prefill" else "decode")
