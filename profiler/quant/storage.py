"""How weights are stored: bytes and formats of the tensors that are loaded."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import nn

from profiler.device.memory import storage_bytes
from profiler.facts.step import StoredWeight
from profiler.quant.bitsandbytes import import_bitsandbytes

# bitsandbytes/functional.py (0.50): blocks of 64 weights by default; double quantisation packs absmax into uint8
# blocks of 256 with a 256-entry float32 code book and one float32 offset.
_BNB_BLOCK = 64
_BNB_NESTED_BLOCK = 256
_BNB_FUSED_FLOOR = 4
_FLOAT32_BYTES = 4

_BFLOAT16_BYTES = 2

_CODE_ENTRIES_4BIT = 16
# Names under which packed formats keep their integers (GPTQ and AWQ, compressed-tensors).
_PACKED = ("qweight", "weight_packed")
_CODE_ENTRIES_8BIT = 256
_MX_BLOCK = 32


def is_linear(module: nn.Module) -> bool:
    """Whether `module` multiplies its input by one weight matrix: nn.Linear, its quantised kin, GPT-2's Conv1D."""
    sized = isinstance(getattr(module, "in_features", None), int) and isinstance(
        getattr(module, "out_features", None), int
    )
    held = any(getattr(module, name, None) is not None for name in ("weight", *_PACKED))
    return type(module).__name__ == "Conv1D" or (sized and held)


def own_params(module: Any) -> dict[int, int]:
    """Parameters that a module itself holds, by the identity of their tensor; a packed matrix as what it stands for.

    GPTQ and AWQ keep their integers in buffers, beside scales and zero points that are no parameters of the model;
    a byte of an MXFP4 block is two weights, and scales are none, its own and FP8's.
    """
    if (matrices := triton_mxfp4_matrices(module)) is not None:
        biases = {id(param): param.numel() for name, param in module.named_parameters() if name.endswith("_bias")}
        return {id(module): module.num_experts * sum(ins * outs for ins, outs in matrices), **biases}
    packed = next((held for name in _PACKED if (held := getattr(module, name, None)) is not None), None)
    dense = {id(param): param.numel() for param in module.parameters(recurse=False)}
    if packed is not None:
        bias = getattr(module, "bias", None)
        return {id(packed): module.in_features * module.out_features, **({} if bias is None else {id(bias): len(bias)})}
    weight = getattr(module, "weight", None)
    for name, param in module.named_parameters(recurse=False):
        if name.endswith("_blocks"):
            dense[id(param)] = 2 * param.numel()
        elif is_scale(name):
            dense[id(param)] = 0
    if type(weight).__name__ == "Params4bit" or type(module).__name__ == "GgufLinear":
        dense[id(weight)] = module.in_features * module.out_features
    elif is_gguf_table(module):
        dense[id(weight)] = module.num_embeddings * module.embedding_dim
    return dense


def is_gguf_table(module: nn.Module) -> bool:
    """An embedding whose rows stay in GGUF blocks, of which each lookup unpacks its own."""
    return type(module).__name__ == "GgufEmbedding"


def triton_mxfp4_matrices(module: Any) -> tuple[tuple[int, int], ...] | None:
    """(in_features, out_features) of an expert's matrices, in MXFP4 that transformers handed to triton; else None.

    Its blocks then lie in tensors of triton's own, which are no parameters (transformers 5.23, integrations/mxfp4.py).
    """
    if type(module).__name__ != "Mxfp4GptOssExperts":
        return None
    return (module.hidden_size, 2 * module.intermediate_size), (module.intermediate_size, module.hidden_size)


def mxfp4_bytes(weights: int) -> int:
    """4 bits a weight and a byte of scale for 32 of them (OCP Microscaling Formats v1.0, section 5.1)."""
    return weights // 2 + weights // _MX_BLOCK


