"""Changes to padding, and changes that concern several calls: batches, a cache for a loop, reads on the host."""

import functools
import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_leaves, tree_map

from profiler import effort
from profiler.loading.cache_argument import argument_name, cache_of
from profiler.report.blocks import evenly
from profiler.units import duration, percent
from profiler.why_slow.call_record import CallRecord
from profiler.why_slow.kept_arguments import Arguments
from profiler.why_slow.observations import Call, most_at_once, padding_share, steady_s
from profiler.why_slow.plain_models import is_plain, token_ids
from profiler.why_slow.repeat_call import CallGroup, Candidate, Run, passed, repeat
from profiler.why_slow.watched_calls import option, prompt_ids

# At most so many prompts are tried together, and fewer if they take longer; as one batch from so many calls on.
_MOST_IN_A_BATCH = 8
_FEWEST_ONE_BY_ONE = 3
_MOST_S = 4.0


def _most_together(group: CallGroup) -> int:
    usual_s = group.seconds / len(group.calls)
    return max(_FEWEST_ONE_BY_ONE, min(_MOST_IN_A_BATCH, int(_MOST_S / max(usual_s, 1e-3))))


def padding_change(group: CallGroup) -> Candidate | None:
    """A change that removes padding: cut columns that are padding in all rows, else split the batch by length."""
    call, noted = group.middle
    mask = noted.mask
    if mask is None or mask.shape[1] != call.prompt_len or call.context_len or bool(mask.all()):
        return None
    share = f"{percent(padding_share(group.calls))} of the tokens passed are padding"
    if not call.settings.on_cpu and call.settings.attention == "sdpa":
        # torch's flash kernel accepts a mask only on a CPU (scaled_dot_product_attention).
        share += ", and the mask keeps SDPA from its flash kernel"
    used = mask.bool().any(0)
    lengths = mask.sum(1).tolist()
    rows = sorted(range(len(lengths)), key=lambda row: lengths[row])
    change, parts = 'pad only to the longest text of a batch: padding="longest"', [rows]
    instead = [replace(call, prompt_len=int(used.sum()))]
    if bool(used.all()):
        if len(rows) < 2:
            return None
        cuts, times = range(1, len(rows)), call.settings.times_computed
        cut = min(cuts, key=lambda at: at * lengths[rows[at - 1]] + (len(rows) - at) * lengths[rows[-1]])
        change = f"sort the texts by length: pass the {cut} shortest of these {len(rows)} as a batch of their own"
        parts = [rows[:cut], rows[cut:]]
        instead = [replace(call, batch_size=len(part) * times, prompt_len=lengths[part[-1]]) for part in parts]
    changed = Run.in_sequence([repeat(_part_of(noted, part), call, group.model) for part in parts])
    return group.candidate("padding", share, change, changed, about=group.saved_share([call], instead))


def _part_of(noted: CallRecord, rows: Sequence[int]) -> CallRecord:
    """The call with some of its rows, without columns that are padding in all of them."""
    chosen = torch.tensor(rows, device=noted.mask.device)
    columns = noted.mask[chosen].bool().any(0).nonzero()[:, 0]

    def cut(value: Any) -> Any:
        fits = isinstance(value, torch.Tensor) and value.shape == noted.mask.shape
        return value[chosen][:, columns] if fits else value

    return replace(noted, arguments=tree_map(cut, noted.arguments))


def _prompts(group: CallGroup) -> list[tuple[Call, CallRecord, torch.Tensor]]:
    """The calls whose arguments are kept, their records and token ids [1, tokens].

    Empty if a call has other inputs or several rows, or another model, as where it was loaded again.
    """
    found = [(call, noted, prompt_ids(*(noted.arguments or ((), {})))) for call, noted in group.repeatable]
    single = all(ids is not None and len(ids) == 1 for _, _, ids in found)
    return found if single and all(noted.model() is group.model for _, noted, _ in found) else []


