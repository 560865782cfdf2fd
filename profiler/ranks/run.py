"""A run over several ranks, each with its share of the model: rank 0 does the job, the others follow its orders."""

import copy
import math
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from profiler.counting.operators import ModelWork
from profiler.counting.tensor_parallel import walk_rank
from profiler.device.clock import no_gc, now_s
from profiler.device.contention import ForeignLoad
from profiler.device.machine import Machine, machine_for
from profiler.device.telemetry import idle_power_w, source_for
from profiler.engines.base import DecodeState, Engine
from profiler.engines.transformers import EagerEngine
from profiler.errors import ModelError
from profiler.facts.ceilings import Ceilings
from profiler.facts.repetitions import Gap, Repetition
from profiler.fallbacks import Fallback, reported_fallbacks
from profiler.grid.cells import Cell
from profiler.loading.config import pretrained_location
from profiler.loading.load import as_loaded, first_call
from profiler.loading.meta_model import plan, quiet_libraries
from profiler.loading.request import LoadedModel, ModelRequest, dtype_name, model_errors
from profiler.measure.schedule import Progress, Schedule
from profiler.measure.subject import Subject
from profiler.measure.sweep import RepetitionContext, sweep
from profiler.ranks.process_group import ProcessGroup
from profiler.report.progress import Listener
from profiler.roofs.measure import measure
from profiler.run.fact_log import open_log, opening
from profiler.run.measure import Session, explain_cells, measure_options
from profiler.run.pipeline import IDLE_POWER, budget_of, keeping_what_was_measured, report, time_cells
from profiler.run.setup import LOOK, UNSEEN, ceiling_dtypes, on_grid, overhead_of_model, set_grid
from profiler.run.stages import Stages
from profiler.run.validate import PreparedRun
from profiler.run.warnings import busy_words
from profiler.store.folder import Run, RunStore

OWN_CORES = (
    "each rank runs on its own cores here, and gloo's event loops cannot preempt it: a plain torchrun gives neither,"
    " and its steps take longer."
)


def load_share(request: ModelRequest, config: Any, group: ProcessGroup) -> tuple[nn.Module, LoadedModel, ModelWork]:
    """Load and count this rank's share: the joined model and a standalone one. Raises ModelError, RequestError."""
    start_s = now_s()
    with quiet_libraries():
        share: Any = plan(request, copy.deepcopy(config))
        work = walk_rank(share, group.size, group.rank)
        with model_errors(f"{request.source.name} does not load over {group.size} ranks"):
            joined = _joined(share, request, group)
            _fill(share, joined)
    load_s = now_s() - start_s
    with group.together():
        first_call_s = first_call(joined, request)
    loaded = LoadedModel(share, request, load_s, first_call_s, getattr(joined.config, "_commit_hash", None))
    return joined, loaded, work


def _joined(share: Any, request: ModelRequest, group: ProcessGroup) -> Any:
    """Load the rank's slices (transformers 5.23, `distributed_config`). Random weights fill an empty checkpoint."""
    from transformers.distributed.configuration_utils import DistributedConfig

    is_random = request.weights == "random"
    where, extra = (None, {"state_dict": {}}) if is_random else pretrained_location(request.source)
    torch.manual_seed(group.rank)
    joined = type(share).from_pretrained(
        where,
        config=copy.deepcopy(share.config),
        dtype=request.dtype,
        distributed_config=DistributedConfig(tp_size=group.size),
        trust_remote_code=request.trust_remote_code,
        use_safetensors=None if request.allow_pickle else True,
        **extra,
    )
    with torch.no_grad():
        for param in joined.parameters():
            local = param._local_tensor if isinstance(param, DTensor) else param  # `to_local` makes a view of it
            if is_random and local is param:
                dist.broadcast(local.data, src=0)  # as in a checkpoint, every rank has the same copy of what is not cut
            elif local.untyped_storage().nbytes() != local.nbytes:
                # On a CPU a slice is a view of a memory-mapped file; memory must hold the share only.
                local.data = local.clone(memory_format=torch.contiguous_format)
    return joined.eval()


def _fill(share: Any, joined: Any) -> None:
    """Replace the meta tensors of `share` by those of `joined`; a shard requires no gradients (`as_loaded`)."""
    own: dict[int, nn.Parameter] = {}
    for name, source in joined.named_parameters(remove_duplicate=False):
        if id(source) not in own:
            is_shard = isinstance(source, DTensor)
            own[id(source)] = nn.Parameter(source.to_local(), False) if is_shard else as_loaded(source.data)
        owner, _, key = name.rpartition(".")
        module = share.get_submodule(owner)
        if getattr(module, key).shape != own[id(source)].shape:
            raise ModelError(f"the shape of {name} is {tuple(own[id(source)].shape)}, not that of transformers' plan.")
        setattr(module, key, own[id(source)])
    for name, buffer in joined.named_buffers(remove_duplicate=False):
        owner, _, key = name.rpartition(".")
        setattr(share.get_submodule(owner), key, buffer)
    embeddings = share.get_input_embeddings()
    rows = embeddings.weight.shape[0]
    embeddings.register_forward_pre_hook(lambda _, args: (args[0] % rows, *args[1:]))
    share.eval()


