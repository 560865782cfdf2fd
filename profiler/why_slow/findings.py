"""Findings: what a script's calls spend, and what a change would save."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from profiler.stats import student_t
from profiler.why_slow.observations import GROWING_CACHES, Call, Observations, covered_s, steady_s

if TYPE_CHECKING:
    from profiler.why_slow.floor import Subject

LEAST_SHARE = 0.02
"""Share of the watched time below which a saving or a cost is not reported."""
_OF_A_MODEL = ("wide-dtype", "emulated-dtype", "autocast")
"""Changes that concern all calls of a model, and may cost some of them more time than they save others."""
_MOST_COST = 3.0
"""The prompts' matmuls in BF16 or FP16 took up to four times as long on CPUs without units for it."""
LEAST_ROUNDS = 5
"""Pairs that must all show a saving. Without a real saving, five do in 3 % of cases (a sign test)."""
MOST_ROUNDS = 8
"""Pairs of which all but one must show a saving, since another process may disturb one: 4 % of cases by chance."""
DECISIVE = 0.3
"""Share of a call from which on three agreeing pairs are enough."""
FEW_ROUNDS = 3
"""Pairs that are enough for such a saving."""
TRIALS_SHARE = 0.9
"""Share of the budget after which trials end. The rest is for a pair that takes longer, and for the report."""
_ROUND_S = 10
_WITHIN = 0.984
"""Share of Student's t within its two ends: at most 1 % of cases is beyond one of them. It is not 0.98, since
`student_t` is up to 9 % too low there."""
_SLOW_FIRST_CALL = 2.0
_FEWEST_OTHERS = 2
"""A first call is reported if it took twice the median of at least so many others, or twice its own repeat."""


Rounds = Sequence[tuple[float, float]]
Basis = Literal["tried", "stand-in", "measured", "computed", "at most"]
"""How the seconds of a finding are known. In a trial, either the change ran as it is printed, or a stand-in for it."""


@dataclass(frozen=True)
class TriedChange:
    """Pairs of a call, unchanged and with one change, measured alternately."""

    id: str
    calls: Sequence[int]
    """Numbers of the calls that it is evidence for."""
    rounds: Rounds
    """(seconds unchanged, seconds changed) of each pair."""
    where: str
    evidence: str
    change: str
    shape: str
    """The calls that were repeated, in words."""
    stand_in: str = ""
    """What ran in place of the change, in words; empty if the change ran as it is printed."""
    against_its_own: bool = False
    """Whether the unchanged times are those of the script's own calls, which are not repeated."""
    saving: float = field(init=False)
    """Share of the call that the change saves, by the median pair; negative if it costs time."""
    claimed: bool = field(init=False)
    """Whether its pairs support the saving."""

    def __post_init__(self) -> None:
        savings = [1 - changed / as_is for as_is, changed in self.rounds]
        object.__setattr__(self, "saving", statistics.median(savings) if savings else 0.0)
        object.__setattr__(self, "claimed", pairs_agree(self.rounds))


def pairs_agree(rounds: Rounds) -> bool:
    """Whether pairs are evidence for a saving: a steady one, three of 30 %, five that save, or all but one of eight."""
    savings = sorted(1 - changed / as_is for as_is, changed in rounds)
    if len(savings) < FEW_ROUNDS:
        return False
    if len(savings) >= MOST_ROUNDS:
        return savings[1] > 0
    many = len(savings) >= LEAST_ROUNDS or statistics.median(savings) > DECISIVE
    return savings[0] > 0 and (many or _is_steady(savings))


def is_settled(rounds: Rounds) -> bool:
    """Whether more pairs would change nothing: a steady saving, three of 30 %, five that agree, or two without any."""
    savings = sorted(1 - changed / as_is for as_is, changed in rounds)
    losses = sum(saving <= 0 for saving in savings)
    decisive = len(savings) >= FEW_ROUNDS and savings[0] > DECISIVE
    enough = len(savings) >= MOST_ROUNDS or (len(savings) >= LEAST_ROUNDS and not losses)
    return decisive or enough or losses > 1 or _is_steady(savings)


def _is_steady(savings: Sequence[float]) -> bool:
    """Whether three or four pairs differ so little that chance gives such a saving in at most 1 % of cases."""
    if not FEW_ROUNDS <= len(savings) < LEAST_ROUNDS:
        return False
    error = statistics.stdev(savings) / math.sqrt(len(savings))
    return statistics.mean(savings) > student_t(len(savings) - 1, _WITHIN) * error