def batching_change(group: CallGroup) -> Candidate | None:
    """A change that passes prompts or texts as one batch instead of one by one; not those that continue a chat."""
    is_loop = grows_by_a_token(group.calls) or any(noted.shape[2] for noted in group.recorder.notes)
    if is_plain(group.model) or (is_loop and not group.generates):  # a plain one may have no mask for padding
        return None
    found = _prompts(group)
    if len(found) < _FEWEST_ONE_BY_ONE or _continue_each_other([ids for *_, ids in found]):
        return None
    chosen = evenly(found, _most_together(group))
    call, noted, _ = chosen[0]
    ids = [row[0] for *_, row in chosen]
    pad = functools.partial(pad_sequence, batch_first=True, padding_side="left" if group.generates else "right")
    # What has a value per token is left out: labels, types and positions do not decide how long a call takes.
    named = {name: value for name, value in noted.named.items()
             if name != "inputs" and getattr(value, "shape", ())[:2] != (1, call.prompt_len)}  # fmt: skip
    at_once = most_at_once(group.calls)
    how = "one by one" if at_once == 1 else f"one per call, up to {at_once} calls at once in threads"
    evidence, more = f"{len(group.calls)} {'prompts' if group.generates else 'texts'} are passed {how}", {}
    change = f"pass {len(chosen)} at a time, padded{' on the left' if group.generates else ' with an attention mask'}"
    if group.generates and all(torch.equal(row, found[0][2]) for *_, row in found):
        evidence = f"the same prompt is passed {len(group.calls)} times, {how}"
        answers, beams = len(chosen) * call.settings.answers, call.settings.beams
        if not option(group.model, named, "do_sample"):
            ids, change = ids[:1], "pass it once, and use its answer again: without sampling, all are the same"
        elif beams == 1 or answers <= beams:  # transformers refuses more
            ids, more = ids[:1], {"num_return_sequences": answers}
            change = f"{passed(more)}, and the prompt once"
    whole = {**named, **more, "input_ids": pad(ids), "attention_mask": pad([torch.ones_like(row) for row in ids])}
    return _in_one_call(group, evidence, change, [pair[:2] for pair in chosen], ((), whole))


def stacking_change(group: CallGroup) -> Candidate | None:
    """A change that passes pictures or recordings of one shape as one batch instead of one by one."""
    name = getattr(group.model, "main_input_name", "")
    found = [(call, noted) for call, noted in group.repeatable if noted.model() is group.model]
    if name not in ("pixel_values", "input_features", "input_values") or len(found) < _FEWEST_ONE_BY_ONE:
        return None
    tensors = [[value for value in tree_leaves(noted.arguments) if hasattr(value, "shape")] for _, noted in found]
    shapes = {tuple(value.shape for value in each) for each in tensors}
    if len(shapes) > 1 or any(len(value) != 1 for value in tensors[0]):
        return None
    chosen = evenly(found, _most_together(group))
    whole = tree_map(
        lambda *rows: torch.cat(rows) if hasattr(rows[0], "shape") else rows[0],
        *(noted.arguments for _, noted in chosen),
    )
    return _in_one_call(
        group, f"{len(found)} {name} of one shape are passed one by one",
        f"stack {len(chosen)} of them into one batch", chosen, whole,
    )  # fmt: skip


def paged_batch_change(group: CallGroup) -> Candidate | None:
    """A change that passes prompts to one `generate_batch`; None if they are few, or passed together.

    It is compared with the script's own calls, each of which starts a manager and plans a cache.
    """
    found = [(call, noted) for call, noted in group.repeatable if call.batch_size == 1]
    if len(found) < _FEWEST_ONE_BY_ONE:
        return None
    chosen = evenly(found, _MOST_IN_A_BATCH)
    prompts = [prompt for _, noted in chosen for prompt in noted.named["inputs"]]
    whole: Arguments = ((), {**chosen[0][1].named, "inputs": prompts})
    changed = _in_one_call(
        group, f"{len(found)} prompts are passed one by one, each to a generate_batch of its own",
        f"pass {len(prompts)} of them, or all, to one generate_batch", chosen, whole,
    )  # fmt: skip
    return replace(changed, alone=True)


