"""The page's theory.js in V8, without a browser."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from py_mini_racer import MiniRacer

import profiler.explore
from profiler.explore.document import ModelEntry, Row

_THEORY = Path(profiler.explore.__file__).with_name("theory.js")
_ASK = """
function ask(entry, gpu, link, bits, steps) {
  return JSON.stringify(steps.map(([batch, query, context, shared = 0, asked = 1]) => {
    const exact = { batch: BigInt(batch), query: BigInt(query), context: BigInt(context) };
    const work = stepWork(entry, { ...exact, shared: BigInt(shared), asked: BigInt(asked) }, bits);
    const fast = stepWork(entry, { batch, query, context, shared, asked }, bits);
    const floor = floorOf(work, entry, gpu, link), tokens = query + context;
    return {
      flops: String(work.flops), bytes: String(work.bytes), fast_flops: fast.flops, fast_bytes: fast.bytes,
      cache_bytes: String(cacheBytes(entry, BigInt(batch), BigInt(tokens), bits, BigInt(shared))), floor_s: floor.total,
      compute_s: floor.compute, memory_s: floor.memory, link_s: floor.link, bound: floor.bound,
      fits: fits(entry, gpu, batch, context || query, tokens, bits, shared),
      safe_bytes: safeBytes(entry, gpu, batch, context || query, tokens, bits, shared),
      largest_batch: largestBatch(entry, gpu, context || query, tokens, bits, shared),
    };
  }));
}
"""


class Theory:
    """theory.js with one entry of a page."""

    def __init__(self) -> None:
        self._engine = MiniRacer()
        self._engine.eval(_THEORY.read_text(encoding="utf-8") + _ASK)

    def ask(
        self,
        entry: ModelEntry,
        gpu: Row,
        steps: Sequence[tuple[int, ...]],
        link: Row | None = None,
        bits: int | None = None,
    ) -> list[dict[str, Any]]:
        """Return the page's figures of each step (batch, query, context, and if need be shared and asked)."""
        given = [asdict(entry), gpu, link, bits or entry.kv_bits, steps]
        found: list[dict[str, Any]] = json.loads(self._engine.eval(f"ask({', '.join(map(json.dumps, given))})"))
        return found
