"""`doctor`: check the installation, list the presets that fit, and propose a first command."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from profiler import packages
from profiler.checks import gpu
from profiler.checks import installation as checks
from profiler.checks.installation import CheckResult, Found, quietly, run_check
from profiler.errors import RoofscopeError, describe_error
from profiler.quant.registry import FORMATS
from profiler.report.blocks import Lines, Section, TextColumn, TextTable
from profiler.run.options import DEFAULT_MODEL, Options
from profiler.units import scaled

if TYPE_CHECKING:
    import torch

    from profiler.device.machine import Machine
    from profiler.quant.registry import Quant

_WELL_KNOWN = "mistral-7b-v0.1"
"""The model of the first command on a GPU, if it fits."""
_FIRST_PROMPT_LEN = 512
_FIRST_BATCHES = (1, 8)
_FIRST_GRID = f"--prompt-lens {_FIRST_PROMPT_LEN} --batch-sizes {','.join(map(str, _FIRST_BATCHES))}"


@dataclass(frozen=True)
class PresetFit:
    """A preset in one precision."""

    model: str
    precision: str
    """A dtype, or a format of `--quant`."""
    needs_bytes: int
    """Weights, KV cache, workspace and fragmentation of the smallest cell of the first command: batch 1, prompt 512."""
    fits: bool
    """Whether the device has room for them (`data.room`)."""
    fits_first: bool = True
    """Whether the device also has room for the largest cell of the first command: batch 8, prompt 512."""


@dataclass(frozen=True)
class Examination:
    """The results of all checks."""

    findings: tuple[CheckResult, ...]
    fits: tuple[PresetFit, ...]
    first: str
    """The command to run first, or what to fix before it."""


_DEVICE_CHECKS = ("memory", "NVML", "CUPTI", "bitsandbytes", "compile", "graphs")
_NEEDED_FIRST = ("driver", "torch", "packages", "device")
"""If one of these fails, the first command is to fix it."""


def examine(device: str = "auto") -> Examination:
    """Check every part of this installation on a device. Downloads nothing, and catches every error of a library.

    Raises DeviceError for a named `device` that does not exist.
    """
    findings = [
        run_check("driver", checks.driver),
        run_check("torch", checks.torch_build),
        run_check("packages", checks.packages),
    ]
    machine, error = _machine(device)
    if machine is None:
        findings.append(CheckResult("device", False, error))
        findings += [CheckResult(name, None, "not tried") for name in _DEVICE_CHECKS]
    else:
        findings += [
            run_check("device", partial(checks.card, machine)),
            run_check("memory", partial(checks.free_memory, machine)),
            run_check("NVML", partial(checks.nvml, machine)),
            run_check("CUPTI", partial(checks.cupti, machine)),
            run_check("bitsandbytes", partial(checks.bitsandbytes, machine.device)),
            run_check("compile", partial(checks.compiling, machine.device), "no --engine compile"),
            run_check("graphs", partial(checks.graphs, machine), "no --engine graph"),
        ]
    if machine is not None and machine.is_cuda:
        findings += [
            run_check("attention", partial(gpu.attention, machine), "a run cannot know its attention kernel"),
            run_check("KV lengths", partial(gpu.new_lengths, machine), "attention does not run in 16 bits"),
            *(run_check(kind.name, partial(gpu.product, machine, kind), kind.fails) for kind in gpu.PRODUCTS),
        ]
    findings += [run_check(name, partial(checks.optional, name)) for name in checks.NEEDED_FOR]
    fits: list[PresetFit] = []

    def fitting() -> Found:
        if machine is None:
            return None, "not tried"
        fits.extend(_fits(machine, packs=any(item.works for item in findings if item.name == "bitsandbytes")))
        return any(fit.fits for fit in fits), fit_words(fits)

    findings.append(run_check("fits", fitting))
    broken = [item.name for item in findings if item.name in _NEEDED_FIRST and item.works is False]
    first = first_command(fits, on_card=machine is not None and machine.is_cuda)
    if broken:
        on_cpu = machine is not None and not machine.is_cuda and "packages" not in broken
        cpu_command = f", or continue on the CPU: {first}" if on_cpu else ""
        first = f"fix {broken[0]}, then run `{_command()} doctor` again{cpu_command}"
    return Examination(tuple(findings), tuple(fits), first)


def _command() -> str:
    """Return the command that starts this program; a checkout that is not installed has no `roofscope`."""
    return "roofscope" if packages.has_own_metadata() else "python -m profiler"


def _machine(device: str) -> tuple[Machine | None, str]:
    """Return the machine to check, or None and the reason if torch does not work."""
    try:
        with quietly():
            from profiler.device.device import resolve_device
            from profiler.device.machine import machine_for

            machine = machine_for(resolve_device(device))
            _ = machine.info
            return machine, ""
    except RoofscopeError:
        raise
    except Exception as error:
        return None, f"torch does not work: {describe_error(error)}"


def _fits(machine: Machine, *, packs: bool) -> list[PresetFit]:
    """Return every preset in the precisions of this device, the widest first, from its config only.

    With `packs`, this includes bitsandbytes' formats.
    """
    import torch

    from profiler.counting.attention_kernel import path_here
    from profiler.counting.memory_need import memory_need
    from profiler.counting.walk import walk
    from profiler.facts.step import Step
    from profiler.loading.config import load_config
    from profiler.loading.device_map import planned_weight_bytes, room_here_bytes
    from profiler.loading.meta_model import build_on_meta
    from profiler.loading.request import dtype_name
    from profiler.loading.source import preset_names, resolve
    from profiler.quant.checkpoints import as_dense_config

    device = machine.device
    half = getattr(torch, machine.info.sixteen_bit_dtype)
    dtypes = [half] if machine.is_cuda else [torch.float32, half]
    precisions: list[tuple[str, torch.dtype, Quant]] = [(dtype_name(dtype), dtype, "none") for dtype in dtypes]
    if packs:
        precisions += [(quant, half, quant) for quant, item in FORMATS.items() if item.in_doctor]
    room = room_here_bytes(device)
    new_tokens = Options(model=DEFAULT_MODEL).new_tokens
    fits = []
    for name in preset_names():
        for label, dtype, quant in precisions:
            config = as_dense_config(load_config(resolve(name)))
            try:
                module = build_on_meta(config, dtype, quant, device=device)
            except RoofscopeError:
                continue  # this device's kernel of the format does not support a layer of this model
            work = walk(module)
            path = path_here(module, work, device, dtype, _FIRST_PROMPT_LEN)
            least, most = (
                memory_need(work, planned_weight_bytes(module), Step(batch, _FIRST_PROMPT_LEN, 0), new_tokens, path)
                for batch in _FIRST_BATCHES
            )
            fits_first = bool(most.safe_bytes <= room)
            fits.append(PresetFit(name, label, int(least.safe_bytes), bool(least.safe_bytes <= room), fits_first))
    return fits


def fit_words(fits: Sequence[PresetFit]) -> str:
    """Return each model at the widest precision in which it fits: `float16: gpt2; nf4: mistral-7b-v0.1`.

    Models are in the order of their size.
    """
    groups: dict[str, list[str]] = {fit.precision: [] for fit in fits}
    large = []
    for model in dict.fromkeys(fit.model for fit in sorted(fits, key=lambda fit: fit.needs_bytes)):
        fits_of_model = [fit for fit in fits if fit.model == model]
        widest = next((fit for fit in fits_of_model if fit.fits), None)
        if widest is not None:
            groups[widest.precision].append(model)
        else:
            large.append(f"{model} ({scaled(min(fit.needs_bytes for fit in fits_of_model), 'B')} at least)")
    words = [f"{precision}: {', '.join(models)}" for precision, models in groups.items() if models]
    return "; ".join([*words, *([f"too large: {', '.join(large)}"] if large else [])])


def first_command(fits: Sequence[PresetFit], *, on_card: bool) -> str:
    """Return a short and informative run: a well-known model on a GPU, the default model on a CPU."""
    fitting = [fit for fit in fits if fit.fits]
    if not on_card or not fitting:
        return f"{_command()} {'run' if any(fit.model == DEFAULT_MODEL for fit in fitting) else 'ceilings'}"
    # LLM.int8() waits for the GPU in every matmul, so it is the last choice.
    well_known = [fit for fit in fitting if fit.model == _WELL_KNOWN]
    well_known.sort(key=lambda fit: (not fit.fits_first, fit.precision == "int8"))
    dense = [fit for fit in fitting if fit.precision not in FORMATS]
    choice = well_known[0] if well_known else max(dense or fitting, key=lambda fit: fit.needs_bytes)
    quant = f" --quant {choice.precision}" if choice.precision in FORMATS else ""
    return f"{_command()} run {choice.model}{quant} {_FIRST_GRID}"


_MARKS = {True: "ok", False: "NO", None: "-"}


def examination_section(examination: Examination) -> Section:
    """The command to run first, and a row for each part of the installation."""
    rows = [
        [item.name, "slow" if item.works and item.slow else _MARKS[item.works], item.says]
        for item in examination.findings
    ]
    columns = (TextColumn(""), TextColumn(""), TextColumn("", wrap=True))
    return Section("", [Lines([f"run first: {examination.first}"]), TextTable(columns, rows)])
