"""`forecast`: cells that were not measured, with the cross-validated error of such forecasts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from torch import nn

from profiler.counting.attention import AttentionCore
from profiler.counting.meta import own_attention
from profiler.counting.operators import ModelWork
from profiler.counting.tensor_parallel import walk_rank
from profiler.counting.walk import walk
from profiler.data.datasheets import gpu_called
from profiler.data.links import Link
from profiler.errors import RequestError, RunError
from profiler.facts.card_profile import CardProfile
from profiler.facts.dispatch import Dispatch
from profiler.facts.measurements import Replay
from profiler.facts.operators import REST
from profiler.facts.run_facts import Facts
from profiler.facts.step import ExecutionPath
from profiler.forecast.check_log import checks_line
from profiler.forecast.datasheet_range import UnmeasuredModel, in_range
from profiler.grid.cells import PHASES, CellKey, Grid, Phase
from profiler.grid.ranges import check_positions, make_grid
from profiler.judge.cells import trial_results
from profiler.judge.demand import faults_of
from profiler.loading.config import config_from, load_config
from profiler.loading.device_map import planned_weight_bytes
from profiler.loading.meta_model import build_on_meta, quiet_libraries
from profiler.loading.request import DTYPES, check_packed_dtype, dtype_name, in_16_bits, model_dtype, most_positions
from profiler.loading.source import resolve
from profiler.predict.card_profile import fitted_on, held_out_kernels, profile_called, profiles, read_profile
from profiler.predict.cross_validation import Trained, train
from profiler.predict.kernel_times import DeviceRates, KernelTimes, MeasuredCells, Replayed
from profiler.predict.operator_arrays import Array, OperatorArrays, Paths, StepArrays, operator_arrays
from profiler.predict.predict import Forecast, variant_factor
from profiler.predict.result import Answer, cells_of, cross_validated_error, forecast_cells, points_of
from profiler.quant.checkpoints import published_format, requested_form
from profiler.quant.registry import FORMATS, Quant, known_quant
from profiler.store.document import RunDocument
from profiler.store.folder import CONFIG_FILE, Run, read_document, read_facts, read_gathered, read_results
from profiler.units import processors


@dataclass(frozen=True)
class RunFacts:
    """A run as forecasts see it: its model counted again from its config, and its measured cells."""

    run: Run
    facts: Facts
    work: ModelWork
    paths: Paths
    engine: str
    trained: Trained
    max_positions: int | None = None
    """Tokens of a sequence that the model was made for; None where its config does not say."""

    def forecast(self, steps: StepArrays) -> Forecast:
        """Any steps of this run's model on its device."""
        return self.trained.fitted.forecast(self.demanded(steps))

    def demanded(self, steps: StepArrays) -> OperatorArrays:
        """What this run's model must do in any steps."""
        return operator_arrays(self.work, steps, self.paths, self.facts.model.storage_bytes)


def run_facts(folder: Path, engine: str = "") -> RunFacts:
    """A run folder, ready to be forecast from. Raises RunError for one that kept too little."""
    document = read_document(folder)
    if document.ranks > 1:
        raise RunError(f"{folder} holds one rank's share of {document.ranks}: forecast a run on one card, with --tp.")
    facts = read_facts(folder, document, read_gathered(folder, document))
    run = Run(folder, document, read_results(folder))
    chosen = engine or document.engine.names[0]
    if chosen not in document.engine.names:
        raise RequestError(f"{folder} has no cell of the engine {chosen!r}; it ran {', '.join(document.engine.names)}.")
    with quiet_libraries():
        module = meta_model_of(folder, document)
        work = walk(module)
    paths: dict[Phase, ExecutionPath] = {phase: document.counting.paths[f"{chosen} {phase}"] for phase in PHASES}
    measured = _measured(run, facts, work, paths, chosen)
    trained = train(measured, _device(facts, chosen))
    return RunFacts(run, facts, work, paths, chosen, trained, most_positions(module.config))