def is_scale(name: str) -> bool:
    """Whether a parameter of this name only scales a weight: of MXFP4 (`_scales`) or FP8 (`weight_scale_inv`)."""
    return name.endswith(("_scales", "_scale_inv", "weight_scale", "activation_scale"))


def stored(module: nn.Module) -> StoredWeight:
    """How the weight of a linear-like module is stored. Raises ValueError for a format that is not known."""
    for matches, describe in _FORMATS:
        if matches(module):
            return describe(module)
    raise ValueError(f"{type(module).__name__} holds its weight in a format that is not known")


def quant_state_tensors(state: Any) -> list[torch.Tensor]:
    """The tensors of a bitsandbytes 4-bit quantisation state: absmax, code book, and the nested level's."""
    if state is None:
        return []
    tensors = [state.absmax, state.code, getattr(state, "offset", None)]
    nested = getattr(state, "state2", None)
    if nested is not None:
        tensors += [nested.absmax, nested.code]
    return [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]


def model_storage_bytes(model: Any) -> int:
    """Bytes of all storages that a loaded model holds: parameters, buffers and quantisation state, shared ones once."""
    tensors = [*model.parameters(), *model.buffers()]
    for param in model.parameters():
        tensors += quant_state_tensors(getattr(param, "quant_state", None))
        tensors.append(getattr(param, "SCB", None))
    for module in model.modules():
        state = getattr(module, "state", None)
        if state is not None and hasattr(state, "SCB"):
            tensors += [state.CB, state.SCB]
    return storage_bytes(tensors)


def _dense(module: Any) -> StoredWeight:
    weight = module.weight
    transposed = type(module).__name__ == "Conv1D"
    outs, ins = reversed(weight.shape) if transposed else weight.shape
    return StoredWeight(
        format=str(weight.dtype).removeprefix("torch."),
        in_features=ins,
        out_features=outs,
        weight_bytes=weight.numel() * weight.element_size(),
        bias_bytes=_bias_bytes(module),
        compute_dtype=weight.dtype,
        transposed=transposed,
    )


def _bnb_4bit(module: Any) -> StoredWeight:
    """bitsandbytes' 4 bits, as they lie at a step: a CPU with AVX512-BF16 repacks them in its first.

    The fused kernel computes in bfloat16 whatever the layer is told (backends/cpu/ops.py, `gemv_4bit`). A module on
    meta says where it will run (`planned_device`), and the library's own attribute whether it is repacked there.
    """
    weight = module.weight
    state = getattr(weight, "quant_state", None)
    if state is not None and weight.device.type != "meta":
        device, fused = weight.device, getattr(state, "packing_format_for_cpu", False)
        weight_bytes = storage_bytes([weight.data, *quant_state_tensors(state)])
        own_dtype = state.dtype
    else:
        device = getattr(module, "planned_device", weight.device)
        fused = getattr(module, "support_avx512bf16_for_cpu", False)
        elements, nested = module.in_features * module.out_features, bool(weight.compress_statistics)
        weight_bytes = (_repacked_4bit_bytes if fused else _quantised_4bit_bytes)(elements, nested)
        own_dtype = torch.float32
    compute_dtype = torch.bfloat16 if fused else module.compute_dtype or own_dtype
    return StoredWeight(
        format=weight.quant_type,
        in_features=module.in_features,
        out_features=module.out_features,
        weight_bytes=weight_bytes,
        bias_bytes=_bias_bytes(module),
        compute_dtype=compute_dtype,
        dense_from_rows=None
        if fused
        else four_bit_dense_from_rows(device, compute_dtype, module.in_features, module.out_features),
    )


