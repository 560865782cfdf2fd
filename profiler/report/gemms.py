"""The census of matrix products: their shapes, how matrix units fit them, and in a run the time of each."""

from __future__ import annotations

from collections.abc import Sequence

from profiler.counting.floor import floor_s
from profiler.facts.operators import GemmShape
from profiler.grid.cells import CellKey
from profiler.report.blocks import DOCUMENTS, Section, text_table
from profiler.report.selection import selected_cells
from profiler.store.folder import Run
from profiler.store.operators_csv import OPERATORS_FILE, replayed_operators
from profiler.units import duration, percent

GEMM_FIT = ("of its tiles", "16-byte rows")
"""The headings of `gemm_fit`."""


def gemm_fit(shapes: Sequence[GemmShape]) -> list[str]:
    """Return the used share of the tiles of 128 x 128 of some products, and whether all rows are whole 16 bytes."""
    work = [shape.count * shape.m * shape.n * shape.k for shape in shapes]
    covered = sum(each / shape.tiles_used for each, shape in zip(work, shapes, strict=True))
    return [percent(sum(work) / covered), "yes" if all(shape.aligned for shape in shapes) else "no"]


def gemms(run: Run) -> Section | None:
    on_gpu = run.document.device.kind == "cuda"
    fit = GEMM_FIT if on_gpu else ()
    headings = ("m x n x k", "calls", "time", "of the step", "of its roof", *fit)
    rows = [row[: len(headings)] for row in gemm_rows(run)]
    groups = [number for number, row in enumerate(rows) if not row[1]]
    caption = (
        "A step that reads weights loses no time by tiles that it does not fill. A replay is short: it runs before the"
        " power limit, so it may pass a roof that was measured at it."
    )
    note = "replayed kernels; the smallest and the largest cell of each phase"
    table = text_table(headings, rows, caption=caption if on_gpu else "", groups=groups)
    return Section("Matrix products", [table], note, DOCUMENTS) if rows else None


def gemm_rows(run: Run) -> list[list[str]]:
    """Return a row per shape of the selected cells' products with weights, the longest first, below its cell's row."""
    if not (run.folder / OPERATORS_FILE).exists():
        return []
    ceilings, cells = run.document.ceilings.ceilings, {cell.key: cell for cell in selected_cells(run)}
    times: dict[CellKey, dict[tuple[GemmShape, ...], list[float]]] = {}
    for key, item, replayed_s in replayed_operators(run.folder):
        if key in cells and item.gemms:
            shapes = tuple(GemmShape.parse(text, item.dtype) for text in item.gemms.split())
            calls_s_roof_s = times.setdefault(key, {}).setdefault(shapes, [0, 0.0, 0.0])
            peak = run.document.ceilings.full_clock.get(item.dtype) or ceilings.compute_flops_per_s(item.dtype)
            calls_s_roof_s[0] += sum(shape.count for shape in shapes)
            calls_s_roof_s[1] += replayed_s
            calls_s_roof_s[2] += floor_s(float(item.flops), float(item.model_bytes), peak, ceilings.memory_bytes_per_s)
    rows = []
    for key, by_shapes in times.items():
        rows.append([key.name, *[""] * (4 + len(GEMM_FIT))])
        for shapes, (calls, seconds, roof_s) in sorted(by_shapes.items(), key=lambda entry: -entry[1][1]):
            words = " + ".join(f"{shape.m} x {shape.n} x {shape.k}" for shape in shapes)
            share = percent(seconds / cells[key].latency_s)
            rows.append([words, f"{calls:.0f}", duration(seconds), share, percent(roof_s / seconds), *gemm_fit(shapes)])
    return rows
