"""The engine of rank 0: it announces each loop to the other ranks, which then run the very same one."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from profiler.engines.base import DecodeState
from profiler.engines.transformers import EagerEngine
from profiler.grid import Cell
from profiler.machine.machine import Machine
from profiler.machine.ranks import Group


class Announce(Protocol):
    """Tells the other ranks what comes next: a cell with so many decode steps, or with None a prefill alone."""

    def __call__(self, cell: Cell, steps: int | None) -> None: ...


class LeadingEngine(EagerEngine):
    """Steps rank 0's share; a step that fails ends the run, since the others wait for the rest of it."""

    def __init__(self, model: Any, machine: Machine, group: Group, announce: Announce) -> None:
        super().__init__(model, machine)
        self._group = group
        self._announce = announce
        self.beside = group.beside

    def announce(self, cell: Cell, steps: int | None) -> None:
        self._announce(cell, steps)

    def prefill(self, ids_BS: torch.Tensor, slots: int) -> DecodeState:  # noqa: N803
        with self._group.together():
            return super().prefill(ids_BS, slots)

    def decode(self, state: DecodeState) -> DecodeState:
        with self._group.together():
            return super().decode(state)