def meta_model_of(folder: Path, document: RunDocument) -> nn.Module:
    """A run's model on the meta device, from the config that it kept. Raises RunError."""
    path, model = folder / CONFIG_FILE, document.model
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        raise RunError(f"{folder} has no {CONFIG_FILE} that can be read: its cells cannot be counted again.") from None
    quant: Quant = model.quant if model.quant in FORMATS else "none"
    config = config_from(content, str(path))
    with quiet_libraries():
        return build_on_meta(config, DTYPES[model.dtype], quant)


def _device(facts: Facts, engine: str) -> DeviceRates:
    dispatch: dict[Phase, dict[int, Dispatch]] = {phase: {} for phase in PHASES}
    for (name, phase, batch), found in facts.dispatch.items():
        if name == engine:
            dispatch[phase][batch] = found
    return DeviceRates(
        facts.ceilings,
        facts.model.dtype,
        dispatch,
        facts.device.overlaps_dispatch,
        facts.device.memory_bytes,
        facts.ceilings.fetch_s(facts.model.offloaded_bytes),
    )


def _measured(run: Run, facts: Facts, work: ModelWork, paths: Paths, engine: str) -> MeasuredCells:
    """The measured cells of one engine, with what was replayed at their shapes."""
    if not facts.ceilings.judges:
        raise RunError(f"{run.folder} has no roof of memory or of arithmetic: there is nothing to forecast under.")
    results = {result.key: result for result in run.measured if result.engine == engine}
    keys = [key for key in facts.grid.keys if key in results]
    if not keys:
        raise RunError(f"{run.folder} has no cell with a number: there is nothing to forecast from.")
    cells = set(facts.grid.keys)
    between = [key for key in facts.replays if key.cell.engine == engine and key not in cells]

    def replayed(some: Sequence[CellKey]) -> Replayed:
        return _replayed(facts, some, operator_arrays(work, StepArrays.of(some), paths, facts.model.storage_bytes))

    return MeasuredCells(
        replayed(keys),
        np.array([results[key].latency_s for key in keys]),
        np.array([(results[key].latency_high_s - results[key].latency_low_s) / 2 for key in keys]),
        np.array([faults_of(key.phase, facts.visits[key.cell]) for key in keys]),
        replayed(between) if between else None,
    )


def _replayed(facts: Facts, keys: Sequence[CellKey], counted: OperatorArrays) -> Replayed:
    """What was run alone of the steps of `keys`, by operator."""
    alone = [facts.replays.get(key, {}) for key in keys]
    names = [*(column.operator for column in counted.columns), REST]

    def known(seconds_of: Callable[[Replay], float]) -> dict[str, Array]:
        columns = {
            name: np.array([seconds_of(each[name]) if name in each else np.nan for each in alone]) for name in names
        }
        return {name: seconds for name, seconds in columns.items() if (seconds > 0).any()}

    return Replayed(
        counted, known(lambda replay: replay.whole.median_s), known(lambda replay: replay.conversion.median_s)
    )


@dataclass(frozen=True)
class ForecastRequest:
    """What is to be forecast; empty texts and 0 stand for what the run had."""

    prompt_lens: str = ""
    batch_sizes: str = ""
    context_lens: str = ""
    new_tokens: int = 0
    dtype: str = "auto"
    quant: str = "none"
    engine: str = ""
    threads: int = 0
    ranks: int = 1
    """Of a tensor parallel group; 1: one device."""
    link: Link | None = None
    """Between them."""


# Without a wish, batches go this far beyond what was measured.
_FURTHER = (2, 4)
SHORTER = "shorter --prompt-lens or --context-lens, or fewer --new-tokens"
ONE_OUT = "each cell forecast from the others"
EXTREMES_OUT = "the largest batch and the longest context of each phase forecast from the rest"


def forecast_run(folder: Path, wanted: ForecastRequest) -> Answer:
    """The cells that are wanted of a run's model on its device. Raises RequestError."""
    document = read_document(folder)
    return forecast_from_facts(
        run_facts(folder, wanted.engine if wanted.engine in document.engine.names else ""), wanted
    )


