"""The table of what is watched: each way in which scripts call models, how it is read, and how it is repeated."""

import functools
import inspect
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from profiler.loading.cache_argument import given_cache, without_cache
from profiler.why_slow.kept_arguments import Arguments
from profiler.why_slow.observations import CallKind, CallSettings
from profiler.why_slow.plain_models import repeatable, token_ids

_NOT_REPEATED = ("streamer", "stopping_criteria", "max_length", "min_length", "max_time", "stop_strings")
"""Arguments that trials leave out: objects of the script with side effects, and limits that they take from the call."""

Given = tuple[CallSettings, tuple[int, int, int], Any, Arguments | None]
"""What arguments say: (settings, shape as in `CallRecord`, mask or None, those of a repetition if it can be one)."""


@dataclass(frozen=True)
class Watched:
    """One way to call a model."""

    kind: CallKind
    method: str
    read: Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Given]
    """Reads a model and its (positional, named) arguments."""
    limits: tuple[str, ...] = ()
    """The options that fix the number of new tokens."""
    takes_cache: bool = True
    """Whether a repetition can be passed a cache of transformers."""
    in_threads: bool = False
    """Whether its forwards run in a thread of transformers. It is then not shortened: the thread takes much of it."""
    sees_attention: bool = False
    """Whether the shapes of its attention are recorded, which no config says."""


def _of_tokens(settings_of: Callable[..., CallSettings], method: str, model: Any, args: Any, named: Any) -> Given:
    args, named = by_name(getattr(type(model), method), args, named)
    settings = settings_of(model, named)
    ids, embedded = prompt_ids(args, named), named.get("inputs_embeds")
    tokens = embedded[..., 0] if ids is None and embedded is not None else ids
    tokens = named.get("decoder_input_ids") if tokens is None else tokens
    rows = next((int(each.shape[0]) for each in (tokens, *args, *named.values()) if getattr(each, "ndim", 0)), 1)
    count = int(method == "generate") if tokens is None else int(tokens.shape[1])  # `generate` has a start token
    shape = rows * settings.times_computed, count, 0 if tokens is None else context_len(named)
    return settings, shape, named.get("attention_mask"), (args, _stored(named))


def _stored(named: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in without_cache(named).items() if name not in _NOT_REPEATED}


def _generate_batch(model: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> Given:
    args, named = by_name(type(model).generate_batch, args, named)
    prompts = named["inputs"]
    settings = replace(generate_settings(model, named), cache=True, cache_class="PagedAttentionCache")
    return settings, (len(prompts), round(statistics.mean(map(len, prompts))), 0), None, (args, _stored(named))


def _plain(model: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> Given:
    shape = (*token_ids(args, named).shape, 0)
    return common_settings(model), shape, named.get("attention_mask"), repeatable(args, dict(named))


FORWARD = Watched("forward", "__call__", lambda *call: _of_tokens(forward_settings, "forward", *call))
GENERATE = Watched(
    "generate", "generate", lambda *call: _of_tokens(generate_settings, "generate", *call),
    limits=("max_new_tokens", "min_new_tokens"),
)  # fmt: skip
GENERATE_BATCH = Watched(
    "generate", "generate_batch", _generate_batch, limits=("max_new_tokens",), takes_cache=False, in_threads=True
)
PLAIN = Watched("forward", "__call__", _plain, takes_cache=False, sees_attention=True)


_EXTRAS = ("output_hidden_states", "output_attentions", "output_scores", "output_logits")


def common_settings(model: Any) -> CallSettings:
    import torch

    weight, fused = next(model.parameters()), torch.backends.cuda  # whose switches apply to a CPU as well
    return CallSettings(
        dtype=str(weight.dtype).removeprefix("torch."),
        device=str(weight.device),
        math_attention=not (
            fused.flash_sdp_enabled() or fused.mem_efficient_sdp_enabled() or fused.cudnn_sdp_enabled()
        ),
        gradients=torch.is_grad_enabled(),
        training=model.training,
        threads=torch.get_num_threads(),
    )


def forward_settings(model: Any, named: Mapping[str, Any]) -> CallSettings:
    """The settings of a forward of transformers, in a tenth of a millisecond."""
    # An encoder's config has no `use_cache`.
    return _settings(model, named, lambda name: named.get(name, getattr(model.config, name, None)), "DynamicCache")


def generate_settings(model: Any, named: Mapping[str, Any]) -> CallSettings:
    """The settings of a `generate`, in a tenth of a millisecond."""
    value = functools.partial(option, model, named)
    return replace(
        _settings(model, named, value, value("cache_implementation") or "DynamicCache"),
        gradients=False,
        beams=value("num_beams", 1),
        answers=value("num_return_sequences", 1),
        assistant=named.get("assistant_model") is not None,
    )


def _settings(model: Any, named: Mapping[str, Any], value: Callable[[str], Any], made: str) -> CallSettings:
    """The settings of a call whose options have a `value`, and which by default makes a cache of the class `made`."""
    config, cache, given = model.config, bool(value("use_cache")), given_cache(named)
    gpus = gpus_in_turn(model)
    return replace(
        common_settings(model),
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        placement=f"layers run GPU after GPU: one of {gpus} works at a time" if gpus > 1 else "",
        attention=str(getattr(config, "_attn_implementation", None) or ""),
        experts=str(getattr(config, "_experts_implementation", None) or ""),
        cache=cache,
        cache_class=str(made if given is None else type(given).__name__) if cache else "",
        outputs=tuple(name for name in _EXTRAS if value(name)),
    )


def by_name(method: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """The arguments of a method, each with its name, so that a cache is known as one."""
    names = _parameters(inspect.unwrap(method))  # what is patched in leads to the recorder, which the cache would keep
    return (args, named) if len(args) > len(names) else ((), {**dict(zip(names, args, strict=False)), **named})


@functools.cache
def _parameters(method: Any) -> tuple[str, ...]:
    _self, *others = inspect.signature(method).parameters.values()
    return tuple(each.name for each in others if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD)


def option(model: Any, named: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """The value that `generate` uses: the argument, else that of its generation config, of the model's, the default."""
    configs = (named.get("generation_config"), getattr(model, "generation_config", None))
    values = (named.get(name), *(getattr(config, name, None) for config in configs))
    return next((value for value in values if value is not None), default)


def device_map_of(model: Any) -> dict[str, str]:
    """The place of each part of a model with a `device_map`, such as `cuda:0`, `cpu` or `disk`; else empty."""
    places = getattr(model, "hf_device_map", None) or {}
    return {name: f"cuda:{place}" if isinstance(place, int) else str(place) for name, place in places.items()}


def gpus_in_turn(model: Any) -> int:
    """The number of GPUs of a `device_map`.

    accelerate's hooks pass the hidden states from GPU to GPU, so a step takes as long as on one of them.
    """
    return len(set(device_map_of(model).values()) - {"cpu", "disk", "meta"})


def is_spread(model: Any) -> bool:
    """Whether a model's weights are on several devices, or on the disk."""
    places = set(device_map_of(model).values())
    return len(places) > 1 or "disk" in places


def prompt_ids(args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    """The token ids passed to a call, [batch, tokens]; None if there are none."""
    values = (named.get("input_ids"), named.get("inputs"), *args[:1])
    return next((value for value in values if hasattr(value, "dim") and value.dim() == 2), None)


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
