"""Try changes on a script's own calls, in interleaved pairs."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import torch

from profiler import effort
from profiler.device.clock import Clock, now_s
from profiler.errors import describe_error, first_line
from profiler.loading.meta_model import quiet_libraries
from profiler.why_slow.changes import candidates
from profiler.why_slow.findings import DECISIVE, LEAST_ROUNDS, LEAST_SHARE, ChangeTrial
from profiler.why_slow.observations import Observations, steady_s
from profiler.why_slow.recorder import Recorder
from profiler.why_slow.repeat_call import CallGroup, Candidate, RepeatedRun, repeat

_DECISIVE_ROUNDS = 3
# Calls that took less are repeated within a round, up to so many times.
_SHORT_S = 0.2
# A change whose calls take so many times as long as the script's own, even once warm, is not tried in turn.
_HOPELESS = 2.0
# First calls of so many shapes are run again once warm.
_MOST_FIRSTS = 8


def try_changes(recorder: Recorder, seen: Observations, budget_s: float) -> tuple[list[ChangeTrial], list[str]]:
    """(trials, what could not be tried and why): the dearest calls first, until `budget_s` seconds are spent, or until
    somebody interrupts, which keeps what was tried so far."""
    deadline_s = now_s() + budget_s
    trials: list[ChangeTrial] = []
    missed: list[str] = []
    with quiet_libraries(), torch.random.fork_rng(devices=[]):
        try:
            for group in _groups(recorder, seen, missed, LEAST_SHARE * seen.steady_s):
                for candidate in candidates(group, recorder):
                    trial = _tried(candidate, group, budget_s, deadline_s)
                    if isinstance(trial, str):
                        missed.append(trial)
                    else:
                        trials.append(trial)
        except KeyboardInterrupt:
            missed.append("what else there is: interrupted")
        except Exception as error:  # looking for candidates among a stranger's calls: the answer stands without more
            missed.append(f"what else there is: {describe_error(error)}")
    return trials, missed


def _tried(candidate: Candidate, group: CallGroup, budget_s: float, deadline_s: float) -> ChangeTrial | str:
    """One thing changed about some calls; or why that could not be tried."""
    left_s = deadline_s - now_s()
    here = f"{candidate.id} at {candidate.where}"
    if left_s <= 0:
        return f"{here}: no time was left"
    allowed_s = min(left_s, budget_s / 2)
    alone = candidate.alone or 2 * _DECISIVE_ROUNDS * candidate.seconds > allowed_s
    try:
        rounds = (_against_its_own if alone else _in_turn)(candidate, allowed_s)
    except Exception as error:
        return f"{here}: {first_line(error)}"
    if not rounds:
        return f"{here}: there was time for a single run alone"
    return ChangeTrial(
        candidate.id,
        tuple(call.number for call in group.calls),
        rounds,
        candidate.where,
        candidate.evidence,
        candidate.change,
        candidate.shape or group.middle[0].words,
        against_its_own=alone,
    )


def _groups(recorder: Recorder, seen: Observations, missed: list[str], least_s: float = 0.0) -> list[CallGroup]:
    """Calls that belong together and take `least_s` seconds, the dearest first; those whose model is gone borrow one of
    the same class. Why others cannot be called again is added to `missed`."""
    alive = {call.model: model for call, noted in zip(seen.calls, recorder.notes, strict=True)
             if (model := noted.model()) is not None}  # fmt: skip
    by_class = {type(model).__name__: model for model in alive.values()}
    found: dict[tuple[object, ...], list[int]] = {}
    for call in seen.calls:
        # A hand-written loop that has no cache hands over one more token each time: its calls are of one kind.
        key = (
            call.kind, call.model.split(" (")[0], call.where, call.context_len > 0, bool(call.failed),
            *call.settings.items(),
        )  # fmt: skip
        found.setdefault(key, []).append(call.number)
    loaded_at = seen.loads[-1].where if seen.loads else ""
    groups = []
    for numbers in found.values():
        calls, notes = [seen.calls[number] for number in numbers], [recorder.notes[number] for number in numbers]
        model = alive.get(calls[-1].model, by_class.get(calls[-1].model.split(" (")[0]))
        if steady_s(calls) < least_s:
            continue
        if model is None or all(noted.arguments is None for noted in notes):
            why = f"they failed ({calls[0].failed})" if calls[0].failed else "their model is gone"
            missed.append(f"the calls at {calls[0].where}: {why}")
            continue
        groups.append(CallGroup(calls, notes, model, loaded_at or calls[0].where))
    return sorted(groups, key=lambda group: -group.seconds)


def once_warm(recorder: Recorder, seen: Observations, budget_s: float) -> Observations:
    """What was seen, with what first calls take once more: trials are of warm calls, and what the first alone paid for
    (code that is loaded, memory that is asked for) is no part of what a change saves.

    The dearest first, until `budget_s` seconds are spent, or until somebody interrupts.
    """
    deadline_s = now_s() + budget_s
    warm_s: dict[int, float] = {}
    with quiet_libraries(), torch.random.fork_rng(devices=[]), contextlib.suppress(KeyboardInterrupt):
        for group in _groups(recorder, seen, []):
            for first, noted in group.firsts[:_MOST_FIRSTS]:
                if noted.arguments is None or now_s() + first.seconds > deadline_s:
                    continue
                with contextlib.suppress(Exception):  # what cannot be run again is taken as it was
                    run = repeat(noted, first, group.model)
                    again_s = _once_s(run, noted.clock)
                    if now_s() + again_s < deadline_s:  # a cache is filled in the first run, and memory asked for
                        again_s = min(again_s, _once_s(run, noted.clock))
                    again_s += sum(first.callbacks_s.values())
                    # Calls beside it in other threads were as cold.
                    share = min(1.0, again_s / first.seconds)
                    warm_s |= {call.number: share * call.seconds for call in group.beside(first)}
    return replace(seen, calls=tuple(replace(call, warm_s=warm_s.get(call.number)) for call in seen.calls))


def _once_s(run: RepeatedRun, clock: Clock) -> float:
    """Seconds of a call as the script's own was timed."""
    start = clock.mark()
    run()
    end = clock.mark()
    clock.synchronize()
    return clock.seconds([start, end])[0]


