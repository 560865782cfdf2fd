"""Try changes: `generate` without and with the line of each, in turn, on the loaded model or on one of fewer layers."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from statistics import median
from typing import Any, TypeVar

import torch
from transformers import LogitsProcessorList

from profiler.counting.attention import AttentionCore
from profiler.device.clock import no_gc
from profiler.device.device import physical_cores
from profiler.engines.caches import quantized_cache
from profiler.engines.transformers import GraphEngine
from profiler.errors import RequestError, RoofscopeError, tolerate_errors
from profiler.facts.cache_format import CACHE_FORMATS
from profiler.facts.change_ids import ChangeId
from profiler.facts.measurements import NotTried, StepSamples, Trial
from profiler.grid.cells import Cell, CellKey, Phase
from profiler.loading.changes import Change, Circumstances
from profiler.loading.load import load
from profiler.loading.request import DTYPES, LoadedModel
from profiler.measure.lines import Switch, arguments_of, attributes_kept
from profiler.measure.short_model import pattern_of, shortened, stack_of
from profiler.measure.subject import Subject
from profiler.measure.sweep import refuse_impossible_times
from profiler.quant.storage import model_storage_bytes
from profiler.quant.torchao import int4_group_size
from profiler.stats import undisturbed

_T = TypeVar("_T")
_TURNS = 3
"""Calls of each side that are timed, in turn."""
_TOKENS = 8
"""New tokens of a call: the first comes from the prefill, and the next ones are warm."""
_WARM_STEPS = 3
"""Decode steps of a call that may prepare something: a cache grows, or a graph is recorded for a new cache."""
_FIRST_IS_LONGER = 2.0
"""A first call that takes this many times as long as a later one prepared something; less may be noise."""
_SLOWER = 1.5
"""A change whose step and prefill both take this many times as long is clear after one turn."""
_LOADING_SHARES = 4
"""Loading a model takes about as long as the calls of this many changes."""
_LEAST_PERIODS = 4
"""Least repetitions of the layers' pattern in a model of fewer layers."""
_MOST_SHARE = 0.5
"""A model with a larger share of the layers adds no information."""
_MEMORY_SHARE = 0.3
"""Share of the free memory that a model of fewer layers may take."""
_FLOAT32_BYTES = 4
_SECOND_MODEL_SHARE = 0.5
"""A second whole model may take this share of the free memory."""
_LOADING_AGAIN = 2.0
"""Loading a model with a change takes at most about so many times as long as loading it was."""
_MOST_CONFIRMING = 0.6
"""The best change is tried again on the whole model, if that takes at most this share of the trials' time."""
_AN_UNKNOWN_SAVES = 0.05
"""Share of the step that a change is expected to save of which nothing is computed."""
_NO_KERNEL = "No available kernel"
"""torch's words where the chosen kernel of attention takes no such tensors (aten/src/ATen/native/transformers)."""


def circumstances_here(subject: Subject, known: Circumstances) -> Circumstances:
    """Return what decides which changes can be tried: `known` facts, and what this process knows of its model."""
    engine, cores = next(iter(subject.engines)), subject.work.of_kind(AttentionCore)
    return replace(
        known,
        kernel=subject.paths[engine, "decode"].kernel,
        grouped_heads=any(core.query_heads != core.kv_heads for core in cores),
        cores=physical_cores(),
        int4_group=_or_none(partial(int4_group_size, subject.loaded.module)),
        quantised_cache=_or_none(partial(quantized_cache, subject.loaded.config, CACHE_FORMATS["fp8"])) is not None,
    )


def _or_none(call: Callable[[], _T]) -> _T | None:
    try:
        return call()
    except RequestError:  # no group divides every layer; an older transformers, or a model with windows
        return None


_MORE_PREFILLS = 2
"""Prefills by themselves after each call, if they take no longer than its steps."""


@dataclass(frozen=True)
class Call:
    """One call: its prefill, its steps after the first ones, and its tokens [batch, new]."""

    prefill: StepSamples
    decode: StepSamples
    tokens: torch.Tensor
    wall_s: float
    longer_s: float
    """What its first steps took longer than later ones, as to record a graph: paid once per call, like a prefill."""