@dataclass(frozen=True)
class Finding:
    """A change to the script, with the seconds that it saves."""

    id: str
    """The name of the fault, such as `cache-off`."""
    saves_s: float
    """Seconds of the script that the change saves."""
    where: str
    """The line of the script, as `script.py:31`; `a library's own code` if no line of the script led there."""
    evidence: str
    """What was observed, in words."""
    change: str
    """What to change, in words. After a trial, options and lines of code in it are those that ran."""
    basis: Basis
    """How the seconds were determined; those of `at most` are a bound, those of `computed` an estimate."""
    how: str
    """The same in words: which calls were repeated how often, or what was timed."""
    once: bool = False
    """Whether the seconds are one-time costs of first calls, which no percentage includes."""
    share: float = 0.0
    """Share of the watched time without one-time costs of first calls; `judge_calls` sets it."""


@dataclass
class Untried:
    """Changes that were not tried, and why."""

    by_reason: dict[str, dict[str, None]] = field(default_factory=dict)
    """Their names and lines, by the reason."""
    without_time: dict[str, float] = field(default_factory=dict)
    """Seconds that three pairs of them would take, by their names and lines."""
    computed: list[Finding] = field(default_factory=list)
    """What they save by what is known without a trial."""

    def add(self, name: str, reason: str) -> None:
        self.by_reason.setdefault(reason, {})[name] = None

    def lines(self, budget_s: float) -> list[str]:
        """One line per reason; the last says which budget would be enough, given that `budget_s` was not."""
        lines = [f"{', '.join(names)}: {reason}" for reason, names in self.by_reason.items()]
        if self.without_time:
            more_s = sum(self.without_time.values()) / TRIALS_SHARE
            enough_s = _ROUND_S * math.ceil((budget_s + more_s) / _ROUND_S)
            names = ", ".join(self.without_time)
            lines.append(f"{names}: no time was left for {FEW_ROUNDS} pairs; --budget {enough_s} would be enough")
        return lines


@dataclass(frozen=True)
class SlowModule:
    """The modules of one class, those of torch at one place of all layers, and their time in the calls of one line."""

    name: str
    """The class."""
    path: str
    """Its place in the model, such as `model.layers.*.mlp`; of several, the slowest."""
    line: str
    """The line of its `forward`, as `modeling_llama.py:88`; empty if unknown."""
    beyond_s: float
    """Seconds of all calls of that line beyond its ceiling, without the modules within it."""
    calls: float
    """Calls of it in one forward; below 1 if only the prompt's forward calls it."""
    where: str
    """The script's line of the calls."""

    @property
    def place(self) -> str:
        """`visual.patch_embed.proj, script.py:19`."""
        return ", ".join(filter(None, (self.path, self.line)))


@dataclass(frozen=True)
class CallFloor:
    """The least time of the same calls on this machine: each prompt once, then a step per token with a cache."""

    seconds: float
    overhead_s: float | None
    """Overhead in `seconds`: all of it on a CPU, the exposed part on a GPU. None if unknown and not included."""
    needless_s: float = 0.0
    """Further seconds at the ceilings for work that the tokens do not need: padding, prompts computed again."""
    left_out: tuple[str, ...] = ()
    """Parts of models that ran and could not be counted, such as a tower for pictures."""
    subjects: Mapping[str, Subject] = field(default_factory=dict)
    """By class of model: its counted work and the ceilings, to estimate other calls of it."""
    with_more: frozenset[int] = frozenset()
    """Numbers of the calls that ran modules besides those of their subject: towers, encoders."""


@dataclass(frozen=True)
class Why:
    """The answer to: why is my script slow?"""

    seen: Observations
    findings: tuple[Finding, ...]
    floor: CallFloor | None
    tried: tuple[TriedChange, ...]
    not_tried: tuple[str, ...] = ()
    """Changes that could not be tried, each with the reason."""
    modules: tuple[SlowModule, ...] = ()

    @property
    def first_calls(self) -> list[tuple[str, float, float]]:
        """(line, seconds, seconds once warm) of first calls that took twice as long as others or as a repeat."""
        first_s, warm_s = (defaultdict[str, float](float) for _ in range(2))
        for where, words in dict.fromkeys((call.where, call.words) for call in self.seen.calls):
            first, *others = [call for call in self.seen.calls if (call.where, call.words) == (where, words)]
            few = len(others) < _FEWEST_OTHERS
            usual_s = first.steady_s if few else statistics.median(call.seconds for call in others)
            beyond_s = first.seconds - usual_s
            if first.seconds > _SLOW_FIRST_CALL * usual_s and beyond_s >= LEAST_SHARE * self.seen.watched_s:
                first_s[where] += first.seconds
                warm_s[where] += usual_s
        return [(where, seconds, warm_s[where]) for where, seconds in first_s.items()]

    @property
    def unclear(self) -> list[tuple[TriedChange, float]]:
        """Trials whose pairs do not agree, and the share of the watched time that their median pair saves."""
        shares = [(trial, _saves_s(trial, self.seen) / self.seen.steady_s) for trial in self.tried if not trial.claimed]
        return [(trial, share) for trial, share in shares if share >= LEAST_SHARE]


