"""The settings of a call, read from the model and its arguments: dtype, cache, mask, attention."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from profiler.loading.cache_argument import given_cache
from profiler.why_slow.observations import CallKind

_EXTRAS = ("output_hidden_states", "output_attentions", "output_scores", "output_logits")
_OF_A_CONFIG = (
    "_attn_implementation_internal",
    "_experts_implementation_internal",
    "_output_attentions",
    "use_cache",
    *_EXTRAS,
)
"""Where a config keeps what settings are read from."""


@dataclass
class ModelSettings:
    """Settings of calls, those of forwards kept by their model."""

    _kept: weakref.WeakKeyDictionary[Any, Any] = field(default_factory=weakref.WeakKeyDictionary)
    """By model: its first parameter, and by what may change them its settings and device."""

    def of(self, kind: CallKind, model: Any, named: dict[str, Any]) -> tuple[dict[str, str], Any]:
        """(settings, device) of a call. A forward's are kept until something tells that they may have changed: reading
        them from a config takes as long as a small model's own work."""
        if kind == "generate":
            return _settings(kind, model, named), model.device
        first, kept = self._kept.get(model, (lambda: None, {}))
        parameter = first()
        if parameter is None:
            parameter = next(model.parameters())
            self._kept[model] = (weakref.ref(parameter), kept)
        placed = vars(model).get("hf_device_map")
        key = (
            parameter.dtype, parameter.device, model.training, placed and tuple(placed.values()),
            *_seen_cheaply(vars(model.config), named),
        )  # fmt: skip
        found: tuple[dict[str, str], Any] | None = kept.get(key)
        if found is None:
            found = kept[key] = (_settings(kind, model, named), model.device)
        return found


def option(model: Any, named: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """What holds for a call of `generate`: its own argument, its generation config's, the model's, the default."""
    configs = (named.get("generation_config"), getattr(model, "generation_config", None))
    for value in (named.get(name), *(getattr(config, name, None) for config in configs)):
        if value is not None:
            return value
    return default


def _seen_cheaply(config: Mapping[str, Any], named: Mapping[str, Any]) -> tuple[Any, ...]:
    """All but the model itself that a forward's settings follow from, as it lies there."""
    import torch

    return (
        torch.is_grad_enabled(),
        torch.get_num_threads(),
        _kernel(),
        type(given_cache(named)),
        *(config.get(name) for name in _OF_A_CONFIG),
        *(bool(named[name]) if name in named else None for name in ("use_cache", *_EXTRAS)),
    )


def _settings(kind: CallKind, model: Any, named: Mapping[str, Any]) -> dict[str, str]:
    import torch

    generates = kind == "generate"
    config = model.config
    cache = option(model, named, "use_cache", True) if generates else _forwards_cache(config, named)
    extras = [
        name
        for name in _EXTRAS
        if (option(model, named, name) if generates else named.get(name, getattr(config, name, False)))
    ]
    return {
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "placement": pipelined_devices(model) or "-",
        "attention": str(getattr(config, "_attn_implementation", None) or "-"),
        "kernel": _kernel(),
        "experts": str(getattr(config, "_experts_implementation", None) or "-"),
        "cache": "on" if cache else "off",
        "cache_class": _cache_class(model, named, generates=generates) if cache else "-",
        "gradients": "on" if torch.is_grad_enabled() and not generates else "off",
        "mode": "train" if model.training else "eval",
        "outputs": ", ".join(extras) or "-",
        "beams": str(option(model, named, "num_beams", 1)) if generates else "-",
        "answers": str(option(model, named, "num_return_sequences", 1)) if generates else "-",
        "assistant": "yes" if named.get("assistant_model") is not None else "no",
        "threads": str(torch.get_num_threads()),
    }


def _forwards_cache(config: Any, named: Mapping[str, Any]) -> bool:
    """Whether a forward keeps keys and values; an encoder's config knows of no cache."""
    return bool(named.get("use_cache", getattr(config, "use_cache", False)))


def _kernel() -> str:
    """`math` where every fused kernel of SDPA is switched off; torch's switches hold for a CPU as well."""
    from torch.backends import cuda as switches

    fused = (switches.flash_sdp_enabled, switches.mem_efficient_sdp_enabled, switches.cudnn_sdp_enabled)
    return "-" if any(enabled() for enabled in fused) else "math"


def _cache_class(model: Any, named: Mapping[str, Any], *, generates: bool) -> str:
    """What holds keys and values: the class that was handed over, or what `generate` is to make."""
    given = given_cache(named)
    if given is not None:
        return type(given).__name__
    return str((option(model, named, "cache_implementation") if generates else None) or "DynamicCache")


def pipelined_devices(model: Any) -> str:
    """What a `device_map` over several cards comes to, in words; empty where one card does all.

    accelerate's hooks hand the hidden states from card to card, so that a step takes as long as on one of them.
    """
    places = {str(place).removeprefix("cuda:") for place in (getattr(model, "hf_device_map", None) or {}).values()}
    cards = len(places - {"cpu", "disk", "meta"})
    return f"layers run card after card: one of {cards} works at a time" if cards > 1 else ""


def tokens_of(args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    """The tokens that were handed over, whatever they were called."""
    for value in (named.get("input_ids"), named.get("inputs"), *args[:1]):
        if getattr(value, "dim", None) is not None and value.dim() == 2:
            return value
    embedded = named.get("inputs_embeds")
    return embedded[..., 0] if embedded is not None else None


def times_computed(settings: Mapping[str, str]) -> int:
    """How often `generate` computes each row that it is handed: `_expand_inputs_for_generation` repeats it, before the
    prompt is computed, for the beams or for the answers wanted, whichever are more."""
    return max(int(settings[name]) if settings[name] != "-" else 1 for name in ("beams", "answers"))


def context_len(named: Mapping[str, Any]) -> int:
    """Tokens in a cache that grows, told by its shapes: asking a static one may wait for the device."""
    layers = getattr(given_cache(named), "layers", None) or []
    keys = getattr(layers[0], "keys", None) if layers else None
    return int(keys.shape[-2]) if keys is not None and keys.dim() == 4 else 0


def new_tokens(result: Any, prompt_len: int, model: Any) -> int:
    tokens = getattr(result, "sequences", result)
    length = int(tokens.shape[-1]) if hasattr(tokens, "shape") else 0
    return max(0, length - (1 if model.config.is_encoder_decoder else prompt_len))


def nbytes_of(value: Any) -> int:
    return int(value.numel() * value.element_size()) if hasattr(value, "element_size") else 0
