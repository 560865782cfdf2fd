"""Load a model's transformers config from a hub id, a folder, a GGUF file or a preset, and reject impossible sizes."""

import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import Any

from profiler.errors import ModelError, first_line
from profiler.loading.meta_model import quiet_libraries
from profiler.loading.request import model_errors
from profiler.loading.source import ModelSource
from profiler.packages import need


def load_config(source: ModelSource, trust_remote_code: bool = False) -> Any:
    """Load the model's transformers config. Raises ModelError, or RequestError if the package gguf is missing."""
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
            if source.kind == "gguf":
                return config_from(raw, source.name)  # reading the file again takes seconds
            _check_claims(raw)
            config = AutoConfig.from_pretrained(where, trust_remote_code=trust_remote_code)
            _check_sizes(config)
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

    _check_claims(content)
    with quiet_libraries(), model_errors(f"{name}: its configuration cannot be read"):
        config = AutoConfig.for_model(**content)
        _check_sizes(config)
    _remove_code(name, config)
    return config


def _remove_code(name: str, config: Any) -> None:
    """Remove `auto_map`, by which transformers runs custom code or prompts. Raises ModelError for a hub's kernel."""
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
    """Import transformers' torchao quantizer, which every model imports, without torchao, until it saves."""
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


MOST_PARTS = 4096
"""Most layers, experts, heads or labels of a model. The libraries build them one by one, so a huge number never ends.
The deepest published model has 1,000 layers (DeepNet, arXiv 2203.00555), the widest 2,048 experts (Switch-C, arXiv
2101.03961)."""
_PARTS = re.compile(r"(^|[_.])(layers?|blocks?|experts?|heads?|codebooks?|labels?)$|^n_(layer|head)$|(^|_)depths?$")
_LEAST = {
    "vocab_size": 1, "hidden_size": 1, "intermediate_size": 1, "num_hidden_layers": 1, "num_attention_heads": 1,
    "num_key_value_heads": 1, "sliding_window": 0,
}  # fmt: skip


def _check_claims(content: Mapping[str, Any]) -> None:
    """Check a parsed config.json. Raises ModelError if it has too many parts, or its own weight file name."""
    stack: list[tuple[str, Any]] = [("", content)]
    while stack:
        name, value = stack.pop()  # an element of a list has the name of the list
        if isinstance(value, Mapping):
            stack += [(str(key), inner) for key, inner in value.items()]
        elif isinstance(value, list):
            stack += [(name, inner) for inner in value]
        elif name == "transformers_weights":
            raise ModelError(
                f"its config.json names {value!r} as its weights; rename them to model.safetensors and delete that key."
            )
        elif isinstance(value, int) and value > MOST_PARTS and _PARTS.search(name):
            raise ModelError(
                f"its configuration says {name} = {value}; roofscope reads models with at most {MOST_PARTS}."
            )


def _check_sizes(config: Any) -> None:
    """Raises ModelError for a config with a size below its least in any layer; a window of 0 means none."""
    text = config.get_text_config()
    for layer in text.per_layer_config if getattr(text, "is_heterogeneous", False) else [text]:
        for name, least in _LEAST.items():
            value = getattr(layer, name, None)
            if isinstance(value, int) and value < least:
                raise ModelError(f"its configuration says {name} = {value}, which is not possible.")
