"""What to load: source, device, dtype, format and weights, resolved before anything slow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from profiler.device.device import compute_capability
from profiler.errors import RequestError
from profiler.loading.device_map import DeviceMap
from profiler.loading.source import ModelSource
from profiler.quant.formats import PLAIN, QuantOptions
from profiler.quant.registry import Quant

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True)
class ModelRequest:
    """What to load, already resolved: everything that decides which tensors will exist."""

    source: ModelSource
    device: torch.device
    dtype: torch.dtype
    quant: Quant = "none"
    quant_options: QuantOptions = PLAIN
    weights: Literal["checkpoint", "random"] = "random"
    attn: str | None = None
    """Attention implementation asked for (`sdpa`, `eager`, ...); None takes transformers' own choice."""
    trust_remote_code: bool = False
    allow_pickle: bool = False


@dataclass(frozen=True)
class CheckpointFit:
    """How a checkpoint and a config go together, by the names of tensors."""

    missing: tuple[str, ...] = ()
    """Which the model has and the checkpoint does not: their values are random."""
    unused: tuple[str, ...] = ()
    """Which the checkpoint has and the model does not."""


@dataclass(frozen=True)
class LoadedModel:
    """A real model, ready to step."""

    module: nn.Module
    request: ModelRequest
    load_s: float
    first_call_s: float = 0.0
    """Seconds of the very first forward pass, of one token: lazy initialisation of libraries, unpacking of weights."""
    revision: str | None = None
    placement: DeviceMap | None = None
    """Where accelerate put each part, when the model did not fit on one device."""
    unpacked_from: str | None = None
    """The form that the model is published in, where that is packed and what lies in memory is dense; else None."""
    offloaded_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes of weights that are fetched at every step, by where they wait: `host` memory or `disk`."""
    fit: CheckpointFit = CheckpointFit()

    @property
    def offloaded(self) -> bool:
        """True when some weights wait elsewhere and cross a link to the device at every step."""
        return bool(self.offloaded_bytes)

    @property
    def config(self) -> Any:
        return self.module.config


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def model_dtype(name: str, config: object) -> torch.dtype:
    """The dtype asked for, or the config's own. Raises RequestError."""
    if name != "auto":
        if name not in DTYPES:
            raise RequestError(f"--dtype {name!r} is unknown; use auto, {', '.join(DTYPES)}.")
        return DTYPES[name]
    own = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
    own = DTYPES.get(own) if isinstance(own, str) else own
    return own if isinstance(own, torch.dtype) else torch.bfloat16


def check_packed_dtype(name: str, quant: Quant) -> None:
    """Raises RequestError for a format beside a dtype that is wider than what it saves."""
    if quant != "none" and name == "float32":
        raise RequestError(
            f"--quant {quant} with --dtype float32 would undo its point: every product would run in float32."
            " Use --dtype bfloat16, float16 or auto."
        )


def in_16_bits(dtype: torch.dtype) -> torch.dtype:
    """The dtype that a card is rented for: the model's own, and bfloat16 where that is float32."""
    return torch.bfloat16 if dtype is torch.float32 else dtype


def resolve_dtype(name: str, quant: Quant, device: torch.device, config: Any) -> torch.dtype:
    """The dtype to compute in.

    `auto` is the checkpoint's own dtype on CUDA (float16 where the card has no bfloat16 units) and float32 on a CPU,
    whose matrix kernels are made for it; quantised models compute in bfloat16 unless told otherwise.
    """
    if name != "auto" and name not in DTYPES:
        raise RequestError(f"--dtype {name!r} is unknown; use auto, {', '.join(DTYPES)}.")
    check_packed_dtype(name, quant)
    if name != "auto":
        return DTYPES[name]
    no_bfloat16 = device.type == "cuda" and compute_capability(device) < (8, 0)
    if quant != "none":
        return torch.float16 if no_bfloat16 else torch.bfloat16
    if device.type == "cpu":
        return torch.float32
    own = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None) or torch.bfloat16
    own = DTYPES.get(own, torch.bfloat16) if isinstance(own, str) else own
    return torch.float16 if own is torch.bfloat16 and no_bfloat16 else own


def most_positions(config: Any) -> int | None:
    """How long a sequence the model was made for; None where its config does not say."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None
