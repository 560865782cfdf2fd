"""Try changes on a script's own calls, in interleaved pairs."""

from __future__ import annotations

import contextlib
import gc
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from profiler import effort
from profiler.device.clock import now_s, time_calls, waited_s
from profiler.device.contention import own_s
from profiler.errors import describe_error, first_line
from profiler.why_slow.call_record import CallRecord, models_of
from profiler.why_slow.changes import candidates
from profiler.why_slow.findings import (
    DECISIVE,
    FEW_ROUNDS,
    LEAST_ROUNDS,
    LEAST_SHARE,
    MOST_ROUNDS,
    TRIALS_SHARE,
    TriedChange,
    Untried,
    is_settled,
    new_finding,
    pairs_agree,
    tried_change,
)
from profiler.why_slow.loop_changes import grows_by_a_token
from profiler.why_slow.observations import Call, Observations, steady_s
from profiler.why_slow.recorder import Recorder
from profiler.why_slow.repeat_call import CallGroup, Candidate, WeightedRun, repeat, synchronize

# A side of a pair takes so long at least: shorter calls are repeated.
_SHORT_S = 0.2
# It takes so long if eight such pairs fit into the time: single runs of a short call differ by several percent.
_LONG_S = 0.6
# A changed call that is warm and still takes this many times as long as the script's own gets no further rounds.
_HOPELESS = 2.0
# A first call of which a repeat takes this share had no one-time costs.
_WARM = 0.8
# A longer call takes more than this share of the time for first calls: only its prompt is repeated.
_COLD_SHARE = 0.25
# At most so many first calls per group are repeated once warm.
_MOST_FIRSTS = 8


@dataclass(frozen=True)
class _Pending:
    """A change that is still to be tried."""

    candidate: Candidate
    group: CallGroup
    waited: bool = False
    """Whether it gets what the others left, because its share of the time was not enough."""

    @property
    def name(self) -> str:
        compiled = ", compiled" if self.candidate.once_s else ""
        return f"{self.candidate.id} ({self.candidate.where}){compiled}"

    @property
    def usual_s(self) -> float:
        """Seconds that a change of this kind usually saves on such calls."""
        return self.group.seconds * usual_saving(self.candidate)

    def give_up(self, least_s: float, untried: Untried) -> None:
        """Note a change for whose pairs, of so many seconds, no time is left, with what is known without a trial."""
        tried = self.candidate
        untried.without_time[self.name] = least_s + tried.once_s
        if tried.about:
            how = "from the shapes of the calls and the roofs; there was no time for a trial"
            what = (tried.where, tried.evidence, tried.change)
            saves_s = tried.about * self.group.seconds
            untried.computed.append(new_finding(tried.id, saves_s, *what, "computed", how))


def try_changes(
    groups: Sequence[CallGroup], least_s: float, budget_s: float, spent_s: float, untried: Untried
) -> list[TriedChange]:
    """Trials of groups of at least `least_s` seconds, the most expensive calls first; `untried` gets other changes.

    Each change may take a share of the time that is left, by the seconds of its calls. A change that cannot be tried in
    at least three pairs waits until the others are done, and its share is kept for it. Trials have TRIALS_SHARE of
    `budget_s`, of which `spent_s` have passed, and end at an interrupt; those made until then are returned. The sides
    of a pair leave out the seconds in which this process waits for a core.
    """
    deadline_s = now_s() + TRIALS_SHARE * budget_s - spent_s
    trials: list[TriedChange] = []
    waiting: list[_Pending] = []
    try:
        pending = _pending([group for group in groups if group.seconds >= least_s], untried)
        while pending:
            weights = [each.usual_s for each in (*pending, *waiting)]
            taken = pending.pop(0)
            candidate, closer, left_s = taken.candidate, taken.candidate.closer, deadline_s - now_s()
            share = 1.0 if taken.waited else weights[0] / max(sum(weights), 1e-9)
            plan = plan_trial(candidate, share * left_s - candidate.once_s)
            while isinstance(plan, float) and taken.waited and candidate.fewer and (fewer := candidate.fewer()):
                candidate, plan = fewer, plan_trial(fewer, left_s)
            if not isinstance(plan, float):
                try:
                    trial = run_trial(candidate, taken.group, plan, now_s() + left_s)
                    # It replaces an earlier trial of its change if its pairs agree.
                    same = (trial.id, trial.calls) if trial.claimed else None
                    trials = [*(each for each in trials if (each.id, each.calls) != same), trial]
                    closer = closer if trial.claimed else None
                except NoTimeLeftError:
                    taken.give_up(plan.least_s, untried)
                except Exception as error:
                    untried.add(taken.name, first_line(error))
                if closer is not None:
                    waiting.append(_Pending(closer, taken.group, waited=True))
            elif taken.waited:
                taken.give_up(plan, untried)
            else:
                waiting.append(replace(taken, waited=True))
            if not pending:
                pending, waiting = waiting, []
    except KeyboardInterrupt:
        untried.add("all other changes", "interrupted")
    except Exception as error:  # a user's model may fail in any way, and the answer is useful without more trials
        untried.add("all other changes", describe_error(error))
    return trials


