"""A model counted where it has no bytes: its modules on the meta device, walked."""

from __future__ import annotations

from profiler.loading.catalog import Source
from profiler.loading.config import load_config
from profiler.loading.placement import planned_weight_bytes
from profiler.loading.published import as_asked
from profiler.loading.quantise import known_quant
from profiler.loading.request import model_dtype
from profiler.loading.skeleton import build_on_meta
from profiler.work.counted import Counted
from profiler.work.walk import walk


def counted_on_meta(source: Source, dtype: str, quant: str, *, trust_remote_code: bool = False) -> Counted:
    """A model in a dtype (`auto`: its own) and a format, from its config alone. Raises RequestError or ModelError."""
    kind = known_quant(quant)
    config = as_asked(load_config(source, trust_remote_code), dtype != "auto")
    module = build_on_meta(config, model_dtype(dtype, config), kind)
    return Counted(walk(module), planned_weight_bytes(module))
