"""The range of each roof, from the read of the model's weights and from later measurements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from profiler.facts.roofs import Ceilings, Roof, RoofsRemeasured, agree, memory_roof
from profiler.facts.run_facts import Facts


def extreme_shares(facts: Facts) -> Mapping[str, tuple[float, float]]:
    """The `lowest` and `highest` (memory, compute) roofs of a run, as shares of the roofs measured first.

    Pairs of (1, 1) are left out. Memory may be slower for the model's weights than for a stream, and both roofs may
    have changed until the end of the run.
    """
    ceilings = facts.ceilings
    memory, compute = [1.0, weight_read_share(ceilings)], [1.0]
    for look in facts.roofs_again:
        memory.append(_share(memory_roof(look.memory), memory_roof(ceilings.memory)))
        compute += [_share(later, first) for _, later, first in _products(ceilings, look)]
    sides = {"lowest": (min(memory), min(compute)), "highest": (max(memory), max(compute))}
    return {name: shares for name, shares in sides.items() if shares != (1.0, 1.0)}


def weight_read_share(ceilings: Ceilings) -> float:
    """Read bandwidth of the model's weights over that of a stream in pieces of the same sizes; 1 if the two agree.

    Older runs have no such stream. For them it is the memory roof for that number of bytes.
    """
    if (witness := ceilings.weights) is None:
        return 1.0
    stream_per_s, half_width = ceilings.memory_bytes_per_s_for(witness.nbytes), ceilings.memory_half_width
    if witness.stream is not None:
        stream_per_s, half_width = witness.stream.per_s, witness.stream.half_width
    own = witness.roof
    return 1.0 if agree(own.per_s, stream_per_s, own.half_width + half_width) else own.per_s / stream_per_s


def moved(ceilings: Ceilings, look: RoofsRemeasured) -> Iterator[tuple[str, str, Roof, Roof]]:
    """(name, unit, first, later) of each roof that differs in a later measurement."""
    pairs = [("memory", "B/s", memory_roof(ceilings.memory), memory_roof(look.memory))]
    pairs += [(f"{dtype} products", "FLOP/s", first, later) for dtype, later, first in _products(ceilings, look)]
    for name, unit, first, later in pairs:
        if _share(later, first) != 1.0:
            yield name, unit, first, later


def _products(ceilings: Ceilings, look: RoofsRemeasured) -> list[tuple[str, Roof, Roof]]:
    """(dtype, later, first) of the products that were measured both times."""
    return [
        (dtype, later, ceilings.compute[dtype]) for dtype, later in look.compute.items() if dtype in ceilings.compute
    ]


def _share(later: Roof, first: Roof) -> float:
    """One roof over another of the same kind, at equal clocks if known; 1 if they agree, or one was not measured.

    They agree if the rates do, as measured or at equal clocks. A GPU at its power limit changes its clock within
    milliseconds, and a few readings miss that.
    """
    if not (later.measured and first.measured):
        return 1.0
    clocks = later.clock_hz / first.clock_hz if later.clock_hz and first.clock_hz else 1.0
    half_width = later.half_width + first.half_width
    if any(agree(later.per_s / clock, first.per_s, half_width) for clock in (1.0, clocks)):
        return 1.0
    return later.per_s / clocks / first.per_s