def judge_calls(
    seen: Observations,
    trials: Sequence[TriedChange],
    floor: CallFloor | None = None,
    not_tried: Sequence[str] = (),
    more: Sequence[Finding] = (),
    modules: Sequence[SlowModule] = (),
) -> Why:
    """The answer, the largest saving first, what did not run last; less than 2 % of the watched time is left out.

    `more` are findings that neither a trial nor `seen` gives. What a change costs other calls is subtracted.
    """
    findings, not_tried = list(more), list(not_tried)
    improved, tried = (defaultdict[tuple[str, str, str], set[int]](set) for _ in range(2))
    for trial in trials:
        tried[_edit(trial)].update(trial.calls)
        improved[_edit(trial)].update(trial.calls if trial.claimed else ())
    for trial in trials:
        costs = trial.saving < 0 and bool(saved := improved[_edit(trial)]) and saved.isdisjoint(trial.calls)
        if trial.claimed and _may_cost_s(trial, tried[_edit(trial)], seen) >= _saves_s(trial, seen):
            not_tried.append(
                f"{trial.id} ({trial.where}): other calls of the model were not tried, and could take more time than it"
                " saves these"
            )
        elif trial.claimed or costs:
            sides = "changed, compared with the script's" if trial.against_its_own else "unchanged and changed, in turn"
            how = f"{trial.shape}, {len(trial.rounds)} times {sides}"
            how += f"; changed: {trial.stand_in}" if trial.stand_in else ""
            findings.append(Finding(
                trial.id, _saves_s(trial, seen), trial.where, trial.evidence, trial.change,
                "stand-in" if trial.stand_in else "tried", how,
            ))  # fmt: skip
    findings += [*_reloads(seen), *_recompilations(seen), *_callbacks(seen), *_texts_again(seen)]
    findings = [replace(finding, share=finding.saves_s / seen.steady_s) for finding in findings]
    merged = _merged([finding for finding in findings if finding.share >= LEAST_SHARE or finding.share < 0])
    worth = tuple(finding for finding in merged if finding.share >= LEAST_SHARE)
    return Why(seen, worth, floor, tuple(trials), tuple(not_tried), tuple(modules))


def _edit(trial: TriedChange) -> tuple[str, str, str]:
    """What the user would edit: one edit changes all calls that lead to its line."""
    return trial.id, trial.where, trial.change


def _may_cost_s(trial: TriedChange, tried: set[int], seen: Observations) -> float:
    """Seconds that a change may cost calls of the same model that no trial of it has shown."""
    models = {call.model for call in seen.calls if call.number in tried}
    others = [call for call in seen.calls if call.model in models and call.number not in tried and not call.failed]
    return _MOST_COST * steady_s(others) if trial.id in _OF_A_MODEL else 0.0


def _saves_s(trial: TriedChange, seen: Observations) -> float:
    """Seconds that a trial saves: its share of the steady-state time of its calls, but of what trials leave out."""
    numbers = set(trial.calls)
    calls = [call for call in seen.calls if call.number in numbers]
    left_out_s = 0.0 if trial.against_its_own else sum(call.left_out_s for call in calls)
    return trial.saving * max(0.0, steady_s(calls) - left_out_s)


def _merged(findings: Sequence[Finding]) -> list[Finding]:
    """The findings, what ran and saves the most first; those with the same change at the same line are added up."""
    merged: dict[tuple[object, ...], Finding] = {}
    for item in sorted(findings, key=lambda item: -item.saves_s):
        key = (item.id, item.where, item.basis == "computed")
        first = merged.setdefault(key, item)
        if first is not item:
            how = first.how + (", less the time that other calls then take longer" if item.saves_s < 0 else "")
            saves_s, share = first.saves_s + item.saves_s, first.share + item.share
            merged[key] = replace(first, saves_s=saves_s, share=share, how=how)
    return sorted(merged.values(), key=lambda item: (item.basis in ("computed", "at most"), -item.saves_s))


