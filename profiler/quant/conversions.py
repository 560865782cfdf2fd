"""Calls of the kernels inside a quantised linear that only convert between formats, to be timed in isolation."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from profiler.facts.step import StoredWeight
from profiler.quant.registry import ConversionCall, library_of
from profiler.quant.storage import stored


def conversion_calls(modules: Sequence[nn.Module], rows: int, activations: torch.dtype) -> list[ConversionCall]:
    """Calls of the conversion kernels that `modules` run for `rows` rows of input, one per module.

    `modules` are loaded linears of one shape, `activations` the dtype of their input. A call writes the dense copy of
    a weight. For LLM.int8() it quantises the inputs and dequantises the int32 products; outlier columns count to the
    product. Empty if the linears convert nothing, or do so inside their product.
    """
    weights = [stored(module) for module in modules]
    if all(weight.format == "int8" for weight in weights):
        return _llm_int8(modules, weights[0], rows, activations)
    if not all(weight.writes_dense_copy(rows) for weight in weights):
        return []
    library = library_of(modules[0].weight)
    pairs = zip(modules, weights, strict=True)
    copies = [library.dense_copy(weight.format, module, weight) for module, weight in pairs] if library else []
    return [copy for copy in copies if copy is not None]


def _llm_int8(
    modules: Sequence[Any], weight: StoredWeight, rows: int, activations: torch.dtype
) -> list[ConversionCall]:
    """All calls share one input and one product: a step makes both anew, but one pair per call would take gigabytes."""
    from bitsandbytes import functional

    device = modules[0].state.SCB.device
    inputs = torch.randn(rows, weight.in_features, dtype=activations, device=device)
    products = torch.randint(-1000, 1000, (rows, weight.out_features), dtype=torch.int32, device=device)

    def convert(scales: torch.Tensor, threshold: float) -> object:
        halves = inputs.to(torch.float16)
        if device.type == "cuda":
            _check_outliers(halves, threshold)
            threshold = 0.0
        _, row_scales, _ = functional.int8_vectorwise_quant(halves, threshold=threshold)
        return functional.int8_mm_dequant(products, row_scales, scales)

    return [partial(convert, module.state.SCB, module.state.threshold) for module in modules]


def without_waiting(module: Any, x: torch.Tensor) -> ConversionCall:
    """A call of a linear on `x` that a CUDA graph can capture.

    In each call, LLM.int8() checks for columns with an outlier, and the host waits for the result (bitsandbytes 0.50,
    backends/cuda/ops.py, `int8_vectorwise_quant`). Random inputs have none, so this runs the kernels of the check and
    ignores the result.
    """
    if stored(module).format != "int8":
        return partial(module, x)
    state = module.state

    def call() -> object:
        threshold = state.threshold
        _check_outliers(x.to(torch.float16), threshold)
        state.threshold = 0.0
        try:
            return module(x)
        finally:
            state.threshold = threshold

    return call


def _check_outliers(halves: torch.Tensor, threshold: float) -> None:
    (halves.abs() >= threshold).any()
