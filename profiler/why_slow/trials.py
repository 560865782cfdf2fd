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
from profiler.why_slow.findings import DECISIVE, FEW_ROUNDS, LEAST_ROUNDS, LEAST_SHARE, ChangeTrial
from profiler.why_slow.observations import Observations, steady_s
from profiler.why_slow.recorder import Recorder
from profiler.why_slow.repeat_call import CallGroup, Candidate, RepeatedRun, repeat

# Shorter calls are repeated within a round.
_SHORT_S = 0.2
# A changed call that is warm and still takes this many times as long as the script's own gets no further rounds.
_HOPELESS = 2.0
# At most so many first calls per group are repeated once warm.
_MOST_FIRSTS = 8


def try_changes(recorder: Recorder, seen: Observations, budget_s: float) -> tuple[list[ChangeTrial], list[str]]:
    """(trials, reasons why other changes were not tried), the most expensive calls first.

    Trials end after `budget_s` seconds or at an interrupt; those made until then are returned.
    """
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
            missed.append("all other changes: interrupted")
        except Exception as error:  # a user's model may fail in any way, and the answer is useful without more trials
            missed.append(f"all other changes: {describe_error(error)}")
    return trials, missed


def _tried(candidate: Candidate, group: CallGroup, budget_s: float, deadline_s: float) -> ChangeTrial | str:
    """The trial of one change, or the reason why it could not be tried."""
    left_s = deadline_s - now_s()
    name = f"{candidate.id} at {candidate.where}"
    if left_s <= 0:
        return f"{name}: no time was left"
    allowed_s = min(left_s, budget_s / 2)
    only_changed = candidate.alone or 2 * FEW_ROUNDS * candidate.seconds > allowed_s
    try:
        rounds = (_pairs_with_own_calls if only_changed else _interleaved_pairs)(candidate, allowed_s)
    except Exception as error:
        return f"{name}: {first_line(error)}"
    if not rounds:
        return f"{name}: there was only time for a single run"
    return ChangeTrial(
        candidate.id,
        tuple(call.number for call in group.calls),
        rounds,
        candidate.where,
        candidate.evidence,
        candidate.change,
        candidate.shape or group.middle[0].words,
        against_its_own=only_changed,
    )


def _groups(recorder: Recorder, seen: Observations, missed: list[str], least_s: float = 0.0) -> list[CallGroup]:
    """Groups of calls that take at least `least_s` seconds, the most expensive first.

    Calls whose model no longer exists are repeated on another model of the same class. Reasons why calls cannot be
    repeated are added to `missed`.
    """
    alive = {call.model: model for call, noted in zip(seen.calls, recorder.notes, strict=True)
             if (model := noted.model()) is not None}  # fmt: skip
    by_class = {type(model).__name__: model for model in alive.values()}
    numbers_by_key: dict[tuple[object, ...], list[int]] = {}
    for call in seen.calls:
        # The prompt length is not in the key: in a hand-written loop without a cache it grows by one token per call.
        key = (
            call.kind, call.model.split(" (")[0], call.where, call.context_len > 0, bool(call.failed),
            *call.settings.items(),
        )  # fmt: skip
        numbers_by_key.setdefault(key, []).append(call.number)
    loaded_at = seen.loads[-1].where if seen.loads else ""
    groups = []
    for numbers in numbers_by_key.values():
        calls, notes = [seen.calls[number] for number in numbers], [recorder.notes[number] for number in numbers]
        model = alive.get(calls[-1].model, by_class.get(calls[-1].model.split(" (")[0]))
        if steady_s(calls) < least_s:
            continue
        if model is None or all(noted.arguments is None for noted in notes):
            reason = f"they failed ({calls[0].failed})" if calls[0].failed else "their model no longer exists"
            missed.append(f"the calls at {calls[0].where}: {reason}")
            continue
        groups.append(CallGroup(calls, notes, model, loaded_at or calls[0].where))
    return sorted(groups, key=lambda group: -group.seconds)


