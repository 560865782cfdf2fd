"""Findings: what a script's calls spend, and what a change would save."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from profiler.why_slow.observations import Observations, covered_s, steady_s

LEAST_SHARE = 0.02
"""Of the watched time: what costs less is not worth a word."""
LEAST_ROUNDS = 5
"""Pairs that must all agree in sign: of five of equals all do in 3 % of cases (a sign test)."""
DECISIVE = 0.3
"""A saving of so much of a call that three agreeing pairs are enough."""
FEW_ROUNDS = 3
_FIRST_CALL = 2.0
_GROWING = ("DynamicCache", "dynamic")
_FEWEST_OTHERS = 2
"""A first call is told where it took twice as long as the median of so many others at least, or as itself again."""
_WORTH_ANOTHER_LOOK = 0.1
"""Of the watched time: what the median pair saves of it, though the pairs do not agree, is told as not known."""


@dataclass(frozen=True)
class ChangeTrial:
    """Pairs of a call as it was and with one change, interleaved, on the script's own model."""

    id: str
    calls: tuple[int, ...]
    """Numbers of the calls that it stands for."""
    rounds: tuple[tuple[float, float], ...]
    """(seconds as it is, seconds changed), a pair each."""
    where: str
    evidence: str
    change: str
    shape: str
    """What was tried, in words."""
    against_its_own: bool = False
    """Whether the script's own calls stand for the call as it was: there was no time to run it again."""

    @property
    def saving(self) -> float:
        """Share of the call that the change saves, by the median pair; negative where it costs."""
        return statistics.median(1 - changed / as_is for as_is, changed in self.rounds) if self.rounds else 0.0

    @property
    def is_claim(self) -> bool:
        """Whether all pairs agree that it saves, and there are enough of them."""
        enough = len(self.rounds) >= (FEW_ROUNDS if self.saving > DECISIVE else LEAST_ROUNDS)
        return enough and all(changed < as_is for as_is, changed in self.rounds)


@dataclass(frozen=True)
class Finding:
    """Something to change, with the seconds that it would have saved."""

    id: str
    saves_s: float
    share: float
    """Of the watched time, without what first calls alone pay for."""
    where: str
    evidence: str
    change: str
    basis: str
    """How the seconds are known."""


@dataclass(frozen=True)
class FirstCall:
    """The first of some calls of one shape, beside the median of the others, or of fewer beside itself run again."""

    where: str
    calls: int
    first_s: float
    usual_s: float
    again: bool
    """Whether `usual_s` is of the first itself, run again."""


@dataclass(frozen=True)
class CallFloor:
    """What the same calls need at least on this machine: each prompt once, then a step a token behind a cache."""

    seconds: float
    dispatch_s: float | None
    """The host's part of it, which adds on a CPU and hides behind a card; None where it is not known, nor counted."""


@dataclass(frozen=True)
class Why:
    """The answer to: why is my script slow?"""

    seen: Observations
    findings: tuple[Finding, ...]
    floor: CallFloor | None
    """None where it is not known."""
    tried: tuple[ChangeTrial, ...]
    not_tried: tuple[str, ...] = ()
    """What could not be tried, and why."""

    @property
    def first_calls(self) -> tuple[FirstCall, ...]:
        """First calls of a shape that took much longer than the ones behind them: no steady state."""
        found = []
        for key in dict.fromkeys((call.where, call.words) for call in self.seen.calls):
            first, *others = [call for call in self.seen.calls if (call.where, call.words) == key]
            few = len(others) < _FEWEST_OTHERS
            usual_s = first.steady_s if few else statistics.median(call.seconds for call in others)
            beyond_s = first.seconds - usual_s
            if first.seconds > _FIRST_CALL * usual_s and beyond_s >= LEAST_SHARE * self.seen.watched_s:
                found.append(FirstCall(key[0], 1 + len(others), first.seconds, usual_s, again=few))
        return tuple(found)

    @property
    def undecided(self) -> tuple[ChangeTrial, ...]:
        """Trials that would save a tenth of the watched time by their median pair, but whose pairs do not agree."""
        return tuple(trial for trial in self._no_claims if self.share_of(trial) >= _WORTH_ANOTHER_LOOK)

    @property
    def too_close(self) -> tuple[ChangeTrial, ...]:
        """Findings that save less than the main ones, and more than the threshold to be listed."""
        return tuple(trial for trial in self._no_claims if LEAST_SHARE <= self.share_of(trial) < _WORTH_ANOTHER_LOOK)

    @property
    def _no_claims(self) -> list[ChangeTrial]:
        return [trial for trial in self.tried if not trial.is_claim]

    def share_of(self, trial: ChangeTrial) -> float:
        """What a trial would save of the watched time, by its median pair."""
        return _saves_s(trial, self.seen) / self.seen.steady_s