@dataclass(frozen=True)
class Side:
    """A model that calls are made of, with or without a change."""

    loaded: LoadedModel
    subject: Subject
    change: Change | None = None
    first: int | None = None
    """The layer at which a step is cut from the layers before it; None: steps are not cut, and count as layers."""

    def call(self, ids_BS: torch.Tensor, new_tokens: int) -> Call:  # noqa: N803
        """Return one call, cut where layer `first` begins and the last one ends."""
        machine, model = self.subject.machine, self.loaded.module
        marks: list[Any] = []

        def mark(*_: object) -> None:
            marks.append(machine.clock.mark())

        with torch.inference_mode(), no_gc(), ExitStack() as stack:
            arguments = stack.enter_context(self._switch.on()) if self._switch else {}
            if self.first is not None:
                layers = stack_of(model, self.loaded.config.get_text_config())
                assert layers is not None, "only a model with a list of layers is cut"
                stack.callback(layers[self.first].register_forward_pre_hook(mark).remove)
                stack.callback(layers[-1].register_forward_hook(mark).remove)
            start_s = machine.now_s()
            if self.change is not None and self.change.id is ChangeId.GRAPH:
                tokens = self._graph.call(ids_BS, new_tokens, mark)
            else:
                mark()
                tokens = generated(model, ids_BS, new_tokens, mark, arguments)
            machine.clock.synchronize()
            wall_s = machine.now_s() - start_s
        prefill, *steps = self._steps(machine.clock.seconds(marks))
        refuse_impossible_times(tuple(layers_s for layers_s, _ in (prefill, *steps)))
        first = max(0, len(steps) - _timed(len(steps)))
        warm, decode = steps[:first], steps[first:]
        longer_s = max(0.0, sum(map(sum, warm)) - len(warm) * median(map(sum, decode))) if decode else 0.0
        return Call(_samples([prefill]), _samples(decode), tokens.cpu(), wall_s, longer_s)

    @cached_property
    def _switch(self) -> Switch | None:
        return Switch(self.change, self.loaded.module) if self.change else None

    @cached_property
    def _graph(self) -> GraphEngine:
        return GraphEngine(self.loaded.module, self.subject.machine)

    def _steps(self, pieces: Sequence[float]) -> list[tuple[float, float]]:
        """Seconds of each forward's repeating layers, and of the rest of it."""
        if self.first is None:
            return [(piece, 0.0) for piece in pieces]
        forwards = zip(pieces[::3], pieces[1::3], pieces[2::3], strict=True)
        return [(layers_s, before_s + after_s) for before_s, layers_s, after_s in forwards]


