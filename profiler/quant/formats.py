"""Quantising on request: bitsandbytes' and torchao's formats, as transformers loads them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from profiler.device.device import compute_capability
from profiler.errors import ModelError, RequestError, RoofscopeError, describe_error, first_line
from profiler.packages import has, need, version_of
from profiler.quant.bitsandbytes import import_bitsandbytes
from profiler.quant.registry import FORMATS, Quant

# torchao's int4 kernels know these groups; the largest that divides every width keeps the fewest scales.
_INT4_GROUPS = (128, 64, 32)
# _weight_int4pack_mm pads the inputs to whole tiles (torchao, int4_tile_packed_to_4d_tensor.py).
_TILE_INPUTS = 1024
_TILE_OUTPUTS = 8
_TILE_WORDS = (128, 32, 4)
# The fused kernel takes blocks of 64 inputs in tiles of 32 outputs (bitsandbytes, `_convert_weight_packed_for_cpu`).
_FUSED_INPUTS = 64
_FUSED_OUTPUTS = 32
_FP8_CAPABILITY = (8, 9)
_INT4_CAPABILITY = (8, 0)


@dataclass(frozen=True)
class QuantOptions:
    """How a 4-bit format of bitsandbytes is kept and computed; other formats know neither."""

    double: bool = False
    """Whether the scales are quantised as well."""
    compute_dtype: torch.dtype | None = None
    """The dtype that products run in; None: the model's own."""


PLAIN = QuantOptions()


def check_quant(quant: Quant, options: QuantOptions, dtype: torch.dtype, device: torch.device) -> None:
    """Raises RequestError for a combination that this machine or the format does not support, with what would work."""
    if options != PLAIN and not FORMATS[quant].has_options:
        raise RequestError(
            f"--double-quant and --compute-dtype belong to bitsandbytes' 4-bit formats, not to {quant!r};"
            f" use --quant {' or '.join(item.name for item in FORMATS.values() if item.has_options)}."
        )
    need_library(quant)
    if quant == "int4wo" and device.type == "cuda":
        if compute_capability(device) < _INT4_CAPABILITY:
            raise RequestError("--quant int4wo: torchao's int4 kernel needs compute capability 8.0; use --quant nf4.")
        if dtype != torch.bfloat16:
            raise RequestError("--quant int4wo: torchao's int4 kernel computes in bfloat16; use --dtype bfloat16.")


def need_library(quant: Quant) -> None:
    """Raises RequestError where the library that quantises to this format is missing."""
    if library := FORMATS[quant].library:
        need(library, f"--quant {quant}")


def can_quantise(quant: Quant) -> bool:
    """Whether the library that quantises to this format is there."""
    library = FORMATS[quant].library
    return not library or has(library)


