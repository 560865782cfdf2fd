"""What was recorded of a script: calls and loads of models, and work on texts."""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from profiler.fallbacks import Fallback

CallKind = Literal["generate", "forward"]

GROWING_CACHES = ("DynamicCache", "dynamic")
"""Values of the setting `cache_class` whose tensors have a new shape at every token."""
_AT_ONCE_S = 1e-5
"""Intervals overlap if they share more than this: marks of a GPU's clock are a microsecond off."""


@dataclass(frozen=True)
class CallSettings:
    """How a call runs: what decides its time besides its shape."""

    dtype: str = ""
    device: str = "cpu"
    placement: str = ""
    """A sentence about layers on several GPUs; empty if at most one computes."""
    attention: str = ""
    """transformers' `attn_implementation`; empty for a plain model."""
    math_attention: bool = False
    """Whether every fused kernel of SDPA is disabled."""
    experts: str = ""
    """transformers' `experts_implementation`."""
    cache: bool | None = None
    """Whether keys and values of earlier tokens are kept; null for a plain model."""
    cache_class: str = ""
    """The class of the cache that was passed, or the implementation that `generate` makes."""
    gradients: bool = False
    training: bool = False
    outputs: tuple[str, ...] = ()
    """Further outputs that are requested, such as `output_attentions`."""
    beams: int = 1
    answers: int = 1
    """`num_return_sequences`."""
    assistant: bool = False
    """Whether an assistant model drafts."""
    threads: int = 1
    compiled: bool = False

    @property
    def on_cpu(self) -> bool:
        return self.device == "cpu"

    @property
    def times_computed(self) -> int:
        """How many times `generate` computes each row that it is passed: its beams or its answers, the more of them.

        `_expand_inputs_for_generation` of transformers repeats the rows before the prompt is computed.
        """
        return max(self.beams, self.answers)


@dataclass(frozen=True)
class Call:
    """One call of a model that the script itself made."""

    number: int
    kind: CallKind
    model: str
    """The class of the model, with a number from the second model of a script on."""
    batch_size: int
    """Sequences computed: the rows passed, for `generate` times its beams or its answers, whichever are more."""
    prompt_len: int
    """Tokens passed per sequence, padding included; 0 for a forward of pictures or sounds only."""
    context_len: int
    """Tokens in the cache that was passed with them."""
    new_tokens: int
    """Tokens that `generate` added; 0 for a forward."""
    forwards: int
    """Forward passes of the model within the call."""
    seconds: float
    """Without waits of the main thread for a core, which only `wall_s` and samples of lines have."""
    where: str
    """The line of the script, as `script.py:31`; `a library's own code` if no line of the script led there."""
    settings: CallSettings
    padding: float = 0.0
    """Share of the tokens passed that the mask hides."""
    callbacks_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds in the script's own stopping criteria, logits processors and streamer, by their class or function."""
    processors_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds in transformers' own ones, which `generate` also makes from options such as `top_p`, by their class."""
    left_out_s: float = 0.0
    """Seconds of both in the script's stopping criteria and streamer, which trials leave out."""
    began_s: float | None = None
    """Start, since the recording began, on the clock of `seconds`. None if unknown; it then overlaps no other call."""
    warm_s: float | None = None
    """Seconds once warm, for the first call of a shape and calls that overlap it; None if not measured."""
    failed: str = ""
    """Class and first line of the exception; empty if the call returned."""
    forward_s: float | None = None
    """Seconds in forward passes within `generate`, on the host's clock; None for a forward and on a GPU."""
    prompt_s: float = 0.0
    """Seconds in the first of them."""

    @property
    def steady_s(self) -> float:
        """Seconds without the one-time costs of a first call."""
        return self.seconds if self.warm_s is None else min(self.seconds, self.warm_s)

    @property
    def grows_a_cache(self) -> bool:
        """Whether it is a `generate` on a GPU that makes a cache whose tensors have a new shape at every token."""
        on_gpu = self.settings.device.startswith("cuda")
        return self.kind == "generate" and on_gpu and self.settings.cache_class in GROWING_CACHES

    @property
    def words(self) -> str:
        """The shape in words: `generate 4 x 512 + 32` with new tokens, `forward 4 x 1 @ 512` with a cache."""
        suffix = f" + {self.new_tokens}" if self.new_tokens else f" @ {self.context_len}" if self.context_len else ""
        tokens = f" x {self.prompt_len}" if self.prompt_len else ""
        return f"{self.kind} {self.batch_size}{tokens}{suffix}"


@dataclass(frozen=True)
class Load:
    """One load of a model."""

    source: str
    seconds: float
    where: str
    began_s: float | None = None
    """Start time, on the clock of `Call.began_s`."""
    conversion: str = ""
    """What it did to the weights besides reading them, in words; empty if nothing."""
    instead: str = ""
    """What to do instead of a conversion."""


