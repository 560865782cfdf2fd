"""The formats of bitsandbytes: quantised linears, their bytes and rules, random weights, and the library's import."""

import ctypes
import importlib.util
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from profiler.device.device import resolve_device
from profiler.device.memory import storage_bytes
from profiler.errors import ModelError, RequestError, describe_error, first_line
from profiler.facts.step import FLOAT32_BYTES, StoredWeight
from profiler.patching import patched
from profiler.quant.registry import ConversionCall, Quant, QuantOptions
from profiler.quant.storage import INT8_CODES, fill_random, quant_state_tensors, rms, stored_as

_KERNELS = "kernels"
# functional.py (0.50): blocks of 64 weights by default; double quantisation packs absmax into uint8 blocks of 256, with
# a 256-entry float32 code book and one float32 offset.
_BLOCK = 64
_NESTED_BLOCK = 256
_FUSED_FLOOR = 4
_CODE_ENTRIES_4BIT = 16
_CODE_ENTRIES_8BIT = 256
_BFLOAT16_BYTES = 2


def import_bitsandbytes() -> Any:
    """`bitsandbytes.functional`, imported while the package `kernels` is hidden. Raises what a broken one raises.

    With it, bitsandbytes would download a compiled kernel on a CPU with AVX512-BF16 (0.50: backends/cpu/ops.py).
    """
    before = {name: sys.modules[name] for name in (_KERNELS,) if name in sys.modules}
    sys.modules[_KERNELS] = None  # type: ignore[assignment]
    try:
        return import_module("bitsandbytes.functional")
    finally:
        del sys.modules[_KERNELS]
        sys.modules.update(before)


def four_bit_fuses_on_cpu() -> bool:
    """Whether this CPU's 4-bit kernel unpacks inside the matmul; loads its library only, not 40 MB of package."""
    package = importlib.util.find_spec("bitsandbytes")
    if package is None or package.origin is None or resolve_device("auto").type == "cuda":
        return False
    try:
        return bool(ctypes.CDLL(str(Path(package.origin).with_name("libbitsandbytes_cpu.so"))).has_avx512bf16_cpu())
    except (OSError, AttributeError):  # an older library, or one for another processor
        return False


def quantise(
    quant: Quant, module: Any, dtype: torch.dtype, options: QuantOptions, device: torch.device | None
) -> nn.Module:
    try:
        import_bitsandbytes()
    except Exception as error:  # a broken installation may raise anything
        raise RequestError(
            f"--quant {quant}: bitsandbytes cannot be imported ({first_line(error)}); see `roofscope doctor`."
        ) from error
    from transformers.quantizers import AutoHfQuantizer

    quantizer = AutoHfQuantizer.from_config(config(quant, dtype, options, module, device), pre_quantized=False)
    quantizer.preprocess_model(model=module, device_map=None, keep_in_fp32_modules=None)
    settle_four_bit(module, device, f"--quant {quant}", "use --quant int8 or int8wo")
    return cast(nn.Module, module)


def settle_four_bit(module: nn.Module, device: torch.device | None, format_name: str, instead: str) -> None:
    """Set the device on which bitsandbytes' 4-bit layers of a model on meta will run; it decides their layout.

    A layer applies what this machine's CPU has to any device (bitsandbytes 0.50: nn/modules.py, `Linear4bit`). Raises
    ModelError, ending with `instead`, for a layer whose shape the CPU's fused kernel does not support.
    """
    for name, layer in module.named_modules():
        if not hasattr(layer, "support_avx512bf16_for_cpu"):
            continue
        if device is not None:
            layer.planned_device = device
        layer.support_avx512bf16_for_cpu &= device is not None and device.type == "cpu"
        # It needs blocks of 64 inputs in tiles of 32 outputs (`_convert_weight_packed_for_cpu`).
        sides = (("inputs", layer.in_features, 64), ("outputs", layer.out_features, 32))
        for side, features, tile in sides:
            if layer.support_avx512bf16_for_cpu and features % tile:
                raise ModelError(
                    f"{format_name}: bitsandbytes' fused kernel on this CPU needs {side} in multiples of {tile},"
                    f" and {name} has {features}; {instead}."
                )


def config(quant: Quant, dtype: torch.dtype, options: QuantOptions, _planned: Any, _device: torch.device | None) -> Any:
    from transformers import BitsAndBytesConfig

    if quant == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quant,
        bnb_4bit_compute_dtype=options.compute_dtype or dtype,
        bnb_4bit_use_double_quant=options.double,
    )


