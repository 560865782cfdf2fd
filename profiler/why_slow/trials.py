"""The answer to a script that called models: its floor, its costs, and changes to its calls, tried in pairs."""

import contextlib
import gc
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from profiler import effort
from profiler.device.clock import now_s, time_calls, waited_s
from profiler.device.contention import own_s
from profiler.device.machine import machine_for
from profiler.errors import RequestError, describe_error, first_line
from profiler.measure.trial_queue import Attempt, in_turn, try_in_order
from profiler.why_slow.batch_and_loop_changes import grows_by_a_token
from profiler.why_slow.call_record import CallRecord, models_of
from profiler.why_slow.change_registry import candidates
from profiler.why_slow.costs import (
    ModuleTimes,
    conversion_findings,
    fallback_findings,
    module_times,
    placement_findings,
    plan_findings,
)
from profiler.why_slow.findings import (
    FEW_ROUNDS,
    LEAST_ROUNDS,
    LEAST_SHARE,
    MOST_ROUNDS,
    TRIALS_SHARE,
    CallFloor,
    Finding,
    Rounds,
    TriedChange,
    Untried,
    Why,
    is_settled,
    judge_calls,
)
from profiler.why_slow.floor import Subject, floor_of_calls, subjects_of
from profiler.why_slow.observations import Call, Observations, steady_s
from profiler.why_slow.recorder import Recorder
from profiler.why_slow.repeat_call import CallGroup, Candidate, Run, repeat

# Share of the budget for repeating first calls.
_FIRST_CALLS_SHARE = 0.25
# Share of the budget by whose end the modules that the floor or a finding needs were timed.
_MODULES_SHARE = 0.5
# A side of a pair takes about so long: single runs of a short call differ by several percent.
_SIDE_S = 0.6
# A call that is shorter gets one more run before it, since the other side has filled memory and caches.
_SHORT_S = 0.2
# So many tokens stand for a longer `generate`, and so many forwards for a longer loop; fewer where time is short.
_FIRST_TOKENS = 12
_FEW_TOKENS = 6
# A changed call that is warm and still takes this many times as long as the script's own gets no further rounds.
_HOPELESS = 2.0
# A first call of which a repeat takes this share had no one-time costs.
_WARM = 0.8
# A longer call takes more than this share of the time for first calls: only its prompt is repeated.
_COLD_SHARE = 0.25
# At most so many first calls per group are repeated once warm.
_MOST_FIRSTS = 8


def with_trials(recorder: Recorder, seen: Observations, budget_s: float | None, start_s: float) -> Why:
    """The answer to a script that called models, which it began to look for at `start_s`."""
    limits = effort.STANDARD
    if budget_s is None:
        budget_s = min(limits.script_most_s, max(limits.script_least_s, seen.wall_s))
    on_core = 1 - seen.waiting
    seen = once_warm(recorder, seen, _FIRST_CALLS_SHARE * on_core * budget_s)
    untried = Untried()
    groups = call_groups(recorder, seen, untried)
    until_s = start_s + _MODULES_SHARE * budget_s
    subjects: dict[str, Subject] = {}
    known: dict[CallGroup, ModuleTimes | None] = {}

    def times_of(group: CallGroup) -> ModuleTimes | None:
        if known.get(group) is None:
            subject = subjects.get(group.calls[0].model)
            known[group] = module_times(group, lambda seconds: now_s() + seconds / on_core <= until_s, subject)
        return known[group]

    floor = _floor(recorder, seen, groups, subjects, times_of) if limits.script_floor else None
    for group in groups:
        group.floor = floor
    more = [
        *placement_findings(groups, untried),
        *plan_findings(groups, untried),
        *fallback_findings(seen.fallbacks, groups, times_of, untried),
    ]
    trials = try_changes(groups, LEAST_SHARE * seen.steady_s, start_s + TRIALS_SHARE * budget_s, untried, on_core)
    more += conversion_findings(seen, recorder.loaded_models)
    until_s = start_s + budget_s
    times = times_of(groups[0]) if groups and floor else None
    slowest = times.slowest() if times else []
    return judge_calls(seen, trials, floor, untried.lines(budget_s), [*more, *untried.computed], slowest)


