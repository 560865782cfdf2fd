"""What a user should be warned of, each with its figure and what to do."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from profiler.diagnosis.levers import JudgedCell
from profiler.grid import Cell
from profiler.loading import dtype_name
from profiler.machine.device import Device, load_average_per_core
from profiler.probes.subject import Context
from profiler.roofs.values import Ceilings
from profiler.timing.outcomes import Gap, Visit
from profiler.units import percent, scaled
from profiler.work.operators import Linear


def device_warnings(info: Device) -> list[str]:
    warnings = []
    load = load_average_per_core()
    if load is not None and load > _BUSY_LOAD_PER_CORE:
        warnings.append(f"this machine is busy (load {load:.2f} a core): times may be too long; stop other work.")
    if info.kind == "cuda" and info.datasheet is None:
        warnings.append(
            f"{info.name} is not in the table of datasheets: only measured roofs are used, MFU and MBU are empty."
        )
    return warnings


def model_warnings(context: Context) -> list[str]:
    warnings = []
    ceilings, dtype = context.ceilings, context.dtype
    if dtype != "float32" and context.info.kind == "cpu":
        own, full = ceilings.compute_flops_per_s(dtype), ceilings.compute_flops_per_s("float32")
        if own < _SLOW_DTYPE_SHARE * full:
            warnings.append(
                f"{dtype} is emulated on this CPU: its products reach {percent(own / full)} of float32's"
                f" {scaled(full, 'FLOP/s')}; --dtype float32 may be faster."
            )
    warnings += health_warnings(context.info, ceilings)
    quant = context.loaded.request.quant
    linears = [op.weight for op in context.work.operators if isinstance(op, Linear) and op.weight.dense_from_rows == 1]
    if quant != "none" and linears:
        warnings.append(
            f"{quant} is emulated here: every product first writes a dense copy of its weights in"
            f" {dtype_name(linears[0].compute_dtype)} and then reads it; it saves memory, and costs time."
        )
    if context.info.kind == "cuda" and dtype == "bfloat16" and float(context.info.compute_capability) < 8.0:
        warnings.append(f"{context.info.name} has no bfloat16 units: torch emulates it; use --dtype float16.")
    if (packed := context.loaded.unpacked_from) is not None:
        warnings.append(
            f"the {packed} checkpoint was unpacked: transformers runs it as {dtype}, and these are {dtype}'s figures."
        )
    if not ceilings.beyond_cache:
        warnings.append("memory was too small to stream past the cache: the memory roof may be too high.")
    if not context.dispatch:
        warnings.append("the hollow twin of this model could not be built: dispatch was not measured.")
    if context.work.coverage < 1:
        names = "; ".join(context.work.unknown[:3])
        warnings.append(f"{100 * (1 - context.work.coverage):.3g} % of the parameters are not counted: {names}.")
    for where, nbytes in context.loaded.offloaded_bytes.items():
        warnings.append(
            f"the model does not fit on the device: {scaled(nbytes, 'B')} of weights come from the {where}"
            f" ({scaled(ceilings.links[where].per_s, 'B/s')} measured) at every step; its cells get no regime."
        )
    return warnings


def health_warnings(info: Device, ceilings: Ceilings) -> list[str]:
    """A card that stays clearly below a healthy one of its kind."""
    sheet = info.datasheet
    if sheet is None:
        return []
    dtype = sheet.healthy_dtype
    checks = (
        (f"{dtype} products", ceilings.compute.get(dtype), sheet.healthy_gemm_flops_per_s, "FLOP/s"),
        ("copies", ceilings.memory.get("copy"), sheet.healthy_copy_bytes_per_s, "B/s"),
    )
    return [
        f"this {sheet.gpu} reaches {scaled(roof.per_s, unit)} in {what}; a healthy one reaches {scaled(healthy, unit)}."
        for what, roof, healthy, unit in checks
        if roof is not None and healthy is not None and roof.per_s < _HEALTHY_SHARE * healthy
    ]


def cell_warnings(judged: Sequence[JudgedCell], gaps: Mapping[Cell, Gap]) -> list[str]:
    warnings = []
    above = [cell for cell in judged if "above-roof" in cell.verdict.flags]
    if above:
        cell = above[0]
        warnings.append(
            f"{len(above)} cells lie above a measured roof (first: {cell.phase} batch {cell.batch_size} x"
            f" {cell.depth}): a roof or a count is too low there, and they prove nothing."
        )
    if gaps:
        cell_gap = next(iter(gaps.values()))
        warnings.append(
            f"{len(gaps)} cells have no number (first: batch {cell_gap.cell.batch_size} x {cell_gap.cell.depth},"
            f" {cell_gap.status}: {cell_gap.reason})."
        )
    return warnings


def time_warnings(visits: Mapping[Cell, Sequence[Visit]]) -> list[str]:
    """Loops whose steps, added up, are not what the host's own clock says they took."""
    apart = {}
    for cell, known in visits.items():
        ratios = [visit.loop_s / sum(visit.decode_s) for visit in known if visit.loop_s]
        if ratios and abs(statistics.median(ratios) - 1) > _CLOCKS_AGREE:
            apart[cell] = statistics.median(ratios)
    if not apart:
        return []
    cell, ratio = max(apart.items(), key=lambda item: abs(item[1] - 1))
    return [
        f"in {len(apart)} cells the host's clock and the sum of the steps differ by more than"
        f" {percent(_CLOCKS_AGREE)} (most: {percent(ratio - 1)} at batch {cell.batch_size} x {cell.depth})."
    ]


# Two clocks around the same loop must agree this well.
_CLOCKS_AGREE = 0.02
# A dtype whose matrix product reaches less than this share of float32's is slower than not using it at all.
_SLOW_DTYPE_SHARE = 0.9
_HEALTHY_SHARE = 0.9
_BUSY_LOAD_PER_CORE = 0.75
