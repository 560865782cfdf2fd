"""The facts of a running job; each is on disk before it is used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from profiler.device.machine import Machine
from profiler.facts.fact import Fact, MergedFacts
from profiler.facts.operators import OperatorWork
from profiler.facts.run_facts import Facts
from profiler.grid.cells import Cell, CellKey
from profiler.judge.cells import CellResult
from profiler.judge.judge_run import judge_cells
from profiler.store.document import RunDocument
from profiler.store.folder import facts_of
from profiler.store.writer import RunStore, write_cells

# Writing the table during a sweep may take this share of its wall time.
_TABLE_SHARE = 0.05


class FactLog:
    """Appends facts to a run folder, and keeps cells.csv up to date."""

    def __init__(
        self,
        store: RunStore,
        machine: Machine,
        document: RunDocument,
        operators: Mapping[CellKey, Sequence[OperatorWork]],
        gathered: MergedFacts,
    ) -> None:
        self._store = store
        self._machine = machine
        self._document = document
        self._operators = operators
        self.gathered = gathered
        self._rows: dict[CellKey, CellResult] = {}
        self._changed: dict[Cell, None] = {}
        self._next_table_s = 0.0

    @property
    def facts(self) -> Facts:
        """All facts so far."""
        return facts_of(self._document, self._operators, self.gathered)

    def begin(self, rows: Sequence[CellResult]) -> None:
        """Write the first table. Cells that an earlier part of the run measured keep their `rows`."""
        self._rows |= {row.key: row for row in rows if row.status == "ok" and row.key.cell in self.gathered.visits}
        self.judge([cell for cell in self.facts.grid.cells if any(key not in self._rows for key in cell.keys)])

    def add(self, fact: Fact) -> None:
        """Append a fact to samples.jsonl, then merge it."""
        self._store.append(fact)
        self.gathered.add(fact)

    def judge(self, cells: Sequence[Cell]) -> None:
        """Judge these cells from the facts so far, and write the table, unless it was written a moment ago."""
        self._changed |= dict.fromkeys(cells)
        if self._machine.now_s() >= self._next_table_s:
            self.keep_table()

    def keep_table(self) -> None:
        """Judge the changed cells and write cells.csv."""
        start_s = self._machine.now_s()
        self._rows |= judge_cells(self.facts, self._changed)
        self._changed.clear()
        write_cells(self._store.folder, [self._rows[key] for key in self.facts.grid.keys])
        end_s = self._machine.now_s()
        self._next_table_s = end_s + (end_s - start_s) * (1 / _TABLE_SHARE - 1)