def judge_calls(
    seen: Observations, trials: Sequence[ChangeTrial], floor: CallFloor | None = None, not_tried: Sequence[str] = ()
) -> Why:
    """Findings from what was seen and tried, the dearest first; what saves under 2 % is left out."""
    found = [_of_trial(trial, seen) for trial in trials if trial.is_claim]
    found += [*_reloads(seen), *_recompilations(seen), *_callbacks(seen), *_texts_again(seen)]
    kept = sorted((item for item in found if item.share >= LEAST_SHARE), key=lambda item: -item.saves_s)
    return Why(seen, tuple(_merged(kept)), floor, tuple(trials), tuple(not_tried))


def _saves_s(trial: ChangeTrial, seen: Observations) -> float:
    """A trial is of warm calls: its share is of what its calls take once warm, and of the time that they cover."""
    numbers = set(trial.calls)
    return trial.saving * steady_s([call for call in seen.calls if call.number in numbers])


def _of_trial(trial: ChangeTrial, seen: Observations) -> Finding:
    saves_s = _saves_s(trial, seen)
    how = "changed, against the script's own calls" if trial.against_its_own else "as it was and changed, in turn"
    basis = f"tried: {trial.shape}, {len(trial.rounds)} times {how}"
    return Finding(trial.id, saves_s, saves_s / seen.steady_s, trial.where, trial.evidence, trial.change, basis)


def _merged(findings: Sequence[Finding]) -> list[Finding]:
    """One finding where several kinds of call have the same thing to change at the same line."""
    merged: dict[tuple[str, str], Finding] = {}
    for item in findings:
        key = (item.id, item.where)
        if key in merged:
            first = merged[key]
            merged[key] = Finding(
                first.id, first.saves_s + item.saves_s, first.share + item.share, first.where, first.evidence,
                first.change, first.basis,
            )  # fmt: skip
        else:
            merged[key] = item
    return sorted(merged.values(), key=lambda item: -item.saves_s)


def _callbacks(seen: Observations) -> list[Finding]:
    """What the script's own objects took within `generate` on a CPU; a card's host waits in them for other work too."""
    found = []
    calls = [call for call in seen.calls if call.callbacks_s and call.settings.get("device", "cpu") == "cpu"]
    for where in dict.fromkeys(call.where for call in calls):
        here = [call for call in calls if call.where == where]
        names = dict.fromkeys(name for call in here for name in call.callbacks_s)
        saves_s = min(covered_s(here), sum(sum(call.callbacks_s.values()) for call in here))
        found.append(
            Finding(
                id="callbacks",
                saves_s=saves_s,
                share=saves_s / seen.steady_s,
                where=where,
                evidence=f"generate calls your {' and '.join(names)} at every token",
                change="do less in it: look at the newest tokens alone, and at them every few tokens",
                basis="measured: the time within it",
            )
        )
    return found


def _texts_again(seen: Observations) -> list[Finding]:
    """Tokenizing what was tokenized before."""
    return [
        Finding(
            id="text-again",
            saves_s=item.seconds,
            share=item.seconds / seen.steady_s,
            where=item.where,
            evidence=f"a text that was tokenized before is tokenized again {item.count} times",
            change="tokenize it once, before the loop",
            basis="measured: the calls behind the first",
        )
        for item in seen.texts_again
    ]


def _reloads(seen: Observations) -> list[Finding]:
    """Loads of one source behind the first."""
    found = []
    for source in dict.fromkeys(load.source for load in seen.loads):
        loads = [load for load in seen.loads if load.source == source]
        again = loads[1:]
        if again:
            saves_s = covered_s(again)
            found.append(
                Finding(
                    id="reloads",
                    saves_s=saves_s,
                    share=saves_s / seen.steady_s,
                    where=again[0].where,
                    evidence=f"the same model, {source}, was loaded {len(loads)} times",
                    change="load it once, before the loop",
                    basis=f"measured: the {len(again)} loads behind the first",
                )
            )
    return found


def _recompilations(seen: Observations) -> list[Finding]:
    """Compilations of the same code behind the first; they take place within the calls."""
    again = seen.recompilations
    if not again:
        return []
    dearest = max(again, key=lambda item: item.seconds)
    saves_s = min(seen.calls_s, sum(item.seconds for item in again))
    behind_a_cache = (call for call in seen.calls if call.new_tokens or call.context_len)
    grows = any(call.settings.get("cache_class") in _GROWING for call in behind_a_cache)
    return [
        Finding(
            id="recompiles",
            saves_s=saves_s,
            share=saves_s / seen.steady_s,
            where=seen.calls[0].where if seen.calls else "",
            evidence=f"the model was compiled {len(again)} times more ({dearest.reason})",
            change=(
                'a cache of one size: cache_implementation="static" (a growing one is another shape at every token)'
                if grows
                else "keep shapes the same (pad to few lengths), or torch.compile(dynamic=True)"
            ),
            basis="measured: the compilations behind the first",
        )
    ]