def forecast_from_facts(known: RunFacts, wanted: ForecastRequest, kernels: KernelTimes | None = None) -> Answer:
    """Forecast from the facts of a run, with a rank's own `kernels` where they are known. Raises RequestError."""
    folder, document = known.run.folder, known.run.document
    facts, trained = known.facts, known.trained
    found = _forecast(known, wanted, kernels)
    forms = _forms(known, wanted)
    factor, off = _factors(known, forms, found)
    how = "from the split of its measured cells: roofs, replayed kernels, dispatch, and what these leave unexplained"
    if forms:
        how += f"; {' and '.join(forms)} as tried on a few layers"
    return Answer(
        source=str(folder),
        model=document.model.id,
        precision=" -> ".join([document.model.precision, *forms]),
        on=f"{facts.device.name}, {processors(facts.device.threads, facts.device.kind)}",
        how=how,
        error=cross_validated_error(trained.within, ONE_OUT),
        beyond=cross_validated_error(trained.outside, EXTREMES_OUT),
        cells=cells_of(trained, found, factor, off),
        notes=checks_line(facts.device.name, facts.device.threads),
        measured=points_of(trained),
    )


def _forecast(known: RunFacts, wanted: ForecastRequest, kernels: KernelTimes | None) -> Forecast:
    """The wanted steps on this device, or on each of several that share the model."""
    grid = requested_grid(known, wanted)
    check_positions(known.max_positions, grid.longest_context, SHORTER)
    steps = StepArrays.of(grid.keys)
    if wanted.ranks == 1:
        return known.forecast(steps)
    module = meta_model_of(known.run.folder, known.run.document)
    work = walk_rank(module, wanted.ranks)
    needed = operator_arrays(work, steps, known.paths, planned_weight_bytes(module), wanted.link)
    fitted = known.trained.fitted
    return replace(fitted, kernels=kernels or fitted.kernels).forecast(needed)


def _forms(known: RunFacts, wanted: ForecastRequest) -> list[str]:
    """What is wanted beside the run's own, as its trials call it."""
    model, threads = known.facts.model, known.facts.device.threads
    found = []
    if wanted.dtype not in ("auto", model.dtype):
        found.append(wanted.dtype)
    if wanted.quant not in ("none", model.quant):
        found.append(known_quant(wanted.quant))
    if wanted.engine and wanted.engine != known.engine:
        found.append("a static cache" if wanted.engine == "static" else f"the engine {wanted.engine}")
    if wanted.threads and wanted.threads != threads:
        found.append(f"{wanted.threads} of {threads} threads")
    return found


def requested_grid(known: RunFacts, wanted: ForecastRequest) -> Grid:
    """The grid to forecast: what is not wished for is the run's own, with batches a little further."""
    asked = known.facts.grid
    largest = max(asked.batch_sizes)
    further = {*asked.batch_sizes, *(largest * times for times in _FURTHER)}
    batches = wanted.batch_sizes or ",".join(map(str, sorted(further)))
    prompts = wanted.prompt_lens or ("" if wanted.context_lens else asked.prompt_lens)
    contexts = wanted.context_lens or ("" if wanted.prompt_lens else asked.context_lens)
    return make_grid(prompts, batches, wanted.new_tokens or asked.new_tokens, contexts, (known.engine,))


def _factors(known: RunFacts, forms: Sequence[str], found: Forecast) -> tuple[Array | None, Array | None]:
    """What forms that the run tried make of each time, and by how much that may be off (log).

    Raises RequestError for one that it did not try in every phase that is wanted.
    """
    factor, off = None, None
    for form in forms:
        one = variant_factor(found.demanded.steps, _ratios(known, form))
        if one is None:
            names = dict.fromkeys(item.form for trials in known.facts.trials.values() for item in trial_results(trials))
            has = f"it tried {', '.join(names)}" if names else "it tried no other form"
            raise RequestError(
                f"{known.run.folder} has no basis for {form} in every phase that is wanted: {has}. Run it so, or"
                " forecast the model --on a profile of this card (`roofscope ceilings --out card.json`)."
            )
        factor = one[0] if factor is None else factor * one[0]
        off = one[1] if off is None else np.hypot(off, one[1])
    return factor, off


