"""A short model on a bench: stepped in one form, and in turn with another."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.attention import sdpa_kernel

from profiler.diagnosis.facts import Stepped
from profiler.engines.registry import ENGINES
from profiler.grid import CellKey, Phase
from profiler.loading.request import LoadedModel
from profiler.machine.clock import no_gc, undisturbed
from profiler.probes.forms import Form
from profiler.probes.shortened import stack_of
from profiler.probes.subject import Subject
from profiler.roofs.values import Ceilings
from profiler.timing.visit import seeded_prompts
from profiler.work.footprint import model_storage_bytes

_DECODE_STEPS = 5
_PREFILLS = 1
_WARM = 1
_TURNS = 2
"""How often the model as it is and the other form are stepped in turn."""


class Bench:
    """A short model in one form, and how it is stepped.

    A few layers would stay in a cache from step to step where the whole model's weights come from memory: then as many
    copies as no cache holds are stepped in turn.
    """

    def __init__(self, form: Form, loaded: LoadedModel, subject: Subject, ceilings: Ceilings) -> None:
        self._form = form
        self.cuts = not form.compiled
        """Whether a step can be cut at its layers: a mark inside of compiled code would break it into pieces."""
        self._machine = subject.machine
        self._vocab_size = subject.vocab_size
        count = _copies(loaded, stack_of(subject.loaded.module, subject.loaded.config.get_text_config()), ceilings)
        self._modules = [loaded.module, *(copy.deepcopy(loaded.module) for _ in range(count - 1))]
        self._stacks = [stack_of(module, loaded.config.get_text_config()) for module in self._modules]
        self._engines = [ENGINES[form.engine or "eager"](module, subject.machine) for module in self._modules]

    def stepped(self, key: CellKey, first: int) -> Stepped:
        """Steps of a cell, each cut where the layer `first` begins and the last one ends; those that cannot be cut are
        given as layers and nothing beside."""
        clock, cell, decode = self._machine.clock, key.cell, key.phase == "decode"
        marks: list[Any] = []

        def mark(*_: object) -> None:
            marks.append(clock.mark())

        with torch.inference_mode(), no_gc(), _threads(self._form.threads), ExitStack() as hooks:
            if self._form.kernel is not None:
                hooks.enter_context(sdpa_kernel(self._form.kernel))
            ids = seeded_prompts(cell, self._vocab_size).to(self._machine.device)
            slots = key.context_len + _WARM + _DECODE_STEPS + 1
            for engine in self._engines:
                engine.prepare(cell.batch_size, slots)
            states = [engine.fill(cell.batch_size, key.context_len, slots) for engine in self._engines if decode]
            for module, stack in zip(self._modules, self._stacks, strict=True):
                assert stack is not None, "the whole model has one"
                if self._form.masked:
                    hook = _padding(itertools.count(key.context_len) if decode else itertools.repeat(0))
                    hooks.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
                if self.cuts:
                    hooks.callback(stack[first].register_forward_pre_hook(mark).remove)
                    hooks.callback(stack[-1].register_forward_hook(mark).remove)
            for step in range(_steps(key.phase)):
                turn = step % len(self._engines)
                clock.synchronize()
                mark()
                if decode:
                    states[turn] = self._engines[turn].decode(states[turn])
                else:
                    self._engines[turn].prefill(ids, cell.prompt_len)
                mark()
            clock.synchronize()
        pieces = clock.seconds(marks)
        if not self.cuts:
            whole = tuple(pieces[2 * _WARM :: 2])
            return Stepped(whole, (0.0,) * len(whole))
        steps = range(4 * _WARM, len(marks), 4)
        return Stepped(
            layers_s=tuple(pieces[start + 1] for start in steps),
            beside_s=tuple(pieces[start] + pieces[start + 2] for start in steps),
        )


def _copies(loaded: LoadedModel, whole: nn.ModuleList | None, ceilings: Ceilings) -> int:
    """How many copies of a short model leave the caches as the model with all its layers would: no more than are
    stepped."""
    short = stack_of(loaded.module, loaded.config.get_text_config())
    assert short is not None
    assert whole is not None
    nbytes, of_layers = model_storage_bytes(loaded.module), model_storage_bytes(short)
    if ceilings.cache_resident(nbytes + of_layers * (len(whole) / len(short) - 1)):
        return 1
    return min(_WARM + _DECODE_STEPS, math.ceil(ceilings.past_caches_bytes / nbytes))


def _padding(contexts: Iterator[int]) -> Callable[..., tuple[Any, dict[str, Any]]]:
    """A hook that hands each forward the mask of a batch whose first sequence is one token shorter than the others.

    `contexts` are the cached tokens that each forward finds: the first of them is the one that is hidden, or the last
    new one where there are none, so that every query sees some key.
    """

    def hook(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        context, ids = next(contexts), named["input_ids"]
        mask = ids.new_ones(ids.shape[0], context + ids.shape[1])
        mask[0, 0 if context else -1] = 0
        return args, named | {"attention_mask": mask}

    return hook


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Within, torch runs on so many threads."""
    with ExitStack() as after:
        if count is not None:
            after.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(count)
        yield


def in_turn(plain: Bench, other: Bench, key: CellKey, first: int) -> tuple[Stepped, Stepped]:
    """Both models stepped in turn, so that a machine that changes changes for both."""
    turns = [(plain.stepped(key, first), other.stepped(key, first)) for _ in range(_TURNS)]
    before, after = (_together(of_one) for of_one in zip(*turns, strict=True))
    return before, after if other.cuts else _cut_like(before, after)


def steps_in_turn(phase: Phase) -> int:
    """Steps that both models make in their turns, together."""
    return 2 * _TURNS * _steps(phase)


def _steps(phase: Phase) -> int:
    return _WARM + (_PREFILLS if phase == "prefill" else _DECODE_STEPS)


def _cut_like(before: Stepped, whole: Stepped) -> Stepped:
    """Steps that could not be cut, as if what lies beside the layers (the head's product, mostly) took as long as in
    those `before`: compiling makes that no faster."""
    beside_s = min(undisturbed(before.beside_s).quartile_s, min(whole.layers_s))
    return Stepped(tuple(step_s - beside_s for step_s in whole.layers_s), (beside_s,) * len(whole.layers_s))


def _together(turns: Sequence[Stepped]) -> Stepped:
    return Stepped(
        layers_s=tuple(seconds for turn in turns for seconds in turn.layers_s),
        beside_s=tuple(seconds for turn in turns for seconds in turn.beside_s),
    )
