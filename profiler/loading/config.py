"""Load a model's transformers config from a hub id, a folder, a GGUF file or a preset."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import Any

from profiler.errors import ModelError, first_line
from profiler.loading.limits import check_claims, check_sizes
from profiler.loading.meta_model import quiet_libraries
from profiler.loading.source import ModelSource
from profiler.packages import need


def load_config(source: ModelSource, trust_remote_code: bool = False) -> Any:
    """Load the model's transformers config.

    Raises ModelError if it cannot be found or read, RequestError if the package gguf is needed and missing.
    """
    if source.kind == "card" and source.preset is not None:
        return config_from(source.preset.config, source.name)
    _without_torchao()
    from transformers import AutoConfig, PreTrainedConfig

    raw: dict[str, Any] = {}
    if source.kind == "gguf" and source.path is not None:
        need("gguf", "a GGUF file")
    with quiet_libraries():
        try:
            where, extra = pretrained_location(source)
            raw, _ = PreTrainedConfig.get_config_dict(where, **extra)
            check_claims(raw)
            if source.kind == "gguf":
                config = AutoConfig.for_model(**raw)  # reading the file again takes seconds
            else:
                config = AutoConfig.from_pretrained(where, trust_remote_code=trust_remote_code)
            check_sizes(config)
        except ModelError:
            raise
        except Exception as error:
            raise _config_error(source, error, needs_code="auto_map" in raw and not trust_remote_code) from error
    if not trust_remote_code:
        _remove_code(source.name, config)
    return config


def config_from(content: Mapping[str, Any], name: str) -> Any:
    """Build the transformers config of a parsed config.json, without its custom code. Raises ModelError."""
    _without_torchao()
    from transformers import AutoConfig

    check_claims(content)
    with quiet_libraries():
        try:
            config = AutoConfig.for_model(**content)
            check_sizes(config)
        except ModelError:
            raise
        except Exception as error:
            raise ModelError(f"{name}: its configuration cannot be read: {first_line(error)}.") from error
    _remove_code(name, config)
    return config


def _remove_code(name: str, config: Any) -> None:
    """Remove `auto_map`, which makes transformers run custom code, or prompt for permission at the terminal.

    Raises ModelError if the config names a kernel on the hub.
    """
    for part in (config, *(getattr(config, inner, None) for inner in getattr(config, "sub_configs", ()))):
        if hasattr(part, "auto_map"):
            del part.auto_map
        for kind in ("_attn_implementation", "_experts_implementation"):
            # `owner/name` is a kernel on the hub; transformers' own implementations have no slash.
            if "/" in str(kernel := getattr(part, kind, None)):
                raise ModelError(
                    f"{name}: its configuration requests the code {kernel!r} from the hub;"
                    " use --trust-remote-code to run it if you trust its source."
                )


def pretrained_location(source: ModelSource) -> tuple[str, dict[str, Any]]:
    """Return the first argument of `from_pretrained` for this source, and its further keyword arguments."""
    if source.kind == "gguf" and source.path is not None:
        return str(source.path.parent), {"gguf_file": source.path.name}
    return (source.hub_id or str(source.path)), {}


def _config_error(source: ModelSource, error: Exception, *, needs_code: bool) -> ModelError:
    if needs_code:
        return ModelError(
            f"{source.name} needs its own code, because transformers does not support this model;"
            " use --trust-remote-code to run it if you trust its source."
        )
    if source.kind == "hub":
        advice = (
            "use its preset, which `roofscope models` lists"
            if source.preset
            else "check the name, run `hf auth login` for a gated model, or give a local folder or a preset"
        )
        return ModelError(
            f"{source.name} is not in the local cache, and the hub does not provide it"
            f" (offline, gated, or no such model); {advice}."
        )
    return ModelError(f"{source.name}: its configuration cannot be read: {first_line(error)}.")


_QUANTIZER = "transformers.quantizers.quantizer_torchao"
_SAFETENSORS = "torchao.prototype.safetensors.safetensors_support"


def _without_torchao() -> None:
    """Import transformers' torchao quantizer, which every model imports, without torchao.

    The quantizer takes one function from torchao, for saving. Its replacement imports torchao when it is called.
    Modules that are already imported stay. If this import fails, the plain one follows at first use.
    """
    if _QUANTIZER in sys.modules or _SAFETENSORS in sys.modules:
        return

    def flatten_tensor_state_dict(*args: Any, **kwargs: Any) -> Any:
        return import_module(_SAFETENSORS).flatten_tensor_state_dict(*args, **kwargs)

    stub = ModuleType(_SAFETENSORS)
    vars(stub)["flatten_tensor_state_dict"] = flatten_tensor_state_dict
    sys.modules[_SAFETENSORS] = stub
    try:
        with suppress(Exception):
            import_module(_QUANTIZER)
    finally:
        del sys.modules[_SAFETENSORS]
