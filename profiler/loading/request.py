"""The request for a model (source, device, dtype, format, weights), and the loaded model."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from profiler.device.device import compute_capability
from profiler.errors import ModelError, RequestError, first_line
from profiler.loading.device_map import DeviceMap
from profiler.loading.source import ModelSource
from profiler.options import DTYPE_NAMES
from profiler.quant.registry import PLAIN, Quant, QuantOptions

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_NAMES}


@dataclass(frozen=True)
class ModelRequest:
    """A resolved request for a model: everything that decides which tensors it has."""

    source: ModelSource
    device: torch.device
    dtype: torch.dtype
    quant: Quant = "none"
    quant_options: QuantOptions = PLAIN
    weights: Literal["checkpoint", "random"] = "random"
    attn: str | None = None
    """Requested attention implementation (`sdpa`, `eager`, ...); None is transformers' default."""
    trust_remote_code: bool = False
    allow_pickle: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `from_pretrained` as a user writes them, in place of those that follow from the other fields."""


@dataclass(frozen=True)
class CheckpointFit:
    """Tensor names in which a checkpoint and the model differ."""

    missing: tuple[str, ...] = ()
    """Tensors of the model that the checkpoint does not have; their values are random."""
    unused: tuple[str, ...] = ()
    """Tensors of the checkpoint that the model does not have."""


@dataclass(frozen=True)
class LoadedModel:
    module: nn.Module
    request: ModelRequest
    load_s: float
    first_call_s: float = 0.0
    """Seconds of the very first forward pass, of one token; includes lazy initialisation and unpacking of weights."""
    revision: str | None = None
    placement: DeviceMap | None = None
    """accelerate's placement if the model does not fit on one device, else None."""
    unpacked_from: str | None = None
    """The packed format of the checkpoint if the weights in memory are dense, else None."""
    offloaded_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes of weights that are fetched in every step, by their location: `host` memory or `disk`."""
    fit: CheckpointFit = CheckpointFit()

    @property
    def config(self) -> Any:
        return self.module.config


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without its module: `torch.bfloat16` -> `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def model_dtype(name: str, config: object) -> torch.dtype:
    """Return the dtype called `name`; for `auto` the config's, or bfloat16 without one. Raises RequestError."""
    if name != "auto":
        if name not in DTYPES:
            raise RequestError(f"--dtype {name!r} is unknown; use auto, {', '.join(DTYPES)}.")
        return DTYPES[name]
    dtype = getattr(config, "dtype", None)
    dtype = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    return dtype if isinstance(dtype, torch.dtype) else torch.bfloat16


def resolve_dtype(name: str, quant: Quant, device: torch.device, config: Any) -> torch.dtype:
    """Return the dtype of a model; `auto`: float32 on a CPU, 16 bits if quantised. Raises RequestError."""
    dtype = model_dtype(name, config)
    if name != "auto":
        return dtype
    if quant != "none":
        dtype = torch.bfloat16
    elif device.type == "cpu":
        return torch.float32
    no_bfloat16 = device.type == "cuda" and compute_capability(device) < (8, 0)
    return torch.float16 if dtype is torch.bfloat16 and no_bfloat16 else dtype


@contextmanager
def model_errors(failed: str) -> Iterator[None]:
    """Raise an error within as a ModelError that begins with `failed`; RequestError and a lack of memory pass."""
    try:
        yield
    except (RequestError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise ModelError(f"{failed}: {first_line(error)}.") from error


def most_positions(config: Any) -> int | None:
    """Return the longest sequence that the model supports, in tokens; None if its config does not say."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None
