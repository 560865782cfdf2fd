"""A stand-in for the package `kernels`, as far as transformers uses it: a norm of layers and a flash attention.

Its kernels compute with torch, on any device. It refuses to load one while downloads are allowed.
"""

from __future__ import annotations

import contextlib
import enum
from types import MethodType, ModuleType
from typing import Any

import huggingface_hub.constants
import torch
from torch.nn import functional as F

__version__ = "0.18.2"
HERE = "kernels-community/flash-attn2"


class Mode(enum.Flag):
    INFERENCE = enum.auto()
    TRAINING = enum.auto()
    TORCH_COMPILE = enum.auto()


class KernelizeFallback(enum.Enum):
    ALL = 1


def key(*args: Any, **named: Any) -> Any:
    return args, tuple(named.items())


CUDAProperties = ROCMProperties = Device = LayerRepository = LocalLayerRepository = key


def nothing(*_args: object, **_named: object) -> None: ...


register_kernel_mapping = replace_kernel_forward_from_hub = nothing


def use_kernel_mapping(*_: object, **_named: object) -> Any:
    return contextlib.nullcontext()


def use_kernel_forward_from_hub(name: str) -> Any:
    def named(layer: Any) -> Any:
        layer.kernel_layer_name = name
        return layer

    return named


def use_kernelized_func(*_: object) -> Any:
    return lambda layer: layer


def rms_norm(self: Any, x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon)


def kernelize(model: Any, **_: object) -> Any:
    assert huggingface_hub.constants.HF_HUB_OFFLINE
    for part in model.modules():
        if getattr(type(part), "kernel_layer_name", "") == "RMSNorm":
            part.forward = MethodType(rms_norm, part)
    return model


def flash_attn_func(q: Any, k: Any, v: Any, softmax_scale: float | None = None, causal: bool = False) -> Any:
    """Attention of [batch, tokens, heads, width]."""
    heads = [each.transpose(1, 2) for each in (q, k, v)]
    causal = causal and q.shape[1] > 1
    found = F.scaled_dot_product_attention(*heads, is_causal=causal, scale=softmax_scale, enable_gqa=True)
    return found.transpose(1, 2)


def get_kernel(repo_id: str, **_: object) -> ModuleType:
    assert huggingface_hub.constants.HF_HUB_OFFLINE
    if repo_id != HERE:
        raise FileNotFoundError(f"{repo_id} is not in the cache")
    found: Any = ModuleType(repo_id)
    found.flash_attn_func = flash_attn_func
    found.flash_attn_varlen_func = lambda *_, **_named: None
    return found
