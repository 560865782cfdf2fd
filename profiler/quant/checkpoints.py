"""Quantised checkpoints: the format named by a config or a GGUF file, and the packed modules on the meta device."""

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
MX_BLOCK = 32  # OCP Microscaling Formats v1.0, 5.1


class AwqLinear(nn.Module):
    """AWQ's linear (arXiv:2306.00978, GEMM): integers in words along the outputs; a scale and a zero per group."""

    def __init__(self, dense: nn.Linear, bits: int, group_size: int) -> None:
        super().__init__()
        self.in_features, self.out_features = dense.in_features, dense.out_features
        groups, words = math.ceil(self.in_features / group_size), math.ceil(self.out_features * bits / _WORD_BITS)
        self._add("qweight", self.in_features, words)
        self._add("qzeros", groups, words)
        self._add("scales", groups, self.out_features, dtype=torch.float16)
        self.bias = None if dense.bias is None else nn.Parameter(dense.bias.to(torch.float16), requires_grad=False)

    def _add(self, name: str, *shape: int, dtype: torch.dtype = torch.int32) -> None:
        self.register_buffer(name, torch.empty(shape, dtype=dtype, device="meta"))


class GptqLinear(AwqLinear):
    """The same of GPTQ (arXiv:2210.17323): words along the inputs, and a group index each (`GPTQQuantLinear`)."""

    def __init__(self, dense: nn.Linear, bits: int, group_size: int) -> None:
        super().__init__(dense, bits, group_size)
        self._add("qweight", math.ceil(self.in_features * bits / _WORD_BITS), self.out_features)
        self._add("g_idx", self.in_features)


PACKED_LINEARS: Mapping[str, Callable[[nn.Linear, int, int], nn.Module]] = {"gptq": GptqLinear, "awq": AwqLinear}
"""By `quant_method` of a checkpoint's config."""


class PackedExpert(nn.ModuleDict):
    """One expert of a mixture, with a packed linear for each of its matrices."""


def plan_packed(model: Any, method: str, options: Mapping[str, Any]) -> nn.Module:
    """Replace the linears of `model`, on meta, with packed ones of `method`, by the `options` of a checkpoint's config.

    Checkpoints of mixtures have a linear for each matrix of each expert. The head and `modules_to_not_convert` stay
    dense. Raises ModelError for options without a width or a group size.
    """
    from transformers.quantizers.quantizers_utils import should_convert_module

    bits, group_size = options.get("bits"), options.get("group_size")
    if not isinstance(bits, int) or not isinstance(group_size, int) or bits < 1 or group_size == 0:
        raise ModelError(f"this {method} checkpoint has no valid `bits` and `group_size` in its config.")
    dense_parts = [*(options.get("modules_to_not_convert") or ()), *(getattr(model, "_keep_in_fp32_modules", ()) or ())]
    blocks = options.get("modules_in_block_to_quantize") or ()
    packed_parts = [part for block in blocks for part in ([block] if isinstance(block, str) else block)]
    head = None if options.get("lm_head") else model.get_output_embeddings()

    def packed(name: str, dense: nn.Linear) -> nn.Module:
        own = {"bits": bits, "group_size": group_size, **(_dynamic(options, name) or {})}
        size = dense.in_features if own["group_size"] < 0 else own["group_size"]  # -1: one group per column
        return PACKED_LINEARS[method](dense, own["bits"], size)

    for name, module in list(model.named_modules()):
        params = module.named_parameters(recurse=False) if "expert" in type(module).__name__.lower() else ()
        banks = {key: param for key, param in params if param.dim() == 3}  # each [experts, a, b] in any order
        if not (isinstance(module, nn.Linear) or banks) or module is head:
            continue
        is_dense = any(_is_part(part, name) for part in dense_parts) or not should_convert_module(name, dense_parts)
        is_left_out = packed_parts and not any(_is_part(part, name) for part in packed_parts)
        if is_dense or is_left_out or _dynamic(options, name) is None:
            continue
        if banks:
            linears = _expert_linears(banks, model.config.get_text_config().hidden_size)
            experts = [
                PackedExpert({part: packed(f"{name}.{number}.{part}", linear) for part, linear in linears.items()})
                for number in range(next(iter(banks.values())).shape[0])
            ]
            model.set_submodule(name, nn.ModuleList(experts))
        else:
            model.set_submodule(name, packed(name, module))
    return cast(nn.Module, model)