def _floor(
    recorder: Recorder,
    seen: Observations,
    groups: Sequence[CallGroup],
    subjects: dict[str, Subject],
    times_of: Callable[[CallGroup], ModuleTimes | None],
) -> CallFloor | None:
    """The floor of all calls that did not fail, if a model can be counted; `subjects` gets those of the models."""
    outside_s: dict[int, float | None] = {}
    calls = [call for call in seen.calls if not call.failed]
    with contextlib.suppress(Exception):  # a user's model may fail in any way, and the answer is useful without a floor
        subjects |= subjects_of(recorder.notes)
        for group in groups:
            names = tuple(f"{name}." for name in subjects[group.calls[0].model].outside)
            if not (has_tokens := group.call.prompt_len > 0):
                names = ("",)  # all modules are counted as they run
            if names and (not has_tokens or _has_other_inputs(group)):
                times = times_of(group)
                more_s = times.ceiling_within(names) / len(group.calls) if times else None
                outside_s |= {call.number: more_s for call in group.calls}
        if calls and (found := floor_of_calls(calls, subjects, outside_s)).seconds:
            return found
    return None


def _has_other_inputs(group: CallGroup) -> bool:
    """Whether the calls run an encoder, or were passed other numbers than token ids: pictures, sounds."""
    others = (value for name, value in group.middle[1].named.items() if name not in ("inputs_embeds", "attention_mask"))
    return group.model.config.is_encoder_decoder or any(
        getattr(value, "is_floating_point", lambda: False)() for value in others
    )


@dataclass(frozen=True)
class TrialPlan:
    """A trial of a change, of the whole call or of its first tokens."""

    candidate: Candidate
    share_s: float
    """The seconds that it may take, or as much more as its fewest pairs need."""
    tokens: int = 0
    """New tokens that stand for all of a `generate`, or forwards for a loop; 0: it is repeated whole."""
    repeats: int = 1
    """How often each side runs."""

    def cost_s(self, rounds: int = FEW_ROUNDS) -> float:
        """About the seconds of so many pairs, and of one changed run before them, with its one-time costs."""
        tried = self.candidate
        side_s = tried.seconds * (self.repeats + (tried.seconds < _SHORT_S))
        if self.tokens:
            side_s = sum(part.about_s for part in tried.as_is.shortened(self.tokens))
        unchanged = 0 if tried.alone else rounds + bool(self.tokens)
        return (unchanged + (rounds + 1) * (1 - tried.expected)) * side_s + tried.once_s


def plan_trial(candidate: Candidate, share_s: float) -> TrialPlan:
    """The trial of the whole call if five pairs fit into `share_s`, else of its first tokens if they are cheaper."""
    most = MOST_ROUNDS * (2 - candidate.expected)
    repeats = int(min(_SIDE_S, share_s / most) / max(candidate.seconds, 1e-3))
    whole = TrialPlan(candidate, share_s, repeats=max(1, min(effort.STANDARD.script_repeats, repeats)))
    first, few = (replace(whole, tokens=tokens, repeats=1) for tokens in (_FIRST_TOKENS, _FEW_TOKENS))
    could = all(run.shortened(first.tokens) for run in (candidate.as_is, candidate.changed)) and not candidate.alone
    if whole.cost_s(LEAST_ROUNDS) <= share_s or not could:
        return whole
    cheaper = min(whole, first, key=TrialPlan.cost_s)
    return cheaper if cheaper.cost_s() <= share_s else min(cheaper, few, key=TrialPlan.cost_s)


def try_changes(
    groups: Sequence[CallGroup], least_s: float, deadline_s: float, untried: Untried, on_core: float = 1.0
) -> list[TriedChange]:
    """Trials of groups of at least `least_s` seconds; `untried` gets other changes.

    What saves the most per second of its trial comes first; a trial that is closer to what the user would run comes
    after all others, unless its stand-in has saved nothing. Each has a share of the time by what it could save.
    Trials end at `deadline_s`, by `now_s`, or at an interrupt; those made until then are returned. The sides of a pair
    leave out the seconds in which this process waits for a core. `on_core` is the share of the others.
    """
    trials: dict[tuple[str, Sequence[int]], TriedChange] = {}
    closer: list[Candidate] = []

    def run(plan: TrialPlan) -> list[tuple[TrialPlan, TriedChange]]:
        return [(plan, run_trial(plan, deadline_s))]

    def without_time(attempt: Attempt[TrialPlan]) -> tuple[()]:
        tried = attempt.work.candidate
        untried.without_time[tried.name] = attempt.cost_s
        if tried.about:
            untried.computed.append(Finding(
                tried.id, tried.about * tried.group.seconds, tried.where, tried.evidence, tried.change, "computed",
                "from the shapes of the calls and the ceilings; there was no time for a trial",
            ))  # fmt: skip
        return ()

    def failed(plan: TrialPlan, error: Exception) -> None:
        untried.add(plan.candidate.name, first_line(error))
        closer.extend(plan.candidate.closer)

    try:
        found = [each for group in groups if group.seconds >= least_s for each in candidates(group, untried)]
        for waiting in (found, closer):
            per_saved = on_core * max(0.0, deadline_s - now_s()) / max(1e-9, sum(each.expected_s for each in waiting))
            plans = [plan_trial(each, each.expected_s * per_saved) for each in waiting]
            queue = [Attempt(plan, plan.candidate.expected_s, plan.cost_s() / on_core) for plan in plans]
            for plan, trial in try_in_order(queue, run, deadline_s, now_s, without_time, failed):
                if trial.claimed or (trial.id, trial.calls) not in trials:
                    trials[trial.id, trial.calls] = trial
                if trial.claimed:
                    closer.extend(plan.candidate.closer)
    except KeyboardInterrupt:
        untried.add("all other changes", "interrupted")
    except Exception as error:  # a lost device, after which the answer is useful without more trials
        untried.add("all other changes", describe_error(error))
    return list(trials.values())


