"""Quantise a model on request to the formats of bitsandbytes and torchao, as transformers does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, cast

import torch
from torch import nn

from profiler.device.device import compute_capability
from profiler.errors import ModelError, RequestError, RoofscopeError, describe_error, first_line
from profiler.packages import has, need, version_of
from profiler.quant.bitsandbytes import import_bitsandbytes
from profiler.quant.registry import FORMATS, Quant

# torchao's int4 kernels support these groups; the largest that divides every width needs the fewest scales.
_INT4_GROUPS = (128, 64, 32)
# _weight_int4pack_mm pads the inputs to whole tiles (torchao, int4_tile_packed_to_4d_tensor.py).
_TILE_INPUTS = 1024
_TILE_OUTPUTS = 8
_TILE_WORDS = (128, 32, 4)
# The fused kernel needs blocks of 64 inputs in tiles of 32 outputs (bitsandbytes, `_convert_weight_packed_for_cpu`).
_FUSED_INPUTS = 64
_FUSED_OUTPUTS = 32
_FP8_CAPABILITY = (8, 9)
_INT4_CAPABILITY = (8, 0)


@dataclass(frozen=True)
class QuantOptions:
    """How a 4-bit format of bitsandbytes is stored and computed; other formats have no such options."""

    double: bool = False
    """Whether the scales are quantised as well."""
    compute_dtype: torch.dtype | None = None
    """The dtype of matrix products; None: the model's dtype."""


PLAIN = QuantOptions()


def check_quant(quant: Quant, options: QuantOptions, dtype: torch.dtype, device: torch.device) -> None:
    """Check that this machine and the format support the options and the dtype. Raises RequestError with advice."""
    if options != PLAIN and not FORMATS[quant].has_options:
        raise RequestError(
            f"--double-quant and --compute-dtype apply to bitsandbytes' 4-bit formats, not to {quant!r};"
            f" use --quant {' or '.join(item.name for item in FORMATS.values() if item.has_options)}."
        )
    need_library(quant)
    if quant == "int4wo" and device.type == "cuda":
        if compute_capability(device) < _INT4_CAPABILITY:
            raise RequestError("--quant int4wo: torchao's int4 kernel needs compute capability 8.0; use --quant nf4.")
        if dtype != torch.bfloat16:
            raise RequestError("--quant int4wo: torchao's int4 kernel computes in bfloat16; use --dtype bfloat16.")


def need_library(quant: Quant) -> None:
    """Check that the library of this format is installed. Raises RequestError if it is missing."""
    if library := FORMATS[quant].library:
        need(library, f"--quant {quant}")


def can_quantise(quant: Quant) -> bool:
    """Whether the library that quantises to this format is installed, or none is needed."""
    library = FORMATS[quant].library
    return not library or has(library)


