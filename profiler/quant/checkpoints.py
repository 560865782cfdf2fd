"""Checkpoints that come quantised: the format that a config names, and unpacking on the meta device."""

from __future__ import annotations

import copy
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from profiler.errors import ModelError

_WORD_BITS = 32


class _PackedLinear(nn.Module):
    """A linear of packed integers: words of 32 bits, with a float16 scale and a packed zero point a group."""

    def __init__(self, dense: nn.Linear, bits: int, group_size: int) -> None:
        super().__init__()
        self.in_features, self.out_features = dense.in_features, dense.out_features
        groups = math.ceil(self.in_features / group_size)
        self._hold("qweight", *self._packed_shape(bits))
        self._hold("qzeros", groups, math.ceil(self.out_features * bits / _WORD_BITS))
        self._hold("scales", groups, self.out_features, dtype=torch.float16)
        self.bias = None if dense.bias is None else nn.Parameter(dense.bias.to(torch.float16), requires_grad=False)

    def _hold(self, name: str, *shape: int, dtype: torch.dtype = torch.int32) -> None:
        self.register_buffer(name, torch.empty(shape, dtype=dtype, device="meta"))

    def _packed_shape(self, bits: int) -> tuple[int, int]:
        raise NotImplementedError


class GptqLinear(_PackedLinear):
    """GPTQ (arXiv:2210.17323): words along the inputs, and each input's group (gptqmodel, `GPTQQuantLinear`)."""

    def __init__(self, dense: nn.Linear, bits: int, group_size: int) -> None:
        super().__init__(dense, bits, group_size)
        self._hold("g_idx", self.in_features)

    def _packed_shape(self, bits: int) -> tuple[int, int]:
        return math.ceil(self.in_features * bits / _WORD_BITS), self.out_features


class AwqLinear(_PackedLinear):
    """AWQ (arXiv:2306.00978), GEMM layout: words along the outputs, no group index (gptqmodel, `AWQuantLinear`)."""

    def _packed_shape(self, bits: int) -> tuple[int, int]:
        return self.in_features, math.ceil(self.out_features * bits / _WORD_BITS)


PACKED_LINEARS: Mapping[str, Callable[[nn.Linear, int, int], nn.Module]] = {"gptq": GptqLinear, "awq": AwqLinear}
"""By `quant_method` of a checkpoint's config."""


def plan_packed(model: Any, method: str, options: Mapping[str, Any]) -> nn.Module:
    """Swap the linears of `model`, on meta, for the packed ones of `method` with a checkpoint's own `options`.

    The head and what `modules_to_not_convert` names stay dense; `modules_in_block_to_quantize` names all that is
    packed. Raises ModelError for options that lack a width or a group size.
    """
    bits, group_size = options.get("bits"), options.get("group_size")
    if not isinstance(bits, int) or not isinstance(group_size, int) or bits < 1 or group_size == 0:
        raise ModelError(f"this {method} checkpoint does not say its `bits` and `group_size` in its config.")
    kept = [*(options.get("modules_to_not_convert") or ()), *(getattr(model, "_keep_in_fp32_modules", None) or ())]
    wanted = [name for names in options.get("modules_in_block_to_quantize") or () for name in _listed(names)]
    head = None if options.get("lm_head") else model.get_output_embeddings()
    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear) or module is head:
            continue
        if any(_is_part(part, name) for part in kept) or (wanted and not any(_is_part(part, name) for part in wanted)):
            continue
        size = module.in_features if group_size < 0 else group_size  # -1: one group a column
        model.set_submodule(name, PACKED_LINEARS[method](module, bits, size))
    return cast(nn.Module, model)


class Mxfp4Experts(nn.Module):
    """A layer's experts as gpt-oss stores them: blocks of 32 weights in 16 bytes with a byte of scale each.

    OCP Microscaling Formats, v1.0; names and shapes as in the checkpoint (transformers, integrations/mxfp4.py).
    """

    def __init__(self, experts: int, hidden: int, inner: int) -> None:
        super().__init__()
        for name, outs, ins in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
            blocks = math.ceil(ins / _MX_BLOCK)
            self._hold(f"{name}_blocks", experts, outs, blocks, _MX_BLOCK // 2, dtype=torch.uint8)
            self._hold(f"{name}_scales", experts, outs, blocks, dtype=torch.uint8)
            self._hold(f"{name}_bias", experts, outs, dtype=torch.bfloat16)

    def _hold(self, name: str, *shape: int, dtype: torch.dtype) -> None:
        self.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False))


