"""Warnings before the first figure, each with what to do."""

from collections.abc import Iterator, Sequence

from profiler.counting.operators import Linear
from profiler.device.contention import ForeignLoad
from profiler.device.device import Device, under_wsl
from profiler.facts.ceilings import Ceilings
from profiler.facts.telemetry import Contention
from profiler.loading.request import CheckpointFit, dtype_name
from profiler.measure.subject import Subject
from profiler.units import percent, scaled

# A dtype whose matmuls reach less than this share of float32's is not worth using.
_SLOW_DTYPE_SHARE = 0.9


def device_warnings(info: Device) -> Iterator[str]:
    """Yield warnings about the machine."""
    if info.kind == "cuda" and info.datasheet is None:
        yield (
            f"{info.name} is not in the table of datasheets: only measured ceilings are used, MFU and MBU are empty."
        )
    if info.kind == "cuda" and under_wsl():
        # github.com/microsoft/WSL, issue 11050; the setting's name: nvidia.custhelp.com, answer 5490.
        yield (
            "under WSL allocations beyond the GPU's memory may spill to system memory without an error, and steps get"
            " slow; set 'CUDA - Sysmem Fallback Policy' to 'Prefer No Sysmem Fallback' in Windows' NVIDIA Control"
            " Panel, or stay well below the GPU's memory."
        )


def busy_words(threads: int, foreign: ForeignLoad) -> list[str]:
    """Return a warning about CPU contention, for work that needs `threads` of the host."""
    busy = foreign.cores()
    if busy is None or not (contention := Contention(busy, foreign.watched)).disturbs(threads):
        return []
    return [f"other processes keep {contention.busy_cores} busy: times may be too long; stop them."]


def model_warnings(subject: Subject, ceilings: Ceilings) -> Iterator[str]:
    """Yield warnings about this model on this device."""
    info, loaded, work = subject.machine.info, subject.loaded, subject.work
    dtype = dtype_name(subject.request.dtype)
    if dtype != "float32" and info.kind == "cpu":
        own, full = ceilings.compute_flops_per_s(dtype), ceilings.compute_flops_per_s("float32")
        if own < _SLOW_DTYPE_SHARE * full:
            yield (
                f"{dtype} is emulated on this CPU: its matmuls reach {percent(own / full)} of float32's"
                f" {scaled(full, 'FLOP/s')}; --dtype float32 may be faster."
            )
    quant = subject.request.quant
    weights = (op.weight for op in work.of_kind(Linear))
    emulated = [weight for weight in weights if weight.dense_from_rows == 1 and not weight.fused_rows]
    if quant != "none" and emulated:
        yield (
            f"{quant} is emulated here: every matmul first writes a dense copy of its weights in"
            f" {dtype_name(emulated[0].compute_dtype)} and then reads it; this saves memory and costs time."
        )
    if info.kind == "cuda" and dtype == "bfloat16" and float(info.compute_capability) < 8.0:
        yield f"{info.name} has no bfloat16 units: torch emulates it; use --dtype float16."
    if (packed := loaded.unpacked_from) is not None:
        yield (
            f"the weights were dequantised from {packed}: transformers runs them in {dtype}, and so are all figures."
            if subject.request.weights == "checkpoint"
            else f"{subject.request.source.name} is published as {packed}, but random weights are dense: all figures"
            f" are for {dtype}; `roofscope count` has those of the published format."
        )
    yield from fit_warnings(loaded.fit)
    yield from ceiling_warnings(ceilings)
    if work.coverage < 1:
        names = "; ".join(work.unknown[:3])
        yield f"{100 * (1 - work.coverage):.3g} % of the parameters are not counted: {names}."
    for where, nbytes in loaded.offloaded_bytes.items():
        link = ceilings.links.get(where)
        measured = f" ({scaled(link.per_s, 'B/s')} measured)" if link else ""
        yield (
            f"the model does not fit on the device: {scaled(nbytes, 'B')} of weights are read from the {where}"
            f"{measured} at every step."
        )


def fit_warnings(fit: CheckpointFit) -> Iterator[str]:
    """Yield warnings about tensors that the checkpoint and the config do not share."""
    if fit.missing:
        yield (
            f"{_named(fit.missing)} of this model are not in the checkpoint and are random: times are valid, answers"
            " would not be; check the config's layers and sizes."
        )
    if fit.unused:
        yield (
            f"{_named(fit.unused)} of the checkpoint have no place in this model and were not loaded: the config is of"
            " another model, a smaller one, or only this one's text part."
        )


def _named(tensors: Sequence[str]) -> str:
    return f"{len(tensors)} tensors (first: {tensors[0]})"


def ceiling_warnings(ceilings: Ceilings) -> Iterator[str]:
    """Yield warnings about ceilings that the datasheet replaces, and a memory ceiling that a cache may have raised."""
    nominal = [name for name, ceiling in (*ceilings.memory.items(), *ceilings.compute.items()) if not ceiling.measured]
    if nominal:
        yield f"the datasheet's peak replaces the ceiling of {' and '.join(nominal)}: no kernel reaches it."
    if ceilings.missing and not ceilings.judges:
        kind = "arithmetic" if ceilings.memory else "memory"
        yield f"there is no ceiling of {kind}: cells have times and counts, and no regime."
    if not any(ceiling.measured for ceiling in ceilings.memory.values()):
        return
    size = f"{ceilings.stream_bytes >> 20} MiB"
    if not ceilings.beyond_cache:
        yield f"no memory or time for buffers beyond the caches ({size}): the memory ceiling may be too high."
    elif not ceilings.plateau:
        ends = " and ".join(scaled(point.bytes_per_s, "B/s") for point in ceilings.curve[-2:])
        yield f"no two sizes up to {size} are read equally fast (last: {ends}): the memory ceiling may be off."
