"""The range of a roof: what the read of the model's weights and a second measurement say of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from profiler.facts.roofs import Ceilings, Roof, RoofsRemeasured, agree, memory_roof
from profiler.facts.run_facts import Facts


def extreme_shares(facts: Facts) -> Mapping[str, tuple[float, float]]:
    """Shares of the memory and of the compute roofs at which they were `lowest` and `highest` in a run.

    Each where it is another than 1 and 1, the roofs that were measured first. Memory may be slower for the model's own
    weights than for a stream; and both kinds may have moved until the end.
    """
    ceilings = facts.ceilings
    memory, compute = [1.0, weight_read_share(ceilings)], [1.0]
    for look in facts.roofs_again:
        memory.append(_share(memory_roof(look.memory), memory_roof(ceilings.memory)))
        compute += [_share(again, first) for _, again, first in _products(ceilings, look)]
    sides = {"lowest": (min(memory), min(compute)), "highest": (max(memory), max(compute))}
    return {name: shares for name, shares in sides.items() if shares != (1.0, 1.0)}


def weight_read_share(ceilings: Ceilings) -> float:
    """What the model's own weights are read at, over a stream in the same pieces; 1 where the two agree.

    Older runs have no such stream: there the roof of so many bytes stands for it.
    """
    if (witness := ceilings.weights) is None:
        return 1.0
    stream_per_s, half_width = ceilings.memory_bytes_per_s_for(witness.nbytes), ceilings.memory_half_width
    if witness.stream is not None:
        stream_per_s, half_width = witness.stream.per_s, witness.stream.half_width
    own = witness.roof
    return 1.0 if agree(own.per_s, stream_per_s, own.half_width + half_width) else own.per_s / stream_per_s


def moved(ceilings: Ceilings, look: RoofsRemeasured) -> Iterator[tuple[str, str, Roof, Roof]]:
    """(what, its unit, first, again) of each roof that a second look found elsewhere."""
    pairs = [("memory", "B/s", memory_roof(ceilings.memory), memory_roof(look.memory))]
    pairs += [(f"{dtype} products", "FLOP/s", first, again) for dtype, again, first in _products(ceilings, look)]
    for what, unit, first, again in pairs:
        if _share(again, first) != 1.0:
            yield what, unit, first, again


def _products(ceilings: Ceilings, look: RoofsRemeasured) -> list[tuple[str, Roof, Roof]]:
    """(dtype, again, first) of the products that were measured both times."""
    return [
        (dtype, again, ceilings.compute[dtype]) for dtype, again in look.compute.items() if dtype in ceilings.compute
    ]


def _share(again: Roof, first: Roof) -> float:
    """One roof over another of the same kind, at the same clock where both are known; 1 where they agree, or were not
    both measured."""
    if not (again.measured and first.measured):
        return 1.0
    clocks = again.clock_hz / first.clock_hz if again.clock_hz and first.clock_hz else 1.0
    same = agree(again.per_s / clocks, first.per_s, again.half_width + first.half_width)
    return 1.0 if same else again.per_s / clocks / first.per_s
