"""A rank's narrower linears, replayed now on the device that a run was taken on."""

from __future__ import annotations

import torch

from profiler.diagnosis.columns import Steps
from profiler.diagnosis.facts import DeviceFacts
from profiler.diagnosis.narrower import Narrower, narrower
from profiler.errors import DeviceError
from profiler.job.forecast import Known, Wanted, skeleton_of, wanted_grid
from profiler.loading.catalog import Source
from profiler.loading.request import DTYPES, ModelRequest
from profiler.machine.device import resolve_device
from profiler.machine.machine import Machine, machine_for
from profiler.probes.kernels import replay_between
from profiler.probes.narrower import Bare, shorten, trained_alike
from profiler.units import processors
from profiler.work.parallel import walk_rank

SET_S = 10.0
"""For the linears of one number of cards."""


def machine_of(facts: DeviceFacts) -> Machine | str:
    """The device that a run was taken on, or why this is another one."""
    try:
        machine = machine_for(resolve_device(facts.kind))
    except DeviceError as error:
        return str(error).removesuffix(".")
    here = machine.info
    if here.name != facts.name:
        return f"this is {here.name}, and the run was on {facts.name}"
    if here.threads != facts.threads:
        return f"this has {processors(here.threads, here.kind)}, and the run had {facts.threads}"
    if here.compute_capability != facts.compute_capability:
        return f"this computes with {here.compute_capability}, and the run did with {facts.compute_capability}"
    return machine


def replay_narrower(known: Known, wanted: Wanted, machine: Machine) -> Narrower | str:
    """A rank's linears at the rows of the wanted steps, in turn with the whole ones; or why there are none.

    Raises RequestError for a model that cannot be cut so.
    """
    model, ceilings = known.facts.model, known.facts.ceilings
    whole, share = (skeleton_of(known.run.folder, known.run.document) for _ in range(2))
    walk_rank(share, wanted.ranks)
    trained_alike(whole, share)
    shorten(whole, share, ceilings)
    grid = wanted_grid(known, wanted)
    request = ModelRequest(Source("folder", model.id), machine.device, DTYPES[model.dtype])
    bare = Bare(request, machine, {(known.engine, phase): path for phase, path in known.paths.items()}, grid)
    try:
        subjects = bare.subject(whole), bare.subject(share)
        in_turn = list(replay_between(subjects, grid.keys, ceilings, SET_S))
    except torch.OutOfMemoryError:
        return "the device has no room for them beside the whole ones"
    finally:
        machine.release()
    return narrower(known.trained.fitted, known.demanded(Steps.of(grid.keys)), grid.keys, in_turn)
