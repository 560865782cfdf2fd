"""The table of what is watched: each way in which scripts call models, how it is read, and how it is repeated."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from profiler.loading.cache_argument import keeps_last_logits, without_cache
from profiler.why_slow.call_settings import (
    by_name,
    common_settings,
    context_len,
    forward_settings,
    generate_settings,
    new_tokens,
    tokens_of,
)
from profiler.why_slow.kept_arguments import Arguments
from profiler.why_slow.observations import CallKind, CallSettings
from profiler.why_slow.plain_models import is_repeatable, token_ids, without_values

if TYPE_CHECKING:
    from profiler.why_slow.call_record import CallRecord

_NOT_REPEATED = ("streamer", "stopping_criteria", "max_length", "min_length", "max_time", "stop_strings")
"""Arguments that trials leave out: objects of the script with side effects, and limits that they take from the call."""
_NEEDS_LOGITS = {"labels", "logits_to_keep"}
"""Arguments of a forward whose logits are all used, or are chosen already."""


@dataclass(frozen=True)
class Given:
    """What the arguments of a call say."""

    settings: CallSettings
    shape: tuple[int, int, int]
    """As `CallRecord.shape`."""
    mask: Any = None
    repeated: Arguments | None = None
    """The arguments of a repetition; None if it cannot be repeated."""


@dataclass(frozen=True)
class Watched:
    """One way to call a model."""

    kind: CallKind
    method: str
    """Of the model."""
    read: Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Given]
    """Reads a model and its (positional, named) arguments."""
    limits: tuple[str, ...] = ()
    """The options that fix the number of new tokens."""
    takes_cache: bool = True
    """Whether a repetition can be passed a cache of transformers."""
    in_threads: bool = False
    """Whether its forwards run in a thread of transformers. It is then not shortened: the thread takes much of it."""

    def end(self, noted: CallRecord, model: Any, result: Any, *, logits_watched: bool) -> None:
        """Note the result of a call; with `logits_watched`, replace its logits by ones that note what is read."""
        if self.kind == "generate":
            noted.new_tokens = new_tokens(result, noted.shape[1], model)
        elif logits_watched and self.takes_cache and noted.arguments and not noted.shape[2]:
            from profiler.why_slow.read_logits import watch_logits

            # A forward without a cache could leave out logits.
            if keeps_last_logits(type(model)) and not _NEEDS_LOGITS & noted.arguments[1].keys():
                noted.read = watch_logits(result, noted.shape[1])


def _forward(model: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> Given:
    args, named = by_name(type(model).forward, args, named)
    return _of_tokens(forward_settings(model, named), args, named)


def _generate(model: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> Given:
    args, named = by_name(type(model).generate, args, named)
    return _of_tokens(generate_settings(model, named), args, named)


def _of_tokens(settings: CallSettings, args: tuple[Any, ...], named: Mapping[str, Any]) -> Given:
    tokens = tokens_of(args, named)
    rows, count = (1, 1) if tokens is None else (int(tokens.shape[0]), int(tokens.shape[1]))
    shape = rows * settings.times_computed, count, 0 if tokens is None else context_len(named)
    return Given(settings, shape, named.get("attention_mask"), (args, _stored(named)))


def _stored(named: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in without_cache(named).items() if name not in _NOT_REPEATED}


def _generate_batch(model: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> Given:
    args, named = by_name(type(model).generate_batch, args, named)
    prompts = named["inputs"]
    settings = replace(generate_settings(model, named), cache=True, cache_class="PagedAttentionCache")
    return Given(settings, (len(prompts), round(statistics.mean(map(len, prompts))), 0), None, (args, _stored(named)))


def _plain(model: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> Given:
    rows, tokens = token_ids(args, named).shape
    kept = tuple(map(without_values, args)), {name: without_values(value) for name, value in named.items()}
    repeated = kept if is_repeatable(args, named) else None
    return Given(common_settings(model), (rows, tokens, 0), named.get("attention_mask"), repeated)


FORWARD = Watched("forward", "__call__", _forward)
GENERATE = Watched("generate", "generate", _generate, limits=("max_new_tokens", "min_new_tokens"))
GENERATE_BATCH = Watched(
    "generate", "generate_batch", _generate_batch, limits=("max_new_tokens",), takes_cache=False, in_threads=True
)
PLAIN = Watched("forward", "__call__", _plain, takes_cache=False)