def _quantised_4bit_bytes(elements: int, nested: bool) -> int:
    """4 bits a weight + absmax a block of 64; nested absmax is uint8 with a second level a block of 256."""
    blocks = -(-elements // _BNB_BLOCK)
    packed = -(-elements // 2) + _CODE_ENTRIES_4BIT * _FLOAT32_BYTES
    if not nested:
        return packed + blocks * _FLOAT32_BYTES
    second = -(-blocks // _BNB_NESTED_BLOCK) * _FLOAT32_BYTES
    return packed + blocks + second + _CODE_ENTRIES_8BIT * _FLOAT32_BYTES + _FLOAT32_BYTES


def _repacked_4bit_bytes(elements: int, nested: bool) -> int:
    """4 bits a weight + bfloat16 absmax a block of 64, no longer nested, of which only the offset stays behind.

    bitsandbytes/functional.py (0.50), `_convert_weight_packed_for_cpu`.
    """
    packed = elements // 2 + _CODE_ENTRIES_4BIT * _FLOAT32_BYTES
    return packed + elements // _BNB_BLOCK * _BFLOAT16_BYTES + (_FLOAT32_BYTES if nested else 0)


@cache
def four_bit_dense_from_rows(device: torch.device, dtype: torch.dtype, ins: int, outs: int) -> int | None:
    """The number of rows from which bitsandbytes dequantises first; None: not known, since it does not import here.

    CPU without AVX512-BF16: always (backends/default/ops.py, `_gemm_4bit_default_impl`). CUDA: 0.49 and older fuse
    one row only (autograd/_functions.py, `A.numel() == A.shape[-1]`); from 0.50 on the library's own table by
    architecture and shape decides (backends/cuda/ops.py), which is asked. Without a card, as on meta, only its floor
    is known: up to 4 rows are always fused (`_GEMM_4BIT_CUSTOM_FLOOR_M`).
    """
    if device.type == "cpu":
        return 1
    try:
        import_bitsandbytes()
    except Exception:  # a missing package, or whatever a broken installation raises
        return None
    version: str = import_module("bitsandbytes").__version__
    if tuple(int(part) for part in version.split(".")[:2]) < (0, 50):
        return 2
    if ins % _BNB_BLOCK:
        return 1
    if device.type != "cuda":
        return _BNB_FUSED_FLOOR + 1
    try:
        from bitsandbytes.backends.cuda import ops

        index = device.index or 0
        return first_dense_row(
            lambda rows: ops._gemm_4bit_use_custom_fn(index, dtype, rows, outs, ins), ops._gemm_4bit_custom_max_m
        )
    except (ImportError, AttributeError, RuntimeError):  # another version, or a card that does not answer
        return _BNB_FUSED_FLOOR + 1


def first_dense_row(fused: Callable[[int], bool], most: int) -> int:
    """The fewest rows for which a choice of kernel is not the fused one; beyond `most` none is."""
    return next((rows for rows in range(1, most + 1) if not fused(rows)), most + 1)


def _bnb_int8(module: Any) -> StoredWeight:
    weight = module.weight
    # The row scales (SCB, float32 a row) move from the parameter to the module's state at the first forward.
    scales = getattr(weight, "SCB", None)
    scales = getattr(module.state, "SCB", None) if scales is None else scales
    loaded = weight.device.type != "meta" and scales is not None
    return StoredWeight(
        format="int8",
        in_features=module.in_features,
        out_features=module.out_features,
        weight_bytes=storage_bytes([_int8_data(module), scales])
        if loaded
        else module.in_features * module.out_features + module.out_features * _FLOAT32_BYTES,
        bias_bytes=_bias_bytes(module),
        compute_dtype=torch.int8,
    )


def _int8_data(module: Any) -> torch.Tensor:
    held: torch.Tensor | None = getattr(module.state, "CB", None)
    return module.weight.data if held is None else held


def _packed(module: Any) -> StoredWeight:
    """GPTQ, AWQ, compressed-tensors: packed integers beside their scales, zero points and group indices."""
    tensors = dict([*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)])
    tensors.pop("bias", None)
    floats = [tensor.dtype for tensor in tensors.values() if tensor.is_floating_point() and tensor.itemsize > 1]
    return StoredWeight(
        format=_method_name(module),
        in_features=module.in_features,
        out_features=module.out_features,
        weight_bytes=storage_bytes(tensors.values()),
        bias_bytes=_bias_bytes(module),
        compute_dtype=floats[0] if floats else torch.float16,
    )


def _gguf(module: Any) -> StoredWeight:
    """GGUF blocks that transformers kept (5.23, integrations/gguf/utils.py): the kernel computes in float32.

    It multiplies up to 8 rows with the blocks as they are, and beyond that a dense copy, a part at a time.
    """
    return StoredWeight(
        format="gguf",
        in_features=module.in_features,
        out_features=module.out_features,
        weight_bytes=storage_bytes([module.weight]),
        bias_bytes=_bias_bytes(module),
        compute_dtype=torch.float32,
        dense_from_rows=_GGUF_FUSED_ROWS + 1,
    )


_GGUF_FUSED_ROWS = 8


def _scaled_float8(module: Any) -> StoredWeight:
    """FP8 with a scale a tensor, a row or a block (DeepSeek-V3 stores `weight_scale_inv` for blocks of 128 x 128)."""
    scales = [getattr(module, name, None) for name in ("weight_scale_inv", "weight_scale")]
    outs, ins = module.weight.shape
    return StoredWeight(
        format="float8",
        in_features=ins,
        out_features=outs,
        weight_bytes=storage_bytes([module.weight, *scales]),
        bias_bytes=_bias_bytes(module),
        compute_dtype=module.weight.dtype,
    )


def _torchao(module: Any) -> StoredWeight:
    """torchao: a tensor subclass that names its inner tensors (packed data, scales, zero points).

    Its int8 and its fp8 without quantised inputs are turned into a dense matrix at every call (torchao 0.18:
    int8_tensor.py casts, float8_tensor.py dequantises); int4 is unpacked inside its kernel.
    """
    weight = module.weight
    name = type(weight).__name__
    quantised_inputs = getattr(weight, "act_quant_kwargs", None) is not None
    return StoredWeight(
        format=_TORCHAO_FORMATS.get(name, name),
        in_features=module.in_features,
        out_features=module.out_features,
        weight_bytes=storage_bytes([weight]),
        bias_bytes=_bias_bytes(module),
        compute_dtype=weight.qdata.dtype if quantised_inputs else weight.dtype,
        dense_from_rows=1 if name in _CAST_AT_EACH_CALL and not quantised_inputs else None,
    )


_CAST_AT_EACH_CALL = ("Int8Tensor", "Float8Tensor")
_TORCHAO_FORMATS = {
    "Int8Tensor": "int8wo",
    "Float8Tensor": "fp8",
    "Int4OpaqueTensor": "int4wo",
    "Int4TilePackedTo4dTensor": "int4wo",
}


def _method_name(module: Any) -> str:
    name = type(module).__name__.lower()
    return next((method for method in ("gptq", "awq", "marlin", "exllama") if method in name), "packed")


def _bias_bytes(module: Any) -> int:
    bias = getattr(module, "bias", None)
    return 0 if bias is None else bias.numel() * bias.element_size()


def _has_packed(module: Any) -> bool:
    return any(getattr(module, name, None) is not None for name in _PACKED)


def _is_float8(module: Any) -> bool:
    return str(module.weight.dtype).startswith("torch.float8")


def _weight_class(name: str) -> Callable[[Any], bool]:
    return lambda module: type(getattr(module, "weight", None)).__name__ == name


# Looked up from the top; a new format is a test and a function here.
_FORMATS: tuple[tuple[Callable[[Any], bool], Callable[[Any], StoredWeight]], ...] = (
    (_weight_class("Params4bit"), _bnb_4bit),
    (_weight_class("Int8Params"), _bnb_int8),
    (_has_packed, _packed),
    (lambda module: type(module).__name__ == "GgufLinear", _gguf),
    (lambda module: hasattr(module.weight, "__tensor_flatten__"), _torchao),
    (_is_float8, _scaled_float8),
    (lambda module: module.weight.is_floating_point() and module.weight.dim() == 2, _dense),
)