# Share of a call that a change usually saves where it applies, in scripts with one fault (tests/why/scripts.py).
_USUAL_SAVING = {
    "cache-off": 0.7, "one-by-one": 0.6, "padding": 0.6, "beams": 0.6, "offload": 0.6, "uncompiled": 0.6,
    "shared-prefix": 0.5, "threads": 0.1, "growing-cache": 0.1,
}  # fmt: skip
_OTHER_SAVING = 0.3


def _pending(groups: Sequence[CallGroup], untried: Untried) -> list[_Pending]:
    pending = []
    for group in groups:
        try:
            pending += [_Pending(candidate, group) for candidate in candidates(group, untried)]
        except Exception as error:
            untried.add(f"changes to the calls at {group.calls[0].where}", describe_error(error))
    return sorted(pending, key=lambda each: -each.usual_s)


class NoTimeLeftError(Exception):
    """A trial has used its time before its third pair, on a machine that has become slower."""


@dataclass(frozen=True)
class TrialPlan:
    """How a change is tried in the time allowed."""

    allowed_s: float
    least_s: float
    """Seconds of the fewest pairs."""
    tokens: int = 0
    """New tokens that stand for all of a `generate`; 0: it is repeated whole; 1: only its prompt is."""
    repeats: int = 1
    """How often each side of a pair runs."""


# A shortened `generate` has at least so many new tokens, and fewer only if nothing else fits: two tokens stand for a
# short answer without a cache, where each token costs a whole prompt, and one where the prompt is much of the call.
_GOOD_TOKENS, _LEAST_TOKENS, _FEWEST_TOKENS = 12, 4, 2
_SHORT_ANSWER = 16
_PROMPTS_WITH_CACHE = 2
_LEAST_PROMPT, _SAFE_SHARE = 0.25, 0.75


def plan_trial(candidate: Candidate, allowed_s: float) -> TrialPlan | float:
    """The plan that fits into `allowed_s`, or the seconds that the fewest pairs would take.

    In order of preference: five whole pairs, five shortened ones, three whole ones, three shortened ones, three of the
    prompt only. The changed side is expected to save what such a change usually saves.
    """
    if candidate.alone:
        least_s = (FEW_ROUNDS + 1) * candidate.seconds
        return TrialPlan(allowed_s, least_s) if least_s <= allowed_s else least_s
    changed_share = 1 - usual_saving(candidate)
    few, enough, most = (n + (n + 1) * changed_share for n in (FEW_ROUNDS, LEAST_ROUNDS, MOST_ROUNDS))
    # A short call gets a run before those that are timed.
    before = candidate.seconds < _SHORT_S
    affordable = int(allowed_s / (most * max(candidate.seconds, 1e-6))) - before
    repeats = max(_repeats_for(_SHORT_S, candidate), min(_repeats_for(_LONG_S, candidate), affordable))
    side_s = candidate.seconds * (repeats + before)
    least_s = few * side_s
    if enough * side_s <= allowed_s:
        return TrialPlan(allowed_s, least_s, repeats=repeats)
    is_short = candidate.new_tokens <= _SHORT_ANSWER and candidate.prompts > _PROMPTS_WITH_CACHE
    least_tokens = _FEWEST_TOKENS if is_short else _LEAST_TOKENS
    if not candidate.as_is.shortened(least_tokens):
        return TrialPlan(allowed_s, least_s, repeats=repeats) if least_s <= allowed_s else least_s
    # Each shortened side is a prompt or more, one of them with a short answer; it is run once before the pairs.
    step_s = max(candidate.seconds - candidate.prompt_s, 1e-6) / max(1, candidate.new_tokens - 1)
    prompts_s = candidate.prompts * candidate.prompt_s

    def tokens(sides: float) -> int:
        return min(int((allowed_s / (sides + 1) - prompts_s) / step_s), candidate.new_tokens - 1)

    if tokens(enough) >= _GOOD_TOKENS:
        return TrialPlan(allowed_s, least_s, tokens(enough))
    short_s = (few + 1) * (prompts_s + least_tokens * step_s)
    # Both sides can run much of the call, its prompt, without the other tokens.
    much = candidate.saves_in_prompt and candidate.prompt_s > _LEAST_PROMPT * candidate.seconds
    stands_for_all = much and candidate.as_is.shortened(1) and candidate.changed.shortened(1)
    prompt_s = few * candidate.prompt_s if stands_for_all else math.inf
    # Three pairs that barely fit do not fit if the change saves less than usual.
    if least_s <= (_SAFE_SHARE if prompt_s <= allowed_s else 1.0) * allowed_s:
        return TrialPlan(allowed_s, least_s, repeats=repeats)
    if tokens(few) >= least_tokens:
        return TrialPlan(allowed_s, short_s, tokens(few))
    if prompt_s <= allowed_s:
        return TrialPlan(allowed_s, prompt_s, tokens=1)
    return min(least_s, short_s, prompt_s)


