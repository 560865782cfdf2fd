"""Repeat a recorded call, unchanged or with some arguments changed."""

from __future__ import annotations

import contextlib
import functools
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._pytree import tree_map, tree_map_only

from profiler.loading.cache_argument import argument_name, cache_of
from profiler.report.blocks import evenly
from profiler.why_slow.call_record import CallRecord
from profiler.why_slow.findings import CallFloor
from profiler.why_slow.floor import Subject, at_ceilings_s, made_s
from profiler.why_slow.kept_arguments import Arguments
from profiler.why_slow.observations import Call, CallSettings, steady_s
from profiler.why_slow.recorder import Recorder
from profiler.why_slow.watched_calls import prompt_ids

# Share of a call that a change usually saves where it applies, in scripts with one fault (tests/why/scripts.py).
_USUAL_SAVING = {
    "cache-off": 0.7, "one-by-one": 0.6, "padding": 0.6, "beams": 0.6, "offload": 0.6, "uncompiled": 0.6,
    "shared-prefix": 0.5, "threads": 0.1,
}  # fmt: skip
_OTHER_SAVING = 0.3


@dataclass(frozen=True)
class Run:
    """A run that a trial repeats."""

    run: Callable[[], object]
    about_s: float = 0.0
    """What it took in the script."""
    shortened: Callable[[int], tuple[Run, ...]] = lambda _tokens: ()
    """Parts that stand for the run, with at most so many new tokens; 1: its prompt, without the other tokens.

    Empty if it cannot be shortened.
    """
    weight: float = 1.0
    """How many times its seconds count."""

    def __call__(self) -> object:
        return self.run()

    @classmethod
    def in_sequence(cls, runs: Sequence[Run]) -> Run:
        def shortened(tokens: int) -> tuple[Run, ...]:
            parts = [run.shortened(tokens) for run in runs]
            return tuple(part for each in parts for part in each) if all(parts) else ()

        return cls(lambda: [run() for run in runs], sum(run.about_s for run in runs), shortened)

    @classmethod
    def in_even_sequence(cls, runs: Sequence[Run]) -> Run:
        """Runs whose time changes evenly from the first to the last; shortened, some of them stand for all."""

        def shortened(tokens: int) -> tuple[Run, ...]:
            chosen = evenly(runs, tokens)
            return tuple(replace(run, weight=len(runs) / len(chosen)) for run in chosen)

        return replace(cls.in_sequence(runs), shortened=shortened)

    @classmethod
    def with_steps(cls, run: Callable[[int], object], count: int) -> Run:
        """A first run and `count` steps after it; `run` runs the first and so many steps."""

        def shortened(tokens: int) -> tuple[Run, ...]:
            steps = tokens - 1
            if steps < 1 or steps >= count:
                return ()
            times = count / steps
            return Run(functools.partial(run, 0), weight=1 - times), Run(functools.partial(run, steps), weight=times)

        return cls(functools.partial(run, count), shortened=shortened)


@dataclass(frozen=True)
class Candidate:
    """One change to try on some calls."""

    group: CallGroup
    id: str
    evidence: str
    change: str
    where: str
    as_is: Run
    changed: Run
    seconds: float
    """Those of the script's own calls of this shape."""
    within: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    """The context in which `changed` runs; entering and leaving it is not timed."""
    release: Callable[[], object] = lambda: None
    """Frees what the changed call made for itself, such as a copy of the model."""
    shape: str = ""
    explain: Callable[[], str] = lambda: ""
    """Measures more evidence, in words, once the trial has shown a saving."""
    once_s: float = 0.0
    """About the seconds that `changed` takes more at its first run, such as those of torch.compile."""
    closer: tuple[Candidate, ...] = ()
    """A trial that is closer to what the user would run, for the time that all others leave; it replaces this one."""
    about: float = 0.0
    """Share of the calls that the change saves by the ceilings, see `CallGroup.saved_share`; 0 if it is unknown."""
    alone: bool = False
    """Whether only `changed` can be run, because objects of the script must not be called again."""
    stand_in: str = ""

    @property
    def name(self) -> str:
        return f"{self.id} ({self.where}){', compiled' if self.once_s else ''}"

    @property
    def expected(self) -> float:
        """Share of the calls that it is expected to save: by the ceilings, else as usual."""
        return self.about or _USUAL_SAVING.get(self.id, _OTHER_SAVING)

    @property
    def expected_s(self) -> float:
        return self.group.seconds * self.expected


