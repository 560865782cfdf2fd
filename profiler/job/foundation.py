"""All that a cell is held against: the model as it is loaded, this device's roofs, and the host's dispatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from profiler.diagnosis.facts import DispatchSamples
from profiler.engines.registry import OWNING
from profiler.errors import ModelError, RoofscopeError, first_line, told
from profiler.grid import PHASES, Phase
from profiler.job.engines import make_engines
from profiler.job.request import Prepared
from profiler.job.stages import Stages
from profiler.loading.load import load
from profiler.loading.request import LoadedModel, ModelRequest, dtype_name
from profiler.machine.device import software
from profiler.machine.machine import Machine
from profiler.probes.dispatch import measure_dispatch
from profiler.probes.subject import Subject, execution_paths
from profiler.roofs.cache import cached
from profiler.roofs.host import measure_host_pace
from profiler.roofs.links import measure_links
from profiler.roofs.measure import measure
from profiler.roofs.sampling import attempt
from profiler.roofs.values import Ceilings
from profiler.roofs.weights import measure_weights
from profiler.work.operators import ModelWork
from profiler.work.step import ExecutionPath
from profiler.work.walk import walk

# Stepping the hollow twin, for each phase, batch size and engine, gets this share of the sweep's time.
_TWIN_SHARE = 0.075
_TWIN_MOST_S = 1.5
_NO_DISPATCH = "the host's share of a step is unexplained"
# Reading the model's own weights as a witness of the memory roof.
_WITNESS_S = 0.5


def set_up(prepared: Prepared, stages: Stages) -> tuple[Subject, Ceilings, list[DispatchSamples]]:
    """Load the model, measure the roofs and dispatch: all that a cell is held against."""
    request, grid, machine = prepared.request, prepared.grid, stages.machine
    stages.begin("loading", f"loading {request.source.name} ({dtype_name(request.dtype)}, {request.weights} weights)")
    loaded = _loaded(prepared)
    work = walk(loaded.module)
    for name in OWNING.keys() & set(grid.engines):
        stages.begin(f"loading into {name}", f"{name} loads the model, compiles it and warms up")
    engines = make_engines(prepared, loaded, work, machine)
    held_bytes = machine.allocated_bytes()
    stages.begin("roofs", "measuring this device's roofs")
    ceilings = measure_ceilings(request, machine, work, fresh=prepared.options.fresh)
    links, missing = measure_links(sorted(loaded.offloaded_bytes), machine)
    weights = None
    with attempt("the model's own weights", machine, missing):
        weights = measure_weights(loaded.module.parameters(), machine, _WITNESS_S)
    ceilings = replace(ceilings, links=links, weights=weights, missing={**ceilings.missing, **missing})
    for name, why in ceilings.missing.items():
        stages.miss(f"measuring {name}", why, "this roof is missing")
    paths: dict[tuple[str, Phase], ExecutionPath] = {
        (name, phase): ExecutionPath() for name in engines for phase in PHASES
    }
    with stages.optional("the choice of kernels", "work is counted as if the fastest ran"):
        paths = execution_paths(loaded, work, engines, grid)
    stages.begin("dispatch", "measuring dispatch on the hollow twin")
    subject = Subject(machine, loaded, work, engines, paths, grid, held_bytes)
    return subject, ceilings, dispatch_of_twin(prepared, subject, stages, grid.batch_sizes, grid.engines)


def _loaded(prepared: Prepared) -> LoadedModel:
    """The model on its device. Raises ModelError whatever keeps it from being there."""
    request = prepared.request
    try:
        return load(request, prepared.config)
    except RoofscopeError:
        raise
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"{request.source.name} does not fit on {request.device}: {first_line(error)}; use --quant nf4 or a smaller"
            " model."
        ) from error
    except Exception as error:
        raise ModelError(f"{request.source.name} does not load on {request.device}: {told(error)}.") from error


def dispatch_of_twin(
    prepared: Prepared, subject: Subject, stages: Stages, batch_sizes: Sequence[int], engines: Sequence[str]
) -> list[DispatchSamples]:
    """What steps of these batch sizes cost each engine's host, within this run's share of time."""
    twin_s, machine = min(_TWIN_SHARE * prepared.options.budget_s, _TWIN_MOST_S), subject.machine
    what = "dispatch on the hollow twin"
    with stages.optional(what, _NO_DISPATCH):
        return measure_dispatch(
            subject.loaded,
            prepared.config,
            machine,
            batch_sizes,
            engines,
            twin_s,
            lambda error: stages.failed(what, error, _NO_DISPATCH),
        )
    return []


def measure_ceilings(request: ModelRequest, machine: Machine, work: ModelWork, *, fresh: bool) -> Ceilings:
    """The roofs of this device for the dtypes of a model's products; kept for a day unless `fresh`.

    The datasheet's peak stands for a roof that could not be measured.
    """
    dtypes, model_dtype = roof_dtypes(work, request), dtype_name(request.dtype)

    def measure_missing(known: Ceilings | None) -> Ceilings:
        roofs = measure(machine, dtypes, model_dtype=model_dtype, known=known)
        missing, host = dict(roofs.missing), roofs.host
        with attempt("the host's pace", machine, missing):
            host = host or measure_host_pace(machine)
        return replace(roofs, host=host, missing=missing)

    ceilings = cached(measure_missing, machine, software(), fresh=fresh)
    return ceilings.only(dtypes, model_dtype, machine.info.datasheet)


def roof_dtypes(work: ModelWork, request: ModelRequest) -> list[str]:
    """The dtypes that this model's products run in; float32 as the yardstick, and bfloat16 as the way out of it."""
    used = {dtype_name(operator.dtype) for operator in work.operators if operator.dtype.itemsize > 0}
    return sorted({"float32", "bfloat16", dtype_name(request.dtype), *used})
