"""`doctor`: check the installation, list the presets that fit, and propose a first command."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from profiler import packages
from profiler.checks import installation
from profiler.checks.installation import CheckResult, Found, quietly, run_check
from profiler.errors import RoofscopeError, describe_error
from profiler.quant.registry import FORMATS
from profiler.report.blocks import Lines, Section, TextColumn, TextTable
from profiler.run.options import DEFAULT_MODEL, DEFAULT_NEW_TOKENS
from profiler.units import scaled

if TYPE_CHECKING:
    from profiler.device.machine import Machine

_TOO_LARGE = "too large"
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
    """Whether the device has free memory for them (`data.free_memory`)."""
    fits_first: bool = True
    """Whether the device also has free memory for the largest cell of the first command: batch 8, prompt 512."""


@dataclass(frozen=True)
class Examination:
    """The results of all checks."""

    findings: tuple[CheckResult, ...]
    fits: tuple[PresetFit, ...]
    first: str
    """The command to run first, or what to fix before it."""


def examine(device: str = "auto") -> Examination:
    """Check every part of this installation on a device. Downloads nothing, and catches every error of a library.

    Raises DeviceError for a named `device` that does not exist.
    """
    findings = [run_check(name, check) for name, check in installation.CHECKS.items()]
    fits: list[PresetFit] = []
    kind = ""
    try:
        with quietly():
            from profiler.checks.device import CHECKS
            from profiler.device.device import resolve_device
            from profiler.device.machine import machine_for

            machine = machine_for(resolve_device(device))
            kind = machine.info.kind
    except RoofscopeError:
        raise
    except Exception as error:
        findings.append(CheckResult("device", False, f"torch does not work: {describe_error(error)}"))
    else:
        findings += [run_check(name, partial(check, machine), otherwise) for name, check, otherwise in CHECKS]
        packs = any(item.works for item in findings if item.name == "bitsandbytes")

        def fitting() -> Found:
            fits.extend(preset_fits(machine, packs=packs))
            return any(fit.fits for fit in fits), fit_words(fits)

        findings.append(run_check("fits", fitting))
    needed = ("driver", "torch", "packages", "device")  # if one of them fails, the first command is to fix it
    broken = [item.name for item in findings if item.name in needed and item.works is False]
    first = first_command(fits, on_card=kind == "cuda")
    if broken:
        otherwise = f", or continue on the CPU: {first}" if kind == "cpu" and "packages" not in broken else ""
        first = f"fix {broken[0]}, then run `{_command()} doctor` again{otherwise}"
    return Examination(tuple(findings), tuple(fits), first)


def _command() -> str:
    """Return the command that starts this program; a checkout that is not installed has no `roofscope`."""
    return "python -m profiler" if packages.version_of("roofscope") == packages.MISSING else "roofscope"


def preset_fits(machine: Machine, *, packs: bool) -> list[PresetFit]:
    """Return every preset as `count` counts it, the widest precision first; with `packs` also bitsandbytes' formats."""
    import torch

    from profiler.counting.attention import AttentionCore
    from profiler.counting.cache import counted_model
    from profiler.counting.chosen_kernel import SdpaStep, attention_path
    from profiler.counting.memory_need import memory_need
    from profiler.facts.step import Step
    from profiler.loading.device_map import room_here_bytes
    from profiler.loading.source import presets, resolve

    half, query = machine.info.sixteen_bit_dtype, _FIRST_PROMPT_LEN
    precisions = [(dtype, dtype, "none") for dtype in ([half] if machine.is_cuda else ["float32", half])]
    precisions += [(quant, half, quant) for quant in ("int8", "nf4") if packs]
    free_bytes, new_tokens, fits = room_here_bytes(machine.device), DEFAULT_NEW_TOKENS, []
    for name in presets():
        for precision, dtype, quant in precisions:
            counted = counted_model(resolve(name), dtype, quant)
            cores, kind = counted.work.of_kind(AttentionCore), getattr(torch, dtype)
            path = attention_path(counted.attention, cores, SdpaStep(machine.device, kind, query, query))
            least, most = (
                int(memory_need(counted.work, counted.weight_bytes, Step(batch, query, 0), new_tokens, path).safe_bytes)
                for batch in _FIRST_BATCHES
            )
            fits.append(PresetFit(name, precision, least, least <= free_bytes, most <= free_bytes))
    return fits


def fit_words(fits: Sequence[PresetFit]) -> str:
    """Return each model at the widest precision in which it fits: `float16: gpt2; nf4: mistral-7b-v0.1`.

    Models are in the order of their size.
    """
    groups: dict[str, list[str]] = {**{fit.precision: [] for fit in fits}, _TOO_LARGE: []}
    least = {fit.model: fit.needs_bytes for fit in sorted(fits, key=lambda fit: -fit.needs_bytes)}
    for model in sorted(least, key=lambda model: least[model]):
        widest = next((fit.precision for fit in fits if fit.model == model and fit.fits), _TOO_LARGE)
        needs = f" ({scaled(least[model], 'B')} at least)" if widest == _TOO_LARGE else ""
        groups[widest].append(f"{model}{needs}")
    return "; ".join(f"{name}: {', '.join(models)}" for name, models in groups.items() if models)


def first_command(fits: Sequence[PresetFit], *, on_card: bool) -> str:
    """Return a short and informative run: a well-known model on a GPU, the default model on a CPU."""
    fitting = [fit for fit in fits if fit.fits]
    if not on_card or not fitting:
        return f"{_command()} {'run' if any(fit.model == DEFAULT_MODEL for fit in fitting) else 'ceilings'}"
    # LLM.int8() waits for the GPU in every matmul, so it is the last choice.
    well_known = [fit for fit in fitting if fit.model == "mistral-7b-v0.1"]
    well_known.sort(key=lambda fit: (not fit.fits_first, fit.precision == "int8"))
    dense = [fit for fit in fitting if fit.precision not in FORMATS]
    choice = well_known[0] if well_known else max(dense or fitting, key=lambda fit: fit.needs_bytes)
    quant = f" --quant {choice.precision}" if choice.precision in FORMATS else ""
    return f"{_command()} run {choice.model}{quant} {_FIRST_GRID}"


def examination_section(examination: Examination) -> Section:
    """A row for each part of the installation, and the command to run first."""
    marks = {True: "ok", False: "NO", None: "-"}
    rows = [[item.name, marks[item.works], item.says] for item in examination.findings]
    columns = (TextColumn(""), TextColumn(""), TextColumn("", wrap=True))
    return Section("", [TextTable(columns, rows), Lines([f"next: {examination.first}"])])
