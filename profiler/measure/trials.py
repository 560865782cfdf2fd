"""Try changes: `generate` without and with the line of each, in turn, on the loaded model or on one of fewer layers."""

import ast
import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from importlib import import_module
from statistics import median
from typing import Any, cast

import torch
from transformers import LogitsProcessorList

from profiler.counting.attention import AttentionCore
from profiler.device.clock import no_gc
from profiler.device.device import physical_cores
from profiler.engines.caches import quantized_cache
from profiler.engines.transformers import GraphEngine, greedy_tokens, unreached_end
from profiler.errors import RequestError, RoofscopeError
from profiler.facts.cache_format import CACHE_FORMATS
from profiler.facts.change_ids import ChangeId
from profiler.facts.measurements import NotTried, StepSamples, Trial
from profiler.grid.cells import Cell, CellKey, extremes
from profiler.loading.changes import Change, Circumstances
from profiler.loading.load import load
from profiler.loading.request import DTYPES, LoadedModel
from profiler.measure.short_model import pattern_of, shortened, stack_of
from profiler.measure.subject import Subject
from profiler.measure.sweep import refuse_impossible_times
from profiler.measure.trial_queue import Attempt, in_turn, try_in_order
from profiler.patching import replace_attribute
from profiler.quant.storage import model_storage_bytes
from profiler.quant.torchao import int4_group_size
from profiler.stats import undisturbed

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
"""Least periods of the layers' pattern in a model of fewer layers."""
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
_MORE_PREFILLS = 2
"""Prefills by themselves after each call, if they take no longer than its steps."""


def circumstances_here(subject: Subject, known: Circumstances) -> Circumstances:
    """Return what decides which changes can be tried: `known` facts, and what this process knows of its model."""
    engine, cores = next(iter(subject.engines)), subject.work.of_kind(AttentionCore)
    int4_group, has_quantised_cache = None, False
    with suppress(RequestError):  # no group divides every layer
        int4_group = int4_group_size(subject.loaded.module)
    with suppress(RequestError):  # an older transformers, or a model with windows
        has_quantised_cache = quantized_cache(subject.loaded.config, CACHE_FORMATS["fp8"]) is not None
    return replace(
        known,
        kernel=subject.paths[engine, "decode"].kernel,
        grouped_heads=any(core.query_heads != core.kv_heads for core in cores),
        cores=physical_cores(),
        int4_group=int4_group,
        quantised_cache=has_quantised_cache,
    )


_MODULES = ("transformers", "torchao.quantization", "torchao.prototype.quantization.int4")
"""Where the names of a line come from, besides `torch`, `transformers` and `model`."""


class _Names(dict[str, Any]):
    def __missing__(self, name: str) -> Any:
        for module in _MODULES:
            if module == name or hasattr(import_module(module), name):
                found = import_module(module)
                return found if module == name else getattr(found, name)
        raise KeyError(name)


def arguments_of(text: str, model: Any = None) -> dict[str, Any]:
    """Return the arguments that a line passes: `dtype=torch.bfloat16` is `{"dtype": torch.bfloat16}`."""
    return cast(dict[str, Any], eval(f"dict({text})", {}, _Names(torch=torch, model=model, dict=dict)))


class Switch:
    """A change's statement about a model, switched on and off: what it assigns is evaluated once."""

    def __init__(self, change: Change, model: Any) -> None:
        self._change, self._model = change, model
        self._names = _Names(torch=torch, model=model, dict=dict)

    @contextmanager
    def on(self) -> Iterator[dict[str, Any]]:
        """Context manager after the statement, which it undoes; yields the change's arguments of `generate`."""
        change = self._change
        if change.undoing or not change.statement:
            exec(change.statement, {}, self._names)
            undo: Callable[[], object] = partial(exec, change.undoing, {}, self._names)
        else:
            undo = replace_attribute(*self._assignment)
        try:
            yield arguments_of(change.calling, self._model)
        finally:
            undo()

    @cached_property
    def _assignment(self) -> tuple[Any, str, Any]:
        """The owner of an attribute, its name, and the value that the statement assigns to it."""
        [statement] = ast.parse(self._change.statement).body
        assert isinstance(statement, ast.Assign), "a statement that is no assignment names what undoes it"
        [target] = statement.targets
        assert isinstance(target, ast.Attribute)
        owner, value = (eval(ast.unparse(each), {}, self._names) for each in (target.value, statement.value))
        return owner, target.attr, value


