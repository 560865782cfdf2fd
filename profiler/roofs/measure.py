"""All roofs of a device in a few seconds; what was measured before is kept unless the device has outgrown it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from profiler.machine.machine import Machine
from profiler.roofs.products import measure_gemm, measure_gemv, square_product, square_size
from profiler.roofs.sampling import STAGE_BUDGET_S, clocked, roof_of, sample
from profiler.roofs.streams import measure_page_fault_s, measure_read, measure_streams
from profiler.roofs.values import AGREE, GEMV, READ, Ceilings, Roof, RoofsAgain

# A short look at what was kept.
_CHECK_S = 0.3


def measure(
    machine: Machine,
    dtypes: Sequence[str],
    *,
    model_dtype: str,
    stage_budget_s: float = STAGE_BUDGET_S,
    known: Ceilings | None = None,
) -> Ceilings:
    """Measure the roofs of a machine: GEMM for each of `dtypes`, streams, and a matrix-vector product of `model_dtype`.

    What `known` holds already is kept, whatever its dtypes, unless a short look shows that the device is faster than
    that: then it was measured in a busy minute. The machine tells its clock during each probe. Data are random, because
    a product of zeros draws less power and runs faster than any real one (Horace He, "Strangely, Matrix Multiplications
    on GPUs Run Faster When Given 'Predictable' Data!", 2024).
    """
    start_s = machine.now_s()
    if known is not None and _outgrown(known, machine):
        known = None
    roofs = known or measure_streams(machine, stage_budget_s)
    if not machine.is_cuda and not roofs.page_fault_s:
        roofs = replace(roofs, page_fault_s=measure_page_fault_s(machine))
    memory, compute = dict(roofs.memory), dict(roofs.compute)
    if model_dtype != "int8" and f"{GEMV} {model_dtype}" not in memory:
        probe = partial(measure_gemv, machine, model_dtype, roofs.stream_bytes, stage_budget_s)
        memory[f"{GEMV} {model_dtype}"] = clocked(probe, machine)
    for dtype in dtypes:
        if dtype not in compute:
            compute[dtype] = clocked(partial(measure_gemm, machine, dtype, stage_budget_s), machine)
    measured_s = roofs.measured_s + machine.now_s() - start_s
    return replace(roofs, compute=compute, memory=memory, measured_s=measured_s)


def look_again(machine: Machine, ceilings: Ceilings, model_dtype: str, budget_s: float) -> RoofsAgain | None:
    """The roofs that verdicts rest on once more, with the buffers and shapes of the first time; `budget_s` for each.

    None where the run has left no room for them.
    """
    machine.release()
    if machine.available_bytes() < 2 * ceilings.stream_bytes:
        return None
    memory = {READ: measure_read(machine, ceilings.stream_bytes, budget_s)}
    if GEMV in ceilings.memory:
        memory[GEMV] = measure_gemv(machine, model_dtype, ceilings.stream_bytes, budget_s)
    first = ceilings.compute.get(model_dtype)
    compute = {}
    if first is not None:
        compute[model_dtype] = clocked(partial(_product_again, machine, model_dtype, first, budget_s), machine)
    return RoofsAgain(memory, compute, machine.unix_s())


def _product_again(machine: Machine, dtype: str, roof: Roof, budget_s: float) -> Roof:
    size = square_size(roof)
    seconds = sample(square_product(machine.device, dtype, size), machine, budget_s)
    return roof_of(2.0 * size**3, seconds, roof.method)


def _outgrown(known: Ceilings, machine: Machine) -> bool:
    """Whether the device is clearly faster now than the roofs that were kept: they are no roofs then."""
    faster = 1 + AGREE
    if measure_read(machine, known.stream_bytes, _CHECK_S).per_s > faster * known.memory_bytes_per_s:
        return True
    roof = known.compute.get("float32")
    return roof is not None and _product_again(machine, "float32", roof, _CHECK_S).per_s > faster * roof.per_s