@dataclass(frozen=True)
class RepeatedCall:
    """A recorded call, repeated at the same length with `options` in place of its arguments; None leaves one out."""

    noted: CallRecord
    call: Call
    model: Callable[[], Any]
    options: Mapping[str, object] = field(default_factory=dict)
    filled: list[Any] = field(default_factory=list)
    """The cache that holds the call's context, once it is filled."""

    @functools.cached_property
    def as_run(self) -> Run:
        return Run(functools.partial(self._run, self.call.new_tokens), self.call.steady_s, self.shortened)

    def shortened(self, tokens: int) -> tuple[Run, ...]:
        """A long `generate` as its prompt and one token, and an average step per further token.

        The time of a step is that of `tokens` tokens without the first. Without a cache, steps grow with the context,
        so those in the middle of the answer are the average.
        """
        new = self.call.new_tokens
        if self.call.kind != "generate" or self.noted.watched.in_threads or tokens < 1:
            return ()
        if new <= tokens:
            return (self.as_run,)
        # The one-time costs of a first call are those of its prompt.
        prompt_s = max(0.0, self.call.prompt_s - (self.call.seconds - self.call.steady_s))
        step_s = (self.call.steady_s - prompt_s) / (new - 1)

        def part(weight: float, tokens: int, further: int = 0) -> Run:
            return Run(functools.partial(self._run, tokens, further), prompt_s + (tokens - 1) * step_s, weight=weight)

        if tokens == 1:
            return (part(1.0, 1),)
        times = (new - 1) / (tokens - 1)
        if self.call.settings.cache:
            return part(1.0 - times, 1), part(times, tokens)
        middle = (new - tokens) // 2
        return part(1.0, 1), part(times, tokens, middle), part(-times, 1, middle)

    def _run(self, new_tokens: int, further: int = 0) -> object:
        """Run the call with `new_tokens`, after a prompt that is `further` tokens longer."""
        model, watched = self.model(), self.noted.watched
        args, named = self._arguments(model, further)
        named |= dict.fromkeys(watched.limits, new_tokens) | dict(self.options)
        named = {name: value for name, value in named.items() if name not in self.options or value is not None}
        with self.noted.context.entered(), torch.set_grad_enabled(self.call.settings.gradients):
            if self.call.context_len and watched.takes_cache:
                named[argument_name(model)] = self._cache(model)
            return getattr(model, watched.method)(*args, **named)

    def _arguments(self, model: Any, further: int) -> Arguments:
        """The arguments, with `further` copies of the last column of the prompt, its mask and inputs of its shape.

        Those of an encoder-decoder, whose answer does not continue the prompt, and of embeddings are not longer.
        """
        ids = None if not further or model.config.is_encoder_decoder else prompt_ids(*self._given)

        def longer(value: Any) -> Any:
            fits = ids is not None and isinstance(value, torch.Tensor) and value.shape == ids.shape
            return torch.cat([value, value[:, -1:].expand(-1, further)], 1) if fits else value

        made: Arguments = tree_map(longer, self._given)  # with lists of its own, which the call may change
        return made

    @functools.cached_property
    def _given(self) -> Arguments:
        """The arguments. Numbers in the script's dtype (features of sounds, caches) get the model's.

        The cache of a plain model has the shapes of the script's, and is zero.
        """
        settings, dtype = self.call.settings, next(self.model().parameters()).dtype

        def filled(value: Any) -> Any:
            if value.is_meta:
                shape = {"dtype": value.dtype, "device": settings.device}
                value = torch.empty_strided(value.shape, value.stride(), **shape).zero_()
            is_own = value.is_floating_point() and str(value.dtype) == f"torch.{settings.dtype}"
            return value.to(dtype) if is_own and dtype.is_floating_point else value

        given: Arguments = tree_map_only(torch.Tensor, filled, self.noted.arguments or ((), {}))
        return given

    def _cache(self, model: Any) -> Any:
        """A cache that holds the call's context: filled at the first run, and cropped before every later one."""
        beyond = self.filled[0].get_seq_length() - self.call.context_len if self.filled else -1
        if beyond < 0:
            ids = torch.zeros(self.call.batch_size, self.call.context_len, dtype=torch.long, device=model.device)
            self.filled[:] = [cache_of(model(ids, use_cache=True))]
        elif beyond > 0:
            self.filled[0].crop(-beyond)
        return self.filled[0]