def stored(module: Any) -> StoredWeight:
    """Return how a weight of bitsandbytes is stored at a step, the first of which changes the layout of some.

    A CPU with AVX512-BF16 repacks 4 bits for its fused kernel, which computes in bfloat16 (backends/cpu/ops.py,
    `gemv_4bit`). On meta, `planned_device` says where it will run. LLM.int8() has a float32 scale per row.
    """
    weight = module.weight
    if type(weight).__name__ == "Int8Params":
        weight_bytes = module.in_features * module.out_features + module.out_features * FLOAT32_BYTES
        return stored_as("int8", module, weight_bytes, torch.int8)
    state = getattr(weight, "quant_state", None)
    if state is not None and weight.device.type != "meta":
        device, fused, default_dtype = weight.device, getattr(state, "packing_format_for_cpu", False), state.dtype
        weight_bytes = storage_bytes([weight.data, *quant_state_tensors(state)])
    else:
        device = getattr(module, "planned_device", weight.device)
        fused = getattr(module, "support_avx512bf16_for_cpu", False)
        elements, nested = module.in_features * module.out_features, bool(weight.compress_statistics)
        weight_bytes = (_repacked_4bit_bytes if fused else _quantised_4bit_bytes)(elements, nested)
        default_dtype = torch.float32
    compute_dtype = torch.bfloat16 if fused else module.compute_dtype or default_dtype
    rows = None if fused else four_bit_rows(device, compute_dtype, module.in_features, module.out_features)
    dense_rows = {"dense_from_rows": rows.dense_from, "fused_rows": rows.fused} if rows else {}
    return stored_as(weight.quant_type, module, weight_bytes, compute_dtype, **dense_rows)


