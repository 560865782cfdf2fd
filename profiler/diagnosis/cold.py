"""From how many requests on an engine pays that must be prepared first."""

from __future__ import annotations

from profiler.diagnosis.facts import FirstCalls


def break_even(own: FirstCalls, prepared: FirstCalls) -> float | None:
    """Requests in the life of a process behind which an engine has saved what it took more to begin with.

    (preparation + first request - a later one, both less the other engine's) / what a later request saves; None where
    a later request saves nothing.
    """
    saves_s = own.second_s - prepared.second_s
    if saves_s <= 0:
        return None
    return max(0.0, (prepared.once_s - own.once_s) / saves_s)
