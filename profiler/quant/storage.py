"""How the weights of a model are stored: their format and bytes, from the modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from itertools import groupby
from typing import Any, Literal

import torch
from torch import nn

from profiler.device.memory import storage_bytes
from profiler.errors import describe_error
from profiler.facts.step import StoredWeight
from profiler.patching import patched
from profiler.quant.bitsandbytes import import_bitsandbytes

# bitsandbytes/functional.py (0.50): blocks of 64 weights by default; double quantisation packs absmax into uint8
# blocks of 256 with a 256-entry float32 code book and one float32 offset.
_BNB_BLOCK = 64
_BNB_NESTED_BLOCK = 256
_BNB_FUSED_FLOOR = 4
_CODE_ENTRIES_4BIT = 16
_CODE_ENTRIES_8BIT = 256
_FLOAT32_BYTES = 4
_BFLOAT16_BYTES = 2
_MX_BLOCK = 32
# Names of the packed integers (GPTQ and AWQ, compressed-tensors).
_PACKED_NAMES = ("qweight", "weight_packed")


def is_linear(module: nn.Module) -> bool:
    """Whether `module` multiplies its input by one weight matrix: nn.Linear, quantised linears, GPT-2's Conv1D."""
    has_sizes = all(isinstance(getattr(module, name, None), int) for name in ("in_features", "out_features"))
    has_weight = _packed_tensor(module) is not None or getattr(module, "weight", None) is not None
    return type(module).__name__ == "Conv1D" or (has_sizes and has_weight)


def own_params(module: Any) -> dict[int, int]:
    """Number of parameters in each tensor of a module itself, by the tensor's `id`; packed weights count unpacked.

    GPTQ and AWQ keep their integers in buffers; their scales and zero points are not model parameters. A byte of an
    MXFP4 block is two weights. Scales of MXFP4 and FP8 count as 0.
    """
    if (matrices := triton_mxfp4_matrices(module)) is not None:
        biases = {id(param): param.numel() for name, param in module.named_parameters() if name.endswith("_bias")}
        return {id(module): module.num_experts * sum(ins * outs for ins, outs in matrices), **biases}
    if (packed := _packed_tensor(module)) is not None:
        bias = getattr(module, "bias", None)
        return {id(packed): module.in_features * module.out_features, **({} if bias is None else {id(bias): len(bias)})}
    counts = {id(param): param.numel() for param in module.parameters(recurse=False)}
    for name, param in module.named_parameters(recurse=False):
        if name.endswith("_blocks"):
            counts[id(param)] = 2 * param.numel()
        elif is_scale(name):
            counts[id(param)] = 0
    weight = getattr(module, "weight", None)
    if type(weight).__name__ == "Params4bit" or type(module).__name__ == "GgufLinear":
        counts[id(weight)] = module.in_features * module.out_features
    elif is_gguf_table(module):
        counts[id(weight)] = module.num_embeddings * module.embedding_dim
    return counts


def is_gguf_table(module: nn.Module) -> bool:
    """Whether `module` is an embedding whose rows stay in GGUF blocks; a lookup unpacks only its own rows."""
    return type(module).__name__ == "GgufEmbedding"


def triton_mxfp4_matrices(module: Any) -> tuple[tuple[int, int], ...] | None:
    """(in_features, out_features) of an expert's two matrices in MXFP4 for triton; None for any other module.

    The blocks are then in triton's tensors, which are not parameters (transformers 5.23, integrations/mxfp4.py).
    """
    if type(module).__name__ != "Mxfp4GptOssExperts":
        return None
    return (module.hidden_size, 2 * module.intermediate_size), (module.intermediate_size, module.hidden_size)


def mxfp4_bytes(weights: int) -> int:
    """Bytes of MXFP4 weights: 4 bits per weight, and one scale byte per 32 (OCP Microscaling Formats v1.0, 5.1)."""
    return weights // 2 + weights // _MX_BLOCK


def is_scale(name: str) -> bool:
    """Whether a parameter with this name only scales a weight in MXFP4 (`_scales`) or FP8 (`weight_scale_inv`)."""
    return name.endswith(("_scales", "_scale_inv", "weight_scale", "activation_scale"))