_MX_BLOCK = 32


def plan_mxfp4(model: Any) -> nn.Module:
    """Swap the experts of `model`, on meta, for those of an MXFP4 checkpoint. Raises ModelError where it has none."""
    found = [name for name, module in model.named_modules() if hasattr(module, "gate_up_proj_bias")]
    if not found:
        raise ModelError(f"MXFP4 is known for the experts of gpt-oss, which {type(model).__name__} does not have.")
    for name in found:
        bank = model.get_submodule(name).down_proj
        experts, inner, hidden = bank.shape
        model.set_submodule(name, Mxfp4Experts(experts, hidden, inner))
    return cast(nn.Module, model)


def _listed(names: Any) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def _is_part(part: str, name: str) -> bool:
    """Whether `part` is a run of whole steps of the dotted path `name`: `mlp.gate` is none of `mlp.gate_proj`."""
    return re.search(rf"(?:^|\.){re.escape(part)}(?:\.|$)", name) is not None


_FLOAT_FORMS = frozenset({"mxfp4", "fp8", "mxfp8"})
"""Floats with a scale a block, which transformers unpacks into any dtype; integers stay what they are."""


def published_format(config: Any) -> str | None:
    """`quant_method` of the config (mxfp4, fp8, gptq, ...), or None where the checkpoint's weights are dense."""
    options = form_options(config)
    if not options:
        return None
    method = options.get("quant_method")
    return str(getattr(method, "value", method))


def form_options(config: Any) -> dict[str, Any]:
    """What the config says of the published form, as its file has it; empty where the weights are dense."""
    own = getattr(config, "quantization_config", None) or {}
    return own if isinstance(own, dict) else own.to_dict()


def as_dense_config(config: Any) -> Any:
    """A copy of the config, as if its checkpoint held dense weights in the model's dtype."""
    plain = copy.deepcopy(config)
    if hasattr(plain, "quantization_config"):
        del plain.quantization_config
    return plain


def requested_form(config: Any, dtype_asked: bool) -> Any:
    """The config in the form to be counted: as published, or dense where a dtype was asked for that replaces it.

    A dtype replaces blocks of floats (MXFP4, FP8); beside packed integers it is that of what stays dense.
    """
    return as_dense_config(config) if dtype_asked and published_format(config) in _FLOAT_FORMS else config


@dataclass(frozen=True)
class Gguf:
    """How a GGUF file holds its weights."""

    types: tuple[str, ...]
    """ggml's names of its quantised types, that of the most weights first; empty: floats alone, or not to be read."""
    kept_by_kernels: bool
    """Whether transformers keeps the blocks of this architecture where a kernel for the device can be had."""

    @property
    def name(self) -> str:
        return f"GGUF ({', '.join(self.types)})" if self.types else "GGUF"


def gguf_format(file: Path) -> Gguf:
    """How `file` holds its weights, from its header alone.

    transformers 5.23 (quantizers/quantizer_gguf.py) keeps blocks for the architectures of `GGUF_ARCHS` alone, with the
    package `kernels` and a kernel published for the device, which no CPU has; all others it dequantises at loading.
    """
    try:
        from gguf import GGMLQuantizationType
        from transformers.integrations.gguf import GGUF_ARCHS, GgufHeader

        header = GgufHeader.from_file(str(file))
    except (ImportError, ValueError):  # an older transformers, or a type of blocks that its reader does not know
        return Gguf((), False)
    weights: Counter[str] = Counter()
    for tensor in header.tensors:
        weights[GGMLQuantizationType(tensor.ggml_type).name] += prod(tensor.shape)
    types = tuple(name for name, _ in weights.most_common() if name not in _GGUF_FLOATS)
    return Gguf(types, header.architecture in GGUF_ARCHS)


_GGUF_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
