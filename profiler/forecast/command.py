"""`forecast`: times of cells that were not measured, from a run with their error, or from a GPU's datasheet."""

import json
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from profiler.counting.cache import counted_model
from profiler.counting.preset_counts import CountedModel
from profiler.counting.walk import walk
from profiler.data.datasheets import gpu_called
from profiler.data.published_results import ENGINE_WORDS, EngineKind, coverage_sentences
from profiler.errors import RequestError, RunError
from profiler.facts.change_ids import ChangeId
from profiler.facts.run_facts import Facts
from profiler.facts.step import ExecutionPath
from profiler.forecast.options import ForecastRequest
from profiler.grid.cells import PHASES, Grid, Phase
from profiler.grid.ranges import check_positions, make_grid
from profiler.judge.breakdown import StepTerms
from profiler.judge.savings import trial_results
from profiler.loading.config import config_from
from profiler.loading.meta_model import build_on_meta, quiet_libraries
from profiler.loading.request import DTYPES, most_positions
from profiler.loading.source import resolve
from profiler.predict.cross_validation import TrainedModel, too_few, train_on
from profiler.predict.operator_arrays import Array, OperatorArrays, StepArrays, operator_arrays
from profiler.predict.predict import Forecast, Terms, change_factor
from profiler.predict.published_efficiency import CardSteps, Range, form_of, steps_by_datasheet
from profiler.predict.result import (
    ForecastCell,
    ForecastDocument,
    ForecastError,
    cells_of,
    cross_validated_error,
    forecast_cells,
)
from profiler.quant.registry import (
    FORMATS,
    Quant,
    check_packed_dtype,
    known_quant,
    published_as,
    quant_of,
    stored_format,
)
from profiler.store.folder import CONFIG_FILE, Run, read_document, read_facts, read_gathered, read_results
from profiler.units import processors


@dataclass(frozen=True)
class RunFacts:
    """The basis of forecasts from a run: its model, counted from its config, and a fit to its measured cells."""

    run: Run
    facts: Facts
    engine: str
    trained: TrainedModel
    demanded: Callable[[StepArrays], OperatorArrays]
    """Returns the work of the run's model in any steps."""
    max_positions: int | None
    """The model's positions; None if its config does not say."""


def run_facts(folder: Path, engine: str = "") -> RunFacts:
    """Read a run folder, count its model and fit its cells of `engine`, or of its first engine if that did not run.

    Raises RunError if the folder lacks facts or a config.json, or is one rank's share.
    """
    document = read_document(folder)
    if document.ranks > 1:
        raise RunError(f"{folder} is a run of {document.ranks} ranks; use a run on one GPU.")
    facts = read_facts(folder, document, read_gathered(folder))
    run = Run(folder, document, read_results(folder))
    chosen = engine if engine in document.engine.names else document.engine.names[0]
    try:
        content = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        raise RunError(f"{folder} has no readable {CONFIG_FILE}, so its cells cannot be counted.") from None
    model, config = document.model, config_from(content, str(folder / CONFIG_FILE))
    with quiet_libraries():
        module = build_on_meta(config, DTYPES[model.dtype], model.quant if model.quant in FORMATS else "none")
        work = walk(module)
    paths: dict[Phase, ExecutionPath] = {phase: document.counting.paths[f"{chosen} {phase}"] for phase in PHASES}
    if not facts.ceilings.judges:
        raise RunError(f"{folder} has no ceiling of memory or of arithmetic: there is nothing to forecast under.")

    def demanded(steps: StepArrays) -> OperatorArrays:
        return operator_arrays(work, steps, paths, facts.model.storage_bytes)

    trained = train_on(facts, run.measured, lambda keys: demanded(StepArrays.of(keys)), chosen)
    if trained is None:
        raise RunError(f"{folder} has no cell with a number: there is nothing to forecast from.")
    return RunFacts(run, facts, chosen, trained, demanded, most_positions(module.config))


_LARGER_BATCHES = (2, 4)
"""Multiples of the largest measured batch that are forecast by default."""
SHORTER = "shorter --prompt-lens or --context-lens, or fewer --new-tokens"


