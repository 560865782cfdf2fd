"""What works of an installation, which model cards fit this device, and what to run first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from profiler.errors import RoofscopeError, first_line
from profiler.job.options import DEFAULT_MODEL
from profiler.loading.catalog import card_names
from profiler.machine import checks
from profiler.machine.checks import Finding, tried
from profiler.units import scaled

if TYPE_CHECKING:
    import torch

    from profiler.loading.quantise import Quant
    from profiler.machine.machine import Machine

_WELL_KNOWN = "mistral-7b-v0.1"
"""What a card is shown on first, where it fits."""
_QUANTISED: tuple[Quant, ...] = ("int8", "nf4")
_FIRST_GRID = "--prompt-lens 512 --batch-sizes 1,8 --budget 30"


@dataclass(frozen=True)
class Fit:
    """A model card in one precision."""

    model: str
    precision: str
    """A dtype, or a format of `--quant`."""
    weight_bytes: int
    fits: bool
    """Whether the weights leave a small run its room, as placement decides it."""


@dataclass(frozen=True)
class Examination:
    """All that was found."""

    findings: tuple[Finding, ...]
    fits: tuple[Fit, ...]
    first: str
    """The command to run first, or what to mend before it."""


_ON_A_DEVICE = ("memory", "NVML", "CUPTI", "bitsandbytes", "compile", "graphs", "fits")


def examine(device: str = "auto") -> Examination:
    """Try every part of this installation on a device; nothing is fetched, and no library's fault gets through.

    Raises DeviceError for a `device` that is asked for by name and cannot be had.
    """
    software = (tried("driver", checks.driver), tried("torch", checks.torch_build))
    machine, trouble = _machine(device)
    if machine is None:
        untried = (Finding(name, None, "not tried") for name in _ON_A_DEVICE)
        return Examination((*software, Finding("card", False, trouble), *untried), (), "mend torch, then ask again")
    found = [
        *software,
        tried("card", lambda: checks.card(machine)),
        tried("memory", lambda: checks.free_memory(machine)),
        tried("NVML", lambda: checks.nvml(machine)),
        tried("CUPTI", lambda: checks.cupti(machine)),
        packs := tried("bitsandbytes", lambda: checks.bitsandbytes(machine.device)),
        tried("compile", lambda: checks.compiling(machine.device)),
        tried("graphs", lambda: checks.graphs(machine)),
    ]
    fits: list[Fit] = []

    def fitting() -> Finding:
        fits.extend(_fits(machine, packs=bool(packs.works)))
        return Finding("fits", any(fit.fits for fit in fits), fit_words(fits))

    found.append(tried("fits", fitting))
    first = first_command(fits, on_card=machine.is_cuda)
    if broken := next((item.name for item in found[:3] if item.works is False), None):
        first = f"mend {broken}" + ("" if machine.is_cuda else f", or go on without a card: {first}")
    return Examination(tuple(found), tuple(fits), first)


def _machine(device: str) -> tuple[Machine | None, str]:
    """The machine to look at; None and the reason where torch itself does not work."""
    try:
        with checks.quietly():
            from profiler.machine.device import resolve_device
            from profiler.machine.machine import machine_for

            machine = machine_for(resolve_device(device))
            _ = machine.info
            return machine, ""
    except RoofscopeError:
        raise
    except Exception as error:
        return None, f"torch does not answer: {first_line(error)}"


def _fits(machine: Machine, *, packs: bool) -> list[Fit]:
    """Every model card in the precisions of this device, the widest first, from its config alone.

    With `packs`, bitsandbytes' formats are among them.
    """
    import torch

    from profiler.loading.catalog import resolve
    from profiler.loading.config import load_config
    from profiler.loading.placement import planned_weight_bytes, room_bytes
    from profiler.loading.published import in_dense_form
    from profiler.loading.request import dtype_name
    from profiler.loading.skeleton import build_on_meta
    from profiler.machine.device import compute_capability

    device = machine.device
    half = torch.float16 if machine.is_cuda and compute_capability(device) < (8, 0) else torch.bfloat16
    dtypes = [half] if machine.is_cuda else [torch.float32, half]
    forms: list[tuple[str, torch.dtype, Quant]] = [(dtype_name(dtype), dtype, "none") for dtype in dtypes]
    if packs:
        forms += [(quant, half, quant) for quant in _QUANTISED]
    room = room_bytes(device)
    found = []
    for name in card_names():
        for label, dtype, quant in forms:
            config = in_dense_form(load_config(resolve(name)))
            try:
                nbytes = planned_weight_bytes(build_on_meta(config, dtype, quant, device=device))
            except RoofscopeError:
                continue  # a layer of this model does not fit the format here
            found.append(Fit(name, label, nbytes, nbytes <= room))
    return found


def fit_words(fits: Sequence[Fit]) -> str:
    """Each model at the widest precision in which it fits, small ones first: `float16: gpt2; nf4: mistral-7b-v0.1`."""
    groups: dict[str, list[str]] = {fit.precision: [] for fit in fits}
    large = []
    for model in dict.fromkeys(fit.model for fit in sorted(fits, key=lambda fit: fit.weight_bytes)):
        own = [fit for fit in fits if fit.model == model]
        widest = next((fit for fit in own if fit.fits), None)
        if widest is not None:
            groups[widest.precision].append(model)
        else:
            large.append(f"{model} ({scaled(min(fit.weight_bytes for fit in own), 'B')} at least)")
    words = [f"{precision}: {', '.join(models)}" for precision, models in groups.items() if models]
    return "; ".join([*words, *([f"too large: {', '.join(large)}"] if large else [])])


def first_command(fits: Sequence[Fit], *, on_card: bool) -> str:
    """A run that is soon done and tells much: a well-known model on a card, the default one on a CPU."""
    fitting = [fit for fit in fits if fit.fits]
    if not on_card or not fitting:
        return "roofscope run" if any(fit.model == DEFAULT_MODEL for fit in fitting) else "roofscope ceilings"
    # LLM.int8() waits for the card in every product, so that it is the last to be shown.
    known = sorted((fit for fit in fitting if fit.model == _WELL_KNOWN), key=lambda fit: fit.precision == "int8")
    dense = [fit for fit in fitting if fit.precision not in _QUANTISED]
    chosen = known[0] if known else max(dense or fitting, key=lambda fit: fit.weight_bytes)
    quant = f" --quant {chosen.precision}" if chosen.precision in _QUANTISED else ""
    return f"roofscope run {chosen.model}{quant} {_FIRST_GRID}"
