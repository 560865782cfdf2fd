"""A model's transformers config, from wherever the model is."""

from __future__ import annotations

from typing import Any

from profiler.errors import ModelError, first_line
from profiler.loading.catalog import Source
from profiler.loading.checkpoint import check_gguf
from profiler.loading.skeleton import quiet_libraries


def load_config(source: Source, trust_remote_code: bool = False) -> Any:
    """The model's transformers config. Raises ModelError when it cannot be had."""
    from transformers import AutoConfig

    with quiet_libraries():
        try:
            if source.kind == "card" and source.card is not None:
                return AutoConfig.for_model(**source.card.config)
            where, extra = pretrained_location(source)
            return AutoConfig.from_pretrained(where, trust_remote_code=trust_remote_code, **extra)
        except Exception as error:
            raise _config_error(source, error) from error


def pretrained_location(source: Source) -> tuple[str, dict[str, Any]]:
    if source.kind == "gguf" and source.path is not None:
        return str(source.path.parent), {"gguf_file": source.path.name}
    return (source.hub_id or str(source.path)), {}


def _config_error(source: Source, error: Exception) -> ModelError:
    if source.kind == "gguf" and source.path is not None:
        check_gguf(source.path)
    if source.kind == "hub":
        hint = (
            f" Its card is known: --weights random, or the name {source.card.hub_id!r}'s card from `roofscope models`."
            if source.card is not None
            else ""
        )
        return ModelError(
            f"{source.name} is neither in the local cache nor to be had from the hub"
            f" (offline, gated, or no such model).{hint}"
        )
    return ModelError(f"{source.name}: its configuration cannot be read: {first_line(error)}.")
