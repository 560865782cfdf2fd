"""The engine protocol: prefill a batch of prompts, then decode one token per call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import torch

from profiler.facts.scheduler import OwnedModel, Scheduled
from profiler.grid.cells import Cell, Phase


@dataclass
class DecodeState:
    """What one decode step hands to the next; stays on the device."""

    cache: Any
    token_B1: torch.Tensor  # noqa: N815  shape suffix: [batch, 1], the last greedy token


class Engine(Protocol):
    """One way to run a causal LM. `slots` is the number of tokens that a cache will have to hold."""

    name: ClassVar[str]
    cache: ClassVar[Literal["dynamic", "static", "paged"]]
    hookable: ClassVar[bool]
    """Whether a step runs the modules' own Python, so that hooks on them see it and change nothing else."""
    eager_phases: ClassVar[tuple[Phase, ...]]
    """Phases in which the hollow twin, stepped the same way, is dispatched as the model is (compiled code is other
    code)."""
    replays_as_graph: ClassVar[bool]
    """Whether a decode step is one launch of recorded work: it needs a device that captures, and no window that the
    host moves."""
    keeps_cache: ClassVar[bool]
    """Whether a shape's cache is kept and emptied between prefills, instead of made anew for each."""
    owns_model: ClassVar[bool]
    """Whether it loads the model anew and keeps its cache itself, so that what its kernels do is not seen."""
    pads: ClassVar[bool]
    """Whether prompts of unequal lengths come padded to the longest, with a mask."""
    whole_calls: ClassVar[bool]
    """Whether a cell is timed by `call`, which runs the prompt and all steps by itself."""
    taxes: ClassVar[bool]
    """Whether such a call wraps the very steps of our own loop, so that what it adds to them is told apart."""
    keeps_last_logits: bool
    """Whether the LM head runs on the last position alone in a prefill."""
    kept_bytes: int
    """Bytes that it holds for other shapes than the one that it was prepared for last."""
    beside: Sequence[int]
    """Processes (their numbers) on this host that work in step with this one, and are no foreign load."""
    graph_skips: int | None
    """Compiled pieces that run without the CUDA graph asked for; None where none is asked for."""
    graph_breaks: int | None
    """How often a step leaves its compiled code for Python and comes back; None where nothing is compiled."""

    @property
    def owned(self) -> OwnedModel | None:
        """What it holds where it owns its model."""

    @property
    def scheduled(self) -> tuple[Scheduled, ...]:
        """The iterations of the last call as its own scheduler told them; empty where it has none."""

    @property
    def cache_used_bytes(self) -> int | None:
        """Most of a cache of its own that the last call held at once."""

    def prepare(self, batch: int, slots: int) -> None:
        """Do once what this shape needs before it can be timed: compile, capture."""

    def announce(self, cell: Cell, steps: int | None) -> None:
        """A cell comes next: its prefill and so many decode steps, or with None a prefill alone. Never timed."""

    def prefill(self, ids_BS: torch.Tensor, slots: int) -> DecodeState:  # noqa: N803
        """Run the prompts [batch, tokens] and give the state with the first new token."""

    def fill(self, batch: int, context: int, slots: int) -> DecodeState:
        """A state `context` tokens deep without the prefill for it: its cache holds random keys and values."""

    def decode(self, state: DecodeState) -> DecodeState:
        """Run one step: one new token for each sequence."""

    def call(self, ids_BS: torch.Tensor, new_tokens: int, mark: Callable[[], object]) -> torch.Tensor:  # noqa: N803
        """The greedy tokens [batch, new_tokens] of prompts in one call, with a mark before it and behind each token."""


def greedy_tokens(engine: Engine, ids_BS: torch.Tensor, new_tokens: int) -> torch.Tensor:  # noqa: N803
    """`new_tokens` greedy tokens for each prompt, [batch, new_tokens], through the same calls that are timed."""
    with torch.inference_mode():
        return engine.call(ids_BS, new_tokens, lambda: None)
