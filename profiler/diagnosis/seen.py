"""What was seen of a watched script: its models' calls, their loads, and its text work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["generate", "forward"]


@dataclass(frozen=True)
class Call:
    """One call of a model that the script itself made."""

    number: int
    kind: Kind
    model: str
    """The class of the model, and its number where there are several of it."""
    batch_size: int
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
    """What it ran with: dtype, attention, cache, beams, grad, mode, outputs, threads."""
    padding: float = 0.0
    """Share of the tokens handed over that the mask hides."""
    callbacks_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds in the script's own stopping criteria, logits processors and streamer, by their class."""

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
class TextAgain:
    """Texts that a line handed to a tokenizer once more."""

    where: str
    count: int
    seconds: float


@dataclass(frozen=True)
class Unnoted:
    """What could not be noted, and is in none of the figures."""

    count: int
    reason: str
    """Of the first."""


@dataclass(frozen=True)
class Seen:
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
    texts_again: tuple[TextAgain, ...] = ()
    reads: tuple[Read, ...] = ()
    """The longest waits first; none on a CPU, where nothing is waited for."""
    graph_breaks: tuple[GraphBreak, ...] = ()
    """The most frequent first."""
    unnoted: Unnoted | None = None
    warnings: tuple[str, ...] = ()
    """What of the machine speaks against these seconds."""

    @property
    def calls_s(self) -> float:
        return sum(call.seconds for call in self.calls)

    @property
    def watched_s(self) -> float:
        """Seconds in calls, loads and tokenizers: what a finding's share is of."""
        return self.calls_s + sum(load.seconds for load in self.loads) + self.text_s

    @property
    def rest_s(self) -> float:
        """Seconds that are neither a model's nor have another name: imports, and what the script does itself."""
        named_s = self.watched_s + sum(item.seconds for item in self.between) + self.overhead_s
        return max(0.0, self.wall_s - named_s)