def forecast_run(folder: Path, request: ForecastRequest) -> ForecastDocument:
    """Forecast a run's model on its device.

    Raises RunError for a run that has no basis for it. Raises RequestError for more tokens than the model has
    positions, for a change that the run did not try, and for cells of which too few around were measured.
    """
    basis = run_facts(folder, request.engine)
    document = basis.run.document
    if request.prefix:
        raise RequestError(
            f"--prefix {request.prefix}: {folder} measured no prefill after a cached prefix; forecast the model --on a"
            " GPU."
        )
    grid = _grid_of(basis, request)
    # A default number of new tokens makes no sequence too long.
    check_positions(basis.max_positions, grid.longest_context - (not request.new_tokens) * grid.new_tokens, SHORTER)
    facts, trained, steps = basis.facts, basis.trained, StepArrays.of(grid.keys)
    if phase := too_few(trained, steps):
        raise RequestError(f"{folder} measured too few cells of {phase} to forecast these; {_measuring(basis, grid)}")
    forecast, half_width = trained.forecast(basis.demanded(steps))
    if not np.isfinite(half_width).all():
        raise RequestError(
            f"the forecast of {grid.keys[int(np.argmax(half_width))].name} contradicts smaller or larger cells;"
            f" {_measuring(basis, grid)}"
        )
    changes = _changes(basis, request)
    factor, off = _factors(basis, changes, steps)
    how = "from the time breakdown of its measured cells: ceilings, replayed kernels, overhead and the unexplained rest"
    if changes:
        how += f"; {' and '.join(changes)} as tried on a few layers"
    return ForecastDocument(
        source=str(folder),
        model=document.model.id,
        precision=" -> ".join([document.model.precision, *changes]),
        on=f"{facts.device.name}, {processors(facts.device.threads, facts.device.kind)}",
        how=how,
        error=cross_validated_error(trained.within, trained.repeat_width, "each cell forecast from the others"),
        beyond=cross_validated_error(
            trained.outside,
            trained.repeat_width,
            "the largest batch and the longest context of each phase forecast from the rest",
        ),
        cells=cells_of(trained, forecast, np.hypot(half_width, off), factor, facts.device.room_bytes),
        notes=(),
    )


def _changes(basis: RunFacts, request: ForecastRequest) -> dict[str, tuple[ChangeId, str] | None]:
    """The changes of the run that are asked for, each by its name with what a trial made; None for other engines."""
    model, threads = basis.facts.model, basis.facts.device.threads
    changes: dict[str, tuple[ChangeId, str] | None] = {}
    if request.dtype not in ("auto", model.dtype):
        changes[request.dtype] = ChangeId.DTYPE, request.dtype
    if (quant := quant_of(request.quant, request.bits)) not in ("none", model.quant):
        changes[quant] = ChangeId.FORMAT, known_quant(quant, counted=True)
    if request.engine and request.engine != basis.engine:
        changes[f"the engine {request.engine}"] = (ChangeId.STATIC_CACHE, "") if request.engine == "static" else None
    if request.threads and request.threads != threads:
        changes[f"{request.threads} of {threads} threads"] = ChangeId.THREADS, str(request.threads)
    return changes


def _grid_of(basis: RunFacts, request: ForecastRequest) -> Grid:
    own = basis.facts.grid
    default_batches = {*own.batch_sizes, *(max(own.batch_sizes) * factor for factor in _LARGER_BATCHES)}
    batches = request.batch_sizes or ",".join(map(str, sorted(default_batches)))
    prompts = request.prompt_lens or ("" if request.context_lens else own.prompt_lens)
    contexts = request.context_lens or ("" if request.prompt_lens else own.context_lens)
    return make_grid(prompts, batches, request.new_tokens or own.new_tokens, contexts, (basis.engine,))


def _measuring(basis: RunFacts, grid: Grid) -> str:
    """The end of a sentence: the command that measures the cells of a grid as the run was measured."""
    command = re.sub(r" --(budget|prompt-lens|batch-sizes|context-lens) [^ ]+", "", basis.run.document.command)
    sizes = {"prompt-lens": grid.prompt_lens, "context-lens": grid.context_lens, "batch-sizes": grid.batch_sizes}
    options = [f"--{name} {','.join(map(str, values))}" for name, values in sizes.items() if values]
    return f"measure them: {' '.join([command, *options])}"


def _factors(
    basis: RunFacts, changes: Mapping[str, tuple[ChangeId, str] | None], steps: StepArrays
) -> tuple[Array, Array]:
    """(time of the changes over the run's [n], half width of its log [n]). Raises RequestError for an untried one."""
    factor, half_width = np.ones(len(steps)), np.zeros(len(steps))
    tried_at = [(key, item) for key, trials in basis.facts.trials.items() for item in trial_results(trials)]
    for name, what in changes.items():
        ratios = [(key, item.ratio, item.half_width) for key, item in tried_at if what and item.trial.what == what]
        ratio = change_factor(steps, ratios)
        if ratio is None:
            names = dict.fromkeys(what[1] or what[0] for _, item in tried_at if (what := item.trial.what))
            tried = f"it tried {', '.join(names)}" if names else "it tried no change"
            raise RequestError(
                f"{basis.run.folder} has no basis for {name} in every requested phase: {tried}. Run the model that way."
            )
        factor, half_width = factor * ratio[0], np.hypot(half_width, ratio[1])
    return factor, half_width


