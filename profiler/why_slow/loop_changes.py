"""Changes to padding, and changes that concern several calls: batches, a cache for a loop, reads on the host."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from profiler import effort
from profiler.loading.cache_argument import argument_name, cache_of
from profiler.units import duration, percent
from profiler.why_slow.call_record import CallRecord
from profiler.why_slow.call_settings import batch_inputs, prompt_ids
from profiler.why_slow.observations import Call, LineTime, most_at_once, padding_share, steady_s
from profiler.why_slow.plain_models import is_plain, token_ids, with_ids
from profiler.why_slow.repeat_call import (
    CallGroup,
    CallsToChange,
    Candidate,
    Run,
    in_even_sequence,
    in_sequence,
    repeat,
    with_steps,
)

# At most so many prompts are tried together, as one batch if there are at least so many calls.
_MOST_IN_A_BATCH = 8
_FEWEST_ONE_BY_ONE = 4


def padding_change(calls: CallsToChange) -> Candidate | None:
    """A change that removes padding: cut columns that are padding in all rows, else split the batch by length."""
    call, noted = calls.middle
    mask = noted.mask
    if mask is None or mask.dim() != 2 or mask.shape[1] != call.prompt_len or call.context_len or bool(mask.all()):
        return None
    share = f"{percent(padding_share(calls.group.calls))} of the tokens passed are padding"
    if not call.settings.on_cpu and call.settings.attention == "sdpa":
        # torch's flash kernel accepts a mask only on a CPU (scaled_dot_product_attention).
        share += ", and the mask keeps SDPA from its flash kernel"
    used = mask.bool().any(0)
    rows = list(range(len(mask)))
    if not bool(used.all()):
        return calls.candidate(
            "padding", share, 'pad only to the longest text of a batch: padding="longest"',
            _on_parts(noted, call, calls.model, [rows]), prompts=2,
            about=calls.saved_share([call], [replace(call, prompt_len=int(used.sum()))]),
        )  # fmt: skip
    if len(rows) < 2:
        return None
    lengths = mask.sum(1).tolist()
    order = sorted(rows, key=lambda row: lengths[row])
    cuts = range(1, len(rows))
    cut = min(cuts, key=lambda at: at * lengths[order[at - 1]] + (len(rows) - at) * lengths[order[-1]])
    parts = (order[:cut], order[cut:])
    apart = [replace(call, batch_size=len(part) * call.settings.times_computed, prompt_len=lengths[part[-1]])
             for part in parts]  # fmt: skip
    return calls.candidate(
        "padding", share, "sort the texts by length, and pass texts of similar length together",
        _on_parts(noted, call, calls.model, parts), prompts=2, saves_in_prompt=False,
        about=calls.saved_share([call], apart),
    )  # fmt: skip


def _on_parts(noted: CallRecord, call: Call, model: Any, parts: Sequence[Sequence[int]]) -> Run:
    """A function that runs the call once per part of its rows, without columns that are padding in all of the part."""
    args, named = noted.arguments or ((), {})
    shape = tuple(noted.mask.shape)

    def rows_of(value: Any, rows: Any, columns: Any) -> Any:
        fits = isinstance(value, torch.Tensor) and tuple(value.shape) == shape
        return value[rows][:, columns] if fits else value

    runs = []
    for part in parts:
        rows = torch.tensor(part, device=noted.mask.device)
        columns = noted.mask[rows].bool().any(0).nonzero()[:, 0]
        cut = copy.copy(noted)
        cut.arguments = (
            tuple(rows_of(value, rows, columns) for value in args),
            {name: rows_of(value, rows, columns) for name, value in named.items()},
        )
        runs.append(repeat(cut, call, model))

    return in_sequence(runs)


def _prompts(group: CallGroup) -> list[tuple[Call, CallRecord, torch.Tensor]]:
    """The calls whose arguments are stored, their records and token ids [1, tokens].

    Empty if a call has other inputs or several rows, or if the script loaded the model again between them: a model of
    an earlier call is then another one, or no longer exists.
    """
    found = [(call, noted, prompt_ids(*(noted.arguments or ((), {})))) for call, noted in _repeatable(group)]
    single = all(ids is not None and len(ids) == 1 for _, _, ids in found)
    return found if single and all(noted.model() is group.model for _, noted, _ in found) else []


def _repeatable(group: CallGroup) -> list[tuple[Call, CallRecord]]:
    """The calls whose arguments are stored, with their records."""
    return [pair for pair in zip(group.calls, group.notes, strict=True) if pair[1].arguments is not None]


def batching_change(calls: CallsToChange, most: int = _MOST_IN_A_BATCH) -> Candidate | None:
    """A change that passes prompts or texts as one batch instead of one by one; not those that continue a chat.

    At most `most` of them are tried.
    """
    group = calls.group
    if is_plain(group.model):  # it may have no mask for padding
        return None
    found = _prompts(group)
    if len(found) < _FEWEST_ONE_BY_ONE or _continue_each_other([ids for *_, ids in found]):
        return None
    generates = found[0][0].kind == "generate"
    size = min(most, len(found))
    chosen = [found[len(found) * index // size] for index in range(size)]
    ids = [row[0] for *_, row in chosen]
    longest = max(map(len, ids))
    batch, mask = (
        torch.stack([_padded(row, longest, left=generates) for row in rows])
        for rows in (ids, [torch.ones_like(row) for row in ids])
    )
    runs = [repeat(noted, call, group.model) for call, noted, _ in chosen]
    call, noted, _ = chosen[0]
    whole = copy.copy(noted)
    # What has a value per token is left out: labels, types and positions do not decide how long a call takes.
    named = {
        name: value
        for name, value in (noted.arguments or ((), {}))[1].items()
        if name != "inputs" and not (isinstance(value, torch.Tensor) and value.shape[:2] == (1, call.prompt_len))
    }
    whole.arguments = ((), {**named, "input_ids": batch, "attention_mask": mask})
    at_once, own = most_at_once(group.calls), [call for call, *_ in chosen]

    def in_threads() -> None:
        with ThreadPoolExecutor(at_once) as threads:
            for done in [threads.submit(run) for run in runs]:
                done.result()

    how = "one by one" if at_once == 1 else f"one per call, up to {at_once} calls at once in threads"
    evidence = f"{len(group.calls)} {'prompts' if generates else 'texts'} are passed {how}"
    change = f"pass {len(chosen)} at a time, padded{' on the left' if generates else ' with an attention mask'}"
    if generates and all(torch.equal(row, ids[0]) for row in ids):
        evidence = f"the same prompt is passed {len(group.calls)} times, {how}"
        change = f"pass it once, with num_return_sequences={len(chosen)}"
    as_is = in_sequence(runs) if at_once == 1 else Run(in_threads)
    return _in_one_call(calls, evidence, change, own, as_is, whole, _half(batching_change, calls, size))


def _in_one_call(
    calls: CallsToChange, evidence: str, change: str, own: Sequence[Call], as_is: Run, whole: CallRecord,
    fewer: Callable[[], Candidate | None] | None,
) -> Candidate:  # fmt: skip
    """The change that makes one call, with the record `whole`, in place of the script's `own` calls."""
    first, tokens = own[0], max(call.new_tokens for call in own)
    together = replace(first, new_tokens=tokens, batch_size=len(own) * first.settings.times_computed,
                       prompt_len=max(call.prompt_len for call in own))  # fmt: skip
    return Candidate(
        "one-by-one", evidence, change, first.where, as_is,
        repeat(whole, replace(first, new_tokens=tokens), calls.model), (steady_s(own),),
        shape=f"{len(own)} of the {'prompts' if calls.generates else 'texts'}",
        new_tokens=tokens,
        prompt_s=sum(call.steady_prompt_s for call in own),
        about=calls.saved_share(own, [together]) if most_at_once(own) == 1 else 0.0,
        fewer=fewer,
    )  # fmt: skip