def _repeats_for(seconds: float, candidate: Candidate) -> int:
    """How many runs of a call take so long."""
    return max(1, min(effort.STANDARD.script_repeats, round(seconds / max(candidate.seconds, 1e-3))))


def usual_saving(candidate: Candidate) -> float:
    """Share of a call that a change of this kind usually saves.

    A batch reads the weights once for all sequences; the arithmetic of their prompts stays.
    """
    share = _USUAL_SAVING.get(candidate.id, _OTHER_SAVING)
    if candidate.id == "one-by-one" and candidate.seconds > 0:
        share *= 1 - min(1.0, candidate.prompt_s / candidate.seconds)
    return share


def run_trial(candidate: Candidate, group: CallGroup, plan: TrialPlan, deadline_s: float) -> TriedChange:
    """The trial of one change to a group of calls, until `deadline_s` on the clock of `now_s`.

    Raises NoTimeLeftError if that comes before the third pair.
    """
    shape = candidate.shape or group.middle[0].words
    gc.collect()  # of the script's last call, and of the trial before: a cache, or a copy of the model
    if candidate.alone:
        rounds = _pairs_with_own_calls(candidate, deadline_s)
    else:
        rounds = _interleaved_pairs(candidate, plan, deadline_s)
        if plan.tokens:
            shape += ", its prompt only" if plan.tokens == 1 else f", as {plan.tokens} of its tokens"
    evidence = candidate.evidence
    if candidate.explain is not None and pairs_agree(rounds):
        with contextlib.suppress(Exception):  # the saving is known without it
            evidence += candidate.explain(deadline_s)
    numbers = tuple(call.number for call in group.calls)
    what = (candidate.where, evidence, candidate.change, shape)
    return tried_change(
        candidate.id, numbers, rounds, *what, stand_in=candidate.stand_in, against_its_own=candidate.alone
    )


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
    loaded = [(id(model), load.where) for model, load in zip(recorder.loaded_models, seen.loads, strict=True)]
    last_load = seen.loads[-1].where if seen.loads else ""
    first_calls = {call.model: call.where for call in reversed(seen.calls)}
    groups = []
    for pairs in by_key.values():
        calls, notes = [call for call, _ in pairs], [noted for _, noted in pairs]
        first, last = calls[0], calls[-1]
        model = models.get(last.model)
        if model is not None and any(noted.arguments is not None for noted in notes):
            loaded_at = dict(loaded).get(id(model), last_load) or first_calls[last.model]
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
            very_first, *others = group.firsts
            others = [] if grows_by_a_token(group.calls) else sorted(others, key=lambda pair: -pair[0].seconds)
            for number, (first, noted) in enumerate([very_first, *others][:_MOST_FIRSTS]):
                together = group.others(first)
                later = [call.seconds for call in group.calls if call.words == first.words and call not in together]
                known = later and first.seconds > _SHORT_S
                repeated_s = min(later) if known else _repeated_s(group, first, noted, deadline_s)
                if repeated_s is None:
                    continue
                # Calls that overlap it in other threads had the same one-time costs.
                share = min(1.0, repeated_s / first.seconds)
                warm_s |= {call.number: share * call.seconds for call in together}
                if number and share > _WARM:
                    break
    return replace(seen, calls=tuple(replace(call, warm_s=warm_s.get(call.number)) for call in seen.calls))


