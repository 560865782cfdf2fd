"""Forecasts from a run folder: cells that were not measured, and how far off such forecasts are."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from profiler.diagnosis.columns import Demanded, Steps
from profiler.diagnosis.facts import REST, Facts
from profiler.diagnosis.forecast import (
    Answer,
    Device,
    Forecast,
    Measured,
    Trained,
    cells_of,
    told,
    train,
    tried_factor,
)
from profiler.diagnosis.parts import faults_of
from profiler.diagnosis.step_time import Dispatch
from profiler.diagnosis.trials import tried
from profiler.errors import ModelError, RequestError, RunError, first_line
from profiler.grid import PHASES, Cell, CellKey, Grid, Phase, make_grid
from profiler.job.demanded import Paths, demanded
from profiler.loading.quantise import QUANTS, Quant
from profiler.loading.request import DTYPES
from profiler.loading.skeleton import build_on_meta, quiet_libraries
from profiler.record.document import RunDocument
from profiler.record.run import CONFIG_FILE, Run, read_document, read_facts, read_gathered, read_results
from profiler.work.step import ExecutionPath
from profiler.work.walk import ModelWork, walk


@dataclass(frozen=True)
class Known:
    """A run as forecasts see it: its model counted again from its config, and its measured cells."""

    run: Run
    facts: Facts
    work: ModelWork
    paths: Paths
    engine: str
    trained: Trained

    def forecast(self, steps: Steps) -> Forecast:
        """Any steps of this run's model on its device."""
        return self.trained.fitted.forecast(self.demanded(steps))

    def demanded(self, steps: Steps) -> Demanded:
        """What this run's model must do in any steps."""
        return demanded(self.work, steps, self.paths, self.facts.model.storage_bytes)


def known_of(folder: Path, engine: str = "") -> Known:
    """A run folder, ready to be forecast from. Raises RunError for one that kept too little."""
    document = read_document(folder)
    facts = read_facts(folder, document, read_gathered(folder, document))
    run = Run(folder, document, read_results(folder))
    chosen = engine or document.engine.names[0]
    if chosen not in document.engine.names:
        raise RequestError(f"{folder} has no cell of the engine {chosen!r}; it ran {', '.join(document.engine.names)}.")
    work = _work_of(folder, document)
    paths: dict[Phase, ExecutionPath] = {phase: document.counting.paths[f"{chosen} {phase}"] for phase in PHASES}
    measured = _measured(run, facts, work, paths, chosen)
    return Known(run, facts, work, paths, chosen, train(measured, _device(facts, chosen)))


def _work_of(folder: Path, document: RunDocument) -> ModelWork:
    """The operators of a run's model, from the config that it kept."""
    from transformers import AutoConfig

    path, model = folder / CONFIG_FILE, document.model
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise RunError(f"{folder} has no {CONFIG_FILE} that can be read: its cells cannot be counted again.") from None
    quant: Quant = model.quant if model.quant in QUANTS else "none"
    with quiet_libraries():
        try:
            config = AutoConfig.for_model(**content)
        except Exception as error:
            raise ModelError(f"{path}: {first_line(error)}.") from error
        return walk(build_on_meta(config, DTYPES[model.dtype], quant))


def _device(facts: Facts, engine: str) -> Device:
    dispatch: dict[Phase, dict[int, Dispatch]] = {phase: {} for phase in PHASES}
    for (name, phase, batch), found in facts.dispatch.items():
        if name == engine:
            dispatch[phase][batch] = found
    links = facts.ceilings.links
    return Device(
        facts.ceilings,
        facts.model.dtype,
        dispatch,
        facts.overlaps_dispatch,
        facts.device.memory_bytes,
        sum(nbytes / links[where].per_s for where, nbytes in facts.model.offloaded_bytes.items()),
    )