def _in_turn(candidate: Candidate, budget_s: float) -> tuple[tuple[float, float], ...]:
    """Pairs of seconds as it is and changed, the order alternating, both warmed up; ends early where pairs disagree."""
    start_s = now_s()

    repeats = max(1, min(effort.STANDARD.script_repeats, round(_SHORT_S / max(candidate.seconds, 1e-3))))

    def once(run: RepeatedRun) -> float:
        before_s = now_s()
        run()
        _synchronize()
        return now_s() - before_s

    def timed(run: RepeatedRun) -> float:
        # What ran before has left its memory and its caches: a short call comes in a row, as in the script.
        if candidate.seconds < _SHORT_S:
            run()
        _synchronize()
        before_s = now_s()
        for _ in range(repeats):
            run()
        _synchronize()
        return (now_s() - before_s) / repeats

    # The script itself has warmed up what is as it was; what is changed pays in its first run for what happens once.
    with candidate.within():
        candidate.changed()
        _synchronize()
        quickest_s = min(once(candidate.changed) for _ in range(2))
    if quickest_s > _HOPELESS * candidate.seconds:
        return ((candidate.seconds, quickest_s),)
    rounds: list[tuple[float, float]] = []
    while len(rounds) < LEAST_ROUNDS and (not rounds or (now_s() - start_s) * (1 + 1 / len(rounds)) < budget_s):
        if len(rounds) % 2:
            as_is_s = timed(candidate.as_is)
        with candidate.within():
            changed_s = timed(candidate.changed)
        if not len(rounds) % 2:
            as_is_s = timed(candidate.as_is)
        rounds.append((as_is_s, changed_s))
        if changed_s >= as_is_s:
            break
        if len(rounds) == _DECISIVE_ROUNDS and all(1 - after / before > DECISIVE for before, after in rounds):
            break
    return tuple(rounds)


def _against_its_own(candidate: Candidate, budget_s: float) -> tuple[tuple[float, float], ...]:
    """Pairs of seconds of the script's own calls and of the changed one, where there is no time to run both again."""
    start_s = now_s()
    changed_s: list[float] = []
    # The first run pays for what happens once, unless it is the only one that there is time for.
    while len(changed_s) <= LEAST_ROUNDS and (not changed_s or now_s() - start_s + changed_s[-1] < budget_s):
        before_s = now_s()
        with candidate.within():
            candidate.changed()
            _synchronize()
        changed_s.append(now_s() - before_s)
        if len(changed_s) > _DECISIVE_ROUNDS and all(1 - after / candidate.seconds > DECISIVE for after in changed_s):
            break
    own = sorted(candidate.own_s)
    if len(own) < _DECISIVE_ROUNDS and not candidate.alone and now_s() - start_s + candidate.seconds < budget_s:
        # One call, or two, may have come at a bad moment, and the first pays for what happens once.
        before_s = now_s()
        candidate.as_is()
        _synchronize()
        own = [now_s() - before_s]
    return tuple((own[index * len(own) // len(changed_s)], after) for index, after in enumerate(changed_s[1:]))


def _synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
