"""The engine protocol: prefill a batch of prompts, then decode one token per call."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

from profiler.facts.cache_format import CacheFormat
from profiler.facts.run_facts import OwnedModel
from profiler.facts.step import CacheKind
from profiler.grid.cells import PHASES, Cell, Phase


@dataclass
class DecodeState:
    """The state between two decode steps; it stays on the device."""

    cache: Any
    token_B1: torch.Tensor  # noqa: N815  shape suffix: [batch, 1], the last greedy token


class Engine(Protocol):
    """One way to run a causal LM; eager steps by default. `slots` is the final number of tokens in the cache."""

    name: ClassVar[str]
    cache: ClassVar[CacheKind] = "dynamic"
    cache_format: ClassVar[CacheFormat | None] = None
    """How a quantised cache stores keys and values; None for other caches."""
    hookable: ClassVar[bool] = True
    """Whether a step runs the Python code of the modules, so that hooks on them work without other effects."""
    eager_phases: ClassVar[tuple[Phase, ...]] = PHASES
    """Phases in which the overhead model has the overhead of the model; compiled code would differ."""
    replays_as_graph: ClassVar[bool] = False
    """Whether a decode step is one launch of a captured graph, which no sliding window that the host moves allows."""
    keeps_cache: ClassVar[bool] = False
    """Whether the cache of a shape is emptied and reused between prefills, instead of newly created."""
    pads: ClassVar[bool] = False
    """Whether prompts of unequal lengths are padded to the longest, with a mask."""
    whole_calls: ClassVar[bool] = False
    """Whether a cell is timed by `call`, which runs the prompt and all steps."""
    calls_generate: ClassVar[bool] = False
    """Whether `call` is transformers' `generate`, whose overhead over the same steps in a loop can be measured."""
    keeps_last_logits: bool
    """Whether the LM head of a prefill runs only on the last position."""
    kept_bytes: int = 0
    """Bytes that it keeps for shapes other than the last prepared one, less the workspace of that one's graph."""
    helper_pids: Sequence[int] = ()
    """Ids of the processes on this host that work for this run, and so are no foreign load."""
    graph_skips: int | None = None
    """Compiled pieces that run without the requested CUDA graph; None if none was requested."""
    graph_breaks: int | None = None
    """How often a step returns from its compiled code to Python; None if nothing is compiled."""

    owned: OwnedModel | None = None
    """The model and cache of an engine that loads them itself, so that its kernels are hidden; None for others."""

    @property
    def held_bytes(self) -> int:
        """Bytes of the caches that it keeps, of all shapes."""
        return 0

    def prepare(self, batch: int, slots: int) -> None:
        """Prepare a shape before it is timed: compile, capture."""
        return

    def announce(self, cell: Cell, steps: int) -> None:
        """Announce the next cell: a prefill and `steps` decode steps. Never timed."""
        return

    def prefill(self, ids_BS: torch.Tensor, slots: int) -> DecodeState:  # noqa: N803
        """Run the prompts [batch, tokens] and return the state with the first new token."""

    def fill(self, batch: int, context: int, slots: int) -> DecodeState:
        """Return a state with `context` cached tokens without a prefill: random keys and values."""

    def decode(self, state: DecodeState) -> DecodeState:
        """Run one step: one new token per sequence."""

    def call(self, ids_BS: torch.Tensor, new_tokens: int, mark: Callable[[], object]) -> torch.Tensor:  # noqa: N803
        """Return the greedy tokens [batch, new_tokens] of one call; `mark` runs before it and after each token."""

    def times(self, ids_BS: torch.Tensor, new_tokens: int) -> tuple[float, tuple[float, ...]]:  # noqa: N803
        """Return the seconds of a prefill and of decode steps; readers leave out the first (`Repetition.decode_s`)."""
        raise RuntimeError(f"the steps of {self.name} are timed by marks")