def generated(
    model: Any,
    ids_BS: torch.Tensor,  # noqa: N803
    new_tokens: int,
    mark: Callable[[], object],
    arguments: Mapping[str, Any],
) -> torch.Tensor:
    """Return the greedy tokens [batch, new] of `generate` with these arguments; `mark` is called after each forward."""

    def after_forward(_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        mark()
        return scores

    tokens: torch.Tensor = model.generate(
        ids_BS,
        attention_mask=torch.ones_like(ids_BS),
        max_new_tokens=new_tokens,
        do_sample=False,
        num_beams=1,
        # No model has this token: the end is checked at every step, as usual, but never reached.
        eos_token_id=model.config.get_text_config().vocab_size,
        pad_token_id=0,
        logits_processor=LogitsProcessorList([after_forward]),
        **arguments,
    )
    return tokens[:, ids_BS.shape[1] :]


def _timed(steps: int) -> int:
    """How many of a call's decode steps are timed."""
    return max(1, steps - _WARM_STEPS)


def _samples(steps: Sequence[tuple[float, float]]) -> StepSamples:
    return StepSamples(tuple(layers_s for layers_s, _ in steps), tuple(beside_s for _, beside_s in steps))


class Workshop:
    """Tries changes of a loaded model: what each costs, both sides of it, and their calls in turn."""

    def __init__(
        self,
        subject: Subject,
        config: Any,
        latencies_s: Mapping[CellKey, float],
        changes: Sequence[Change],
        savings_s: Mapping[tuple[ChangeId, str], float],
        budget_s: float,
    ) -> None:
        """`latencies_s` are measured steps; `savings_s` are computed savings per step."""
        self._subject, self._config, self._latencies_s = subject, config, latencies_s
        self._savings_s, self._budget_s = savings_s, budget_s
        self._pattern = pattern_of(subject.loaded.module, config.get_text_config())
        # Without a pattern no model of fewer layers can be loaded, and there may be no room for a second whole one.
        self._changes = [change for change in changes if self._pattern or not change.loads]
        self._warm: set[tuple[int, Cell]] = set()
        self.clearly_slower: set[str] = set()

    @cached_property
    def cells(self) -> list[Cell]:
        """The smallest and the largest measured cell with a prompt, of which both phases were timed."""
        timed = [key.cell for key in self._latencies_s if key.phase == "decode" and key.cell.prompt_len]
        timed = [cell for cell in timed if CellKey("prefill", cell) in self._latencies_s]
        by_size = sorted(timed, key=lambda cell: (cell.batch_size * cell.depth, cell.batch_size))
        return list(dict.fromkeys([*by_size[:1], *by_size[-1:]]))

    @cached_property
    def layers(self) -> int:
        """Layers of the model that is loaded for a change: all if there is time, else as many as there is time for.

        Few layers would stay in a cache from step to step, which the whole model's do not.
        """
        pattern = self._pattern
        short = sum(self.is_short(change) for change in self._changes)
        if pattern is None or not short or not self.cells:
            return 0
        share = self._budget_s / (_LOADING_SHARES + short) / self._calls_s(self.cells[0])
        stack = stack_of(self._subject.loaded.module, self._subject.loaded.config.get_text_config())
        assert stack is not None, "a pattern is one of a list of layers"
        layer_bytes = sum(part.numel() for part in stack.parameters()) * _FLOAT32_BYTES / len(stack)
        other_bytes = model_storage_bytes(self._subject.loaded.module) - model_storage_bytes(stack)
        room_bytes = _MEMORY_SHARE * self._subject.machine.available_bytes() - 2 * other_bytes
        most = min(room_bytes / (2 * max(layer_bytes, 1.0)), _MOST_SHARE * pattern.layers)
        return pattern.long(min(most, share * pattern.layers), _LEAST_PERIODS)

    def ranked(self) -> list[Change]:
        """Return the changes, those first that promise most per second of their trial."""
        cells = self.cells[:1]
        return sorted(self._changes, key=lambda change: -sum(self._worth(change, cell) for cell in cells))

    def _worth(self, change: Change, cell: Cell) -> float:
        unknown_s = _AN_UNKNOWN_SAVES * self._latencies_s[CellKey("decode", cell)]
        return self._savings_s.get((change.id, change.value), unknown_s) / self.cost_s(change, cell)

    def is_short(self, change: Change) -> bool:
        """Whether a change is first tried on fewer layers: if a model is loaded for it, and on a CPU in any case."""
        return self._pattern is not None and (change.loads or not self._subject.machine.is_cuda)

    def fits_whole(self, change: Change) -> bool:
        """Whether there is room for a second whole model, if the change needs one."""
        return (
            not change.loads
            or self._subject.model_bytes < _SECOND_MODEL_SHARE * self._subject.machine.available_bytes()
        )

    def cost_s(self, change: Change, cell: Cell, *, whole: bool = False) -> float:
        """Return the expected seconds of a change's trial at a cell."""
        if whole:
            return _LOADING_AGAIN * self._subject.loaded.load_s * change.loads + self._calls_s(cell)
        share, loading = 1.0, _LOADING_SHARES / _TURNS if change.loads else 0.0
        if self._pattern is not None and self.is_short(change):
            share = self.layers / self._pattern.layers
        return change.preparing_s + share * self._calls_s(cell) * (1 + loading)

    def _calls_s(self, cell: Cell) -> float:
        """Seconds of all calls of a trial with all layers."""
        step_s, prefill_s = (self._latencies_s[CellKey(phase, cell)] for phase in ("decode", "prefill"))
        prefills = (1 + 2 * _TURNS) + 2 * _TURNS * self._more_prefills(cell)
        return prefills * prefill_s + (1 + 2 * _TURNS) * self._new_tokens(cell) * step_s

    def _more_prefills(self, cell: Cell) -> int:
        """Prefills by themselves after each call."""
        step_s, prefill_s = (self._latencies_s[CellKey(phase, cell)] for phase in ("decode", "prefill"))
        return min(_MORE_PREFILLS, int(self._new_tokens(cell) * step_s / prefill_s))

    @staticmethod
    def _new_tokens(cell: Cell) -> int:
        """Tokens of a call, which does not go beyond the cell's own last one: a table of positions may end there."""
        return max(2, min(_TOKENS, cell.new_tokens))

    def confirming_s(self, cell: Cell) -> float:
        """Return the seconds to keep for the best change on the whole model; 0 if that takes too much of the time."""
        costs_s = [self.cost_s(change, cell, whole=True) for change in self._changes if self.is_short(change)]
        longest_s = max(costs_s, default=0.0)
        return longest_s if longest_s <= _MOST_CONFIRMING * self._budget_s else 0.0

    def best_of(self, trials: Sequence[Trial]) -> Change | None:
        """Return the change that saved most of a step; None if that was on the whole model, or if it has no room."""
        ratios = {trial.line: _ratio(trial) for trial in trials if trial.line}
        line = min(ratios, key=lambda each: ratios[each], default="")
        is_whole = any(trial.line == line and trial.layers == trial.of_layers for trial in trials)
        change = next((each for each in self._changes if each.line == line and not each.preparing_s), None)
        if change is None or is_whole or ratios[line] > 1 - _AN_UNKNOWN_SAVES or not self.fits_whole(change):
            return None
        return change

    def trial(self, change: Change, cell: Cell, *, whole: bool = False) -> Iterator[Trial]:
        """Yield the prefill and the decode step of a cell, before and after a change."""
        tokens = self._new_tokens(cell)
        plain, other = self.sides(change, whole)
        with attributes_kept(plain.loaded.module), attributes_kept(other.loaded.module):
            ids = self._ids(cell, change, tokens)
            if (id(plain.loaded), cell) not in self._warm:
                plain.call(next(ids), tokens)
                self._warm.add((id(plain.loaded), cell))
            first_s = other.call(next(ids), tokens).wall_s
            turns: list[tuple[Call, Call]] = []
            prefills: list[tuple[Call, Call]] = []
            for _ in range(_TURNS):
                turns.append((plain.call(next(ids), tokens), other.call(next(ids), tokens)))
                for _ in range(self._more_prefills(cell)):
                    prefills.append((plain.call(next(ids), 1), other.call(next(ids), 1)))
                if all(_times(*turns[0], phase) > _SLOWER for phase in ("prefill", "decode")):
                    self.clearly_slower.add(change.line)
                    break
        later_s = turns[-1][1].wall_s
        once_s = first_s - later_s if first_s > _FIRST_IS_LONGER * later_s else 0.0
        once_s += max(0.0, other.loaded.load_s - plain.loaded.load_s) if change.id is ChangeId.FORMAT else 0.0
        alike = not change.loads and not change.new_lengths
        same = _same_tokens(turns[0][0].tokens, turns[0][1].tokens) if alike else 0
        of_layers = 1 if self._pattern is None else self._pattern.layers - self._pattern.first
        layers = of_layers
        if not whole and self._pattern is not None and self.is_short(change):
            layers = self.layers - (other.first or self._pattern.first)
        for key, calls in ((CellKey("prefill", cell), [*turns, *prefills]), (CellKey("decode", cell), turns)):
            prepares = bool(change.preparing_s) and key.phase == "prefill"
            before, after = (_together(key.phase, [call[side] for call in calls], prepares) for side in (0, 1))
            yield Trial(
                key, change.phrase, layers, of_layers, before, after, change.line, change.id,
                change.value, once_s,
                tokens if alike else 0, same,
            )  # fmt: skip

    def _ids(self, cell: Cell, change: Change, tokens: int) -> Iterator[torch.Tensor]:
        """The prompts of successive calls: the cell's own, or for `new_lengths` each beyond all lengths so far."""
        ids = self._subject.prompts.of(cell).to(self._subject.machine.device)
        for number in itertools.count():
            longer = (1 + number) * tokens + cell.new_tokens if change.new_lengths else 0
            yield torch.cat([ids, ids[:, :1].expand(-1, longer)], dim=1)

    def sides(self, change: Change, whole: bool) -> tuple[Side, Side]:
        """Return a model as it is and with a change: the loaded one, or one of fewer layers."""
        subject = self._subject
        if whole or self._pattern is None or not self.is_short(change):
            other = self._loaded(change, self._config) if change.loads else subject.loaded
            return Side(subject.loaded, subject), Side(other, subject, change)
        plain = self._short
        other = self._loaded(change, shortened(self._config, self.layers)) if change.loads else plain
        # Compiled code has no hooks: its steps are not cut, nor are those next to it.
        first = None if change.preparing_s else self._pattern.cold(self.layers)
        return Side(plain, subject, None, first), Side(other, subject, change, first)

    @cached_property
    def _short(self) -> LoadedModel:
        return self._loaded(None, shortened(self._config, self.layers))

    def _loaded(self, change: Change | None, config: Any) -> LoadedModel:
        """A model of this config from the same source, loaded with a change's arguments."""
        request = self._subject.request
        if change is not None:
            arguments = arguments_of(change.loading)
            dtype = DTYPES.get(change.dtype, request.dtype)
            quant = change.value if change.id is ChangeId.FORMAT else "none"
            request = replace(request, dtype=dtype, quant=quant, arguments=arguments)
        return load(request, copy.deepcopy(config))


def _ratio(trial: Trial) -> float:
    """How many times as long a step takes with the change, by the layers that were stepped."""
    after_s, before_s = (undisturbed(each.layers_s).quartile_s for each in (trial.after, trial.before))
    return after_s / before_s if before_s else math.inf


def _times(before: Call, after: Call, phase: str) -> float:
    """How many times as long the phase of a call takes."""
    seconds = (undisturbed(getattr(each, phase).layers_s).quartile_s for each in (after, before))
    after_s, before_s = seconds
    return after_s / before_s if before_s else math.inf


def _together(phase: Phase, calls: Sequence[Call], prepares: bool) -> StepSamples:
    """The samples of a phase; with `prepares`, including what the first steps of a call take longer."""
    longer_s = median(call.longer_s for call in calls if call.decode.layers_s) if prepares else 0.0
    samples = [getattr(call, phase) for call in calls]
    return StepSamples(
        layers_s=tuple(seconds for each in samples for seconds in each.layers_s),
        beside_s=tuple(seconds + longer_s for each in samples for seconds in each.beside_s),
    )


def _same_tokens(before_BN: torch.Tensor, after_BN: torch.Tensor) -> int:  # noqa: N803
    """The first tokens that agree in all sequences."""
    differ = (before_BN != after_BN).any(dim=0).nonzero()
    return int(differ[0]) if len(differ) else before_BN.shape[1]


def try_changes(
    subject: Subject,
    config: Any,
    latencies_s: Mapping[CellKey, float],
    changes: Sequence[Change],
    budget_s: float,
    on_failure: Callable[[str, Exception], object] = lambda change, error: None,
    earlier: Sequence[Trial] = (),
    savings_s: Mapping[tuple[ChangeId, str], float] = {},
) -> Iterator[Trial | NotTried]:
    """Yield the trials of changes within a budget: at the smallest cell, then at the largest; and what was left out.

    `latencies_s` are measured steps, from which the costs follow. `earlier` trials are not repeated. `savings_s` are
    computed savings: what promises most per second of its trial comes first. What saved most of the smallest step on
    few layers is tried again on the whole model before the largest cell.

    A change that does not load or run here is left out, after a call of `on_failure` if that is an error and not an
    unsupported request.
    """
    shop, machine = Workshop(subject, config, latencies_s, changes, savings_s, budget_s), subject.machine
    deadline_s = machine.now_s() + budget_s
    trials = list(earlier)

    def failed(change: Change, error: Exception) -> None:
        machine.recover(change.phrase)
        unavailable = isinstance(error, (RoofscopeError, ImportError, NotImplementedError))
        if not unavailable and _NO_KERNEL not in str(error):
            on_failure(change.phrase, error)

    def tried(change: Change, cell: Cell, *, whole: bool = False) -> Iterator[Trial]:
        with tolerate_errors(partial(failed, change)):
            for trial in shop.trial(change, cell, whole=whole):
                trials.append(trial)
                yield trial
        if change.id in (ChangeId.COMPILED_STEP, ChangeId.COMPILED_FORWARD):
            torch._dynamo.reset()  # it holds the memory of its graphs

    for number, cell in enumerate(shop.cells):
        known = {(trial.form, trial.line) for trial in trials if trial.key.cell == cell}
        reserved_s = 0.0 if number else shop.confirming_s(cell)
        for change in shop.ranked():
            if (change.phrase, change.line) in known or change.line in shop.clearly_slower:
                continue
            if number and change.preparing_s:
                continue  # code is compiled or captured for every shape: the first represents all of them
            needs_s = shop.cost_s(change, cell)
            if machine.now_s() + needs_s <= deadline_s - reserved_s:
                yield from tried(change, cell)
            elif not number and change.line:
                yield NotTried(change.phrase, change.line, change.id, needs_s)
        best = None if number else shop.best_of([trial for trial in trials if trial.key == CellKey("decode", cell)])
        if best is not None and machine.now_s() + shop.cost_s(best, cell, whole=True) <= deadline_s:
            yield from tried(best, cell, whole=True)
