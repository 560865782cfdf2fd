"""Models as commands have them: loaded on this CPU, or built on meta and walked."""

from pathlib import Path
from typing import Any

import torch
from machines import CPU

from profiler.counting.operators import ModelWork
from profiler.counting.walk import walk
from profiler.loading.config import config_from, load_config
from profiler.loading.load import load
from profiler.loading.meta_model import build_on_meta
from profiler.loading.request import LoadedModel, ModelRequest
from profiler.loading.source import resolve


def loaded(model: str | Path, dtype: torch.dtype = torch.float32, **options: Any) -> LoadedModel:
    """Load a model with its checkpoint's weights, unless `options` of the request say otherwise."""
    source = resolve(str(model))
    return load(ModelRequest(source, CPU, dtype, **{"weights": "checkpoint", **options}), load_config(source))


def on_meta(model: str | dict[str, Any], dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    """Build a model that is known by its name or by its config, without weights."""
    config = load_config(resolve(model)) if isinstance(model, str) else config_from(model, "model")
    return build_on_meta(config, dtype, **options)


def walked(model: str | dict[str, Any], **options: Any) -> ModelWork:
    return walk(on_meta(model, **options))