def _ratios(known: RunFacts, form: str) -> list[tuple[Phase, int, int, int, float, float]]:
    return [
        (
            key.phase,
            key.cell.batch_size,
            key.query_tokens,
            key.query_tokens + key.context_len,
            item.ratio,
            item.half_width,
        )
        for key, trials in known.facts.trials.items()
        for item in trial_results(trials)
        if item.form == form
    ]


KERNELS_OUT = "kernels of each width forecast from those of the others"
_OTHER_SHARE = 0.05
"""What else a forecast on a profile may be off by, beside its kernels: small kernels, overlap, the cache's growth."""
_NORMAL_90 = 1.645


def forecast_on(model: str, on: str, wanted: ForecastRequest) -> Answer:
    """A model that never ran there on a profiled card, or as a range on a card of the table. Raises RequestError."""
    dtype, quant = wanted.dtype, wanted.quant
    kind = known_quant(quant)
    source = resolve(model)
    config = requested_form(load_config(source), dtype != "auto")
    profile = profile_of(on)
    chosen = model_dtype(dtype, config)
    if profile is None and kind != "none":  # what a format leaves dense runs in 16 bits
        check_packed_dtype(dtype, kind)
        chosen = in_16_bits(chosen)
    if profile is not None and dtype == "auto" and dtype_name(chosen) not in profile.dtypes:
        chosen = DTYPES[profile.dtypes[0]]
    with quiet_libraries():
        module = build_on_meta(config, chosen, kind)
    work = walk(module) if wanted.ranks == 1 else walk_rank(module, wanted.ranks)
    weights = planned_weight_bytes(module)
    grid = make_grid(
        wanted.prompt_lens or ("" if wanted.context_lens else "64,128,256,512"),
        wanted.batch_sizes or "1,2,4,8",
        wanted.new_tokens or 32,
        wanted.context_lens,
    )
    check_positions(most_positions(config), grid.longest_context, SHORTER)
    steps = StepArrays.of(grid.keys)
    name, form = dtype_name(chosen), kind if kind != "none" else published_format(config)
    precision = name if form is None else f"{name}, {form}"
    if profile is None:
        bare = UnmeasuredModel(source.name, precision, name, kind, work, weights, own_attention(module))
        return in_range(bare, gpu_called(on), steps, wanted.link)
    needed = operator_arrays(work, steps, dict.fromkeys(PHASES, ExecutionPath()), weights, wanted.link)
    layers = sum(op.count for op in work.operators if isinstance(op, AttentionCore))
    if name not in profile.dtypes:
        raise RequestError(f"{on} was profiled in {', '.join(profile.dtypes)}; give --dtype one of these.")
    if quant != "none" and not any(point.format == quant for point in profile.products):
        raise RequestError(
            f"{on} has no kernels of {quant}; run the model there once, or forecast it on a card's name."
        )
    fitted = fitted_on(profile, name, layers)
    found = fitted.forecast(needed)
    held = held_out_kernels(profile, name)
    share = (found.terms.total_s - found.terms.dispatch_s - found.terms.link_s) / found.terms.total_s
    spread = np.exp(_NORMAL_90 * np.hypot(_OTHER_SHARE, share * (held.median if held.told else 0.2)))
    return Answer(
        source=source.name,
        model=source.name,
        precision=precision,
        on=f"{profile.name}, {processors(profile.threads, profile.kind)} (profiled)",
        how="from the card's profile: its kernels over rows and widths, its roofs and its dispatch of a layer",
        error=cross_validated_error(held, KERNELS_OUT),
        beyond=None,
        cells=forecast_cells(
            found,
            found.latency_s,
            (found.latency_s / spread, found.latency_s * spread),
            ["the card's profile: the model never ran there"] * len(steps),
            found.fits(profile.memory_bytes),
        ),
    )


def profile_of(on: str) -> CardProfile | None:
    """The profile that `on` names, or None where it is a card of the table without one."""
    if on.endswith(".json") or on in profiles():
        return profile_called(on)
    sheet = gpu_called(on)
    return next((found for path in profiles().values() if (found := read_profile(path)).datasheet == sheet.gpu), None)
