"""Trials in their order: which change comes next, whether there is time for it, both sides in turn, what fails."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from profiler.errors import tolerate_errors

_Work = TypeVar("_Work")
_Result = TypeVar("_Result")
_Side = TypeVar("_Side")


@dataclass(frozen=True)
class Attempt(Generic[_Work]):
    """A trial that waits for its turn."""

    work: _Work
    saves_s: float
    cost_s: float
    """Seconds that its change is expected to save, and that the trial is expected to take."""


def try_in_order(
    queue: Iterable[Attempt[_Work]],
    run: Callable[[_Work], Iterable[_Result]],
    deadline_s: float,
    now_s: Callable[[], float],
    without_time: Callable[[Attempt[_Work]], Iterable[_Result]],
    failed: Callable[[_Work, Exception], object],
) -> Iterator[_Result]:
    """Yield the results of trials, the largest expected saving per second of its trial first.

    One that would end after `deadline_s` on the clock `now_s` has the result of `without_time` instead. One that raises
    ends with a call of `failed`, and the next one follows.
    """
    for attempt in sorted(queue, key=lambda each: -each.saves_s / max(each.cost_s, 1e-3)):
        if now_s() + attempt.cost_s > deadline_s:
            yield from without_time(attempt)
            continue
        with tolerate_errors(partial(failed, attempt.work)):
            yield from run(attempt.work)


def in_turn(
    plain: Callable[[], _Side],
    changed: Callable[[], _Side],
    is_enough: Callable[[Sequence[tuple[_Side, _Side]]], bool],
) -> list[tuple[_Side, _Side]]:
    """Return enough pairs, run in the order plain, changed, changed, plain, so that a drift affects both alike."""
    pairs: list[tuple[_Side, _Side]] = []
    while not is_enough(pairs):
        if len(pairs) % 2:
            after = changed()
            pairs.append((plain(), after))
        else:
            pairs.append((plain(), changed()))
    return pairs
