"""Forecasts from a profile of a simulated GPU: kernels of other widths, dispatch per layer, and damaged files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from machines import roof

from profiler.counting.floor import floor_s
from profiler.counting.operators import Linear
from profiler.errors import RequestError
from profiler.facts.roofs import Ceilings
from profiler.facts.step import StoredWeight
from profiler.forecast.command import ForecastRequest, forecast_on
from profiler.gpu_profile.kernels import fitted_on, held_out_kernels
from profiler.gpu_profile.profile import (
    PROFILE_SCHEMA,
    AttentionPoint,
    DispatchPoint,
    GpuProfile,
    ProductPoint,
    SmallPoint,
    profile_json,
    read_profile,
)
from profiler.grid.cells import Cell, CellKey
from profiler.predict.operator_arrays import OperatorColumn, StepArrays

FLOPS_PER_S, BYTES_PER_S = 1.0e11, 2.0e10
LAYER_S, CALLS_S = 3e-4, 1e-4


def share(rows: float, width: float) -> float:
    """The simulated GPU's efficiency: higher with more rows, and slightly lower for narrow weights."""
    return min(0.95, 0.35 + 0.05 * np.log2(rows) + 0.02 * np.log2(width / 512))


def planted() -> GpuProfile:
    """The profile of a GPU whose kernel times are known."""
    products = [
        ProductPoint("float32", "dense", rows, ins, outs, 4.0 * ins * outs,
                     floor_s(2.0 * rows * ins * outs, 4.0 * ins * outs, FLOPS_PER_S, BYTES_PER_S) / share(rows, ins))
        for ins, outs in ((512, 512), (512, 2048), (2048, 512), (2048, 2048), (1024, 4096), (512, 16384))
        for rows in (1, 2, 4, 8, 16, 64, 256, 1024)
    ]  # fmt: skip
    attentions = [
        AttentionPoint("float32", batch, query, keys, heads, kv, 64, 2 * floor_s(
            4.0 * heads * 64 * batch * (query * (keys - query) + query * (query + 1) // 2),
            batch * keys * 2 * kv * 64 * 4.0, FLOPS_PER_S, BYTES_PER_S))
        for heads, kv in ((9, 3), (16, 4))
        for batch, query, keys in ((1, 1, 64), (1, 1, 512), (8, 1, 512), (1, 64, 64), (1, 512, 512), (8, 128, 128))
    ]  # fmt: skip
    dispatches = [
        DispatchPoint("float32", phase, batch, LAYER_S, CALLS_S) for phase in ("prefill", "decode") for batch in (1, 8)
    ]
    ceilings = Ceilings({"float32": roof(FLOPS_PER_S)}, {"read": roof(BYTES_PER_S)}, 1 << 28, True)
    return GpuProfile(
        PROFILE_SCHEMA, "0", "2026-11-20T00:00:00+00:00", "a planted card", "cpu", 2, "AVX2", 64 << 30, 32 << 20, {},
        ceilings, tuple(products), tuple(attentions), tuple(dispatches),
    )  # fmt: skip


def test_kernels_of_other_widths_are_forecast() -> None:
    """Each width is forecast from the others, on a GPU whose times are known."""
    held = held_out_kernels(planted(), "float32")
    assert len(held.errors) == 48
    assert held.median < 0.05
    assert held.p90 < 0.12


def test_a_model_that_never_ran_there_is_forecast(tmp_path: Path) -> None:
    """SmolLM2-135M: its linears at the planted efficiency plus the dispatch of its layers, in sequence as on a CPU."""
    path = tmp_path / "card.json"
    path.write_text(profile_json(planted()))
    request = ForecastRequest(prompt_lens="64", batch_sizes="1,4", dtype="float32")
    answer = forecast_on("smollm2-135m", str(path), request)
    layers = ((576, 576), (576, 192), (576, 192), (576, 576), (576, 1536), (576, 1536), (1536, 576))
    for cell in answer.cells:
        rows = cell.batch_size * (64 if cell.phase == "prefill" else 1)
        shapes = [*(30 * list(layers)), (576, 49152)]
        linears_s = 0.0
        for ins, outs in shapes:
            outputs = cell.batch_size if outs == 49152 else rows
            roof_s = floor_s(2.0 * outputs * ins * outs, 4.0 * ins * outs, FLOPS_PER_S, BYTES_PER_S)
            linears_s += roof_s / share(outputs, ins)
        expected_s = linears_s + 30 * (LAYER_S - CALLS_S)
        assert cell.latency_s == pytest.approx(expected_s, rel=0.15), cell
        assert cell.terms["dispatch_s"] == pytest.approx(30 * LAYER_S)
        assert cell.low_s < cell.latency_s < cell.high_s


@pytest.mark.slow
def test_layouts_and_formats_have_different_kernels(tmp_path: Path) -> None:
    """Transposed weights take twice as long here, and packed ones half.

    All linears of GPT-2 except the head are transposed, and a model in 4 bits is packed.
    """
    card = planted()
    other = [
        replace(point, format=format_, seconds=factor * point.seconds)
        for format_, factor in (("transposed", 2.0), ("nf4", 0.5))
        for point in card.products
    ]
    plain, more = tmp_path / "plain.json", tmp_path / "more.json"
    plain.write_text(profile_json(card))
    more.write_text(profile_json(replace(card, products=(*card.products, *other))))
    request = ForecastRequest(prompt_lens="64", batch_sizes="1", dtype="float32")

    def decode_s(model: str, path: Path, request: ForecastRequest = request) -> float:
        [cell] = [cell for cell in forecast_on(model, str(path), request).cells if cell.phase == "decode"]
        return cell.latency_s

    weights = 12 * 12 * 768 * 768
    transposed_s = 2.0 * 4.0 * weights / BYTES_PER_S / 0.36
    assert decode_s("gpt2", more) - decode_s("gpt2", plain) == pytest.approx(transposed_s / 2, rel=0.1)
    assert decode_s("smollm2-135m", more) == pytest.approx(decode_s("smollm2-135m", plain), rel=1e-6)
    with pytest.raises(RequestError, match="no kernels of nf4"):
        decode_s("smollm2-135m", plain, replace(request, quant="nf4"))
    assert decode_s("smollm2-135m", more, replace(request, quant="nf4")) < decode_s("smollm2-135m", more)


@pytest.mark.slow
def test_small_kernels_of_a_prefill_take_their_profiled_time(tmp_path: Path) -> None:
    """If they take three times as long as their traffic, a prefill is longer by twice that traffic.

    Without small kernels in the profile, they take as long as their traffic. A decode step's dispatch hides them.
    """

    def times(ratio: float | None) -> dict[str, float]:
        smalls = () if ratio is None else tuple(SmallPoint("float32", s, ratio * s) for s in (1e-6, 1e-4, 1e-2))
        path = tmp_path / "card.json"
        path.write_text(profile_json(replace(planted(), smalls=smalls)))
        request = ForecastRequest(prompt_lens="64", batch_sizes="1", dtype="float32")
        return {cell.phase: cell.latency_s for cell in forecast_on("smollm2-135m", str(path), request).cells}

    without, once, thrice, twice = times(None), times(1.0), times(3.0), times(2.0)
    assert once == pytest.approx(without)
    assert thrice["prefill"] - once["prefill"] == pytest.approx(2 * (twice["prefill"] - once["prefill"]))
    # Each of 30 layers writes at least hidden states, queries, keys, values and two tensors of the MLP's width.
    written_s = 30 * 64 * 4.0 * (2 * 576 + 2 * 576 + 2 * 192 + 2 * 1536) / BYTES_PER_S
    assert twice["prefill"] - once["prefill"] > written_s
    assert thrice["decode"] == pytest.approx(once["decode"])


def test_a_cache_saves_traffic_but_not_the_losses_of_a_kernel() -> None:
    """A product at a quarter of the memory roof takes 4 ms from memory, of which it loses 3.

    From a cache of twice the bandwidth its bytes take half a millisecond, and the loss is the same.
    """
    points = tuple(
        ProductPoint("float32", "dense", rows, 500, 10_000, 2e7, 4e-3) for rows in (1, 2)
    )  # 20 MB at 20 GB/s: 1 ms
    card = replace(planted(), products=points)
    kernels = fitted_on(card, "float32", 1).kernels
    steps = StepArrays.of([CellKey("decode", Cell(batch_size=1, prompt_len=8, new_tokens=4))])
    one = np.array([1.0])
    weight = StoredWeight("dense", 500, 10_000, 20_000_000, 0, torch.float32)
    column = OperatorColumn(
        "mlp", "mlp", 1, "float32", one, 1e7 * one, 2e7 * one, 0 * one, 0 * one, {}, {},
        source=Linear(
            name="mlp", group="mlp", dtype=torch.float32, weight=weight, rows="tokens", activation_dtype=torch.float32
        ),
    )  # fmt: skip
    for roof_s, expected_s in ((1e-3, 4e-3), (0.5e-3, 3.5e-3)):
        assert kernels.seconds(column, steps, roof_s * one) == pytest.approx(expected_s)


def test_a_profile_survives_its_file_and_bad_ones_are_refused(tmp_path: Path, roofscope: Callable[..., Any]) -> None:
    path = tmp_path / "card.json"
    path.write_text(profile_json(planted()))
    assert len(path.read_bytes()) < 40_000
    back = read_profile(path)
    assert back.products == planted().products
    content = json.loads(path.read_text())
    newer = json.dumps({**content, "schema_version": PROFILE_SCHEMA + 1})
    for text, words in (
        (newer, f"has version {PROFILE_SCHEMA + 1}.*measure the device again"),
        (json.dumps({**content, "products": 3}), "damaged"),
        ("{", "not JSON"),
    ):
        path.write_text(text)
        with pytest.raises(RequestError, match=words):
            read_profile(path)
    with pytest.raises(RequestError, match="there is no profile at"):
        read_profile(tmp_path / "none.json")
