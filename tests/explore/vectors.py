"""Conformance vectors: every preset in every precision at three cells. `python -m tests.explore.vectors` writes them.

Any port of the count, including the page, must give these figures.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from profiler.counting.floor import RoofSet
from profiler.counting.grid_count import gpu_floors
from profiler.counting.memory_need import memory_need, path_on
from profiler.counting.preset_counts import CountedModel, preset_counts
from profiler.data.datasheets import gpu_called
from profiler.facts.step import Step
from profiler.loading.source import preset_names
from profiler.quant.registry import FORMATS

FILE = Path(__file__).with_name("vectors.json")
STEPS = ((1, 512, 0), (1, 1, 512), (32, 1, 4000))
"""(batch, query, context): the prefill of a prompt, a decode step after it, and a batch of decodes past a window."""
_PEAKS = {"float32": 8.1e12, "float16": 65e12, "int8": 130e12}
ROOFS = RoofSet("T4, datasheet", 320e9, _PEAKS, gpu_called("T4").room_bytes, fuses_grouped_heads=False)
"""Nvidia's datasheet of the T4; a bfloat16 model runs in float16, which has as many bytes."""


def figures(counted: CountedModel) -> list[dict[str, Any]]:
    """Return the figures of a model at each step, by Python."""
    found = []
    for batch, query, context in STEPS:
        step = Step(np.array([batch]), query, context)
        work, path = counted.work.work(step), path_on(counted.work, counted.attention, fuses_grouped_heads=False)
        first = context or query  # a decode step needs the memory of the prefill before it
        prefill = Step(np.array([batch]), first, 0)
        need = memory_need(counted.work, counted.weight_bytes, prefill, query + context - first, path)
        floors = gpu_floors(ROOFS, counted.work, counted.dtype, step, need)
        found.append(
            {
                "flops": int(np.asarray(work.model_flops).item()),
                "bytes": round(np.asarray(work.model_bytes).item()),
                "cache_bytes": int(need.cache_bytes[0]),
                "floor_s": float(f"{floors.floor_s[0]:.12g}"),
                "bound": str(floors.bound[0]),
                "fits": bool(floors.fits[0]),
                "safe_bytes": round(float(need.safe_bytes[0])),
            }
        )
    return found


def presets() -> dict[tuple[str, str], CountedModel]:
    """Return every preset in every precision that counts it."""
    pairs = [(card, quant) for card in preset_names() for quant in FORMATS]
    return {pair: counted for pair in pairs if (counted := preset_counts(*pair)) is not None}


def document() -> str:
    """Return the vectors as JSON, one cell per line."""
    rows = [
        {"model": card, "precision": quant, "batch": step[0], "query": step[1], "context": step[2], **values}
        for (card, quant), counted in presets().items()
        for step, values in zip(STEPS, figures(counted), strict=True)
    ]
    return "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n"


if __name__ == "__main__":
    FILE.write_text(document(), encoding="utf-8")
