"""What may be changed about a loop of the script's own around its forwards."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch

from profiler.diagnosis.seen import Call, Read
from profiler.machine.cache_name import argument_name, cache_of
from profiler.probes.repeats import Candidate, Group, repeat
from profiler.units import duration

# From so many forwards on, each of a token more than the one before, they are a loop that has no cache.
_FEWEST_IN_A_LOOP = 4
# Forwards of a loop that are run behind each other to see what waiting for each of them costs.
_IN_A_ROW = 8


def grows_by_a_token(calls: Sequence[Call]) -> bool:
    """Whether most of these forwards hand over one token more than the one before, and no cache."""
    grows = [after.prompt_len - before.prompt_len for before, after in itertools.pairwise(calls)]
    return len(grows) >= _FEWEST_IN_A_LOOP and grows.count(1) >= 0.8 * len(grows) and not calls[0].context_len


def loop_without_cache(group: Group) -> Candidate | None:
    """Forwards that hand over one more token each time: a loop that decodes without a cache."""
    calls = group.calls
    if not grows_by_a_token(calls):
        return None
    kept = [(call, noted) for call, noted in zip(calls, group.notes, strict=True) if noted.arguments is not None]
    model, first, last = group.model, kept[0][0], kept[-1][0]
    runs = [repeat(noted, call, model) for call, noted in kept]
    gradients = first.settings["gradients"] == "on"

    def as_is() -> None:
        for run in runs:
            run()

    def changed() -> None:
        with torch.set_grad_enabled(gradients):
            ids = torch.zeros(first.batch_size, first.prompt_len, dtype=torch.long, device=model.device)
            cache = cache_of(model(ids, use_cache=True))
            name = argument_name(model)
            for _ in range(len(kept) - 1):
                cache = cache_of(model(ids[:, :1], use_cache=True, **{name: cache}))

    return Candidate(
        "cache-off",
        f"each of {len(calls)} forwards computes the whole prompt again, which grows by one token",
        "hand past_key_values on, and only the new token",
        first.where,
        as_is,
        changed,
        (sum(call.steady_s for call, _ in kept),),
        shape=f"{len(kept)} forwards of {first.prompt_len} to {last.prompt_len} tokens",
    )


def without_reads(group: Group, read: Read) -> Candidate:
    """Forwards of a loop with as many reads behind each as the loop has, and without."""
    kept = [(call, noted) for call, noted in zip(group.calls, group.notes, strict=True) if noted.arguments is not None]
    middle = len(kept) // 2
    chosen = kept[max(0, middle - _IN_A_ROW // 2) : middle + _IN_A_ROW // 2]
    runs = [repeat(noted, call, group.model) for call, noted in chosen]
    clock, reads_each = chosen[0][1].clock, max(1, round(read.count / len(group.calls)))

    def in_a_row(reads: int) -> None:
        for run in runs:
            value = run().logits[0, -1, 0]
            for _ in range(reads):
                value.item()
        clock.synchronize()

    return Candidate(
        "host-sync",
        f"the host reads {read.count} values, waits {duration(read.seconds)} for them, and cannot run ahead",
        "keep tokens on the device, and read them every few steps or at the end",
        read.where,
        functools.partial(in_a_row, reads_each),
        functools.partial(in_a_row, 0),
        (sum(call.steady_s for call, _ in chosen),),
        shape=f"{len(chosen)} forwards in a row",
    )