def _measured(run: Run, facts: Facts, work: ModelWork, paths: Paths, engine: str) -> Measured:
    """The measured cells of one engine, with what was replayed at their shapes."""
    results = {result.key: result for result in run.measured if result.engine == engine}
    keys = [key for key in facts.grid.keys if key in results]
    if not keys:
        raise RunError(f"{run.folder} has no cell with a number: there is nothing to forecast from.")
    counted = demanded(work, Steps.of(keys), paths, facts.model.storage_bytes)
    names = [*(column.operator for column in counted.columns), REST]
    alone = [facts.replays.get(key, {}) for key in keys]
    replayed = {
        name: np.array([each[name].whole.median_s if name in each else np.nan for each in alone]) for name in names
    }
    converted = {
        name: np.array([each[name].conversion.median_s if name in each else np.nan for each in alone])
        for name in names
    }
    return Measured(
        counted,
        np.array([results[key].latency_s for key in keys]),
        np.array([(results[key].latency_high_s - results[key].latency_low_s) / 2 for key in keys]),
        {name: seconds for name, seconds in replayed.items() if (seconds > 0).any()},
        {name: seconds for name, seconds in converted.items() if (seconds > 0).any()},
        np.array([faults_of(key.phase, facts.visits[key.cell]) for key in keys]),
    )


@dataclass(frozen=True)
class Wanted:
    """What is to be forecast; empty texts and 0 stand for what the run had."""

    prompt_lens: str = ""
    batch_sizes: str = ""
    context_lens: str = ""
    new_tokens: int = 0
    form: str = ""
    """Another dtype, format, cache or thread count, as a trial of the run calls it."""


# Without a wish, batches go this far beyond what was measured.
_FURTHER = 4
ONE_OUT = "each cell forecast from the others"
EXTREMES_OUT = "the largest batch and the longest context of each phase forecast from the rest"


def forecast_run(folder: Path, wanted: Wanted, engine: str = "") -> tuple[Known, Answer]:
    """The cells that are wanted of a run's model on its device. Raises RequestError."""
    known = known_of(folder, engine)
    document, facts = known.run.document, known.facts
    grid = wanted_grid(known, wanted)
    found = known.forecast(Steps.of(grid.keys))
    trained = known.trained
    factor = _factor(known, wanted.form, found) if wanted.form else (None, None)
    how = "from the split of its measured cells: roofs, replayed kernels, dispatch, and what these leave unexplained"
    if wanted.form:
        how += f"; {wanted.form} as it was tried on a few layers"
    return known, Answer(
        source=str(folder),
        model=document.model.id,
        precision=document.model.precision if not wanted.form else f"{document.model.precision} -> {wanted.form}",
        on=f"{facts.device.name}, {facts.device.threads} {'threads' if facts.device.kind == 'cpu' else 'SMs'}",
        how=how,
        error=told(trained.within, ONE_OUT),
        beyond=told(trained.outside, EXTREMES_OUT),
        cells=cells_of(trained, found, *factor),
        notes=tuple(document.warnings[:0]),
    )


def wanted_grid(known: Known, wanted: Wanted) -> Grid:
    """The grid to forecast: what is not wished for is the run's own, with batches a little further."""
    asked = known.facts.grid
    largest = max(asked.batch_sizes)
    batches = wanted.batch_sizes or ",".join(
        str(batch) for batch in sorted({*asked.batch_sizes, *(largest * 2**power for power in range(1, 1 + _FURTHER // 2))})
    )
    prompts = wanted.prompt_lens or ("" if wanted.context_lens else asked.prompt_lens)
    contexts = wanted.context_lens or ("" if wanted.prompt_lens else asked.context_lens)
    grid = make_grid(prompts, batches, wanted.new_tokens or asked.new_tokens, contexts, (known.engine,))
    return grid


def _factor(known: Known, form: str, found: Forecast):  # type: ignore[no-untyped-def]
    """What a form that the run tried makes of each time. Raises RequestError for one that it did not try."""
    ratios, names = [], set()
    for key, trials in known.facts.trials.items():
        for item in tried(trials):
            names.add(item.form)
            if item.form == form:
                depth = key.query_tokens + key.context_len
                ratios.append(
                    (key.phase, key.cell.batch_size, key.query_tokens, depth, item.ratio, item.half_width)
                )
    factor = tried_factor(found.demanded.steps, ratios) if ratios else None
    if factor is None:
        has = f"it tried {', '.join(sorted(names))}" if names else "it tried no other form"
        raise RequestError(
            f"{known.run.folder} has no basis for {form} in every phase: {has}. Run it so, or profile the card with"
            " `roofscope ceilings --out card.json` and forecast the model --on card.json."
        )
    return factor