def run_trial(plan: TrialPlan, deadline_s: float) -> TriedChange:
    """The trial of one change. Raises RequestError if `deadline_s`, by `now_s`, comes before its third pair."""
    candidate = plan.candidate
    _free(candidate.group)  # such as the cache of the script's last call
    try:
        rounds = _pairs(plan, now_s() + plan.share_s, deadline_s)
    finally:
        candidate.release()
        _free(candidate.group)
    first_tokens = f", as {plan.tokens} of its tokens" if plan.tokens else ""
    trial = TriedChange(
        candidate.id, tuple(call.number for call in candidate.group.calls), rounds, candidate.where,
        candidate.evidence, candidate.change, (candidate.shape or candidate.group.call.words) + first_tokens,
        candidate.stand_in, candidate.alone,
    )  # fmt: skip
    if trial.claimed:
        with contextlib.suppress(Exception):  # the saving is known without it
            trial = replace(trial, evidence=trial.evidence + candidate.explain())
    return trial


def _free(group: CallGroup) -> None:
    """Free what nothing refers to; on a GPU, graphs of the script may still need the memory that is then unused."""
    gc.collect()
    if group.settings.on_cpu:
        machine_for(torch.device("cpu")).release()


def _pairs(plan: TrialPlan, until_s: float, deadline_s: float) -> Rounds:
    """Pairs of (seconds unchanged, seconds changed), warmed up, until they are settled; from the third on to `until_s`.

    Unchanged calls that cannot be repeated have the median of the script's, and changed ones are timed as these were.
    """
    candidate, seconds = plan.candidate, plan.candidate.seconds
    synchronize = candidate.group.middle[1].clock.synchronize
    as_is, changed = (
        run.shortened(plan.tokens) if plan.tokens else (run,) for run in (candidate.as_is, candidate.changed)
    )

    def timed(parts: Sequence[Run]) -> float:
        if seconds < _SHORT_S:
            parts[0]()
        synchronize()
        return sum(part.weight * waited_s(part, synchronize, plan.repeats, now=own_s) for part in parts)

    def unchanged_s() -> float:
        return seconds if candidate.alone else timed(as_is)

    def changed_s() -> float:
        with candidate.within():
            return timed(changed)

    # The script has warmed up the unchanged call; the changed one has its one-time costs in its first run.
    if plan.tokens:
        unchanged_s()
    start_s = now_s()
    if changed_s() > _HOPELESS * seconds and (again_s := changed_s()) > _HOPELESS * seconds:
        return ((seconds, again_s),)

    def is_enough(rounds: Rounds) -> bool:
        pair_s = (now_s() - start_s) / (1 + len(rounds))
        has_time = now_s() + pair_s <= (deadline_s if len(rounds) < FEW_ROUNDS else min(until_s, deadline_s))
        if not is_settled(rounds) and not has_time and len(rounds) < FEW_ROUNDS:
            raise RequestError("its pairs took longer than there was time for")
        return is_settled(rounds) or not has_time

    return tuple(in_turn(unchanged_s, changed_s, is_enough))


