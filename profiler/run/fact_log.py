"""The facts of a running job; each is on disk before it is used."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from profiler.device.machine import Machine
from profiler.facts.fact import Fact, MergedFacts
from profiler.facts.measurements import CellPeak, PredictedPeaks
from profiler.facts.operators import OperatorWork
from profiler.facts.run_facts import Facts
from profiler.grid.cells import DEFAULT_ENGINE, Cell, CellKey
from profiler.judge.cells import CellResult
from profiler.judge.judge_run import break_down_run, time_run
from profiler.measure.subject import Subject
from profiler.run.validate import PreparedRun
from profiler.store.document import RunDocument
from profiler.store.folder import facts_of, read_document, read_gathered, refuse_another
from profiler.store.writer import RunStore, write_cells, write_config, write_document, write_operators

# Writing the table during a sweep may take this share of its wall time.
_TABLE_SHARE = 0.05


@dataclass
class FactLog:
    """Appends facts to a run folder, and keeps cells.csv up to date."""

    store: RunStore
    machine: Machine
    document: RunDocument
    operators: Mapping[CellKey, Sequence[OperatorWork]]
    gathered: MergedFacts
    _rows: dict[CellKey, CellResult] = field(default_factory=dict)
    _changed: dict[Cell, None] = field(default_factory=dict)
    _next_table_s: float = 0.0

    @property
    def facts(self) -> Facts:
        """All facts so far."""
        return facts_of(self.document, self.operators, self.gathered)

    def add(self, fact: Fact) -> None:
        """Append a fact to samples.jsonl, then merge it."""
        self.store.append(fact)
        fact.merge_into(self.gathered)

    def extend(self, facts: Iterable[Fact]) -> None:
        """Append facts, each as soon as it is measured."""
        for fact in facts:
            self.add(fact)

    def judge(self, cells: Sequence[Cell]) -> None:
        """Judge these cells from the facts so far, and write the table, unless it was written a moment ago."""
        self._changed |= dict.fromkeys(cells)
        if self.machine.now_s() >= self._next_table_s:
            self.keep_table()

    def keep_table(self) -> None:
        """Judge the changed cells and write cells.csv."""
        start_s = self.machine.now_s()
        shapes = {replace(cell, engine=DEFAULT_ENGINE) for cell in self._changed}  # engines are compared
        keys = [key for key in self.facts.grid.keys if replace(key.cell, engine=DEFAULT_ENGINE) in shapes]
        self._rows |= break_down_run(time_run(self.facts, keys)).rows
        self._changed.clear()
        write_cells(self.store.folder, [self._rows[key] for key in self.facts.grid.keys])
        end_s = self.machine.now_s()
        self._next_table_s = end_s + (end_s - start_s) * (1 / _TABLE_SHARE - 1)


def open_log(
    prepared: PreparedRun, store: RunStore, document: RunDocument, subject: Subject, known: Sequence[Fact]
) -> FactLog:
    """Return the log of a folder and of its earlier part. Raises RunError if that is of another device or model."""
    gathered = MergedFacts()
    if prepared.resumed:
        earlier = read_document(prepared.out)
        refuse_another(earlier, document)
        gathered = read_gathered(prepared.out)
    write_document(store.folder, document)
    config: dict[str, object] = prepared.config.to_dict()
    config.pop("_name_or_path", None)  # the path that it was read from
    write_config(store.folder, config)
    operators = {key: subject.operators_of(key) for key in prepared.grid.keys}
    log = FactLog(store, subject.machine, document, operators, gathered)
    peaks = tuple(CellPeak(cell, int(subject.need(cell).peak_bytes)) for cell in prepared.grid.cells)
    log.extend([*known, PredictedPeaks(peaks)])
    write_operators(store.folder, log.facts)
    log.judge(prepared.grid.cells)
    return log