def stored(module: nn.Module) -> StoredWeight:
    """How the weight of a linear-like module is stored. Raises ValueError for an unknown format."""
    for matches, describe in _FORMATS:
        if matches(module):
            return describe(module)
    raise ValueError(f"the weight of {type(module).__name__} has an unknown format")


def quant_state_tensors(state: Any) -> list[torch.Tensor]:
    """The tensors of a bitsandbytes 4-bit quantisation state: absmax and code book, also of the nested level."""
    if state is None:
        return []
    tensors = [state.absmax, state.code, getattr(state, "offset", None)]
    nested = getattr(state, "state2", None)
    if nested is not None:
        tensors += [nested.absmax, nested.code]
    return [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]


def model_storage_bytes(model: Any) -> int:
    """Bytes of all storages of a loaded model: parameters, buffers, quantisation state. Shared storages count once."""
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
    """bitsandbytes' 4 bits in the layout of a step: a CPU with AVX512-BF16 repacks them in its first step.

    The fused kernel always computes in bfloat16 (backends/cpu/ops.py, `gemv_4bit`). A module on meta has the device
    where it will run (`planned_device`), and the library's own attribute says whether it is repacked there.
    """
    weight = module.weight
    state = getattr(weight, "quant_state", None)
    if state is not None and weight.device.type != "meta":
        device, fused = weight.device, getattr(state, "packing_format_for_cpu", False)
        weight_bytes = storage_bytes([weight.data, *quant_state_tensors(state)])
        default_dtype = state.dtype
    else:
        device = getattr(module, "planned_device", weight.device)
        fused = getattr(module, "support_avx512bf16_for_cpu", False)
        elements, nested = module.in_features * module.out_features, bool(weight.compress_statistics)
        weight_bytes = (_repacked_4bit_bytes if fused else _quantised_4bit_bytes)(elements, nested)
        default_dtype = torch.float32
    compute_dtype = torch.bfloat16 if fused else module.compute_dtype or default_dtype
    rows = None if fused else four_bit_rows(device, compute_dtype, module.in_features, module.out_features)
    return _stored_as(
        weight.quant_type,
        module,
        weight_bytes,
        compute_dtype,
        dense_from_rows=rows.dense_from if rows else None,
        fused_rows=rows.fused if rows else (),
    )


def bitsandbytes_bytes(quant: Literal["int8", "nf4", "fp4"], ins: int, outs: int) -> int:
    """Bytes of a weight of `ins` x `outs` in a format of bitsandbytes, with its scales, on a GPU; needs no library."""
    return _int8_bytes(ins, outs) if quant == "int8" else _quantised_4bit_bytes(ins * outs, nested=False)


def _int8_bytes(ins: int, outs: int) -> int:
    """8 bits per weight + a float32 scale per output."""
    return ins * outs + outs * _FLOAT32_BYTES