def quantise_modules(
    module: Any, quant: Quant, dtype: torch.dtype, options: QuantOptions = PLAIN, device: torch.device | None = None
) -> nn.Module:
    """Swap the weights of the linear layers of a model on meta, as `from_pretrained` would (the head stays as it is).

    `device` is where the model will run, which decides the layout of 4-bit weights and whether fp8 has units. None:
    nowhere in particular, so that bitsandbytes' weights lie as it quantises them, and torchao's as on a CPU.
    Raises RequestError where the format's library is missing or no layer fits the format, ModelError where one does not
    fit this CPU's kernel.
    """
    quantise = FORMATS[quant].quantise
    if quantise is None:
        return cast(nn.Module, module)
    need_library(quant)
    try:
        return cast(nn.Module, quantise(module, dtype, options, device))
    except (RoofscopeError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a library raises what it likes
        raise ModelError(
            f"--quant {quant}: {FORMATS[quant].library} does not quantise this model ({describe_error(error)});"
            " use another format, or none."
        ) from error


def quantise_with_torchao(
    quant: Quant, module: Any, _dtype: torch.dtype, _options: QuantOptions, device: torch.device | None
) -> nn.Module:
    """`quantise` of torchao's formats."""
    quantise_linears(module, _torchao_config(quant, module, device or torch.device("cpu")))
    return cast(nn.Module, module)


def quantise_with_bitsandbytes(
    quant: Quant, module: Any, dtype: torch.dtype, options: QuantOptions, device: torch.device | None
) -> nn.Module:
    """`quantise` of bitsandbytes' formats."""
    try:
        import_bitsandbytes()
    except Exception as error:  # a broken library raises what it likes
        raise RequestError(
            f"--quant {quant}: bitsandbytes does not import ({first_line(error)}); see `roofscope doctor`."
        ) from error
    from transformers.quantizers import AutoHfQuantizer

    quantizer = AutoHfQuantizer.from_config(quantization_config(quant, dtype, options), pre_quantized=False)
    quantizer.preprocess_model(model=module, device_map=None, keep_in_fp32_modules=None)
    settle_four_bit(module, device, f"--quant {quant}", "use --quant int8 or int8wo")
    return cast(nn.Module, module)


def settle_four_bit(module: nn.Module, device: torch.device | None, format_name: str, instead: str) -> None:
    """Tell bitsandbytes' 4-bit layers of a model on meta where they will run, which decides how they lie at a step.

    A layer asks this machine's CPU alone whether it has the fused kernel (AVX512-BF16), whose layout it takes on in
    its first step, and takes the answer for whatever device it is on (bitsandbytes 0.50: nn/modules.py, `Linear4bit`).
    Raises ModelError, which says what to do `instead`, for a layer whose shape that kernel does not take: it would
    fail in that step.
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
                    f"{format_name}: bitsandbytes' fused kernel on this CPU takes layers whose {side} are multiples of"
                    f" {tile}, and {name} has {features}; {instead}."
                )


def quantization_config(
    quant: Quant,
    dtype: torch.dtype,
    options: QuantOptions = PLAIN,
    *,
    planned: Any = None,
    device: torch.device | None = None,
) -> Any:
    """What `from_pretrained` is told: bitsandbytes' blocks of 64, LLM.int8(), or torchao's own configuration.

    `planned` is the model on meta, whose widths decide the groups of int4wo.
    """
    config = FORMATS[quant].config
    if config is None:
        raise RequestError(f"--quant {quant}: transformers does not quantise a checkpoint to it as it loads.")
    return config(dtype, options, planned, device)


def torchao_config(
    quant: Quant, _dtype: torch.dtype, _options: QuantOptions, planned: Any, device: torch.device | None
) -> Any:
    """`config` of torchao's formats."""
    from transformers import TorchAoConfig

    return TorchAoConfig(_torchao_config(quant, planned, device or torch.device("cpu")))


def bitsandbytes_config(
    quant: Quant, dtype: torch.dtype, options: QuantOptions, _planned: Any, _device: torch.device | None
) -> Any:
    """`config` of bitsandbytes' formats."""
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
    """torchao's own `quantize_` over the linears of a model on meta but for the head; int4 does not run there."""
    from torchao.quantization import quantize_

    head = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
    group_size = getattr(config, "group_size", None)

    def wanted(layer: nn.Module, _name: str) -> bool:
        fits = isinstance(layer, nn.Linear) and layer is not head
        return fits and (group_size is None or layer.in_features % group_size == 0)

    if group_size is not None:
        plan = _INT4_PLANS[type(config).__name__]
        for layer in module.modules():
            if wanted(layer, ""):
                layer.weight = nn.Parameter(plan(layer.weight, group_size), requires_grad=False)
        return
    quantize_(module, config, filter_fn=wanted)


def _torchao_config(quant: Quant, module: Any, device: torch.device) -> Any:
    """Weight-only int8 and int4, and fp8: with quantised inputs where the device multiplies fp8, else weight-only.

    Raises RequestError where no group of int4 fits the model, or this torchao does not import with this torch.
    """
    try:
        if quant == "int8wo":
            return _int8()
        if quant == "fp8":
            return _fp8(device.type == "cuda" and compute_capability(device) >= _FP8_CAPABILITY)
        group_size = _int4_group_size(module)
        return _int4_tiles(group_size) if device.type == "cuda" else _int4_opaque(group_size)
    except ImportError as error:
        raise RequestError(
            f"--quant {quant}: torchao {version_of('torchao')} does not import with torch {torch.__version__}"
            f" ({first_line(error)}); install a newer torch, or use --quant int8 or nf4."
        ) from error


def _int8() -> Any:
    from torchao.quantization import Int8WeightOnlyConfig

    return Int8WeightOnlyConfig()


def _fp8(quantised_inputs: bool) -> Any:
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, Float8WeightOnlyConfig, PerRow

    if quantised_inputs:
        return Float8DynamicActivationFloat8WeightConfig(granularity=PerRow())
    return Float8WeightOnlyConfig()


def _int4_opaque(group_size: int) -> Any:
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig

    return PrototypeInt4WeightOnlyConfig(group_size=group_size)


def _int4_tiles(group_size: int) -> Any:
    from torchao.quantization import Int4WeightOnlyConfig

    return Int4WeightOnlyConfig(group_size=group_size, int4_packing_format="tile_packed_to_4d")


def _int4_group_size(module: Any) -> int:
    head = module.get_output_embeddings()
    widths = {layer.in_features for layer in module.modules() if isinstance(layer, nn.Linear) and layer is not head}
    for size in _INT4_GROUPS:
        if widths and all(width % size == 0 for width in widths):
            return size
    raise RequestError(
        f"--quant int4wo quantises in groups of {', '.join(map(str, _INT4_GROUPS))} inputs, and none of them divides"
        " every layer of this model; use --quant nf4 or int8wo."
    )


def _planned_opaque(weight: torch.Tensor, group_size: int) -> torch.Tensor:
    """torchao's layout on a CPU: two weights a byte, and a scale and a zero point a group in the model's dtype."""
    from torchao.prototype.quantization.int4 import Int4OpaqueTensor

    outs, ins = weight.shape
    return Int4OpaqueTensor(
        torch.empty(outs, ins // 2, dtype=torch.uint8, device="meta"),
        torch.empty(ins // group_size, outs, 2, dtype=weight.dtype, device="meta"),
        [1, group_size],
        weight.shape,
    )


def _planned_tiles(weight: torch.Tensor, group_size: int) -> torch.Tensor:
    """torchao's layout for tensor cores: inputs padded to a multiple of 1024, outputs to one of 8."""
    from torchao.quantization.quantize_.workflows import Int4TilePackedTo4dTensor

    outs = -(-weight.shape[0] // _TILE_OUTPUTS) * _TILE_OUTPUTS
    ins = -(-weight.shape[1] // _TILE_INPUTS) * _TILE_INPUTS
    inputs_a_tile, *words = _TILE_WORDS
    return Int4TilePackedTo4dTensor(
        torch.empty(outs // _TILE_OUTPUTS, ins // inputs_a_tile, *words, dtype=torch.int32, device="meta"),
        torch.empty(ins // group_size, outs, 2, dtype=torch.bfloat16, device="meta"),
        [1, group_size],
        weight.shape,
    )


_INT4_PLANS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "PrototypeInt4WeightOnlyConfig": _planned_opaque,
    "Int4WeightOnlyConfig": _planned_tiles,
}
