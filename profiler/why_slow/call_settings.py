"""The settings of a call, read from the model and its arguments: dtype, cache, mask, attention."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from profiler.loading.cache_argument import given_cache
from profiler.why_slow.observations import CallKind, CallSettings
from profiler.why_slow.plain_models import is_plain, plain_settings

_EXTRAS = ("output_hidden_states", "output_attentions", "output_scores", "output_logits")
_CONFIG_ATTRIBUTES = (
    "_attn_implementation_internal",
    "_experts_implementation_internal",
    "_output_attentions",
    "use_cache",
    *_EXTRAS,
)
"""Attributes of a config that the settings of a forward are read from."""


@dataclass
class ModelSettings:
    """Reads the settings of calls, with a cache for those of forwards."""

    _cache: weakref.WeakKeyDictionary[Any, Any] = field(default_factory=weakref.WeakKeyDictionary)
    """By model: (its first parameter, {key: (settings, device)}). A key holds all that the settings depend on."""

    def of(self, kind: CallKind, model: Any, named: dict[str, Any]) -> tuple[CallSettings, Any]:
        """(settings, device) of a call.

        Those of a forward are cached: to read them from a config takes as long as a small model's forward.
        """
        if is_plain(model):
            return plain_settings(model, math_attention=math_attention())
        if kind == "generate":
            return _settings(kind, model, named), model.device
        first, by_key = self._cache.get(model, (lambda: None, {}))
        parameter = first()
        if parameter is None:
            parameter = next(model.parameters())
            self._cache[model] = (weakref.ref(parameter), by_key)
        device_map = vars(model).get("hf_device_map")
        key = (
            parameter.dtype, parameter.device, model.training, device_map and tuple(device_map.values()),
            *_key(vars(model.config), named),
        )  # fmt: skip
        settings: tuple[CallSettings, Any] | None = by_key.get(key)
        if settings is None:
            settings = by_key[key] = (_settings(kind, model, named), model.device)
        return settings


def option(model: Any, named: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """The value that `generate` uses: the argument, else that of its generation config, of the model's, the default."""
    configs = (named.get("generation_config"), getattr(model, "generation_config", None))
    for value in (named.get(name), *(getattr(config, name, None) for config in configs)):
        if value is not None:
            return value
    return default


def _key(config: Mapping[str, Any], named: Mapping[str, Any]) -> tuple[Any, ...]:
    """The global state, config attributes and arguments that the settings of a forward depend on."""
    import torch

    return (
        torch.is_grad_enabled(),
        torch.get_num_threads(),
        math_attention(),
        type(given_cache(named)),
        *(config.get(name) for name in _CONFIG_ATTRIBUTES),
        *(bool(named[name]) if name in named else None for name in ("use_cache", *_EXTRAS)),
    )


def _settings(kind: CallKind, model: Any, named: Mapping[str, Any]) -> CallSettings:
    import torch

    generates = kind == "generate"
    config = model.config
    # An encoder's config has no `use_cache`.
    cache = (
        option(model, named, "use_cache", True)
        if generates
        else named.get("use_cache", getattr(config, "use_cache", False))
    )
    extras = [
        name
        for name in _EXTRAS
        if (option(model, named, name) if generates else named.get(name, getattr(config, name, False)))
    ]
    return CallSettings(
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        placement=pipelined_devices(model),
        attention=str(getattr(config, "_attn_implementation", None) or ""),
        math_attention=math_attention(),
        experts=str(getattr(config, "_experts_implementation", None) or ""),
        cache=bool(cache),
        cache_class=_cache_class(model, named, generates=generates) if cache else "",
        gradients=torch.is_grad_enabled() and not generates,
        training=model.training,
        outputs=tuple(extras),
        beams=option(model, named, "num_beams", 1) if generates else 1,
        answers=option(model, named, "num_return_sequences", 1) if generates else 1,
        assistant=named.get("assistant_model") is not None,
        threads=torch.get_num_threads(),
    )


def math_attention() -> bool:
    """Whether every fused kernel of SDPA is disabled. torch's switches apply to a CPU as well."""
    from torch.backends import cuda as switches

    fused = (switches.flash_sdp_enabled, switches.mem_efficient_sdp_enabled, switches.cudnn_sdp_enabled)
    return not any(enabled() for enabled in fused)


def _cache_class(model: Any, named: Mapping[str, Any], *, generates: bool) -> str:
    """The class of the cache that was passed, or of the one that `generate` makes."""
    given = given_cache(named)
    if given is not None:
        return type(given).__name__
    return str((option(model, named, "cache_implementation") if generates else None) or "DynamicCache")


def pipelined_devices(model: Any) -> str:
    """A sentence about a `device_map` over several GPUs; empty if at most one GPU computes."""
    gpus = gpus_in_turn(model)
    return f"layers run GPU after GPU: one of {gpus} works at a time" if gpus > 1 else ""


def gpus_in_turn(model: Any) -> int:
    """The number of GPUs of a `device_map`.

    accelerate's hooks pass the hidden states from GPU to GPU, so a step takes as long as on one of them.
    """
    places = {str(place).removeprefix("cuda:") for place in (getattr(model, "hf_device_map", None) or {}).values()}
    return len(places - {"cpu", "disk", "meta"})


def is_spread(model: Any) -> bool:
    """Whether a model's weights are on several devices, or on the disk."""
    places = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
    return len(places) > 1 or bool(places & {"disk"})


def prompt_ids(args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    """The token ids passed to a call, [batch, tokens]; None if there are none."""
    for value in (named.get("input_ids"), named.get("inputs"), *args[:1]):
        if getattr(value, "dim", None) is not None and value.dim() == 2:
            return value
    return None


def batch_inputs(args: tuple[Any, ...], named: Mapping[str, Any]) -> list[list[int]]:
    """The prompts passed to `generate_batch`, each a list of token ids."""
    inputs: list[list[int]] = named["inputs"] if "inputs" in named else args[0]
    return inputs


def tokens_of(args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    """A tensor with the shape [batch, tokens] of a call: its token ids, else a slice of its embeddings, else None."""
    ids, embedded = prompt_ids(args, named), named.get("inputs_embeds")
    return embedded[..., 0] if ids is None and embedded is not None else ids


def context_len(named: Mapping[str, Any]) -> int:
    """Tokens in a growing cache, by the shape of its keys: the length of a static one may need the device."""
    layers = getattr(given_cache(named), "layers", None) or []
    keys = getattr(layers[0], "keys", None) if layers else None
    return int(keys.shape[-2]) if keys is not None and keys.dim() == 4 else 0


def new_tokens(result: Any, prompt_len: int, model: Any) -> int:
    """Tokens per sequence that `generate` added to the prompt; of an encoder-decoder, to the start token."""
    if isinstance(result, dict) and not hasattr(result, "sequences"):  # of generate_batch, by request
        return max((len(each.generated_tokens) for each in result.values()), default=0)
    tokens = getattr(result, "sequences", result)
    length = int(tokens.shape[-1]) if hasattr(tokens, "shape") else 0
    return max(0, length - (1 if model.config.is_encoder_decoder else prompt_len))