def _in_one_call(
    group: CallGroup, evidence: str, change: str, chosen: Sequence[tuple[Call, CallRecord]], arguments: Arguments
) -> Candidate:
    """The change that makes one call in place of the script's `chosen` ones, which run in as many threads as there."""
    own, at_once = [call for call, _ in chosen], most_at_once(group.calls)
    runs = [repeat(noted, call, group.model) for call, noted in chosen]

    def in_threads() -> None:
        with ThreadPoolExecutor(at_once) as threads:
            list(threads.map(lambda run: run(), runs))

    first, noted = chosen[0]
    longest = replace(first, new_tokens=max(call.new_tokens for call in own))

    def saved_share(calls: Sequence[Call]) -> float:
        rows, prompt_len = len(calls) * first.settings.times_computed, max(call.prompt_len for call in calls)
        return group.saved_share(calls, [replace(longest, batch_size=rows, prompt_len=prompt_len)])

    about = saved_share(own) if most_at_once(own) == 1 else 0.0
    as_is = Run.in_sequence(runs) if at_once == 1 else Run(in_threads)
    shape = f"{len(own)} of the calls"
    if len(own) < _MOST_IN_A_BATCH and about and saved_share(group.calls) > about:
        shape += " (more at once save more)"
    return group.candidate(
        "one-by-one", evidence, change, repeat(replace(noted, arguments=arguments), longest, group.model),
        as_is=as_is, seconds=steady_s(own), shape=shape, about=about,
    )  # fmt: skip


def _continue_each_other(prompts: Sequence[torch.Tensor]) -> bool:
    """Whether most prompts [1, tokens] begin with the whole prompt before them, as in a chat."""
    continued = [_shared_tokens(before, after) == before.shape[1] for before, after in itertools.pairwise(prompts)]
    return continued.count(True) > len(continued) / 2


# A prompt that repeats fewer tokens of the one before is not worth a trial.
_LEAST_PREFIX = 64