def forecast_on(model: str, on: str, request: ForecastRequest) -> ForecastDocument:
    """Forecast a model by a GPU's datasheet, as ranges from published results.

    Raises RequestError for an unknown name, without a published figure of format and engine kind, or for a GPU without
    their kernels or dtype.
    """
    quant, source, sheet = quant_of(request.quant, request.bits), resolve(model), gpu_called(on)
    check_packed_dtype(request.dtype, quant)
    # The parts that a format leaves dense run in 16 bits.
    counted = counted_model(source, request.dtype, quant, rented=quant != "none")
    if request.dtype == "auto" and sheet.peak_flops_per_s(counted.dtype) is None:
        counted = replace(counted, dtype=sheet.sustained_dtype)
    grid = make_grid(
        request.prompt_lens or ("" if request.context_lens else "64,128,256,512"),
        request.batch_sizes or "1,2,4,8",
        request.new_tokens or 32,
        request.context_lens,
        prefix=request.prefix,
    )
    check_positions(counted.max_positions, grid.longest_context - (not request.new_tokens) * grid.new_tokens, SHORTER)
    if request.engine not in ("", "eager", "compiled"):
        raise RequestError(
            f"--engine {request.engine!r}: by its datasheet a GPU has ranges of eager and compiled engines only."
        )
    kind: EngineKind = "compiled" if request.engine == "compiled" else "eager"
    steps = StepArrays.of(grid.keys, prefix=grid.prefix, is_shared=kind != "eager")
    found = steps_by_datasheet(counted, quant, sheet, steps, kind)
    times = found.times
    packed = counted.published if quant == "none" else quant
    cells = forecast_cells(
        Forecast(found.needed, _terms(found.on_gpu, times), times.typical_s, np.zeros(len(steps))),
        times.typical_s,
        (times.low_s, times.high_s),
        ["published figures of other GPUs"] * len(steps),
        sheet.room_bytes,
    )
    return ForecastDocument(
        source=source.name,
        model=source.name,
        precision=counted.dtype if packed is None else f"{counted.dtype}, {packed}",
        on=f"{sheet.gpu}, by its datasheet",
        how=f"a range for {ENGINE_WORDS[kind]}, by published figures",
        error=ForecastError(None, None, 0, "no run on this GPU"),
        beyond=None,
        cells=cells,
        notes=(*coverage_sentences(kind, form_of(counted, quant)), *_too_wide(cells), *_notes(counted, quant)),
    )


def _terms(gpu_steps: CardSteps, times: Range) -> Terms:
    """The floor of each step, and the rest: overhead where the host is slower than the device, else slow kernels."""
    floor_s = gpu_steps.floor_s()
    zeros = np.zeros(len(floor_s))
    memory_s = (gpu_steps.weight_bytes + gpu_steps.other_bytes) / gpu_steps.bandwidth
    by_compute = gpu_steps.flops / gpu_steps.peak > memory_s
    lost_s = times.typical_s - floor_s
    return StepTerms(
        weights_s=np.where(by_compute, 0.0, floor_s), kv_s=zeros, compute_s=np.where(by_compute, floor_s, 0.0),
        dequantise_s=zeros, kernel_s=np.where(times.is_host, 0.0, lost_s), redundant_s=zeros, padding_s=zeros,
        link_s=zeros, overhead_s=np.where(times.is_host, lost_s, 0.0),
    )  # fmt: skip


DECIDING_WIDTH = 2.0
"""The upper end of a range over its lower end, up to which it distinguishes GPUs.

Bandwidth grows by 1.6 to 2.3 from a generation of GPUs to the next (V100, A100, H100, B200: gpus.csv)."""


def _too_wide(cells: Sequence[ForecastCell]) -> Iterator[str]:
    wide = []
    for phase in PHASES:
        widths = [cell.high_s / cell.low_s for cell in cells if cell.phase == phase]
        if widths and (width := statistics.median(widths)) > DECIDING_WIDTH:
            wide.append(f"{width:.1f} times for {phase}")
    if wide:
        yield (
            f"The upper end of the range is {' and '.join(wide)} the lower: too wide to choose between GPUs that differ"
            " by less. A run on the GPU narrows it."
        )


def _notes(counted: CountedModel, quant: Quant) -> Iterator[str]:
    if stored_format(quant):
        yield f"No figure of {quant} is in these ranges: those of {published_as(quant)} stand in, whose kernels differ."
    if counted.dtype == "float32":
        yield "No published figure is in float32: its share of the peak is assumed to be that of 16 bits."
