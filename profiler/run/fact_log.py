"""The facts of a running job, each on disk before it is used; run.json before the first measurement."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial

from profiler import __version__
from profiler.device.clock import instrument_s
from profiler.device.device import software
from profiler.device.machine import Machine
from profiler.facts.ceilings import Ceilings
from profiler.facts.fact import Fact, MergedFacts
from profiler.facts.measurements import CellPeak, PredictedPeaks
from profiler.facts.operators import OperatorWork
from profiler.facts.overhead import OverheadSamples, overhead_of, overhead_seconds
from profiler.facts.run_facts import DeviceFacts, Facts
from profiler.grid.cells import DEFAULT_ENGINE, Cell, CellKey
from profiler.json_document import view
from profiler.judge.cells import CellResult
from profiler.judge.judge_run import break_down_run, time_run
from profiler.loading.request import dtype_name
from profiler.measure.subject import Subject
from profiler.run.stages import Stages
from profiler.run.validate import PreparedRun
from profiler.run.warnings import device_warnings, model_warnings
from profiler.store.document import (
    SCHEMA_VERSION,
    CeilingsRecord,
    CountingRecord,
    EngineRecord,
    GridRecord,
    HealthRecord,
    RunDocument,
)
from profiler.store.folder import (
    RunStore,
    facts_of,
    read_document,
    read_gathered,
    refuse_another,
    write_cells,
    write_config,
    write_document,
    write_operators,
)

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


def opening(
    prepared: PreparedRun,
    subject: Subject,
    ceilings: Ceilings,
    overhead: Sequence[OverheadSamples],
    stages: Stages,
    *,
    idle_power_w: float | None,
) -> RunDocument:
    """Return run.json as it is before anything was timed: model, device, software, ceilings, grid and warnings."""
    machine, grid = subject.machine, prepared.grid
    warnings = list(prepared.warnings)
    with stages.optional("the check of device and model", "some warnings may be missing"):
        warnings += device_warnings(machine.info)
        warnings += model_warnings(subject, ceilings)
    health = HealthRecord(idle_power_w=idle_power_w)
    with stages.optional("the device's settings", "they are not stored with the run"):
        health = replace(health, not_seen=machine.source.missing, settings=machine.source.facts())
    clock_s = stages.tried(
        "the overhead of a time mark", "it is not stored with the run", partial(instrument_s, machine.clock)
    )
    info, sheet, dtype = machine.info, machine.info.datasheet, dtype_name(subject.request.dtype)
    by_step = {(item.engine, item.phase, item.batch_size): overhead_of(item) for item in overhead}
    return RunDocument(
        schema_version=SCHEMA_VERSION,
        roofscope=__version__,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=prepared.command,
        model=subject.model_facts(),
        device=view(
            DeviceFacts,
            info,
            datasheet=sheet.gpu if sheet else None,
            datasheet_flops_per_s=sheet.peak_flops_per_s(dtype) if sheet else None,
            datasheet_bytes_per_s=sheet.bandwidth_bytes_per_s if sheet else None,
        ),
        software=software(),
        ceilings=view(
            CeilingsRecord,
            ceilings,
            full_clock={},
            memory_bytes_per_s=ceilings.memory_bytes_per_s if ceilings.memory else None,
            overhead_s=overhead_seconds(by_step),
        ),
        grid=view(
            GridRecord,
            grid,
            prompts=prepared.prompts.name,
            prompts_digest=prepared.prompts.digest,
            larger=prepared.larger,
        ),
        engine=EngineRecord(
            names=grid.engines,
            budget_s=prepared.options.budget_s,
            instrument_s_per_step=clock_s,
            generate=tuple(name for name, engine in subject.engines.items() if engine.calls_generate),
            replay_as_graph=tuple(name for name, engine in subject.engines.items() if engine.replays_as_graph),
            owned={name: engine.owned for name, engine in subject.engines.items() if engine.owned},
        ),
        counting=CountingRecord(
            coverage=subject.work.coverage,
            unknown=subject.work.unknown,
            paths={f"{engine} {phase}": path for (engine, phase), path in subject.paths.items()},
        ),
        health=health,
        looked_inside=prepared.options.breakdown or prepared.options.trace,
        set_up_warnings=tuple(warnings),
        warnings=tuple(warnings),
    )


def open_log(
    prepared: PreparedRun, store: RunStore, document: RunDocument, subject: Subject, known: Sequence[Fact]
) -> FactLog:
    """Return the log of a folder and of its earlier part. Raises RunError if that is of another device or model."""
    gathered = MergedFacts()
    if prepared.resumed:
        refuse_another(read_document(prepared.out), document)
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