def _quantised_4bit_bytes(elements: int, nested: bool) -> int:
    """4 bits per weight + absmax per block of 64; nested absmax is uint8, with a second level per block of 256."""
    blocks = -(-elements // _BLOCK)
    packed = -(-elements // 2) + _CODE_ENTRIES_4BIT * FLOAT32_BYTES
    if not nested:
        return packed + blocks * FLOAT32_BYTES
    second = -(-blocks // _NESTED_BLOCK) * FLOAT32_BYTES
    return packed + blocks + second + _CODE_ENTRIES_8BIT * FLOAT32_BYTES + FLOAT32_BYTES


def _repacked_4bit_bytes(elements: int, nested: bool) -> int:
    """4 bits per weight + bfloat16 absmax per block; a nested one is unpacked (`_convert_weight_packed_for_cpu`)."""
    packed = elements // 2 + _CODE_ENTRIES_4BIT * FLOAT32_BYTES
    return packed + elements // _BLOCK * _BFLOAT16_BYTES + (FLOAT32_BYTES if nested else 0)


@dataclass(frozen=True)
class FourBitRows:
    """Numbers of rows of input for which bitsandbytes dequantises a 4-bit weight before the matmul."""

    dense_from: int
    """The fewest of them."""
    fused: tuple[tuple[int, int], ...] = ()
    """Ranges of more rows, (first, last), without a dense copy."""

    @property
    def always_from(self) -> int:
        """The number of rows from which every matmul has a dense copy."""
        return self.fused[-1][1] + 1 if self.fused else self.dense_from


@cache
def four_bit_rows(device: torch.device, dtype: torch.dtype, ins: int, outs: int) -> FourBitRows | None:
    """Return the rows of input for which bitsandbytes dequantises the weight first; None if it cannot be imported.

    CPU without AVX512-BF16: always (`_gemm_4bit_default_impl`). CUDA: 0.49 and older fuse one row only
    (autograd/_functions.py); from 0.50 on a table decides (backends/cuda/ops.py), of which without a GPU only the floor
    of 4 rows is known (`_GEMM_4BIT_CUSTOM_FLOOR_M`).
    """
    if device.type == "cpu":
        return FourBitRows(1)
    try:
        import_bitsandbytes()
    except Exception:  # missing, or a broken installation, which may raise anything
        return None
    if not _has_table():
        return FourBitRows(2)
    if ins % _BLOCK:
        return FourBitRows(1)
    if device.type != "cuda" or four_bit_rule_error(device):
        return FourBitRows(_FUSED_FLOOR + 1)
    fuses, most_rows = _four_bit_table(device)
    return dense_rows(lambda rows: fuses(dtype, rows, outs, ins), most_rows)


def _has_table() -> bool:
    """Return whether this bitsandbytes chooses 4-bit kernels by a table: from 0.50 on. Raises what its import does."""
    return tuple(map(int, import_module("bitsandbytes").__version__.split(".")[:2])) >= (0, 50)


@cache
def _four_bit_table(device: torch.device) -> tuple[Callable[[torch.dtype, int, int, int], bool], int]:
    """Return whether a GPU's matmul of (dtype, rows, outs, ins) has no dense copy, and the most rows of one (0.50).

    Raises whatever another version, a broken installation, or a GPU that does not respond raises.
    """
    from bitsandbytes.backends.cuda import ops

    fuses = partial(ops._gemm_4bit_use_custom_fn, device.index or 0)
    # It looks at the GPU once, and only for more rows than are always fused.
    fuses(torch.float16, _FUSED_FLOOR + 1, _BLOCK, _BLOCK)
    return fuses, ops._gemm_4bit_custom_max_m


@contextmanager
def dense_copies(dense: bool) -> Iterator[None]:
    """Context manager: 4-bit matmuls of few rows on a GPU write a dense copy, or not. Raises ImportError (0.49)."""
    if not _has_table():
        raise ImportError("bitsandbytes has no table of 4-bit kernels before 0.50")
    from bitsandbytes.backends.cuda import ops

    with patched(ops, _gemm_4bit_use_custom_fn=lambda *_: not dense):
        yield


def four_bit_rule_error(device: torch.device) -> str:
    """Return why bitsandbytes' table of 4-bit kernels is unreadable, so that its floor is assumed; empty if not."""
    try:
        if device.type == "cuda" and _has_table():
            _four_bit_table(device)
    except Exception as error:  # missing, or a broken installation, which may raise anything
        return describe_error(error)
    return ""


def dense_rows(fused: Callable[[int], bool], most: int) -> FourBitRows:
    """Return the rows for which `fused(rows)` is false; above `most` rows it always is."""
    groups = ((is_fused, list(rows)) for is_fused, rows in groupby(range(1, most + 1), lambda rows: bool(fused(rows))))
    ranges = [(rows[0], rows[-1]) for is_fused, rows in groups if is_fused]
    if ranges and ranges[0][0] == 1:
        return FourBitRows(ranges[0][1] + 1, tuple(ranges[1:]))
    return FourBitRows(1, tuple(ranges))


def random_weight(owner: Any, device: torch.device, std: float) -> Any:
    """Return random values with a standard deviation of about `std` in the layout of the planned weight of `owner`."""
    from bitsandbytes.nn import Int8Params

    if not isinstance(owner.weight, Int8Params):
        return _random_4bit(owner, device, std)
    # LLM.int8() has 127 at a row's absolute maximum.
    data = fill_random(torch.empty(owner.out_features, owner.in_features, dtype=torch.int8, device=device))
    scales = torch.full((owner.out_features,), 127 * std / rms(INT8_CODES), device=device)
    return Int8Params(data, requires_grad=False, has_fp16_weights=False, CB=data, SCB=scales)


def _random_4bit(owner: Any, device: torch.device, std: float) -> Any:
    """4 bits have 16 codes, and a block's absolute maximum.

    For a CPU's fused kernel the data has the repacked layout (functional.py, 0.50: [outs, ins / 2] bytes, [ins / block,
    outs] bfloat16).
    """
    from bitsandbytes.functional import QuantState, get_4bit_type, quantize_blockwise
    from bitsandbytes.nn import Params4bit

    planned, outs, ins = owner.weight, owner.out_features, owner.in_features
    dtype, fused = owner.compute_dtype, owner.support_avx512bf16_for_cpu
    quantised_shape = torch.Size([math.ceil(outs * ins / 2), 1])
    code = get_4bit_type(planned.quant_type, device=device)
    absmax = torch.full((math.ceil(outs * ins / planned.blocksize),), std / rms(code), device=device)
    state = QuantState(
        absmax=absmax,
        shape=torch.Size([outs, ins]),
        code=code,
        blocksize=planned.blocksize,
        quant_type=planned.quant_type,
        dtype=dtype,
    )
    if planned.compress_statistics:
        state.offset = torch.zeros((), device=device)
        state.nested = not fused
    if fused:
        state.absmax = absmax.to(torch.bfloat16).view(-1, outs)
        state.dtype = torch.bfloat16
        # The library's inverse needs these to save or move the layer.
        state.original_dtype, state.original_qshape = dtype, quantised_shape
        state.original_nested = bool(planned.compress_statistics)
        state.packing_format_for_cpu = True
    elif state.nested:
        state.absmax, state.state2 = quantize_blockwise(absmax, blocksize=_NESTED_BLOCK)
    data = fill_random(torch.empty((outs, ins // 2) if fused else quantised_shape, dtype=torch.uint8, device=device))
    options = {**planned.__dict__, "quant_state": state, "bnb_quantized": True}
    parameter = Params4bit(data, requires_grad=False, **options)
    if parameter.module is not None:
        parameter.module.quant_state = state
    return parameter


def dense_copy(_quant: Quant, module: Any, _weight: StoredWeight) -> ConversionCall | None:
    from bitsandbytes import functional

    packed = module.weight
    return lambda: functional.dequantize_4bit(packed.data, packed.quant_state)