def call_groups(recorder: Recorder, seen: Observations, untried: Untried) -> list[CallGroup]:
    """Groups of calls that can be repeated, the most expensive first.

    Calls whose model no longer exists are repeated on another one of its architecture. `untried` gets the reasons why
    other calls cannot be repeated, if they take 2 % of the time.
    """
    models = models_of(recorder.notes)
    by_key = defaultdict[tuple[object, ...], list[tuple[Call, CallRecord]]](list)
    for call, noted in zip(seen.calls, recorder.notes, strict=True):
        # The prompt length is not in the key: in a hand-written loop without a cache it grows by one token per call.
        key = (call.kind, noted.architecture, call.where, call.context_len > 0, bool(call.failed), call.settings)
        by_key[key].append((call, noted))
    loaded = {id(model): load.where for model, load in zip(recorder.loaded_models, seen.loads, strict=True)}
    last_load = seen.loads[-1].where if seen.loads else ""
    first_calls = {call.model: call.where for call in reversed(seen.calls)}
    groups = []
    for pairs in by_key.values():
        calls, notes = [call for call, _ in pairs], [noted for _, noted in pairs]
        first, last = calls[0], calls[-1]
        model = models.get(last.model)
        if model is not None and any(noted.arguments is not None for noted in notes):
            loaded_at = loaded.get(id(model), last_load) or first_calls[last.model]
            groups.append(CallGroup(calls, notes, model, loaded_at, recorder))
        elif steady_s(calls) >= LEAST_SHARE * seen.steady_s:
            why = "their arguments are not kept: calls share a cache, or the arguments are large"
            if model is None:
                why = "their model no longer exists"
            elif first.failed:
                why = f"they failed ({first.failed})"
            elif first.settings.compiled:
                why = "compiled code is not repeated with changes, which would compile it again"
            untried.add(f"the calls at {first.where}", why)
    return sorted(groups, key=lambda group: -group.seconds)


def once_warm(recorder: Recorder, seen: Observations, budget_s: float) -> Observations:
    """The observations with `warm_s` of first calls, which are repeated for that, the most expensive first.

    Where a later call had the shape of a long first one, its seconds are taken instead of a repeat. A line's other
    shapes, the slowest first, are repeated until one has no one-time costs; of a loop without a cache, whose every call
    has its own shape, only the first of all is. Trials use warm calls, and no change saves the one-time costs of first
    calls (loading code, allocating memory). The repeats end after `budget_s` seconds or at an interrupt.
    """
    deadline_s = now_s() + budget_s
    warm_s: dict[int, float] = {}
    with contextlib.suppress(KeyboardInterrupt):
        for group in call_groups(recorder, seen, Untried()):
            by_shape = defaultdict[str, list[tuple[Call, CallRecord]]](list)
            for call, noted in sorted(zip(group.calls, group.notes, strict=True), key=lambda pair: pair[1].began_s):
                by_shape[call.words].append((call, noted))
            very_first, *others = by_shape.values()
            others = [] if grows_by_a_token(group.calls) else sorted(others, key=lambda alike: -alike[0][0].seconds)
            for number, ((first, noted), *further) in enumerate([very_first, *others][:_MOST_FIRSTS]):
                # Calls that overlap it in other threads had the same one-time costs.
                ended_s = (first.began_s or 0.0) + first.seconds
                together = [first, *(call for call, _ in further if (call.began_s or 0.0) < ended_s)]
                later = [call.seconds for call, _ in further if (call.began_s or 0.0) >= ended_s]
                known = later and first.seconds > _SHORT_S
                repeated_s = min(later) if known else _repeated_s(group, first, noted, deadline_s)
                if repeated_s is None:
                    continue
                share = min(1.0, repeated_s / first.seconds)
                warm_s |= {call.number: share * call.seconds for call in together}
                if number and share > _WARM:
                    break
    return replace(seen, calls=tuple(replace(call, warm_s=warm_s.get(call.number)) for call in seen.calls))


def _repeated_s(group: CallGroup, first: Call, noted: CallRecord, deadline_s: float) -> float | None:
    """Seconds of a repeat of a first call, or of its prompt and the rest as it was; None without time or if it fails.

    It is repeated by the clock that timed it. The one-time costs of a long `generate` are those of its prompt.
    """
    left_s, call, rest_s = deadline_s - now_s(), first, first.left_out_s
    # On a GPU, attention may also have made a plan for each new length.
    if first.prompt_s and first.seconds > left_s * (_COLD_SHARE if first.settings.on_cpu else 1.0):
        call, rest_s = replace(first, new_tokens=1), first.seconds - first.prompt_s
    if noted.arguments is None or first.seconds - rest_s > left_s:
        return None
    with contextlib.suppress(Exception):  # a call that cannot be repeated counts in full
        run = repeat(noted, call, group.model)
        [repeated_s] = time_calls(run, noted.clock, 1, drop_first=False)
        if now_s() + repeated_s < deadline_s:  # the first repeat also fills a cache and allocates memory
            repeated_s = min(repeated_s, *time_calls(run, noted.clock, 1, drop_first=False))
        return repeated_s + rest_s
    return None