@dataclass(frozen=True)
class Recompilation:
    """One more compilation of a model's code, because something about a call had changed."""

    seconds: float
    reason: str


@dataclass(frozen=True)
class LineTime:
    """What one line of the script did several times: reads of a device's values, texts tokenized again."""

    where: str
    count: int
    seconds: float


@dataclass(frozen=True)
class OwnLine:
    """Seconds of a function of the script, or of a line of none, outside of its models' calls, from samples."""

    where: str
    """The line with the most of them."""
    function: str
    """The script's function that the line is in; empty for a line of the module."""
    calls: str
    """What the line calls in a library, by its package: `difflib.SequenceMatcher.ratio`; empty for code of its own."""
    seconds: float

    @property
    def words(self) -> str:
        """`s.py:33, in pick: difflib.SequenceMatcher.ratio`."""
        within = f", in {self.function}" if self.function else ""
        return f"{self.where}{within}" + (f": {self.calls}" if self.calls else "")


def by_line(seconds: Mapping[str, Sequence[float]]) -> tuple[LineTime, ...]:
    """The seconds of each line, the longest total first."""
    times = (LineTime(where, len(each), sum(each)) for where, each in seconds.items())
    return tuple(sorted(times, key=lambda item: -item.seconds))


@dataclass(frozen=True)
class GraphBreak:
    """Places where torch.compile left compiled code for Python, by reason."""

    count: int
    reason: str


@dataclass(frozen=True)
class Observations:
    """All that was recorded of a script."""

    script: str
    wall_s: float
    calls: tuple[Call, ...]
    loads: tuple[Load, ...]
    text_s: float
    text_where: str
    overhead_s: float
    interrupted: bool = False
    recompilations: tuple[Recompilation, ...] = ()
    texts_again: tuple[LineTime, ...] = ()
    graph_breaks: tuple[GraphBreak, ...] = ()
    """The most frequent first."""
    unnoted: Counter[str] = field(default_factory=Counter)
    """Calls that could not be recorded, by their errors, the first one first; no figure includes them."""
    fallbacks: tuple[Fallback, ...] = ()
    waited_s: float = 0.0
    """Seconds that the script's main thread waited for a core while other threads used it; 0 where it is unknown."""
    own_lines: tuple[OwnLine, ...] = ()
    """Where the script's own code spent its time, the longest first; without imports."""
    making_s: float = 0.0
    """Seconds in the constructors of modules, outside of loads, from the same samples."""
    sampled_s: float = 0.0
    """Seconds of all samples outside of calls, imports included."""
    callbacks: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """(function of the script, line where it begins) by the names in `Call.callbacks_s` and `Call.processors_s`."""
    warnings: tuple[str, ...] = ()
    """Conditions of the machine that make these times doubtful."""

    @property
    def waiting(self) -> float:
        """Share of the run time in which it waited for a core."""
        return min(0.99, self.waited_s / self.wall_s) if self.wall_s else 0.0

    @property
    def calls_s(self) -> float:
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
        """`watched_s` without one-time costs of first calls; the share of a finding refers to it."""
        return steady_s(self.calls) + self.loads_s + self.text_s


def covered_s(spans: Sequence[Call | Load]) -> float:
    """Seconds in which at least one of them ran; overlapping ones, from several threads, count once."""
    total_s = sum(span.seconds for span in spans if span.began_s is None)
    reached_s = float("-inf")
    for began_s, ended_s in sorted(_known(spans)):
        total_s += max(0.0, ended_s - max(began_s, reached_s))
        reached_s = max(reached_s, ended_s)
    return total_s


def steady_s(calls: Sequence[Call]) -> float:
    """Steady-state time of the calls: without one-time costs of first calls, overlapping ones counted once."""
    return min(covered_s(calls), sum(call.steady_s for call in calls))


def padding_share(calls: Sequence[Call]) -> float:
    tokens = [call.batch_size * call.prompt_len for call in calls]
    padded = sum(call.padding * count for call, count in zip(calls, tokens, strict=True))
    return padded / max(1, sum(tokens))


def most_at_once(spans: Sequence[Call | Load]) -> int:
    """The highest number of them that ran at the same time."""
    ends = sorted((at, step) for began_s, ended_s in _known(spans)
                  for at, step in ((began_s, 1), (max(began_s, ended_s - _AT_ONCE_S), -1)))  # fmt: skip
    return max(itertools.accumulate(step for _, step in ends), default=min(1, len(spans)))


def _known(spans: Sequence[Call | Load]) -> list[tuple[float, float]]:
    return [(span.began_s, span.began_s + span.seconds) for span in spans if span.began_s is not None]
