"""What was recorded of a script: its models' calls, loads and text work."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

CallKind = Literal["generate", "forward"]

_AT_ONCE_S = 1e-5
"""Intervals overlap where they share more: marks of a card are a microsecond off."""


@dataclass(frozen=True)
class Call:
    """One call of a model that the script itself made."""

    number: int
    kind: CallKind
    model: str
    """The class of the model, and its number where there are several of it."""
    batch_size: int
    """Sequences that are computed: of `generate` the rows handed over, times its beams or answers if those are more."""
    prompt_len: int
    """Tokens that were handed over, of the longest sequence."""
    context_len: int
    """Tokens in the cache that was handed over with them."""
    new_tokens: int
    """Of `generate`; 0 for a forward."""
    forwards: int
    """Forward passes of the model within it."""
    seconds: float
    where: str
    """`script.py:31`."""
    settings: Mapping[str, str]
    """What it ran with: dtype, attention, cache, beams, answers to a prompt, grad, mode, outputs, threads."""
    padding: float = 0.0
    """Share of the tokens handed over that the mask hides."""
    callbacks_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds in the script's own stopping criteria, logits processors and streamer, by their class."""
    began_s: float | None = None
    """Since the watch began, by the same clock as `seconds`; None: not known, and apart from all others."""
    warm_s: float | None = None
    """What it takes once warm, for first calls of a shape and those beside them; None: not known."""
    failed: str = ""
    """The class and the first line of what it raised; empty: it returned."""

    @property
    def steady_s(self) -> float:
        """Seconds without what a first call alone pays for."""
        return self.seconds if self.warm_s is None else min(self.seconds, self.warm_s)

    @property
    def words(self) -> str:
        """`generate 4 x 512 + 32`."""
        behind = f" + {self.new_tokens}" if self.new_tokens else f" @ {self.context_len}" if self.context_len else ""
        return f"{self.kind} {self.batch_size} x {self.prompt_len}{behind}"


@dataclass(frozen=True)
class Load:
    """One load of a model."""

    source: str
    seconds: float
    where: str
    began_s: float | None = None
    """Start time, on the clock of `Call.began_s`."""


@dataclass(frozen=True)
class Recompilation:
    """Code of a model that was compiled once more, because something about a call had changed."""

    seconds: float
    reason: str


@dataclass(frozen=True)
class Read:
    """Values of a device that a line of the script read on the host, outside of its models' calls."""

    where: str
    count: int
    seconds: float
    """That the host waited for them."""


@dataclass(frozen=True)
class GraphBreak:
    """Where torch.compile left compiled code for Python, and why."""

    count: int
    reason: str


@dataclass(frozen=True)
class Between:
    """What the script itself did between forwards that one line made in a row."""

    where: str
    count: int
    seconds: float


@dataclass(frozen=True)
class RepeatedText:
    """Texts that a line handed to a tokenizer once more."""

    where: str
    count: int
    seconds: float


@dataclass(frozen=True)
class UnrecordedCall:
    """What could not be noted, and is in none of the figures."""

    count: int
    reason: str
    """Of the first."""


@dataclass(frozen=True)
class Observations:
    """All that was seen of a script."""

    script: str
    wall_s: float
    calls: tuple[Call, ...]
    loads: tuple[Load, ...]
    text_s: float
    """Seconds in tokenizers."""
    text_where: str
    overhead_s: float
    """What the watching itself took: how often it was called times what a call of it takes."""
    interrupted: bool = False
    recompilations: tuple[Recompilation, ...] = ()
    between: tuple[Between, ...] = ()
    texts_again: tuple[RepeatedText, ...] = ()
    reads: tuple[Read, ...] = ()
    """The longest waits first; none on a CPU, where nothing is waited for."""
    graph_breaks: tuple[GraphBreak, ...] = ()
    """The most frequent first."""
    unnoted: UnrecordedCall | None = None
    warnings: tuple[str, ...] = ()
    """What about the machine makes these seconds doubtful."""

    @property
    def calls_s(self) -> float:
        """Seconds in which any call ran."""
        return covered_s(self.calls)

    @property
    def loads_s(self) -> float:
        return covered_s(self.loads)

    @property
    def watched_s(self) -> float:
        """Seconds in calls, loads and tokenizers."""
        return self.calls_s + self.loads_s + self.text_s

    @property
    def steady_s(self) -> float:
        """Of `watched_s`, without what first calls alone pay for: what a finding's share is of."""
        return steady_s(self.calls) + self.loads_s + self.text_s

    @property
    def rest_s(self) -> float:
        """Seconds that are neither a model's nor have another name: imports, and what the script does itself."""
        named_s = self.watched_s + sum(item.seconds for item in self.between) + self.overhead_s
        return max(0.0, self.wall_s - named_s)


def covered_s(spans: Sequence[Call | Load]) -> float:
    """Seconds in which any of them ran: those that overlap, as from several threads, are counted once."""
    total_s = sum(span.seconds for span in spans if span.began_s is None)
    reached_s = float("-inf")
    for began_s, ended_s in sorted(_known(spans)):
        total_s += max(0.0, ended_s - max(began_s, reached_s))
        reached_s = max(reached_s, ended_s)
    return total_s


def steady_s(calls: Sequence[Call]) -> float:
    """Steady-state time of the calls: one-time costs of first calls are excluded."""
    return min(covered_s(calls), sum(call.steady_s for call in calls))


def most_at_once(spans: Sequence[Call | Load]) -> int:
    """How many of them ran at the same time, at most."""
    ends = sorted((at, step) for began_s, ended_s in _known(spans)
                  for at, step in ((began_s, 1), (max(began_s, ended_s - _AT_ONCE_S), -1)))  # fmt: skip
    return max(itertools.accumulate(step for _, step in ends), default=min(1, len(spans)))


def _known(spans: Sequence[Call | Load]) -> list[tuple[float, float]]:
    return [(span.began_s, span.began_s + span.seconds) for span in spans if span.began_s is not None]