@contextmanager
def attributes_kept(model: Any) -> Iterator[None]:
    """Context manager after which a model has the attributes that it had before, such as no cache and compiled code."""
    before = dict(vars(model))
    try:
        yield
    finally:
        for name in vars(model).keys() - before.keys():
            delattr(model, name)
        vars(model).update(before)


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

        def after_forward(_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            mark()
            return scores

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
                arguments = {"logits_processor": LogitsProcessorList([after_forward]), **arguments}
                tokens = greedy_tokens(model, ids_BS, new_tokens, **unreached_end(model), **arguments)
            machine.clock.synchronize()
            wall_s = machine.now_s() - start_s
        pieces = machine.clock.seconds(marks)
        forwards = [(piece, 0.0) for piece in pieces]
        if self.first is not None:  # before the layers, in them, and after them
            cut = zip(pieces[::3], pieces[1::3], pieces[2::3], strict=True)
            forwards = [(layers_s, before_s + after_s) for before_s, layers_s, after_s in cut]
        refuse_impossible_times(tuple(layers_s for layers_s, _ in forwards))
        prefill, *steps = forwards
        first = max(0, min(_WARM_STEPS, len(steps) - 1))
        warm, decode = steps[:first], steps[first:]
        longer_s = max(0.0, sum(map(sum, warm)) - len(warm) * median(map(sum, decode))) if decode else 0.0
        return Call(_samples([prefill]), _samples(decode), tokens.cpu(), wall_s, longer_s)

    @cached_property
    def _switch(self) -> Switch | None:
        return Switch(self.change, self.loaded.module) if self.change else None

    @cached_property
    def _graph(self) -> GraphEngine:
        return GraphEngine(self.loaded.module, self.subject.machine)


def _samples(steps: Sequence[tuple[float, float]]) -> StepSamples:
    return StepSamples(tuple(layers_s for layers_s, _ in steps), tuple(beside_s for _, beside_s in steps))


@dataclass(frozen=True)
class _Work:
    change: Change
    cell: Cell
    whole: bool = False
    """Whether on the whole model, also where fewer layers would do."""


@dataclass(eq=False)
class Trials:
    """The changes to try, by the arguments of `try_changes`: what each costs, both sides of it, and its trial."""

    subject: Subject
    config: Any
    latencies_s: Mapping[CellKey, float]
    changes: Sequence[Change]
    savings_s: Mapping[tuple[ChangeId, str], float]
    budget_s: float
    _warm: set[tuple[int, Cell]] = field(default_factory=set)
    _clearly_slower: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._pattern = pattern_of(self.subject.loaded.module, self.config.get_text_config())
        # Without a pattern no model of fewer layers can be loaded, and a second whole one may not fit.
        self.changes = [change for change in self.changes if self._pattern or not change.loads]

    @cached_property
    def cells(self) -> list[Cell]:
        """The smallest and the largest measured cell with a prompt, of which both phases were timed."""
        cells = [key.cell for key in self.latencies_s if key.phase == "decode" and key.cell.prompt_len]
        return extremes(cell for cell in cells if CellKey("prefill", cell) in self.latencies_s)

    @cached_property
    def layers(self) -> int:
        """Layers of the model that is loaded for a change, as many as there is time for: few would stay in a cache."""
        pattern = self._pattern
        short = sum(self.is_short(change) for change in self.changes)
        if pattern is None or not short or not self.cells:
            return 0
        share = self.budget_s / (_LOADING_SHARES + short) / self._calls_s(self.cells[0])
        stack = stack_of(self.subject.loaded.module, self.subject.loaded.config.get_text_config())
        assert stack is not None, "a pattern is one of a list of layers"
        layer_bytes = sum(part.numel() for part in stack.parameters()) * _FLOAT32_BYTES / len(stack)
        other_bytes = self.subject.model_bytes - model_storage_bytes(stack)
        room_bytes = _MEMORY_SHARE * self.subject.machine.available_bytes() - 2 * other_bytes
        most = min(room_bytes / (2 * max(layer_bytes, 1.0)), _MOST_SHARE * pattern.layers)
        return pattern.long(min(most, share * pattern.layers), _LEAST_PERIODS)

    def queue(self, cell: Cell, earlier: Sequence[Trial]) -> list[Attempt[_Work]]:
        """Return the trials at a cell that none of the `earlier` ones has made, or shown to be needless."""
        known = {(trial.form, trial.line) for trial in earlier if trial.key.cell == cell}
        return [
            self.attempt(_Work(change, cell))
            for change in self.changes
            if (change.phrase, change.line) not in known
            and change.line not in self._clearly_slower
            # Code is compiled or captured for every shape: the first cell represents all of them.
            and not (change.preparing_s and cell != self.cells[0])
        ]

    def attempt(self, work: _Work) -> Attempt[_Work]:
        """Return a trial with its expected saving per step, and its expected seconds."""
        unknown_s = _AN_UNKNOWN_SAVES * self.latencies_s[CellKey("decode", self.cells[0])]
        saves_s = self.savings_s.get((work.change.id, work.change.value), unknown_s)
        return Attempt(work, saves_s, self.cost_s(work.change, work.cell, whole=work.whole))

    def is_short(self, change: Change) -> bool:
        """Whether a change is first tried on fewer layers: if a model is loaded for it, and always on a CPU."""
        return self._pattern is not None and (change.loads or not self.subject.machine.is_cuda)

    def cost_s(self, change: Change, cell: Cell, *, whole: bool = False) -> float:
        """Return the expected seconds of a change's trial at a cell."""
        if whole:
            return _LOADING_AGAIN * self.subject.loaded.load_s * change.loads + self._calls_s(cell)
        share, loading = 1.0, _LOADING_SHARES / _TURNS if change.loads else 0.0
        if self._pattern is not None and self.is_short(change):
            share = self.layers / self._pattern.layers
        return change.preparing_s + share * self._calls_s(cell) * (1 + loading)

    def _calls_s(self, cell: Cell) -> float:
        step_s, prefill_s = (self.latencies_s[CellKey(phase, cell)] for phase in ("decode", "prefill"))
        prefills = (1 + 2 * _TURNS) + 2 * _TURNS * self._more_prefills(cell)
        return prefills * prefill_s + (1 + 2 * _TURNS) * self._new_tokens(cell) * step_s

    def _more_prefills(self, cell: Cell) -> int:
        step_s, prefill_s = (self.latencies_s[CellKey(phase, cell)] for phase in ("decode", "prefill"))
        return min(_MORE_PREFILLS, int(self._new_tokens(cell) * step_s / prefill_s))

    @staticmethod
    def _new_tokens(cell: Cell) -> int:
        """Tokens of a call, which does not go beyond the cell's own last one: a table of positions may end there."""
        return max(2, min(_TOKENS, cell.new_tokens))

    def confirming_s(self, cell: Cell) -> float:
        """Return the seconds to keep for the best change on the whole model; 0 if that takes too much of the time."""
        short = filter(self.is_short, self.changes)
        longest_s = max((self.cost_s(change, cell, whole=True) for change in short), default=0.0)
        return longest_s if longest_s <= _MOST_CONFIRMING * self.budget_s else 0.0

    def best_of(self, trials: Sequence[Trial]) -> Change | None:
        """Return the change that saved most of a step; None if that was on the whole model, or if it does not fit."""
        times = {trial.line: _times(trial.before, trial.after) for trial in trials if trial.line}
        line = min(times, key=lambda each: times[each], default="")
        whole = {trial.line for trial in trials if trial.layers == trial.of_layers}
        change = next((each for each in self.changes if each.line == line and not each.preparing_s), None)
        if change is None or line in whole or times[line] > 1 - _AN_UNKNOWN_SAVES:
            return None
        room_bytes = _SECOND_MODEL_SHARE * self.subject.machine.available_bytes()
        return None if change.loads and self.subject.model_bytes >= room_bytes else change

    def trial(self, work: _Work) -> Iterator[Trial]:
        """Yield the prefill and the decode step of a cell, before and after a change."""
        change, cell, tokens = work.change, work.cell, self._new_tokens(work.cell)
        plain, other = self.sides(change, work.whole)
        first_s, pairs = self._call_pairs(work, plain, other)
        if len(pairs) < _TURNS:
            self._clearly_slower.add(change.line)
        (first_before, *_), (first_after, *_) = pairs[0]
        later_s = pairs[-1][1][0].wall_s
        once_s = first_s - later_s if first_s > _FIRST_IS_LONGER * later_s else 0.0
        once_s += max(0.0, other.loaded.load_s - plain.loaded.load_s) if change.id is ChangeId.FORMAT else 0.0
        alike = not change.loads and not change.new_lengths
        same = _same_tokens(first_before.tokens, first_after.tokens) if alike else 0
        layers = of_layers = 1 if self._pattern is None else self._pattern.layers - self._pattern.first
        if not work.whole and self._pattern is not None and self.is_short(change):
            layers = self.layers - (other.first or self._pattern.first)
        prefills, steps = [], []
        for side in (0, 1):
            of_side = [call for pair in pairs for call in pair[side]]
            # A change that prepares something does so in the first steps of each call.
            longer_s = median(call.longer_s for call in of_side if call.decode.layers_s) if change.preparing_s else 0.0
            prefills.append(_together([call.prefill for call in of_side], longer_s))
            steps.append(_together([call.decode for call in of_side]))
        for key, (before, after) in ((CellKey("prefill", cell), prefills), (CellKey("decode", cell), steps)):
            yield Trial(
                key, change.phrase, layers, of_layers, before, after, change.line, change.id,
                change.value, once_s, tokens if alike else 0, same,
            )  # fmt: skip

    def _call_pairs(self, work: _Work, plain: Side, other: Side) -> tuple[float, list[tuple[list[Call], list[Call]]]]:
        """The seconds of the first call with the change, and calls without and with it, each with its prefills."""
        cell, tokens, more_prefills = work.cell, self._new_tokens(work.cell), self._more_prefills(work.cell)
        with attributes_kept(plain.loaded.module), attributes_kept(other.loaded.module):
            ids = self._ids(cell, work.change, tokens)

            def calls(side: Side) -> list[Call]:
                return [side.call(next(ids), tokens), *(side.call(next(ids), 1) for _ in range(more_prefills))]

            if (id(plain.loaded), cell) not in self._warm:
                plain.call(next(ids), tokens)
                self._warm.add((id(plain.loaded), cell))
            first_s = other.call(next(ids), tokens).wall_s
            return first_s, in_turn(partial(calls, plain), partial(calls, other), _is_enough)

    def _ids(self, cell: Cell, change: Change, tokens: int) -> Iterator[torch.Tensor]:
        """The prompts of successive calls: the cell's own, or for `new_lengths` each beyond all lengths so far."""
        ids = self.subject.prompts.of(cell).to(self.subject.machine.device)
        longer = cell.new_tokens
        while True:
            longer += tokens
            yield torch.cat([ids, ids[:, :1].expand(-1, longer)], dim=1) if change.new_lengths else ids

    def sides(self, change: Change, whole: bool) -> tuple[Side, Side]:
        """Return a model as it is and with a change: the loaded one, or one of fewer layers."""
        subject, config, plain, first = self.subject, self.config, self.subject.loaded, None
        if self._pattern is not None and self.is_short(change) and not whole:
            config, plain = shortened(self.config, self.layers), self._short
            # Compiled code has no hooks: its steps are not cut, nor are those next to it.
            first = None if change.preparing_s else self._pattern.cold(self.layers)
        other = self._loaded(change, config) if change.loads else plain
        return Side(plain, subject, None, first), Side(other, subject, change, first)

    @cached_property
    def _short(self) -> LoadedModel:
        return self._loaded(None, shortened(self.config, self.layers))

    def _loaded(self, change: Change | None, config: Any) -> LoadedModel:
        request = self.subject.request
        if change is not None:
            quant = change.value if change.id is ChangeId.FORMAT else "none"
            dtype = DTYPES.get(change.dtype, request.dtype)
            request = replace(request, dtype=dtype, quant=quant, arguments=arguments_of(change.loading))
        return load(request, copy.deepcopy(config))


def _times(before: StepSamples, after: StepSamples) -> float:
    """How many times as long a step takes with the change, by the layers that were stepped."""
    before_s, after_s = (undisturbed(each.layers_s).quartile_s for each in (before, after))
    return after_s / before_s if before_s else math.inf


def _is_enough(pairs: Sequence[tuple[list[Call], list[Call]]]) -> bool:
    """Whether all turns are over, or both phases of the first take so much longer that no other would show less."""
    if not pairs:
        return False
    (before, *_), (after, *_) = pairs[0]
    both = _times(before.prefill, after.prefill), _times(before.decode, after.decode)
    return len(pairs) == _TURNS or min(both) > _SLOWER


def _together(samples: Sequence[StepSamples], longer_s: float = 0.0) -> StepSamples:
    """All samples, each with so much more time outside of its layers."""
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

    `latencies_s` are measured steps, from which the costs follow; `savings_s` are computed savings per step. `earlier`
    trials are not repeated. What saved most of the smallest step on few layers is tried again on the whole model before
    the largest cell. A change that fails is left out, after a call of `on_failure` unless it is just unsupported here.
    """
    trials, machine = Trials(subject, config, latencies_s, changes, savings_s, budget_s), subject.machine
    deadline_s = machine.now_s() + budget_s
    made = list(earlier)

    def failed(work: _Work, error: Exception) -> None:
        machine.recover(work.change.phrase)
        unavailable = isinstance(error, (RoofscopeError, ImportError, NotImplementedError))
        if not unavailable and _NO_KERNEL not in str(error):
            on_failure(work.change.phrase, error)

    def run(work: _Work) -> Iterator[Trial | NotTried]:
        try:
            for trial in trials.trial(work):
                made.append(trial)
                yield trial
        finally:
            if work.change.id in (ChangeId.COMPILED_STEP, ChangeId.COMPILED_FORWARD):
                torch._dynamo.reset()  # it holds the memory of its graphs

    def without_time(attempt: Attempt[_Work]) -> Iterator[NotTried]:
        change = attempt.work.change
        if change.line and attempt.work == _Work(change, trials.cells[0]):
            yield NotTried(change.phrase, change.line, change.id, attempt.cost_s)

    def tried(queue: Sequence[Attempt[_Work]], kept_s: float = 0.0) -> Iterator[Trial | NotTried]:
        return try_in_order(queue, run, deadline_s - kept_s, machine.now_s, without_time, failed)

    for cell in trials.cells:
        is_first = cell == trials.cells[0]
        yield from tried(trials.queue(cell, made), trials.confirming_s(cell) if is_first else 0.0)
        best = trials.best_of([trial for trial in made if trial.key == CellKey("decode", cell)]) if is_first else None
        if best is not None:
            yield from tried([trials.attempt(_Work(best, cell, whole=True))])