def passed(options: Mapping[str, object]) -> str:
    """`pass num_beams=1`, or `leave out assistant_model`: the options of a RepeatedCall, as they are executed."""
    out = [name for name, value in options.items() if value is None]
    given = [f"{name}={json.dumps(value) if isinstance(value, str) else value}"
             for name, value in options.items() if value is not None]  # fmt: skip
    return ", and ".join(f"{verb} {', '.join(names)}" for verb, names in (("pass", given), ("leave out", out)) if names)


def repeat(noted: CallRecord, call: Call, model: Any, options: Mapping[str, object] | None = None, **more: Any) -> Run:
    """A recorded call of a model, to be repeated; `more` are fields of RepeatedCall."""
    return RepeatedCall(noted, call, lambda: model, options or {}, **more).as_run


@dataclass(eq=False)
class CallGroup:
    """Calls of one kind, from one line, with one model and the same settings. One of them stands for all in trials."""

    calls: list[Call]
    notes: list[CallRecord]
    model: Any
    loaded_at: str
    recorder: Recorder
    floor: CallFloor | None = None
    """Without it, no step is known to be bound by the GPU."""

    @property
    def seconds(self) -> float:
        return steady_s(self.calls)

    @property
    def repeatable(self) -> list[tuple[Call, CallRecord]]:
        """The calls whose arguments are kept, with their records."""
        return [pair for pair in zip(self.calls, self.notes, strict=True) if pair[1].arguments is not None]

    @functools.cached_property
    def middle(self) -> tuple[Call, CallRecord]:
        """The call with the median time, among those that can be repeated, and its record."""
        pairs = sorted(self.repeatable, key=lambda pair: pair[0].steady_s)
        return pairs[len(pairs) // 2]

    @property
    def call(self) -> Call:
        return self.middle[0]

    @property
    def settings(self) -> CallSettings:
        return self.call.settings

    @property
    def generates(self) -> bool:
        return self.call.kind == "generate"

    @property
    def last_step_s(self) -> tuple[float, float] | None:
        """Seconds of the last decode step: (at the ceilings, of the host to launch it); None if they are unknown."""
        subject = self.floor.subjects.get(self.call.model) if self.floor else None
        if subject is None or subject.overhead_s is None or self.call.new_tokens < 2:
            return None
        context_len = self.call.prompt_len + self.call.new_tokens - 1
        last = replace(self.call, kind="forward", prompt_len=1, context_len=context_len, new_tokens=0)
        return at_ceilings_s(last, subject), subject.overhead_s[1]

    @property
    def subject(self) -> Subject | None:
        """The counted work of the model and its ceilings; None if unknown, or if the calls also run something else."""
        if self.floor is None or not self.floor.with_more.isdisjoint(call.number for call in self.calls):
            return None
        return self.floor.subjects.get(self.calls[0].model)

    def saved_share(self, before: Sequence[Call], after: Sequence[Call]) -> float:
        """Share of some calls that others save in their place, estimated from the ceilings and overhead of their steps.

        It holds if the calls are equally far from their ceilings. 0 if the ceilings are unknown.
        """
        if (subject := self.subject) is None:
            return 0.0
        return max(0.0, 1 - made_s(after, subject) / made_s(before, subject))

    def repeated(self, **options: object) -> Run:
        """The call, with `options` in place of its arguments."""
        call, noted = self.middle
        return repeat(noted, call, self.model, options)

    def candidate(self, name: str, evidence: str, change: str, changed: Run | None = None, **more: Any) -> Candidate:
        """A change to the call that stands for all, or to that of `more`; by default, the same call `within`."""
        as_is = self.repeated()
        common: dict[str, Any] = {
            "where": self.call.where,
            "as_is": as_is,
            "seconds": statistics.median(other.steady_s for other in self.calls if other.words == self.call.words),
        }
        return Candidate(self, name, evidence, change, changed=changed or as_is, **common | more)
