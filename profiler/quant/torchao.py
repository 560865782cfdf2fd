"""The formats of torchao: quantised linears, their bytes, random weights and dense copies."""

from importlib import import_module
from typing import Any, cast

import torch
from torch import nn

from profiler.device.device import compute_capability
from profiler.device.memory import storage_bytes
from profiler.errors import RequestError, first_line
from profiler.facts.step import StoredWeight
from profiler.packages import version_of
from profiler.quant.registry import ConversionCall, Quant, QuantOptions, format_of
from profiler.quant.storage import INT8_CODES, fill_random, rms, stored_as

# torchao's int4 kernels support these groups; the largest that divides every width needs the fewest scales.
_INT4_GROUPS = (128, 64, 32)
# _weight_int4pack_mm pads the inputs to whole tiles (torchao, int4_tile_packed_to_4d_tensor.py).
_TILE_INPUTS = 1024
_TILE_OUTPUTS = 8
_CODES = {
    "int8wo": INT8_CODES,
    "int4wo": torch.arange(-8, 8) + 0.5,
    "fp8": torch.arange(64, dtype=torch.uint8).view(torch.float8_e4m3fn),
}


def quantise(
    quant: Quant, module: Any, _dtype: torch.dtype, _options: QuantOptions, device: torch.device | None
) -> nn.Module:
    quantise_linears(module, _config(quant, module, device or torch.device("cpu")))
    return cast(nn.Module, module)


def config(quant: Quant, _dtype: torch.dtype, _options: QuantOptions, planned: Any, device: torch.device | None) -> Any:
    from transformers import TorchAoConfig

    return TorchAoConfig(_config(quant, planned, device or torch.device("cpu")))


def quantise_linears(module: Any, config: Any) -> None:
    """Run torchao's `quantize_` over the linears on meta but the head; int4, which it cannot, is made directly."""
    from torchao.quantization import quantize_

    head = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
    group_size = getattr(config, "group_size", None)

    def fits_config(layer: nn.Module, _name: str) -> bool:
        return (
            isinstance(layer, nn.Linear)
            and layer is not head
            and (group_size is None or layer.in_features % group_size == 0)
        )

    if group_size is not None:
        plan = _planned_tiles if type(config).__name__ == "Int4WeightOnlyConfig" else _planned_opaque
        for layer in module.modules():
            if fits_config(layer, ""):
                layer.weight = nn.Parameter(plan(layer.weight, group_size), requires_grad=False)
        return
    quantize_(module, config, filter_fn=fits_config)


def _config(quant: Quant, module: Any, device: torch.device) -> Any:
    """torchao's configuration of a format. Raises RequestError without a fitting group, or without torchao."""
    try:
        quantization = import_module("torchao.quantization")
        if quant == "int8wo":
            return quantization.Int8WeightOnlyConfig()
        if quant == "fp8":
            if device.type == "cuda" and compute_capability(device) >= (8, 9):
                return quantization.Float8DynamicActivationFloat8WeightConfig(granularity=quantization.PerRow())
            return quantization.Float8WeightOnlyConfig()
        group_size = int4_group_size(module)
        if device.type == "cuda":
            return quantization.Int4WeightOnlyConfig(group_size=group_size, int4_packing_format="tile_packed_to_4d")
        from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig

        return PrototypeInt4WeightOnlyConfig(group_size=group_size)
    except ImportError as error:
        raise RequestError(
            f"--quant {quant}: torchao {version_of('torchao')} cannot be imported with torch {torch.__version__}"
            f" ({first_line(error)}); install a newer torch, or use --quant int8 or nf4."
        ) from error


def int4_group_size(module: Any) -> int:
    """Return the largest group of inputs of torchao's int4 that divides every layer's. Raises RequestError for none."""
    head = module.get_output_embeddings()
    widths = {layer.in_features for layer in module.modules() if isinstance(layer, nn.Linear) and layer is not head}
    for size in _INT4_GROUPS:
        if widths and all(width % size == 0 for width in widths):
            return size
    raise RequestError(
        f"--quant int4wo quantises in groups of {', '.join(map(str, _INT4_GROUPS))} inputs, and none of them divides"
        " the inputs of every layer of this model; use --quant nf4 or int8wo."
    )


def _planned_opaque(weight: torch.Tensor, group_size: int) -> torch.Tensor:
    """torchao's int4 on a CPU: two weights per byte; a scale and a zero point per group, in the model's dtype."""
    from torchao.prototype.quantization.int4 import Int4OpaqueTensor

    outs, ins = weight.shape
    return Int4OpaqueTensor(
        torch.empty(outs, ins // 2, dtype=torch.uint8, device="meta"),
        torch.empty(ins // group_size, outs, 2, dtype=weight.dtype, device="meta"),
        [1, group_size],
        weight.shape,
    )


def _planned_tiles(weight: torch.Tensor, group_size: int) -> torch.Tensor:
    """torchao's int4 for tensor cores: inputs padded to a multiple of 1024, outputs to a multiple of 8."""
    from torchao.quantization.quantize_.workflows import Int4TilePackedTo4dTensor

    outs = -(-weight.shape[0] // _TILE_OUTPUTS) * _TILE_OUTPUTS
    ins = -(-weight.shape[1] // _TILE_INPUTS) * _TILE_INPUTS
    return Int4TilePackedTo4dTensor(
        torch.empty(outs // _TILE_OUTPUTS, ins // 128, 32, 4, dtype=torch.int32, device="meta"),
        torch.empty(ins // group_size, outs, 2, dtype=torch.bfloat16, device="meta"),
        [1, group_size],
        weight.shape,
    )


def stored(module: Any) -> StoredWeight:
    """Return how a weight of torchao is stored; int8, and fp8 with plain inputs, become dense in every call (0.18)."""
    weight = module.weight
    known = format_of(weight)
    name = known.name if known else type(weight).__name__
    if getattr(weight, "act_quant_kwargs", None) is not None:  # its inputs are quantised as well
        return stored_as(name, module, storage_bytes([weight]), weight.qdata.dtype)
    return stored_as(
        name,
        module,
        storage_bytes([weight]),
        weight.dtype,
        dense_from_rows=1 if name in ("int8wo", "fp8") else None,
    )


def random_weight(owner: Any, device: torch.device, std: float) -> nn.Parameter:
    planned = owner.weight
    names, attributes = planned.__tensor_flatten__()
    tensors = {name: torch.empty_like(getattr(planned, name), device=device) for name in names}
    data = fill_random(tensors["qdata"])
    if data.dtype == torch.float8_e4m3fn:
        # Without the upper half of the exponents, which includes NaN.
        data.view(torch.uint8).bitwise_and_(0b1011_1111)
    known = format_of(planned)
    assert known is not None, "a format of `--quant`"
    scale = std / rms(_CODES[known.name])
    if "zero_point" in tensors:
        tensors["zero_point"].zero_()
    if "scale" in tensors:
        tensors["scale"].fill_(scale)
    else:  # a pair per group: the value is (code - 8) * scale + zero
        tensors["scale_and_zero"][..., 0] = scale
        tensors["scale_and_zero"][..., 1] = scale / 2
    return nn.Parameter(type(planned).__tensor_unflatten__(tensors, attributes, None, None), requires_grad=False)


def dense_copy(quant: Quant, module: Any, weight: StoredWeight) -> ConversionCall | None:
    if quant == "int8wo":
        return lambda: module.weight.qdata.t().to(weight.compute_dtype)
    return module.weight.dequantize if quant == "fp8" else None  # int4wo's kernel unpacks
