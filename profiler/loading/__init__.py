"""Source + precision + weights (checkpoint or random) -> LoadedModel."""

from profiler.loading.checkpoint import check_weights
from profiler.loading.config import load_config
from profiler.loading.load import load
from profiler.loading.request import (
    DTYPES,
    QUANTS,
    LoadedModel,
    ModelRequest,
    Quant,
    check_context,
    dtype_name,
    resolve_device,
    resolve_dtype,
    resolve_weights,
)
from profiler.loading.skeleton import build_on_meta, quiet_libraries

__all__ = [
    "DTYPES",
    "QUANTS",
    "LoadedModel",
    "ModelRequest",
    "Quant",
    "build_on_meta",
    "check_context",
    "check_weights",
    "dtype_name",
    "load",
    "load_config",
    "quiet_libraries",
    "resolve_device",
    "resolve_dtype",
    "resolve_weights",
]
