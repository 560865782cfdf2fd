"""KV caches of engines: create, fill without a prefill, empty."""

from collections.abc import Callable
from typing import Any

import torch

from profiler.errors import RequestError, first_line
from profiler.facts.cache_format import CacheFormat


def static_cache(model: Any, slots: int) -> Any:
    """Return transformers' StaticCache for this model. Raises RequestError if the model does not support it."""
    from transformers import StaticCache

    try:
        return StaticCache(config=model.config, max_cache_len=slots)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise RequestError(f"this model has no static cache in transformers: {first_line(error)}.") from error


def quantized_cache(config: Any, stored: CacheFormat) -> Any:
    """Return an empty QuantizedCache. Raises RequestError without its backend, or with other than full attention."""
    from transformers import QuantizedCache

    feature = f"--cache {stored.backend}"
    try:
        return QuantizedCache(stored.backend, config)
    except ImportError as error:
        raise RequestError(f"{feature} needs {stored.package}: pip install {stored.package}.") from error
    except ValueError as error:
        if "Unknown quantization backend" in str(error):
            raise RequestError(f"{feature} needs transformers 5.22: pip install 'transformers>=5.22'.") from error
        raise RequestError(f"{feature}: transformers quantises only the caches of full attention layers.") from error


def unwindowed(cache: Any, slots: int) -> Any:
    """Replace windowed layers that hold all `slots`: they count on the host, and no captured graph replays that."""
    from transformers.cache_utils import StaticLayer

    cache.layers = [
        StaticLayer(max_cache_len=slots) if layer.is_sliding and layer.max_cache_len == slots else layer
        for layer in cache.layers
    ]
    return cache


def moving_window(cache: Any) -> bool:
    """Return whether a layer of a static cache has a window that moves once it is full."""
    return any(hasattr(layer, "cumulative_length_int") for layer in cache.layers)


def deepen(cache: Any, context: int) -> None:
    """Fill a cache of one token with `context` random ones; states stay. Raises RequestError without layers."""
    if not hasattr(cache, "layers"):
        raise RequestError("this model's cache cannot be filled directly; use --prompt-lens instead of --context-lens.")
    for layer in cache.layers:
        states = _states(layer)
        if hasattr(layer, "_quantized_keys"):
            _deepen_quantized(layer, context)
        elif states is not None and getattr(layer, "max_cache_len", None):
            for each in states:
                each[:, :, :context].normal_()
            layer.cumulative_length.fill_(context)
            if hasattr(layer, "cumulative_length_int"):
                layer.cumulative_length_int = context
        elif states is not None:
            window = getattr(layer, "sliding_window", None)
            tokens = context if window is None else min(context, window - 1)
            layer.keys, layer.values = (_random_like(each, tokens) for each in states)
            layer.cumulative_length = context  # which only a layer with a window reads


def _deepen_quantized(layer: Any, context: int) -> None:
    for name in ("key", "value"):
        axis = {"axis": getattr(layer, f"axis_{name}")} if hasattr(layer, f"axis_{name}") else {}
        one = layer._dequantize(getattr(layer, f"_quantized_{name}s"))
        setattr(layer, f"_quantized_{name}s", layer._quantize(_random_like(one, context), **axis))
    layer.cumulative_length = context


def rewind(cache: Any, context: int, *, growing: bool = False) -> Callable[[], None]:
    """Return a function that sets a static cache, or a `growing` one, back to `context` tokens, in one kernel."""
    with_states = (layer for layer in getattr(cache, "layers", ()) if _states(layer) is not None)
    layers = [layer for layer in with_states if getattr(layer, "max_cache_len", None)]
    if not layers:
        filled = [(layer, dict(vars(layer))) for layer in getattr(cache, "layers", ()) if growing]
        return lambda: [vars(layer).update(before) for layer, before in filled].clear()
    lengths = torch.full((len(layers),), context, dtype=torch.long, device=layers[0].cumulative_length.device)
    for layer, length in zip(layers, lengths.unbind(), strict=True):
        layer.cumulative_length = length

    def set_back() -> None:
        lengths.fill_(context)
        for layer in layers:
            if hasattr(layer, "cumulative_length_int"):
                layer.cumulative_length_int = context

    return set_back


def emptied(cache: Any) -> Any:
    """Empty a cache and return it; None if not all its layers are growing ones."""
    for layer in getattr(cache, "layers", [None]):
        states = _states(layer)
        if states is None or getattr(layer, "max_cache_len", None):
            return None
        layer.keys, layer.values = (torch.empty_like(each[:, :, :0]) for each in states)
        layer.cumulative_length = 0
    return cache


def _states(layer: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Keys and values of a layer, [batch, heads, tokens, width] each; None if it has none."""
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if not isinstance(keys, torch.Tensor) or not isinstance(values, torch.Tensor) or keys.dim() != 4:
        return None
    return keys, values


def _random_like(states_BHSD: torch.Tensor, tokens: int) -> torch.Tensor:  # noqa: N803
    batch, heads, _, width = states_BHSD.shape
    return torch.randn(batch, heads, tokens, width, dtype=states_BHSD.dtype, device=states_BHSD.device)


def greedy_token(output: Any) -> torch.Tensor:
    """Return the most likely next tokens of a model's output, [batch, 1]."""
    return output.logits[:, -1:].argmax(dim=-1)
