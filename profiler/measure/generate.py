"""Decode steps inside transformers' `generate` and in roofscope's own loop, in turn, part by part."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from profiler.device.clock import no_gc, now_s
from profiler.engines.transformers import EagerEngine, GenerateEngine
from profiler.facts.measurements import GenerateSteps
from profiler.grid.cells import Cell
from profiler.measure.subject import Subject
from profiler.patching import patched

# Both loops run this often in turn, for at most this many tokens; the first turn warms up.
_TURNS, _MOST_TOKENS = 3, 16

PartTimes = dict[str, list[float]]


def time_generate(subject: Subject, cells: Sequence[Cell], budget_s: float) -> Iterator[GenerateSteps]:
    """Time the parts of a decode step within `generate`, for each cell that it stepped, as far as `budget_s` goes.

    By the host's clock: if the device runs after the host, the wait is in the read that ends each step.
    """
    deadline_s = subject.machine.now_s() + budget_s
    for cell in cells:
        if not subject.engines[cell.engine].calls_generate:
            continue
        if subject.machine.now_s() > deadline_s:
            return
        with torch.inference_mode(), no_gc():
            yield _generate_steps(subject, cell)


def _generate_steps(subject: Subject, cell: Cell) -> GenerateSteps:
    import transformers

    model: Any = subject.loaded.module
    own_loop, engine = EagerEngine(model, subject.machine), GenerateEngine(model, subject.machine)
    ids = subject.prompts.of(cell).to(subject.machine.device)
    tokens = min(_MOST_TOKENS, cell.new_tokens)
    streamer = SimpleNamespace(put=lambda tokens: None, end=lambda: None)  # the cheapest: each token goes to the host
    runs: list[Callable[[Callable[[], object]], object]] = [
        functools.partial(own_loop.call, ids, tokens),
        functools.partial(engine.call, ids, tokens),
        functools.partial(engine.call, ids, tokens, streamer=streamer),
    ]
    own, inside, streamed = parts = PartTimes(), PartTimes(), PartTimes()
    for turn in range(_TURNS):
        for steps, run in zip(parts, runs, strict=True):
            _add_steps(steps if turn else {}, model, run)
    few, more = (count_reads(functools.partial(engine.call, ids, count, lambda: None)) for count in (2, 4))
    return GenerateSteps(
        cell=cell,
        transformers=transformers.__version__,
        parts_s={name: tuple(values) for name, values in inside.items()},
        own_s={name: tuple(values) for name, values in own.items()},
        streamed_s=tuple(streamed["read"]),
        reads_a_token=(more - few) / 2,
    )


def _add_steps(steps: PartTimes, model: Any, run: Callable[[Callable[[], object]], object]) -> None:
    """Add the seconds of each part to `steps`, per decode step; the first one, which grows the cache, is left out."""
    totals_by_step: list[tuple[float, dict[str, float]]] = []
    with _timed(model) as totals:
        run(lambda: totals_by_step.append((now_s(), dict(totals))))
    for (before_s, before), (after_s, after) in itertools.pairwise(totals_by_step[2:]):
        steps.setdefault("step", []).append(after_s - before_s)
        for name in after:
            steps.setdefault(name, []).append(after[name] - before[name])


@contextlib.contextmanager
def _timed(model: Any) -> Iterator[dict[str, float]]:
    """Context manager that yields the seconds in each part so far; 0 for parts that this transformers lacks."""
    from transformers import cache_utils
    from transformers.generation import logits_process, stopping_criteria, utils

    targets = (
        ("stopping", stopping_criteria.StoppingCriteriaList, "__call__"),
        ("read", getattr(utils, "StopCheck", None), "__call__"),
        ("processors", logits_process.LogitsProcessorList, "__call__"),
        ("inputs", model, "prepare_inputs_for_generation"),
        ("inputs", model, "_update_model_kwargs_for_generation"),
        ("cache", cache_utils.Cache, "update"),
        ("forward", model, "forward"),
    )
    totals = {part: 0.0 for part, _, _ in targets}

    def adding(part: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def timed(*args: Any, **named: Any) -> Any:
            start_s = now_s()
            try:
                return original(*args, **named)
            finally:
                totals[part] += now_s() - start_s

        return timed

    with contextlib.ExitStack() as stack:
        for part, owner, name in targets:
            if hasattr(owner, name):
                stack.enter_context(patched(owner, **{name: adding(part, getattr(owner, name))}))
        yield totals


_READS = torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default, torch.ops.aten.is_nonzero.default
"""The operators of `.item()`, `bool(tensor)` and printing, in any mode; a GPU's host waits for each."""


class _Counting(TorchDispatchMode):  # type: ignore[misc]
    reads = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.reads += func in _READS
        return func(*args, **(kwargs or {}))


def count_reads(run: Callable[[], object]) -> int:
    """Return how many single values the host reads from tensors while `run` runs."""
    counting = _Counting()
    with counting:
        run()
    return counting.reads