def _repeated_s(group: CallGroup, first: Call, noted: CallRecord, deadline_s: float) -> float | None:
    """Seconds of a repeat of a first call, or of its prompt and the rest as it was; None without time or if it fails.

    It is repeated by the clock that timed it. The one-time costs of a long `generate` are those of its prompt.
    """
    left_s = deadline_s - now_s()
    # On a GPU, attention may also have made a plan for each new length.
    whole = first.seconds <= left_s * (_COLD_SHARE if first.settings.on_cpu else 1.0)
    by_prompt = not whole and first.prompt_s > 0
    if noted.arguments is None or (first.prompt_s if by_prompt else first.seconds) > left_s:
        return None
    try:
        run = repeat(noted, replace(first, new_tokens=1) if by_prompt else first, group.model)
        [repeated_s] = time_calls(run, noted.clock, 1, drop_first=False)
        if now_s() + repeated_s < deadline_s:  # the first repeat also fills a cache and allocates memory
            repeated_s = min(repeated_s, *time_calls(run, noted.clock, 1, drop_first=False))
    except Exception:  # a call that cannot be repeated counts in full
        return None
    return repeated_s + (first.seconds - first.prompt_s if by_prompt else first.left_out_s)


def _interleaved_pairs(candidate: Candidate, plan: TrialPlan, deadline_s: float) -> tuple[tuple[float, float], ...]:
    """Pairs of (seconds unchanged, seconds changed), warmed up, in alternating order.

    If only the prompt is repeated, both sides include the seconds of the other tokens as the script took them. Pairs
    end early if three pairs save 30 % each, or two pairs save nothing. Raises NoTimeLeftError if `deadline_s`
    comes before the third.
    """
    start_s = now_s()
    as_is = candidate.as_is.shortened(plan.tokens) or (WeightedRun(1.0, candidate.as_is),)
    changed = candidate.changed.shortened(plan.tokens) or (WeightedRun(1.0, candidate.changed),)
    rest_s = max(0.0, candidate.seconds - candidate.prompt_s) if plan.tokens == 1 else 0.0

    def timed(parts: Sequence[WeightedRun]) -> float:
        # The other run has filled memory and caches, so a short call gets a run before it, as in the script.
        if candidate.seconds < _SHORT_S:
            parts[0].run()
        synchronize()
        return rest_s + _total_s(parts, plan.repeats)

    # The script has warmed up the unchanged call; the changed one has its one-time costs in its first run.
    if plan.tokens > 1:
        _total_s(as_is)
    with candidate.within():
        quickest_s = _total_s(changed)
        if quickest_s > _HOPELESS * candidate.seconds:
            quickest_s = _total_s(changed)
    if quickest_s > _HOPELESS * candidate.seconds:
        return ((candidate.seconds, quickest_s),)
    first_s = now_s()
    rounds: list[tuple[float, float]] = []
    while not is_settled(rounds):
        # The fewest pairs may take what others left, but no more than all.
        until_s = deadline_s if len(rounds) < FEW_ROUNDS else min(deadline_s, start_s + plan.allowed_s)
        if now_s() + (now_s() - first_s) / max(1, len(rounds)) > until_s:
            break
        if len(rounds) % 2:
            as_is_s = timed(as_is)
        with candidate.within():
            changed_s = timed(changed)
        if not len(rounds) % 2:
            as_is_s = timed(as_is)
        rounds.append((as_is_s, changed_s))
    if len(rounds) < FEW_ROUNDS and not is_settled(rounds):
        raise NoTimeLeftError
    return tuple(rounds)


def _pairs_with_own_calls(candidate: Candidate, deadline_s: float) -> tuple[tuple[float, float], ...]:
    """Pairs of (seconds of a call of the script, seconds changed), for calls that must not be repeated unchanged.

    Raises NoTimeLeftError if `deadline_s` comes before the third.
    """
    changed_s: list[float] = []
    # One more run than pairs, as the first has the one-time costs and is dropped.
    while len(changed_s) <= LEAST_ROUNDS and (not changed_s or now_s() + changed_s[-1] < deadline_s):
        with candidate.within():
            changed_s.append(waited_s(candidate.changed, synchronize))  # as the script's calls were timed
        if len(changed_s) > FEW_ROUNDS and all(1 - after / candidate.seconds > DECISIVE for after in changed_s):
            break
    if len(changed_s) <= FEW_ROUNDS:
        raise NoTimeLeftError
    own = sorted(candidate.own_s)
    return tuple((own[index * len(own) // len(changed_s)], after) for index, after in enumerate(changed_s[1:]))


def _total_s(parts: Sequence[WeightedRun], repeats: int = 1) -> float:
    """Seconds that some parts stand for, without waits for a core."""
    return sum(part.weight * waited_s(part.run, synchronize, repeats, now=own_s) for part in parts)