def prefix_change(group: CallGroup) -> Candidate | None:
    """A change that keeps the cache of what prompts share with the one before; None if most of them share little."""
    call, model = group.calls[0], group.model
    single = call.batch_size == 1 and not call.context_len and not model.config.is_encoder_decoder
    if not single or not call.settings.cache or call.settings.assistant:
        return None
    found = _prompts(group)
    if any(noted.mask is not None and not bool(noted.mask.all()) for _, noted, _ in found):
        return None  # equal tokens may be padding
    prompts = [ids for *_, ids in found]
    shared = [0, *(_shared_tokens(before, after) for before, after in itertools.pairwise(prompts))]
    if sorted(shared)[len(shared) // 2] < _LEAST_PREFIX:
        return None
    most = _most_together(group)
    start = max(0, len(found) - most) // 2  # the middle of the script
    chosen = found[start : start + most]
    own = [each for each, *_ in chosen]
    continued = [replace(each, context_len=tokens) for each, tokens in zip(own, shared[start:], strict=False)]
    # One cache for all, as in the changed script: each run leaves at least the tokens that the next one keeps.
    kept: list[Any] = []
    changed = [repeat(noted, after, model, filled=kept) for after, (_, noted, _) in zip(continued, chosen, strict=True)]
    share = sum(shared) / sum(ids.shape[1] for ids in prompts)
    # By a negative number: transformers 5.23 refuses the length that remains.
    crop = (
        ""
        if _continue_each_other(prompts)
        else ", cut to the n tokens that both share: past_key_values.crop(n - past_key_values.get_seq_length())"
    )
    return group.candidate(
        "shared-prefix",
        f"{100 * share:.0f} % of the tokens of {len(found)} prompts are those of the prompt before, computed again",
        f"pass past_key_values of the prompt before with each prompt{crop}", Run.in_sequence(changed),
        as_is=Run.in_sequence([repeat(noted, each, model) for each, noted, _ in chosen]), seconds=steady_s(own),
        shape=f"{len(own)} of the prompts", about=group.saved_share(own, continued),
    )  # fmt: skip


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


def loop_without_cache(group: CallGroup) -> Candidate | None:
    """A change that adds a cache to forwards whose prompt grows by a token each; None if it does not grow.

    A plain model has no cache that a trial could pass, so it runs on its prompt, then on single tokens.
    """
    if not grows_by_a_token(group.calls):
        return None
    own, plain, model = [call for call, _ in group.repeatable], is_plain(group.model), group.model
    (first, noted), *_ = group.repeatable
    given = [noted.arguments or ((), {}) for _, noted in group.repeatable]
    name, more = ("", {}) if plain else (argument_name(model), {"use_cache": True})

    def changed(steps: int) -> None:
        with noted.context.entered(), torch.set_grad_enabled(first.settings.gradients):
            (args, named), *later = given[: 1 + steps]
            found = model(*args, **(named | more))
            for args, named in map(_of_the_last_token, later):
                found = model(*args, **(named | more | ({} if plain else {name: cache_of(found)})))

    change = (
        "keep the keys and values of earlier tokens, and pass only the new token"
        if plain
        else f"{passed(more)}, and later {name} with only the new token"
    )
    steps = [replace(each, prompt_len=1, context_len=each.prompt_len - 1) for each in own[1:]]
    return group.candidate(
        "cache-off", f"each of {len(group.calls)} forwards computes the whole prompt again, which grows by one token",
        change, Run.with_steps(changed, len(own) - 1),
        as_is=Run.in_even_sequence([repeat(noted, call, model) for call, noted in group.repeatable]),
        seconds=sum(call.steady_s for call in own), about=group.saved_share(own, [first, *steps]),
        shape=f"{len(own)} forwards of {first.prompt_len} to {own[-1].prompt_len} tokens",
        stand_in="forwards of one token without attention to earlier ones" if plain else "",
    )  # fmt: skip


def _of_the_last_token(arguments: Arguments) -> Arguments:
    """The arguments of a forward with its last token only, whose mask is that of all tokens."""
    args, named = arguments
    ids = prompt_ids(args, named)
    tokens = [token_ids(args, named) if ids is None else ids, named.get("inputs_embeds"), named.get("position_ids")]

    def last(value: Any) -> Any:
        return value[:, -1:] if isinstance(value, torch.Tensor) and any(value is each for each in tokens) else value

    found: Arguments = tree_map(last, arguments)
    return found


def without_reads(group: CallGroup) -> Candidate | None:
    """A change that leaves out the reads on the host that follow each forward of a loop; None if there are none."""
    reads = group.recorder.reads_after(group.call.where)
    if not reads:
        return None
    read, pairs, most = reads[0], group.repeatable, effort.STANDARD.script_calls // 2
    middle = len(pairs) // 2
    chosen = pairs[max(0, middle - most) : middle + most]
    runs = [repeat(noted, call, group.model) for call, noted in chosen]
    reads_each = max(1, round(read.count / len(group.calls)))

    def in_a_row(reads: int) -> None:
        for run in runs:
            found: Any = run()
            logits = getattr(found, "logits", found)
            value = logits[(0,) * logits.dim()]
            for _ in range(reads):
                value.item()
        chosen[0][1].clock.synchronize()

    return group.candidate(
        "host-sync",
        f"the host reads {read.count} values, waits {duration(read.seconds)} for them, and cannot run ahead",
        "keep tokens on the device, and read them every few steps or at the end", Run(functools.partial(in_a_row, 0)),
        as_is=Run(functools.partial(in_a_row, reads_each)), where=read.where,
        seconds=sum(call.steady_s for call, _ in chosen), shape=f"{len(chosen)} forwards in a row",
    )  # fmt: skip