class LeadingEngine(EagerEngine):
    """Runs rank 0's share. A failed step ends the run, since the other ranks wait for the rest of it."""

    def __init__(self, model: Any, machine: Machine, group: ProcessGroup) -> None:
        super().__init__(model, machine)
        self._group = group
        self.helper_pids = group.helper_pids

    def announce(self, cell: Cell, steps: int) -> None:
        self._group.order((cell, steps))

    def prefill(self, ids_BS: torch.Tensor, slots: int) -> DecodeState:  # noqa: N803
        with self._group.together():
            return super().prefill(ids_BS, slots)

    def decode(self, state: DecodeState) -> DecodeState:
        with self._group.together():
            return super().decode(state)


def ceilings_of_rank(request: ModelRequest, work: ModelWork, group: ProcessGroup, machine: Machine) -> Ceilings:
    """Return this device's ceilings while all ranks measure theirs, with the link between them."""
    dtype, dtypes = dtype_name(request.dtype), ceiling_dtypes(work, request, machine.info)
    ceilings = measure(machine, dtypes, model_dtype=dtype).only(dtypes, dtype, machine.info.datasheet)
    return replace(ceilings, collective=group.measure_link(machine))


def execute_ranks(prepared: PreparedRun, listener: Listener, group: ProcessGroup, *, spent_s: float = 0.0) -> Run:
    """Execute a checked request as rank 0: no repetition is given up, no change is tried. Raises RankError."""
    prepared = replace(prepared, request=replace(prepared.request, device=group.device))
    with RunStore(prepared.out, resume=prepared.resumed) as store, quiet_libraries(), reported_fallbacks() as fallbacks:
        session = _set_up(prepared, store, listener, fallbacks, group, spent_s)
        with keeping_what_was_measured(session) as ending:
            try:
                time_cells(session, _patient_sweep)
                explain_cells(session)
                group.order(None)
                measure_options(session)
            except KeyboardInterrupt:
                for number in (signal.SIGINT, signal.SIGTERM):  # torchrun repeats it while the measurements are written
                    signal.signal(number, signal.SIG_IGN)
                raise
        del session
        return report(ending, prepared.out)


def _patient_sweep(
    schedule: Schedule, engines: Mapping[str, Engine], context: RepetitionContext, show: Callable[[Progress], None]
) -> Iterator[Repetition | Gap]:
    """A sweep whose repetitions may take as long as they need. A GPU counts its own energy, not that of all ranks."""
    schedule.plan = replace(schedule.plan, late_s=math.inf)
    for found in sweep(schedule, engines, context, show):
        yield replace(found, energy_j=None) if isinstance(found, Repetition) and context.machine.is_cuda else found


def _set_up(
    prepared: PreparedRun,
    store: RunStore,
    listener: Listener,
    fallbacks: list[Fallback],
    group: ProcessGroup,
    spent_s: float,
) -> Session:
    machine = machine_for(group.device, source=source_for(group.device, group.helper_pids))
    request, grid, prompts = prepared.request, prepared.grid, prepared.prompts
    stages = Stages(listener, machine, spent_s)
    idle_w = stages.tried(*IDLE_POWER, partial(idle_power_w, machine.source))
    foreign = stages.tried(LOOK, UNSEEN, partial(ForeignLoad, group.helper_pids))
    stages.begin("loading", f"loading {request.source.name} over {group.size} ranks")
    joined, loaded, work = load_share(request, prepared.config, group)
    warnings = [OWN_CORES] if group.share_cores() else []
    held_bytes = machine.allocated_bytes()
    budget = budget_of(replace(prepared, whole=True), machine)
    stages.left_s = budget.to_end_s
    stages.begin("roofs", "measuring the ceilings of all ranks at once, and the link between them")
    ceilings = ceilings_of_rank(request, work, group, machine)
    engines = {name: LeadingEngine(joined, machine, group) for name in grid.engines}
    subject = on_grid(Subject(machine, loaded, work, engines, {}, grid, prompts, held_bytes), grid, stages)
    prepared, subject, pace = set_grid(prepared, subject, ceilings, stages, budget)
    overhead = overhead_of_model(prepared, subject, stages, budget, prepared.grid.batch_sizes, prepared.grid.engines)
    warnings += busy_words(machine.info.host_threads, foreign) if foreign else []
    prepared = replace(prepared, warnings=(*prepared.warnings, *warnings))
    document = replace(opening(prepared, subject, ceilings, overhead, stages, idle_power_w=idle_w), ranks=group.size)
    ledger = open_log(prepared, store, document, subject, [ceilings, *overhead])
    return Session(prepared, subject, ledger, stages, budget, pace, fallbacks=fallbacks)


def follow_rank(prepared: PreparedRun, group: ProcessGroup) -> None:
    """Run a rank other than 0 until rank 0 ends the run, or is gone."""
    machine, request = machine_for(group.device), replace(prepared.request, device=group.device)
    with quiet_libraries():
        joined, _, work = load_share(request, prepared.config, group)
        group.share_cores()
        ceilings_of_rank(request, work, group, machine)
        engine = EagerEngine(joined, machine)
        while (order := group.next_order()) is not None:
            cell, steps = order
            with torch.inference_mode(), no_gc():
                if cell.prompt_len:
                    state = engine.prefill(prepared.prompts.of(cell).to(group.device), cell.slots)
                else:
                    state = engine.fill(cell.batch_size, cell.context_len, cell.slots)
                for _ in range(steps):
                    state = engine.decode(state)
                del state  # its cache ends with the cell, as on rank 0
