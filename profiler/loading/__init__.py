"""Source + precision + weights (checkpoint or random) -> LoadedModel."""

from profiler.loading.checkpoint import check_weights, resolve_weights
from profiler.loading.config import load_config, pretrained_location
from profiler.loading.load import load
from profiler.loading.quantise import PLAIN, QUANTS, Quant, QuantOptions, check_quant
from profiler.loading.request import (
    DTYPES,
    LoadedModel,
    ModelRequest,
    check_context,
    dtype_name,
    resolve_device,
    resolve_dtype,
)
from profiler.loading.skeleton import build_on_meta, plan, quiet_libraries

__all__ = [
    "DTYPES",
    "PLAIN",
    "QUANTS",
    "LoadedModel",
    "ModelRequest",
    "Quant",
    "QuantOptions",
    "build_on_meta",
    "check_context",
    "check_quant",
    "check_weights",
    "dtype_name",
    "load",
    "load_config",
    "plan",
    "pretrained_location",
    "quiet_libraries",
    "resolve_device",
    "resolve_dtype",
    "resolve_weights",
]
