"""Which prompts go together: padding that a batch could do without, prompts that could be one batch."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from profiler.diagnosis.seen import Call, most_at_once, steady_s
from profiler.probes.repeats import Candidate, Group, Run, repeat
from profiler.watching.noted import Noted

# Prompts that are tried as one batch, and from how many calls on that is worth a trial.
_TOGETHER = 8
_FEWEST_ONE_BY_ONE = 4


def padding(call: Call, noted: Noted, model: Any, again: Run, own_s: tuple[float, ...]) -> Iterator[Candidate]:
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


def _on_parts(noted: Noted, call: Call, model: Any, parts: Sequence[Sequence[int]]) -> Run:
    """The same call on some of the rows at a time, each without the columns that are padding in all of its rows."""
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


def together(group: Group) -> Iterator[Candidate]:
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


def _prompt(noted: Noted) -> Any:
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