def _quantised_4bit_bytes(elements: int, nested: bool) -> int:
    """4 bits per weight + absmax per block of 64; nested absmax is uint8, with a second level per block of 256."""
    blocks = -(-elements // _BNB_BLOCK)
    packed = -(-elements // 2) + _CODE_ENTRIES_4BIT * _FLOAT32_BYTES
    if not nested:
        return packed + blocks * _FLOAT32_BYTES
    second = -(-blocks // _BNB_NESTED_BLOCK) * _FLOAT32_BYTES
    return packed + blocks + second + _CODE_ENTRIES_8BIT * _FLOAT32_BYTES + _FLOAT32_BYTES


def _repacked_4bit_bytes(elements: int, nested: bool) -> int:
    """4 bits per weight + bfloat16 absmax per block of 64. Nested absmax is unpacked; only its offset remains.

    Source: bitsandbytes/functional.py (0.50), `_convert_weight_packed_for_cpu`.
    """
    packed = elements // 2 + _CODE_ENTRIES_4BIT * _FLOAT32_BYTES
    return packed + elements // _BNB_BLOCK * _BFLOAT16_BYTES + (_FLOAT32_BYTES if nested else 0)


@dataclass(frozen=True)
class FourBitRows:
    """Numbers of rows of input for which bitsandbytes dequantises a 4-bit weight before the product."""

    dense_from: int
    """The fewest of them."""
    fused: tuple[tuple[int, int], ...] = ()
    """Ranges of more rows, (first, last), without a dense copy."""

    @property
    def always_from(self) -> int:
        """The number of rows from which every product has a dense copy."""
        return self.fused[-1][1] + 1 if self.fused else self.dense_from


@cache
def four_bit_rows(device: torch.device, dtype: torch.dtype, ins: int, outs: int) -> FourBitRows | None:
    """Return the rows of input for which bitsandbytes dequantises the weight first; None if it cannot be imported.

    CPU without AVX512-BF16: always (backends/default/ops.py, `_gemm_4bit_default_impl`). CUDA: 0.49 and older fuse
    one row only (autograd/_functions.py, `A.numel() == A.shape[-1]`). From 0.50 on, the library's table by
    architecture and shape decides (backends/cuda/ops.py). Without a GPU, as on meta, only its floor is known: up to
    4 rows are always fused (`_GEMM_4BIT_CUSTOM_FLOOR_M`).
    """
    if device.type == "cpu":
        return FourBitRows(1)
    try:
        import_bitsandbytes()
    except Exception:  # missing, or a broken installation, which may raise anything
        return None
    version: str = import_module("bitsandbytes").__version__
    if tuple(int(part) for part in version.split(".")[:2]) < (0, 50):
        return FourBitRows(2)
    if ins % _BNB_BLOCK:
        return FourBitRows(1)
    if device.type != "cuda":
        return FourBitRows(_BNB_FUSED_FLOOR + 1)
    table = _four_bit_table(device)
    if table.error:
        return FourBitRows(_BNB_FUSED_FLOOR + 1)
    return dense_rows(lambda rows: table.fuses(dtype, rows, outs, ins), table.most_rows)


@dataclass(frozen=True)
class _FourBitTable:
    """bitsandbytes' table of 4-bit kernels for one GPU (0.50)."""

    fuses: Callable[[torch.dtype, int, int, int], bool]
    """Whether the product of (dtype, rows, outs, ins) has no dense copy."""
    most_rows: int
    error: str = ""
    """Why the table cannot be read: another version, a broken installation, or a GPU that did not respond."""


@cache
def _four_bit_table(device: torch.device) -> _FourBitTable:
    try:
        from bitsandbytes.backends.cuda import ops

        fuses = partial(ops._gemm_4bit_use_custom_fn, device.index or 0)
        # It looks at the GPU once, and only for more rows than are always fused.
        fuses(torch.float16, _BNB_FUSED_FLOOR + 1, _BNB_BLOCK, _BNB_BLOCK)
        return _FourBitTable(fuses, ops._gemm_4bit_custom_max_m)
    except Exception as error:
        return _FourBitTable(lambda *_: False, 0, describe_error(error))


@contextmanager
def dense_copies(dense: bool) -> Iterator[None]:
    """Context manager in which every 4-bit product of few rows on a GPU writes a dense copy first, or none does.

    From 0.50 on, the answer of bitsandbytes' table decides (backends/cuda/ops.py). Raises ImportError or AttributeError
    for another version.
    """
    from bitsandbytes.backends.cuda import ops

    with patched(ops, _gemm_4bit_use_custom_fn=lambda *_: not dense):
        yield


def four_bit_rule_error(device: torch.device) -> str:
    """Return why bitsandbytes' table of 4-bit kernels cannot be read on a GPU; empty if it can, or has none.

    `four_bit_rows` then assumes the table's floor.
    """
    try:
        version = import_module("bitsandbytes").__version__
    except Exception as error:  # missing, or a broken installation, which may raise anything
        return describe_error(error)
    has_table = device.type == "cuda" and tuple(int(part) for part in version.split(".")[:2]) >= (0, 50)
    return _four_bit_table(device).error if has_table else ""


def dense_rows(fused: Callable[[int], bool], most: int) -> FourBitRows:
    """Return the rows for which `fused(rows)` is false; above `most` rows it always is."""
    ranges = []
    for is_fused, group in groupby(range(1, most + 1), lambda rows: bool(fused(rows))):
        numbers = list(group)
        if is_fused:
            ranges.append((numbers[0], numbers[-1]))
    if ranges and ranges[0][0] == 1:
        return FourBitRows(ranges[0][1] + 1, tuple(ranges[1:]))
    return FourBitRows(1, tuple(ranges))


def _bnb_int8(module: Any) -> StoredWeight:
    weight = module.weight
    # The first forward moves the integers (CB) and the row scales (SCB, float32) from the parameter to the state.
    scales = getattr(weight, "SCB", None)
    scales = getattr(module.state, "SCB", None) if scales is None else scales
    integers = getattr(module.state, "CB", None)
    weight_bytes = _int8_bytes(module.in_features, module.out_features)
    if weight.device.type != "meta" and scales is not None:
        weight_bytes = storage_bytes([weight.data if integers is None else integers, scales])
    return _stored_as("int8", module, weight_bytes, torch.int8)


def _packed(module: Any) -> StoredWeight:
    """GPTQ, AWQ, compressed-tensors: packed integers with their scales, zero points and group indices."""
    tensors = dict([*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)])
    tensors.pop("bias", None)
    floats = [tensor.dtype for tensor in tensors.values() if tensor.is_floating_point() and tensor.itemsize > 1]
    class_name = type(module).__name__.lower()
    method = next((method for method in ("gptq", "awq", "marlin", "exllama") if method in class_name), "packed")
    return _stored_as(method, module, storage_bytes(tensors.values()), floats[0] if floats else torch.float16)


def _gguf(module: Any) -> StoredWeight:
    """GGUF blocks that transformers kept (5.23, integrations/gguf/utils.py); their kernel computes in float32.

    It multiplies up to 8 rows by the blocks directly, and more rows by a dense copy, one part at a time.
    """
    weight_bytes = storage_bytes([module.weight])
    return _stored_as("gguf", module, weight_bytes, torch.float32, dense_from_rows=_GGUF_FUSED_ROWS + 1)


_GGUF_FUSED_ROWS = 8


def _scaled_float8(module: Any) -> StoredWeight:
    """FP8 with a scale per tensor, row or block (DeepSeek-V3: `weight_scale_inv` per block of 128 x 128)."""
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

    int8, and fp8 without quantised inputs, become a dense matrix in every call (torchao 0.18: int8_tensor.py casts,
    float8_tensor.py dequantises). int4 is unpacked inside its kernel.
    """
    weight = module.weight
    name = type(weight).__name__
    quantised_inputs = getattr(weight, "act_quant_kwargs", None) is not None
    return _stored_as(
        _TORCHAO_FORMATS.get(name, name),
        module,
        storage_bytes([weight]),
        weight.qdata.dtype if quantised_inputs else weight.dtype,
        dense_from_rows=1 if name in _CAST_AT_EACH_CALL and not quantised_inputs else None,
    )


_CAST_AT_EACH_CALL = ("Int8Tensor", "Float8Tensor")
_TORCHAO_FORMATS = {
    "Int8Tensor": "int8wo",
    "Float8Tensor": "fp8",
    "Int4OpaqueTensor": "int4wo",
    "Int4TilePackedTo4dTensor": "int4wo",
}


def _stored_as(
    format_: str, module: Any, weight_bytes: int, compute_dtype: torch.dtype, **dense_rows: Any
) -> StoredWeight:
    sizes = module.in_features, module.out_features
    return StoredWeight(format_, *sizes, weight_bytes, _bias_bytes(module), compute_dtype, **dense_rows)


def _bias_bytes(module: Any) -> int:
    bias = getattr(module, "bias", None)
    return 0 if bias is None else bias.numel() * bias.element_size()


def _packed_tensor(module: Any) -> torch.Tensor | None:
    return next((tensor for name in _PACKED_NAMES if (tensor := getattr(module, name, None)) is not None), None)


def _weight_class(name: str) -> Callable[[Any], bool]:
    return lambda module: type(getattr(module, "weight", None)).__name__ == name


# The first match decides.
_FORMATS: tuple[tuple[Callable[[Any], bool], Callable[[Any], StoredWeight]], ...] = (
    (_weight_class("Params4bit"), _bnb_4bit),
    (_weight_class("Int8Params"), _bnb_int8),
    (lambda module: _packed_tensor(module) is not None, _packed),
    (lambda module: type(module).__name__ == "GgufLinear", _gguf),
    (lambda module: hasattr(module.weight, "__tensor_flatten__"), _torchao),
    (lambda module: str(module.weight.dtype).startswith("torch.float8"), _scaled_float8),
    (lambda module: module.weight.is_floating_point() and module.weight.dim() == 2, _dense),
)
