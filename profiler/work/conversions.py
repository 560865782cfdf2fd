"""The kernels that only convert between formats inside a quantised linear, to be timed on their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from profiler.work.formats import StoredWeight, stored

Call = Callable[[], object]


def conversion_call(module: nn.Module, rows: int, activations: torch.dtype) -> Call | None:
    """The very kernels that `module`, loaded, runs to convert between formats for so many rows of input.

    A dense copy of the weight where one is written first; for LLM.int8() the quantising of its inputs and the
    dequantising of its int32 products (what it does with outlier columns is part of its product). None where the
    linear converts nothing, or does so inside its product.
    """
    weight = stored(module)
    if weight.format == "int8":
        return _llm_int8(module, weight, rows, activations)
    if weight.dense_from_rows is None or rows < weight.dense_from_rows:
        return None
    return _DENSE[weight.format](module, weight)


def _llm_int8(module: Any, weight: StoredWeight, rows: int, activations: torch.dtype) -> Call:
    from bitsandbytes import functional

    scales = module.state.SCB
    inputs = torch.randn(rows, weight.in_features, dtype=activations, device=scales.device)
    products = torch.randint(-1000, 1000, (rows, weight.out_features), dtype=torch.int32, device=scales.device)
    threshold = module.state.threshold

    def convert() -> object:
        _, row_scales, _ = functional.int8_vectorwise_quant(inputs.to(torch.float16), threshold=threshold)
        return functional.int8_mm_dequant(products, row_scales, scales)

    return convert


def _bitsandbytes_4bit(module: Any, _weight: StoredWeight) -> Call:
    from bitsandbytes import functional

    packed = module.weight
    return lambda: functional.dequantize_4bit(packed.data, packed.quant_state)


def _torchao_int8(module: Any, weight: StoredWeight) -> Call:
    return lambda: module.weight.qdata.t().to(weight.compute_dtype)


def _torchao_fp8(module: Any, _weight: StoredWeight) -> Call:
    return lambda: module.weight.dequantize()


# By the name of the format (see formats.py); each of those that may write a dense copy first.
_DENSE: dict[str, Callable[[Any, StoredWeight], Call]] = {
    "nf4": _bitsandbytes_4bit,
    "fp4": _bitsandbytes_4bit,
    "int8wo": _torchao_int8,
    "fp8": _torchao_fp8,
}