def quantise_modules(
    module: Any, quant: Quant, dtype: torch.dtype, options: QuantOptions = PLAIN, device: torch.device | None = None
) -> nn.Module:
    """Quantise the linear layers of a model on meta, as `from_pretrained` would; the head stays dense.

    `device`, where the model will run, decides the layout of 4-bit weights and whether fp8 inputs are quantised.
    Without it, bitsandbytes' weights have the layout after quantisation, and torchao's the layout on a CPU.
    Raises RequestError if the format's library is missing or no layer fits the format. Raises ModelError if a layer
    does not fit this CPU's kernel or the library fails.
    """
    quantise = FORMATS[quant].quantise
    if quantise is None:
        return cast(nn.Module, module)
    need_library(quant)
    try:
        return cast(nn.Module, quantise(module, dtype, options, device))
    except (RoofscopeError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # the library may raise anything
        raise ModelError(
            f"--quant {quant}: {FORMATS[quant].library} cannot quantise this model ({describe_error(error)});"
            " use another format, or none."
        ) from error


def quantise_with_torchao(
    quant: Quant, module: Any, _dtype: torch.dtype, _options: QuantOptions, device: torch.device | None
) -> nn.Module:
    """Quantise the linears of a model on meta with torchao: the `quantise` of its formats."""
    quantise_linears(module, _torchao_config(quant, module, device or torch.device("cpu")))
    return cast(nn.Module, module)


def quantise_with_bitsandbytes(
    quant: Quant, module: Any, dtype: torch.dtype, options: QuantOptions, device: torch.device | None
) -> nn.Module:
    """Quantise the linears of a model on meta with bitsandbytes: the `quantise` of its formats."""
    try:
        import_bitsandbytes()
    except Exception as error:  # a broken installation may raise anything
        raise RequestError(
            f"--quant {quant}: bitsandbytes cannot be imported ({first_line(error)}); see `roofscope doctor`."
        ) from error
    from transformers.quantizers import AutoHfQuantizer

    quantizer = AutoHfQuantizer.from_config(quantization_config(quant, dtype, options), pre_quantized=False)
    quantizer.preprocess_model(model=module, device_map=None, keep_in_fp32_modules=None)
    settle_four_bit(module, device, f"--quant {quant}", "use --quant int8 or int8wo")
    return cast(nn.Module, module)


def settle_four_bit(module: nn.Module, device: torch.device | None, format_name: str, instead: str) -> None:
    """Set the device on which bitsandbytes' 4-bit layers of a model on meta will run; it decides their layout.

    A layer only checks whether this machine's CPU has the fused kernel (AVX512-BF16) and applies the answer to any
    device (bitsandbytes 0.50: nn/modules.py, `Linear4bit`). Its first step converts the weights to that layout.
    Raises ModelError for a layer whose shape the kernel does not support, since that step would fail. The message
    ends with `instead`, the advice.
    """
    for name, layer in module.named_modules():
        if not hasattr(layer, "support_avx512bf16_for_cpu"):
            continue
        if device is not None:
            layer.planned_device = device
        layer.support_avx512bf16_for_cpu &= device is not None and device.type == "cpu"
        if not layer.support_avx512bf16_for_cpu:
            continue
        for side, features, tile in (
            ("inputs", layer.in_features, _FUSED_INPUTS),
            ("outputs", layer.out_features, _FUSED_OUTPUTS),
        ):
            if features % tile:
                raise ModelError(
                    f"{format_name}: bitsandbytes' fused kernel on this CPU needs {side} in multiples of {tile},"
                    f" and {name} has {features}; {instead}."
                )


def quantization_config(
    quant: Quant,
    dtype: torch.dtype,
    options: QuantOptions = PLAIN,
    *,
    planned: Any = None,
    device: torch.device | None = None,
) -> Any:
    """The `quantization_config` of `from_pretrained`: bitsandbytes' blocks of 64, LLM.int8(), or torchao's config.

    `planned` is the model on meta, whose widths decide the groups of int4wo. Raises RequestError for a format to
    which transformers cannot quantise while it loads.
    """
    config = FORMATS[quant].config
    if config is None:
        raise RequestError(f"--quant {quant}: transformers cannot quantise a checkpoint to it while loading.")
    return config(dtype, options, planned, device)


def torchao_config(
    quant: Quant, _dtype: torch.dtype, _options: QuantOptions, planned: Any, device: torch.device | None
) -> Any:
    """transformers' TorchAoConfig for a format of torchao."""
    from transformers import TorchAoConfig

    return TorchAoConfig(_torchao_config(quant, planned, device or torch.device("cpu")))


def bitsandbytes_config(
    quant: Quant, dtype: torch.dtype, options: QuantOptions, _planned: Any, _device: torch.device | None
) -> Any:
    """transformers' BitsAndBytesConfig for a format of bitsandbytes."""
    from transformers import BitsAndBytesConfig

    if quant == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quant,
        bnb_4bit_compute_dtype=options.compute_dtype or dtype,
        bnb_4bit_use_double_quant=options.double,
    )


def quantise_linears(module: Any, config: Any) -> None:
    """Run torchao's `quantize_` over the linears of a model on meta, except the head.

    int4 cannot be quantised on meta, so its tensors are made directly.
    """
    from torchao.quantization import quantize_

    head = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
    group_size = getattr(config, "group_size", None)

    def fits_config(layer: nn.Module, _name: str) -> bool:
        is_inner_linear = isinstance(layer, nn.Linear) and layer is not head
        return is_inner_linear and (group_size is None or layer.in_features % group_size == 0)

    if group_size is not None:
        plan = _INT4_PLANS[type(config).__name__]
        for layer in module.modules():
            if fits_config(layer, ""):
                layer.weight = nn.Parameter(plan(layer.weight, group_size), requires_grad=False)
        return
    quantize_(module, config, filter_fn=fits_config)


def _torchao_config(quant: Quant, module: Any, device: torch.device) -> Any:
    """torchao's configuration of a format: int8 and int4 weight-only, fp8 with quantised inputs on a device with fp8.

    Raises RequestError if no group size of int4 fits the model, or this torchao cannot be imported with this torch.
    """
    try:
        quantization = import_module("torchao.quantization")
        if quant == "int8wo":
            return quantization.Int8WeightOnlyConfig()
        if quant == "fp8":
            if device.type == "cuda" and compute_capability(device) >= _FP8_CAPABILITY:
                return quantization.Float8DynamicActivationFloat8WeightConfig(granularity=quantization.PerRow())
            return quantization.Float8WeightOnlyConfig()
        group_size = _int4_group_size(module)
        if device.type == "cuda":
            return quantization.Int4WeightOnlyConfig(group_size=group_size, int4_packing_format="tile_packed_to_4d")
        from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig

        return PrototypeInt4WeightOnlyConfig(group_size=group_size)
    except ImportError as error:
        raise RequestError(
            f"--quant {quant}: torchao {version_of('torchao')} cannot be imported with torch {torch.__version__}"
            f" ({first_line(error)}); install a newer torch, or use --quant int8 or nf4."
        ) from error


def _int4_group_size(module: Any) -> int:
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
    tile_inputs, *words = _TILE_WORDS
    return Int4TilePackedTo4dTensor(
        torch.empty(outs // _TILE_OUTPUTS, ins // tile_inputs, *words, dtype=torch.int32, device="meta"),
        torch.empty(ins // group_size, outs, 2, dtype=torch.bfloat16, device="meta"),
        [1, group_size],
        weight.shape,
    )


_INT4_PLANS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "PrototypeInt4WeightOnlyConfig": _planned_opaque,
    "Int4WeightOnlyConfig": _planned_tiles,
}