def _dynamic(options: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """The options of one module by the regular expressions of GPTQModel's `dynamic`; None if it stays dense (`-:`)."""
    for pattern, own in (options.get("dynamic") or {}).items():
        if re.match(pattern.removeprefix("+:").removeprefix("-:"), name):
            return None if pattern.startswith("-:") else own
    return {}


def _expert_linears(banks: Mapping[str, torch.Tensor], hidden_size: int) -> dict[str, nn.Linear]:
    """The linears of one expert on meta, as checkpoints have them: a bank `gate_up_proj` is two of them."""
    linears: dict[str, nn.Linear] = {}
    for name, bank in banks.items():
        inner = bank[0].numel() // hidden_size
        if name.startswith("gate_up"):
            linears["gate_proj"] = linears["up_proj"] = nn.Linear(hidden_size, inner // 2, bias=False)
        else:
            sizes = (inner, hidden_size) if "down" in name else (hidden_size, inner)
            linears[name] = nn.Linear(*sizes, bias=False)
    return linears


class Mxfp4Experts(nn.Module):
    """Experts as gpt-oss stores them: blocks of 32 weights in 16 bytes, and a scale byte (OCP Microscaling, v1.0)."""

    def __init__(self, experts: int, hidden: int, inner: int) -> None:
        super().__init__()
        for name, outs, ins in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
            blocks = math.ceil(ins / MX_BLOCK)
            self._add(f"{name}_blocks", experts, outs, blocks, MX_BLOCK // 2, dtype=torch.uint8)
            self._add(f"{name}_scales", experts, outs, blocks, dtype=torch.uint8)
            self._add(f"{name}_bias", experts, outs, dtype=torch.bfloat16)

    def _add(self, name: str, *shape: int, dtype: torch.dtype) -> None:
        self.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False))


def plan_mxfp4(model: Any) -> nn.Module:
    """Replace the experts of `model`, on meta, with those of an MXFP4 checkpoint. Raises ModelError for others."""
    banks = [(name, module) for name, module in model.named_modules() if hasattr(module, "gate_up_proj_bias")]
    if not banks:
        raise ModelError(f"MXFP4 is supported for the experts of gpt-oss, which {type(model).__name__} does not have.")
    for name, bank in banks:
        experts, inner, hidden = bank.down_proj.shape
        model.set_submodule(name, Mxfp4Experts(experts, hidden, inner))
    return cast(nn.Module, model)


def _is_part(part: str, name: str) -> bool:
    """Whether the dotted path `name` contains all components of `part`: `mlp.gate` is not part of `mlp.gate_proj`."""
    return re.search(rf"(?:^|\.){re.escape(part)}(?:\.|$)", name) is not None


def published_format(config: Any) -> str | None:
    """The config's `quant_method` (mxfp4, fp8, gptq, ...); None if the checkpoint's weights are dense."""
    if not (options := form_options(config)):
        return None
    method = options.get("quant_method")
    return str(getattr(method, "value", method))


def form_options(config: Any) -> dict[str, Any]:
    """The config's `quantization_config` as a dict; empty if the weights are dense."""
    options = getattr(config, "quantization_config", None) or {}
    return options if isinstance(options, dict) else options.to_dict()


def as_dense_config(config: Any) -> Any:
    """A copy of the config without its quantisation, for dense weights in the model's dtype."""
    plain = copy.deepcopy(config)
    if hasattr(plain, "quantization_config"):
        del plain.quantization_config
    return plain


def counted_config(config: Any, dtype_requested: bool) -> Any:
    """The config to count: as published, or dense if a requested dtype replaces its blocks of floats.

    transformers unpacks those into any dtype; packed integers stay packed.
    """
    in_floats = published_format(config) in ("mxfp4", "fp8", "mxfp8")
    return as_dense_config(config) if dtype_requested and in_floats else config


@dataclass(frozen=True)
class Gguf:
    """The formats of the weights in a GGUF file."""

    types: tuple[str, ...]
    """ggml's names of its quantised types, the type of most weights first; empty: only floats, or unreadable."""
    kept_by_kernels: bool
    """Whether transformers loads this architecture packed on a device that has a kernel for it."""
    name: str


def gguf_format(file: Path) -> Gguf:
    """The format of the weights in a GGUF file, by its header; kernels keep blocks of `GGUF_ARCHS` (5.23)."""
    try:
        from gguf import GGMLQuantizationType
        from transformers.integrations.gguf import GGUF_ARCHS, GgufHeader

        header = GgufHeader.from_file(str(file))
    except (ImportError, ValueError):  # an older transformers, or a type of block that its reader does not support
        return Gguf((), False, "GGUF")
    weights: Counter[str] = Counter()
    for tensor in header.tensors:
        weights[GGMLQuantizationType(tensor.ggml_type).name] += prod(tensor.shape)
    types = tuple(name for name, _ in weights.most_common() if name not in ("F64", "F32", "F16", "BF16"))
    return Gguf(types, header.architecture in GGUF_ARCHS, f"GGUF ({', '.join(types)})" if types else "GGUF")
