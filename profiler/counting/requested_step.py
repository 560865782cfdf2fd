"""The step that a request names; no torch."""

from dataclasses import replace

from profiler.counting.floor import verifying
from profiler.errors import RequestError
from profiler.facts.step import Step
from profiler.grid.cells import PHASES
from profiler.grid.ranges import MOST, check_prefix
from profiler.options import one_of


def requested_step(phase: str, batch: int, prompt: int, context: int | None, prefix: int, verify: int) -> Step:
    """Return the step that `count` counts, which its docstring describes. Raises RequestError."""
    one_of(phase, "--phase", PHASES)
    given = ((batch, 1, "--batch"), (prompt, 1, "--prompt"), (context or 0, 0, "--context"), (verify, 0, "--verify"))
    for value, least, option in given:
        if not least <= value <= MOST:
            raise RequestError(f"{option}: {value} is not possible; use {least} to {MOST}.")
    if phase == "prefill":
        if verify:
            raise RequestError("--verify is a decode step of several tokens; leave out --phase prefill.")
        if prefix and context is not None:
            raise RequestError("--prefix is what a prefill has cached; leave out --context, or use it as --prefix.")
        check_prefix(prefix, prompt)
        return Step(batch, prompt - prefix, prefix or context or 0, prefix)
    cached = prompt if context is None else context
    check_prefix(prefix, cached)
    return replace(verifying(batch, verify, cached), shared=prefix)
