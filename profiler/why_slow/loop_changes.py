"""Changes that concern several calls: batching, repeated prompts, tokens read one by one."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from profiler import effort
from profiler.loading.cache_argument import argument_name, cache_of
from profiler.units import duration
from profiler.why_slow.call_record import CallRecord
from profiler.why_slow.observations import Call, Read, most_at_once, steady_s
from profiler.why_slow.repeat_call import CallGroup, Candidate, RepeatedRun, repeat

# Prompts that are tried as one batch, and from how many calls on that is worth a trial.
_TOGETHER = 8
_FEWEST_ONE_BY_ONE = 4


def padding_changes(
    call: Call, noted: CallRecord, model: Any, again: RepeatedRun, own_s: tuple[float, ...]
) -> Iterator[Candidate]:
    """Padding that all sequences share is cut off; else sequences of like length are passed together."""
    mask = noted.mask
    if mask is None or mask.dim() != 2 or mask.shape[1] != call.prompt_len or call.context_len or bool(mask.all()):
        return
    share = f"{100 * call.padding:.0f} % of the tokens handed over are padding"
    if call.settings["device"] != "cpu" and call.settings["attention"] == "sdpa":
        # torch's flash kernel takes no mask there (scaled_dot_product_attention); the one of a CPU does.
        share += ", and their mask keeps SDPA from its flash kernel"
    used = mask.bool().any(0)
    rows = list(range(len(mask)))
    if not bool(used.all()):
        yield Candidate(
            "padding", share, 'pad to the longest text of a batch alone: padding="longest"', call.where, again,
            _on_parts(noted, call, model, [rows]), own_s,
        )  # fmt: skip
        return
    if len(rows) < 2:
        return
    lengths = mask.sum(1).tolist()
    order = sorted(rows, key=lambda row: lengths[row])
    cuts = range(1, len(rows))
    cut = min(cuts, key=lambda at: at * lengths[order[at - 1]] + (len(rows) - at) * lengths[order[-1]])
    yield Candidate(
        "padding", share, "sort the texts by length, and pass those of like length together", call.where, again,
        _on_parts(noted, call, model, [order[:cut], order[cut:]]), own_s,
    )  # fmt: skip


def _on_parts(noted: CallRecord, call: Call, model: Any, parts: Sequence[Sequence[int]]) -> RepeatedRun:
    """Run the call on some rows at a time, each without the columns that are padding in all of its rows."""
    args, named = noted.arguments or ((), {})
    shape = tuple(noted.mask.shape)

    def of_part(value: Any, rows: Any, columns: Any) -> Any:
        fits = isinstance(value, torch.Tensor) and tuple(value.shape) == shape
        return value[rows][:, columns] if fits else value

    runs = []
    for part in parts:
        rows = torch.tensor(part, device=noted.mask.device)
        columns = noted.mask[rows].bool().any(0).nonzero()[:, 0]
        cut = copy.copy(noted)
        cut.arguments = (
            tuple(of_part(value, rows, columns) for value in args),
            {name: of_part(value, rows, columns) for name, value in named.items()},
        )
        runs.append(repeat(cut, call, model))

    def run() -> None:
        for each in runs:
            each()

    return run


def batching_changes(group: CallGroup) -> Iterator[Candidate]:
    """Prompts that were passed one by one, as one batch; those that go on from an earlier answer are no such."""
    kept = [(call, noted) for call, noted in zip(group.calls, group.notes, strict=True) if noted.arguments is not None]
    prompts = [_prompt(noted) for _, noted in kept]
    if len(kept) < _FEWEST_ONE_BY_ONE or any(prompt is None or len(prompt) != 1 for prompt in prompts):
        return
    if _goes_on(prompts):
        return
    chosen = [kept[len(kept) * index // min(_TOGETHER, len(kept))] for index in range(min(_TOGETHER, len(kept)))]
    ids = [_prompt(noted)[0] for _, noted in chosen]
    longest = max(map(len, ids))
    batch = torch.stack([torch.cat([row.new_zeros(longest - len(row)), row]) for row in ids])
    mask = torch.stack([torch.cat([row.new_zeros(longest - len(row)), torch.ones_like(row)]) for row in ids])
    runs = [repeat(noted, call, group.model) for call, noted in chosen]
    call, noted = chosen[0]
    whole = copy.copy(noted)
    named = {name: value for name, value in (noted.arguments or ((), {}))[1].items() if name != "inputs"}
    whole.arguments = ((), {**named, "input_ids": batch, "attention_mask": mask})
    tokens = max(call.new_tokens for call, _ in chosen)
    options = {"max_new_tokens": tokens, "min_new_tokens": tokens}

    at_once = most_at_once(group.calls)

    def as_is() -> None:
        if at_once == 1:
            for run in runs:
                run()
            return
        with ThreadPoolExecutor(at_once) as threads:
            for done in [threads.submit(run) for run in runs]:
                done.result()

    how = "one by one" if at_once == 1 else f"one to a call, of which up to {at_once} run at once in threads"
    yield Candidate(
        "one-by-one",
        f"{len(group.calls)} prompts are passed {how}",
        f"pass {len(chosen)} at a time, padded on the left",
        call.where,
        as_is,
        repeat(whole, call, group.model, options),
        (steady_s([call for call, _ in chosen]),),
        shape=f"{len(chosen)} of the prompts",
    )


def _prompt(noted: CallRecord) -> Any:
    args, named = noted.arguments or ((), {})
    for value in (named.get("input_ids"), named.get("inputs"), *args[:1]):
        if isinstance(value, torch.Tensor) and value.dim() == 2:
            return value
    return None


def _goes_on(prompts: Sequence[Any]) -> bool:
    """Whether most prompts begin with the whole of the one before, as a chat's do."""
    pairs = list(itertools.pairwise(prompts))
    on = sum(
        before.shape[1] < after.shape[1] and bool((after[:, : before.shape[1]] == before).all())
        for before, after in pairs
    )
    return bool(on > len(pairs) / 2)


# From so many forwards on, each of a token more than the one before, they are a loop that has no cache.
_FEWEST_IN_A_LOOP = 4
# Forwards of a loop that are run behind each other to see what waiting for each of them costs.


def grows_by_a_token(calls: Sequence[Call]) -> bool:
    """Whether most of these forwards hand over one token more than the one before, and no cache."""
    grows = [after.prompt_len - before.prompt_len for before, after in itertools.pairwise(calls)]
    return len(grows) >= _FEWEST_IN_A_LOOP and grows.count(1) >= 0.8 * len(grows) and not calls[0].context_len


def loop_without_cache(group: CallGroup) -> Candidate | None:
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


def without_reads(group: CallGroup, read: Read) -> Candidate:
    """Forwards of a loop with as many reads behind each as the loop has, and without."""
    kept = [(call, noted) for call, noted in zip(group.calls, group.notes, strict=True) if noted.arguments is not None]
    middle = len(kept) // 2
    chosen = kept[max(0, middle - effort.STANDARD.script_calls // 2) : middle + effort.STANDARD.script_calls // 2]
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
