"""samples.jsonl: every fact as it was measured, one JSON object per line, and all of them merged."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from profiler.errors import RunError
from profiler.facts.dispatch import Dispatch, DispatchSamples, dispatch_of
from profiler.facts.measurements import (
    Activity,
    AfterIdle,
    FreshStart,
    GenerateSteps,
    Hooked,
    PredictedPeaks,
    Quality,
    QueueTrial,
    RankSteps,
    Readings,
    Replay,
    Replays,
    Trial,
)
from profiler.facts.operators import OperatorWork
from profiler.facts.roofs import Ceilings, DriftReading, RoofsRemeasured
from profiler.facts.run_facts import Facts
from profiler.facts.telemetry import Reading
from profiler.facts.visits import Gap, Visit
from profiler.grid.cells import Cell, CellKey, Phase
from profiler.store.document import RunDocument
from profiler.store.migrations import dispatch_within
from profiler.units import visible_in

SAMPLES_FILE = "samples.jsonl"

Fact = (
    Visit
    | Gap
    | DriftReading
    | Ceilings
    | RoofsRemeasured
    | DispatchSamples
    | Replays
    | Hooked
    | Activity
    | Readings
    | PredictedPeaks
    | Trial
    | RankSteps
    | Quality
    | GenerateSteps
    | FreshStart
    | AfterIdle
    | QueueTrial
)

_KINDS: dict[str, type[Fact]] = {
    "visit": Visit,
    "gap": Gap,
    "sentinel": DriftReading,
    "roofs": Ceilings,
    "roofs_again": RoofsRemeasured,
    "dispatch": DispatchSamples,
    "replay": Replays,
    "hooks": Hooked,
    "activity": Activity,
    "readings": Readings,
    "predicted_peaks": PredictedPeaks,
    "trial": Trial,
    "ranks": RankSteps,
    "quality": Quality,
    "generate": GenerateSteps,
    "fresh_start": FreshStart,
    "after_silence": AfterIdle,
    "queue": QueueTrial,
}
_KIND_OF = {kind: name for name, kind in _KINDS.items()}
_ADAPTERS: dict[str, TypeAdapter[Any]] = {name: TypeAdapter(kind) for name, kind in _KINDS.items()}
_CELL = tuple(item.name for item in fields(Cell))


def line_of(fact: Fact) -> str:
    """A fact as a line, without its end; the columns of a cell stand flat beside the rest."""
    values = asdict(fact)
    key = values.pop("key", None)
    cell = key["cell"] if key else values.pop("cell", None)
    flat = {**({"phase": key["phase"]} if key else {}), **(cell or {})}
    return json.dumps({"kind": _KIND_OF[type(fact)], **flat, **values}, allow_nan=False)


def fact_of(record: Mapping[str, Any]) -> Fact:
    """The fact of a line. Raises ValidationError, KeyError for what is none."""
    values = dict(record)
    kind = values.pop("kind")
    if kind == "dispatch":
        values = dispatch_within(values)
    names = {item.name for item in fields(_KINDS[kind])}
    if "key" in names or "cell" in names:
        cell = {name: values.pop(name) for name in _CELL if name in values}
        if "key" in names:
            values["key"] = {"phase": values.pop("phase"), "cell": cell}
        else:
            values["cell"] = cell
    fact: Fact = _ADAPTERS[kind].validate_python(values)
    return fact


def read_records(folder: Path) -> list[dict[str, Any]]:
    """All raw records of samples.jsonl. Raises RunError naming the first line that cannot be read."""
    return [record for _, record in _numbered(folder)]


def read_facts_of(folder: Path, defaults: Mapping[str, Any] | None = None) -> list[Fact]:
    """All facts of samples.jsonl; `defaults` stand for what older versions did not write of a cell.

    Raises RunError naming the first line that cannot be read.
    """
    found = []
    for number, record in _numbered(folder):
        try:
            found.append(fact_of({**(defaults or {}), **record} if record.get("kind") in ("visit", "gap") else record))
        except (ValidationError, KeyError, TypeError):
            raise RunError(f"{folder / SAMPLES_FILE}, line {number} is no fact of a run.") from None
    return found


def _numbered(folder: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        file = (folder / SAMPLES_FILE).open("rb")
    except OSError:
        raise RunError(f"{folder} has no {SAMPLES_FILE}.") from None
    with file:
        for number, raw in enumerate(file, start=1):
            try:
                line = raw.decode()
                record = json.loads(line)
                # Most lines are numbers alone, and there may be a million of them.
                if "\\" in line or not line.rstrip("\n").isprintable():
                    record = visible_in(record)
            except (ValueError, RecursionError):
                raise RunError(f"{folder / SAMPLES_FILE}, line {number} is damaged.") from None
            if not isinstance(record, dict):
                raise RunError(f"{folder / SAMPLES_FILE}, line {number} is no record.")
            yield number, record


@dataclass
class GatheredFacts:
    """Grows fact by fact; of what is measured once, the last holds."""

    visits: dict[Cell, list[Visit]] = field(default_factory=dict)
    gaps: dict[Cell, Gap] = field(default_factory=dict)
    looks: list[DriftReading] = field(default_factory=list)
    roofs_again: list[RoofsRemeasured] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)
    dispatch: dict[tuple[str, Phase, int], Dispatch] = field(default_factory=dict)
    replays: dict[CellKey, dict[str, Replay]] = field(default_factory=dict)
    hooked: dict[CellKey, Hooked] = field(default_factory=dict)
    activity: dict[CellKey, Activity] = field(default_factory=dict)
    trials: dict[CellKey, list[Trial]] = field(default_factory=dict)
    queue_trials: dict[Cell, dict[str, QueueTrial]] = field(default_factory=dict)
    rank_steps: dict[Cell, RankSteps] = field(default_factory=dict)
    generate_steps: dict[Cell, GenerateSteps] = field(default_factory=dict)
    fresh_starts: dict[str, FreshStart] = field(default_factory=dict)
    after_silence: dict[float, AfterIdle] = field(default_factory=dict)
    peaks: dict[Cell, int] = field(default_factory=dict)
    ceilings: Ceilings | None = None
    quality: Quality | None = None

    def add(self, fact: Fact) -> None:
        """Take in one more fact."""
        match fact:
            case Visit():
                self.visits.setdefault(fact.cell, []).append(fact)
                self.gaps.pop(fact.cell, None)  # a resumed run tries it once more
            case Gap():
                self.gaps[fact.cell] = fact
            case DriftReading():
                self.looks.append(fact)
            case RoofsRemeasured():
                self.roofs_again.append(fact)
            case Readings():
                self.readings += fact.readings
            case Ceilings():
                self.ceilings = fact
            case DispatchSamples():
                step = (fact.engine, fact.phase, fact.batch_size)
                found = dispatch_of(fact)
                self.dispatch[step] = min(found, self.dispatch.get(step, found), key=lambda item: item.step_s)
            case Replays():
                for key in fact.keys:
                    known = self.replays.setdefault(key, {})
                    known.update({item.operator: _faster(item, known.get(item.operator)) for item in fact.operators})
            case Hooked():
                self.hooked[fact.key] = fact
            case Activity():
                self.activity[fact.key] = fact
            case Trial():
                self.trials.setdefault(fact.key, []).append(fact)
            case QueueTrial():
                self.queue_trials.setdefault(fact.cell, {})[fact.way] = fact
            case RankSteps():
                self.rank_steps[fact.cell] = fact
            case PredictedPeaks():
                self.peaks |= {item.cell: item.peak_bytes for item in fact.peaks}
            case GenerateSteps():
                self.generate_steps[fact.cell] = fact
            case FreshStart():
                self.fresh_starts[fact.link] = fact
            case AfterIdle():
                self.after_silence[fact.silence_s] = fact
            case Quality():
                self.quality = fact

    def facts(self, document: RunDocument, operators: Mapping[CellKey, Sequence[OperatorWork]]) -> Facts:
        """What a verdict is drawn from, as far as it has come; it goes on growing with this."""
        return Facts(
            model=document.model,
            device=document.device,
            grid=document.asked,
            ceilings=self.ceilings or document.ceilings.ceilings,
            operators=operators,
            predicted_peak_bytes=self.peaks,
            dispatch=self.dispatch,
            graph_engines=frozenset(document.engine.replay_as_graph),
            generate_engines=frozenset(document.engine.generate),
            generate_steps=self.generate_steps,
            owning_engines={name: owned.how for name, owned in document.engine.owned.items()},
            visits=self.visits,
            gaps=self.gaps,
            looks=self.looks,
            roofs_again=self.roofs_again,
            readings=self.readings,
            replays=self.replays,
            hooked=self.hooked,
            trials=self.trials,
            queue_trials=self.queue_trials,
            rank_steps=self.rank_steps,
        )


def _faster(replay: Replay, earlier: Replay | None) -> Replay:
    """Of two measurements the one that was held up less."""
    return replay if earlier is None or replay.whole.median_s <= earlier.whole.median_s else earlier