def once_warm(recorder: Recorder, seen: Observations, budget_s: float) -> Observations:
    """The observations with `warm_s` of first calls, which are repeated for that, the most expensive first.

    Trials use warm calls, and no change saves the one-time costs of first calls (loading code, allocating memory). The
    repeats end after `budget_s` seconds or at an interrupt.
    """
    deadline_s = now_s() + budget_s
    warm_s: dict[int, float] = {}
    with quiet_libraries(), torch.random.fork_rng(devices=[]), contextlib.suppress(KeyboardInterrupt):
        for group in _groups(recorder, seen, []):
            for first, noted in group.firsts[:_MOST_FIRSTS]:
                if noted.arguments is None or now_s() + first.seconds > deadline_s:
                    continue
                with contextlib.suppress(Exception):  # a call that cannot be repeated counts in full
                    run = repeat(noted, first, group.model)
                    repeated_s = _once_s(run, noted.clock)
                    if now_s() + repeated_s < deadline_s:  # the first repeat also fills a cache and allocates memory
                        repeated_s = min(repeated_s, _once_s(run, noted.clock))
                    repeated_s += sum(first.callbacks_s.values())
                    # Calls that overlap it in other threads had the same one-time costs.
                    share = min(1.0, repeated_s / first.seconds)
                    warm_s |= {call.number: share * call.seconds for call in group.others(first)}
    return replace(seen, calls=tuple(replace(call, warm_s=warm_s.get(call.number)) for call in seen.calls))


def _once_s(run: RepeatedRun, clock: Clock) -> float:
    """Seconds of one run, by the clock that timed the script's own call."""
    start = clock.mark()
    run()
    end = clock.mark()
    clock.synchronize()
    return clock.seconds([start, end])[0]


def _interleaved_pairs(candidate: Candidate, budget_s: float) -> tuple[tuple[float, float], ...]:
    """Pairs of (seconds unchanged, seconds changed), warmed up, in alternating order.

    They end early at the first pair without a saving, or if three pairs save 30 % each.
    """
    start_s = now_s()
    repeats = max(1, min(effort.STANDARD.script_repeats, round(_SHORT_S / max(candidate.seconds, 1e-3))))

    def timed(run: RepeatedRun) -> float:
        # The other run has filled memory and caches, so a short call gets a run before it, as in the script.
        if candidate.seconds < _SHORT_S:
            run()
        _synchronize()
        return _seconds(run, repeats)

    # The script has warmed up the unchanged call; the changed one has its one-time costs in its first run.
    with candidate.within():
        candidate.changed()
        _synchronize()
        quickest_s = min(_seconds(candidate.changed) for _ in range(2))
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
        if len(rounds) == FEW_ROUNDS and all(1 - after / before > DECISIVE for before, after in rounds):
            break
    return tuple(rounds)


def _pairs_with_own_calls(candidate: Candidate, budget_s: float) -> tuple[tuple[float, float], ...]:
    """Pairs of (seconds of a call of the script, seconds changed), used if there is no time to run both."""
    start_s = now_s()
    changed_s: list[float] = []
    # One more run than pairs, as the first has the one-time costs and is dropped.
    while len(changed_s) <= LEAST_ROUNDS and (not changed_s or now_s() - start_s + changed_s[-1] < budget_s):
        with candidate.within():
            changed_s.append(_seconds(candidate.changed))
        if len(changed_s) > FEW_ROUNDS and all(1 - after / candidate.seconds > DECISIVE for after in changed_s):
            break
    own = sorted(candidate.own_s)
    if len(own) < FEW_ROUNDS and not candidate.alone and now_s() - start_s + candidate.seconds < budget_s:
        # One or two calls may have been disturbed, and the first has one-time costs.
        own = [_seconds(candidate.as_is)]
    return tuple((own[index * len(own) // len(changed_s)], after) for index, after in enumerate(changed_s[1:]))


def _seconds(run: RepeatedRun, repeats: int = 1) -> float:
    """Seconds per run, on the host's clock and until the device is done."""
    before_s = now_s()
    for _ in range(repeats):
        run()
    _synchronize()
    return (now_s() - before_s) / repeats


def _synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
