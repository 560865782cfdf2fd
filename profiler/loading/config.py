"""A model's transformers config, from a hub id, a folder, a GGUF file or a preset."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from profiler.errors import ModelError, first_line
from profiler.loading.config_limits import check_claims, check_sizes
from profiler.loading.gguf_header import check_gguf
from profiler.loading.library import import_transformers
from profiler.loading.meta_model import quiet_libraries
from profiler.loading.source import ModelSource
from profiler.packages import need


def load_config(source: ModelSource, trust_remote_code: bool = False) -> Any:
    """The model's transformers config. Raises ModelError when it cannot be had, RequestError where gguf is missing."""
    import_transformers()
    from transformers import AutoConfig, PreTrainedConfig

    raw: dict[str, Any] = {}
    if source.kind == "gguf" and source.path is not None:
        check_gguf(source.path)
        need("gguf", "a GGUF file")
    with quiet_libraries():
        try:
            if source.kind == "card" and source.card is not None:
                return config_from(source.card.config, source.name)
            where, extra = pretrained_location(source)
            if source.kind != "gguf":
                raw, _ = PreTrainedConfig.get_config_dict(where)
                check_claims(raw)
            config = AutoConfig.from_pretrained(where, trust_remote_code=trust_remote_code, **extra)
            check_sizes(config)
        except ModelError:
            raise
        except Exception as error:
            raise _config_error(source, error, own_code="auto_map" in raw and not trust_remote_code) from error
    if not trust_remote_code:
        _leave_out_code(source.name, config)
    return config


def config_from(content: Mapping[str, Any], name: str) -> Any:
    """The transformers config of a parsed config.json, without code of its own. Raises ModelError."""
    import_transformers()
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
    _leave_out_code(name, config)
    return config


def architecture_of(config: Any) -> str:
    """The class of transformers that a config's causal LM is, as `config.json` names it; its model type otherwise."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    named = getattr(config, "architectures", None) or [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)]
    return str(named[0] or config.model_type)


def _leave_out_code(name: str, config: Any) -> None:
    """Leave out what would have transformers run or fetch a stranger's code, or ask at the terminal whether to."""
    for part in (config, *(getattr(config, inner, None) for inner in getattr(config, "sub_configs", ()))):
        if hasattr(part, "auto_map"):
            del part.auto_map
        for kind in ("_attn_implementation", "_experts_implementation"):
            # `owner/name` is a kernel on the hub; those that transformers has itself are words.
            if "/" in str(wanted := getattr(part, kind, None)):
                raise ModelError(
                    f"{name}: its configuration asks for the code {wanted!r} from the hub;"
                    " --trust-remote-code lets it, if you trust its source."
                )


def pretrained_location(source: ModelSource) -> tuple[str, dict[str, Any]]:
    if source.kind == "gguf" and source.path is not None:
        return str(source.path.parent), {"gguf_file": source.path.name}
    return (source.hub_id or str(source.path)), {}


def _config_error(source: ModelSource, error: Exception, *, own_code: bool) -> ModelError:
    if own_code:
        return ModelError(
            f"{source.name} comes with code of its own, and transformers knows no such model without;"
            " --trust-remote-code runs it, if you trust its source."
        )
    if source.kind == "hub":
        hint = " Its card is known: `roofscope models` has the name that stands for it." if source.card else ""
        return ModelError(
            f"{source.name} is neither in the local cache nor to be had from the hub"
            f" (offline, gated, or no such model).{hint}"
        )
    return ModelError(f"{source.name}: its configuration cannot be read: {first_line(error)}.")