_OF_OPTIONS = {
    "PrefixConstrainedLogitsProcessor": ("prefix_allowed_tokens_fn", "compute the mask of allowed tokens once, in a"
                                         " LogitsProcessor of your own, and change it by the newest token"),
    "NoBadWordsLogitsProcessor": ("bad_words_ids", "shorten the list, and pass single tokens as suppress_tokens"),
    "SequenceBiasLogitsProcessor": ("sequence_bias", "shorten the list"),
    "NoRepeatNGramLogitsProcessor": ("no_repeat_ngram_size", "leave it out, or install a newer transformers"),
    "StopStringCriteria": ("stop_strings", "pass the tokens that end an answer as eos_token_id"),
    "WhisperTimeStampLogitsProcessor": ("return_timestamps", "leave it out, unless the times are read"),
    "TextStreamer": ("streamer", "decode every few tokens, in a streamer of your own"),
    "TextIteratorStreamer": ("streamer", "decode every few tokens, in a streamer of your own"),
}  # fmt: skip
"""Classes of transformers that `generate` makes from options: the option, and what to do if it takes long."""
_LEAST_OF_AN_OPTION = 0.1
"""Share of the time from which on an option is a finding: what it does is wanted."""


def callbacks_s(calls: Iterable[Call]) -> dict[tuple[str, bool], float]:
    """Seconds of what `generate` ran at every token, by (name, whether it is the script's), the longest first."""
    spent_s = defaultdict[tuple[str, bool], float](float)
    for call in calls:
        for times, is_own in ((call.callbacks_s, True), (call.processors_s, False)):
            for name, seconds in times.items():
                spent_s[name, is_own] += seconds
    return dict(sorted(spent_s.items(), key=lambda item: -item[1]))


def callback_words(name: str, is_own: bool) -> str:
    """`your Stops`, `NoBadWordsLogitsProcessor (bad_words_ids)`, or `TopPLogitsWarper`."""
    option, _ = _OF_OPTIONS.get(name, ("", ""))
    return f"your {name}" if is_own else f"{name} ({option})" if option else name


def _callbacks(seen: Observations) -> Iterator[Finding]:
    """Time of what `generate` runs at every token, on a CPU only: on a GPU it also waits for the device."""
    for where in dict.fromkeys(call.where for call in seen.calls if call.settings.on_cpu):
        here = [call for call in seen.calls if call.where == where]
        spent_s = {(name, is_own): seconds for (name, is_own), seconds in callbacks_s(here).items()
                   if (is_own and seconds >= LEAST_SHARE * seen.steady_s)
                   or (name in _OF_OPTIONS and seconds >= _LEAST_OF_AN_OPTION * seen.steady_s)}  # fmt: skip
        if not spent_s:
            continue
        first, is_own = next(iter(spent_s))
        function, line = seen.callbacks.get(first, ("", ""))
        within = f", with {function} in it" if function and not is_own else ""
        words = " and ".join(callback_words(*each) for each in spent_s)
        yield Finding(
            "callbacks", min(covered_s(here), sum(spent_s.values())), line or where,
            f"generate runs {words} at every token{within}",
            "do less in it: read only the newest tokens, of all rows at once by operations on tensors" if is_own
            else _OF_OPTIONS[first][1],
            "measured", "the time within it",
        )  # fmt: skip


def _texts_again(seen: Observations) -> Iterator[Finding]:
    for item in seen.texts_again:
        yield Finding(
            "text-again", item.seconds, item.where,
            f"a text that was tokenized before is tokenized again {item.count} times",
            "tokenize it once, before the loop", "measured", "the calls after the first",
        )  # fmt: skip


def _reloads(seen: Observations) -> Iterator[Finding]:
    for source in dict.fromkeys(load.source for load in seen.loads):
        _first, *repeats = [load for load in seen.loads if load.source == source]
        if repeats:
            yield Finding(
                "reloads", covered_s(repeats), repeats[0].where,
                f"the same model, {source}, was loaded {1 + len(repeats)} times", "load it once, before the loop",
                "measured", f"the {'load' if len(repeats) == 1 else 'loads'} after the first",
            )  # fmt: skip


def _recompilations(seen: Observations) -> Iterator[Finding]:
    """Time of compilations after the first of the same code; they happen within the calls."""
    if not seen.recompilations or not seen.calls:
        return
    slowest = max(seen.recompilations, key=lambda item: item.seconds)
    with_cache = (call for call in seen.calls if call.new_tokens or call.context_len)
    grows = any(call.settings.cache_class in GROWING_CACHES for call in with_cache)
    yield Finding(
        "recompiles", min(seen.calls_s, sum(item.seconds for item in seen.recompilations)),
        seen.calls[0].where,
        f"the model was compiled {len(seen.recompilations)} times more ({slowest.reason})",
        'a cache of fixed size: cache_implementation="static" (a growing one has a new shape at every token)' if grows
        else "keep shapes the same (pad to few lengths), or use torch.compile(dynamic=True)",
        "measured", "the compilations after the first",
    )  # fmt: skip
