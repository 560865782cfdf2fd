"""The facts of a run as they come: from a folder, or from the machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from profiler.diagnosis.dispatch import dispatch_of
from profiler.diagnosis.facts import (
    Activity,
    AfterSilence,
    DispatchSamples,
    Facts,
    FreshStart,
    GenerateSteps,
    Hooked,
    OperatorWork,
    PredictedPeaks,
    Quality,
    QueueTrial,
    RankSteps,
    Readings,
    Replay,
    Replays,
    Trial,
)
from profiler.diagnosis.step_time import Dispatch
from profiler.grid import Cell, CellKey, Phase
from profiler.machine.readings import Reading
from profiler.record.document import RunDocument
from profiler.record.samples import Fact
from profiler.roofs.values import Ceilings, Look, RoofsAgain
from profiler.timing.outcomes import Gap, Visit


@dataclass
class Gathered:
    """Grows fact by fact; of what is measured once, the last holds."""

    visits: dict[Cell, list[Visit]] = field(default_factory=dict)
    gaps: dict[Cell, Gap] = field(default_factory=dict)
    looks: list[Look] = field(default_factory=list)
    roofs_again: list[RoofsAgain] = field(default_factory=list)
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
    after_silence: dict[float, AfterSilence] = field(default_factory=dict)
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
            case Look():
                self.looks.append(fact)
            case RoofsAgain():
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
            case AfterSilence():
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