def paged_batch_change(calls: CallsToChange, most: int = _MOST_IN_A_BATCH) -> Candidate | None:
    """A change that passes prompts to one call of `generate_batch`; None if they are few, or passed together."""
    group = calls.group
    found = [(call, noted) for call, noted in _repeatable(group) if call.batch_size == 1]
    if len(found) < _FEWEST_ONE_BY_ONE:
        return None
    size = min(most, len(found))
    chosen = [found[len(found) * index // size] for index in range(size)]
    _, noted = chosen[0]
    whole = copy.copy(noted)
    args, named = noted.arguments or ((), {})
    prompts = [prompt for _, each in chosen if each.arguments for prompt in batch_inputs(*each.arguments)]
    whole.arguments = ((prompts, *args[1:]), named) if args else (args, {**named, "inputs": prompts})
    evidence = f"{len(found)} prompts are passed one by one, each to a generate_batch of its own"
    as_is = in_sequence([repeat(each, call, group.model) for call, each in chosen])
    own, fewer = [call for call, _ in chosen], _half(paged_batch_change, calls, size)
    return _in_one_call(calls, evidence, "pass all prompts to one generate_batch", own, as_is, whole, fewer)


def _half(
    change: Callable[[CallsToChange, int], Candidate | None], calls: CallsToChange, count: int
) -> Callable[[], Candidate | None] | None:
    """A function that makes the change to half of `count` calls; None if that would be a single one."""
    return functools.partial(change, calls, count // 2) if count > 3 else None


def _padded(row: torch.Tensor, length: int, *, left: bool) -> torch.Tensor:
    zeros = row.new_zeros(length - len(row))
    return torch.cat([zeros, row] if left else [row, zeros])


def _continue_each_other(prompts: Sequence[Any]) -> bool:
    """Whether most prompts begin with the whole prompt before them, as in a chat."""
    pairs = list(itertools.pairwise(prompts))
    continuations = sum(
        before.shape[1] < after.shape[1] and bool((after[:, : before.shape[1]] == before).all())
        for before, after in pairs
    )
    return bool(continuations > len(pairs) / 2)


# A prompt that repeats fewer tokens of the one before is not worth a trial.
_LEAST_PREFIX = 64


def prefix_change(calls: CallsToChange, most: int = _MOST_IN_A_BATCH) -> Candidate | None:
    """A change that keeps the cache of what prompts share with the one before; None if most of them share little.

    At most `most` of them are tried, from the middle of the script.
    """
    group = calls.group
    call, settings = group.calls[0], group.calls[0].settings
    if group.model.config.is_encoder_decoder or call.context_len:
        return None
    if not settings.cache or settings.assistant or call.batch_size > 1:
        return None
    found = _prompts(group)
    if any(noted.mask is not None and not bool(noted.mask.all()) for _, noted, _ in found):
        return None  # equal tokens may be padding
    prompts = [ids for *_, ids in found]
    shared = [0, *(_shared_tokens(before, after) for before, after in itertools.pairwise(prompts))]
    if sorted(shared)[len(shared) // 2] < _LEAST_PREFIX:
        return None
    start = max(0, len(found) - most) // 2
    end = start + most
    chosen = [each for each, _, _ in found[start:end]]
    # One cache for all, as in the changed script: each run leaves at least the tokens that the next one keeps.
    kept: list[Any] = []
    continued = [replace(each, context_len=tokens) for each, tokens in zip(chosen, shared[start:end], strict=True)]
    changed = [
        repeat(noted, each, group.model, filled=kept)
        for each, (_, noted, _) in zip(continued, found[start:end], strict=True)
    ]
    share = sum(shared) / sum(ids.shape[1] for ids in prompts)
    return Candidate(
        "shared-prefix",
        f"{100 * share:.0f} % of the tokens of {len(found)} prompts are those of the prompt before, computed again",
        "pass past_key_values with the next prompt"
        if _continue_each_other(prompts)
        else "compute them once, and pass copy.deepcopy of their past_key_values with each prompt",
        call.where,
        in_sequence([repeat(noted, each, group.model) for each, noted, _ in found[start:end]]),
        in_sequence(changed),
        (steady_s(chosen),),
        shape=f"{len(chosen)} of the prompts",
        new_tokens=max(each.new_tokens for each in chosen),
        prompt_s=sum(each.steady_prompt_s for each in chosen),
        about=calls.saved_share(chosen, continued),
        fewer=_half(prefix_change, calls, len(chosen)),
    )


def _shared_tokens(before: torch.Tensor, after: torch.Tensor) -> int:
    """Tokens at the beginning of a prompt that are those of the one before, without its last token."""
    length = min(before.shape[1], after.shape[1] - 1)
    return int((before[0, :length] == after[0, :length]).cumprod(0).sum())


# So many increases by one token from forward to forward are a decode loop without a cache.
_FEWEST_IN_A_LOOP = 4


def grows_by_a_token(calls: Sequence[Call]) -> bool:
    """Whether most of these forwards have one token more than the one before, and no cache."""
    increases = [after.prompt_len - before.prompt_len for before, after in itertools.pairwise(calls)]
    mostly_one = len(increases) >= _FEWEST_IN_A_LOOP and increases.count(1) >= 0.8 * len(increases)
    return mostly_one and not calls[0].context_len


def loop_without_cache(calls: CallsToChange) -> Candidate | None:
    """A change that adds a cache to forwards whose prompt grows by a token each; None if it does not grow."""
    group = calls.group
    if not grows_by_a_token(group.calls):
        return None
    pairs = _repeatable(group)
    own = [call for call, _ in pairs]
    model, first, last = group.model, own[0], own[-1]
    steps = [replace(each, prompt_len=1, context_len=each.prompt_len - 1) for each in own[1:]]
    runs = [repeat(noted, call, model) for call, noted in pairs]
    gradients = first.settings.gradients

    def changed(steps: int) -> None:
        with torch.set_grad_enabled(gradients):
            if is_plain(model):
                _plain_steps(model, pairs[0][1], steps)
                return
            ids = torch.zeros(first.batch_size, first.prompt_len, dtype=torch.long, device=model.device)
            cache = cache_of(model(ids, use_cache=True))
            name = argument_name(model)
            for _ in range(steps):
                cache = cache_of(model(ids[:, :1], use_cache=True, **{name: cache}))

    return Candidate(
        "cache-off",
        f"each of {len(group.calls)} forwards computes the whole prompt again, which grows by one token",
        "keep the keys and values of earlier tokens, and pass only the new token"
        if is_plain(model)
        else "pass past_key_values and only the new token",
        first.where,
        in_even_sequence(runs),
        with_steps(changed, len(pairs) - 1),
        (sum(call.steady_s for call in own),),
        shape=f"{len(pairs)} forwards of {first.prompt_len} to {last.prompt_len} tokens"
        + (", changed: of one token without attention to earlier ones" if is_plain(model) else ""),
        new_tokens=len(pairs),
        about=calls.saved_share(own, [first, *steps]),
    )


def _plain_steps(model: Any, noted: CallRecord, steps: int) -> None:
    """Run a plain model on its prompt, then on single tokens: it has no cache that a trial could pass."""
    args, named = noted.arguments or ((), {})
    model(*args, **named)
    args, named = with_ids(args, named, token_ids(args, named)[:, :1])
    for _ in range(steps):
        model(*args, **named)


def without_reads(group: CallGroup, read: LineTime) -> Candidate:
    """A change that leaves out the reads on the host that follow each forward of a loop."""
    pairs = _repeatable(group)
    middle = len(pairs) // 2
    chosen = pairs[max(0, middle - effort.STANDARD.script_calls // 2) : middle + effort.STANDARD.script_calls // 2]
    runs = [repeat(noted, call, group.model) for call, noted in chosen]
    clock, reads_each = chosen[0][1].clock, max(1, round(read.count / len(group.calls)))

    def in_a_row(reads: int) -> None:
        for run in runs:
            found: Any = run()
            logits = getattr(found, "logits", found)
            value = logits[(0,) * logits.dim()]
            for _ in range(reads):
                value.item()
        clock.synchronize()

    return Candidate(
        "host-sync",
        f"the host reads {read.count} values, waits {duration(read.seconds)} for them, and cannot run ahead",
        "keep tokens on the device, and read them every few steps or at the end",
        read.where,
        Run(functools.partial(in_a_row, reads_each)),
        Run(functools.partial(in_a_row, 0)),
        (sum(call.steady_s for call, _ in chosen),),
        shape=f"{len(chosen)} forwards in a row",
    )
