"""What may be changed about a script's own calls, each only where it applies."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from profiler.diagnosis.why import Call, Read
from profiler.probes.forms import Form, other_forms
from profiler.units import duration
from profiler.watching.recorder import Noted, Recorder

# Prompts that are tried as one batch, and from how many calls on that is worth a trial.
_TOGETHER = 8
_FEWEST_ONE_BY_ONE = 4
# Forwards of a loop that are run behind each other to see what waiting for each of them costs.
_IN_A_ROW = 8
# Arguments that act on their own, or that hold the length: a trial has the length that the call came to.
_NOT_AGAIN = ("streamer", "stopping_criteria", "max_length", "min_length", "max_time", "stop_strings")

Run = Callable[[], Any]
Mode = Callable[[], contextlib.AbstractContextManager[object]]


@dataclass(frozen=True)
class Candidate:
    """One thing that may be changed about some calls."""

    id: str
    evidence: str
    change: str
    where: str
    as_is: Run
    changed: Run
    own_s: tuple[float, ...]
    """What it took in the script, each time that it had this shape."""
    within: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    """What holds while `changed` runs; entering and leaving it is not timed."""
    shape: str = ""
    alone: bool = False
    """Whether it cannot be run as it was: what the script's own objects do is done once."""

    @property
    def seconds(self) -> float:
        return statistics.median(self.own_s)


@dataclass
class Group:
    """Calls of one kind from one line with one model and the same settings."""

    calls: list[Call]
    notes: list[Noted]
    model: Any
    loaded_at: str
    halves: dict[str, Any] = field(default_factory=dict)

    @property
    def middle(self) -> tuple[Call, Noted]:
        """The call that took the median time, of those that can be repeated."""
        pairs = [pair for pair in zip(self.calls, self.notes, strict=True) if pair[1].arguments is not None]
        pairs.sort(key=lambda pair: pair[0].seconds)
        return pairs[len(pairs) // 2]

    @property
    def seconds(self) -> float:
        return sum(call.seconds for call in self.calls)

    def like(self, call: Call) -> tuple[float, ...]:
        """Seconds of all its calls of one shape."""
        return tuple(other.seconds for other in self.calls if other.words == call.words)


def candidates(group: Group, recorder: Recorder) -> Iterator[Candidate]:
    """What may be changed about some calls, each only where it applies."""
    call, noted = group.middle
    model, settings = group.model, call.settings
    again = _repeat(noted, call, model)

    def with_options(**options: object) -> Run:
        return _repeat(noted, call, model, options)

    def candidate(name: str, evidence: str, change: str, changed: Run = again, **more: Any) -> Candidate:
        return Candidate(
            name, evidence, change, more.pop("where", call.where), again, changed, group.like(call), **more
        )

    if call.kind == "generate" and settings["cache"] == "off":
        yield candidate(
            "cache-off", "use_cache=False computes the whole prompt again at every token", "remove use_cache=False",
            with_options(use_cache=True),
        )  # fmt: skip
    if call.kind == "forward" and (loop := _loop_without_cache(group)):
        yield loop
    if call.kind == "forward" and len(group.calls) > 1 and (reads := recorder.reads(call.where)):
        yield _without_reads(group, reads[0])
    if call.kind == "forward" and settings["gradients"] == "on" and not recorder.trained:
        yield candidate(
            "grad-on", "gradients are recorded, and nothing is differentiated", "call it within torch.inference_mode()",
            _repeat(noted, call, model, inference=True),
        )  # fmt: skip
    if settings["mode"] == "train" and not recorder.trained:
        yield candidate(
            "train-mode", "the model is in train mode", "model.eval() behind the load", within=lambda: _eval_mode(model)
        )  # fmt: skip
    if settings["gradients"] == "off" and (weight := _frozen_head(model)) is not None:
        yield candidate(
            "frozen-weights", "weights are frozen, so that the LM head copies its weight for each last position",
            "leave requires_grad_(False) out: within torch.inference_mode() no gradient is recorded",
            within=lambda: _trainable(weight),
        )  # fmt: skip
    yield from _padding(call, noted, model, again, group.like(call))
    if call.kind == "forward" and _only_last_is_used(group, recorder):
        yield candidate(
            "all-logits", f"logits of all {call.prompt_len} positions are computed", "pass logits_to_keep=1",
            with_options(logits_to_keep=1),
        )  # fmt: skip
    if settings["outputs"] != "-":
        yield candidate(
            "extra-outputs", f"{settings['outputs']} are asked for", "ask for them only where they are used",
            with_options(**dict.fromkeys(settings["outputs"].split(", "), False)),
        )  # fmt: skip
    yield from _in_other_kernels(group, candidate)
    if settings["beams"] not in ("-", "1"):
        yield candidate(
            "beams", f"{settings['beams']} beams are followed", "num_beams=1, where its answers are good enough",
            with_options(num_beams=1, num_return_sequences=1),
        )  # fmt: skip
    if noted.callbacks and settings["device"] != "cpu":
        yield candidate(
            "host-sync", f"{_joined(noted.callbacks)} read every token on the host, which waits for the device",
            "read every few tokens, or leave it out", alone=True,
        )  # fmt: skip
    if settings["assistant"] == "yes":
        yield candidate(
            "assistant", "an assistant model drafts", "leave assistant_model out", with_options(assistant_model=None)
        )
    yield from _in_other_forms(group, call, noted, candidate)
    if call.kind == "generate":
        yield from _together(group)
    # Threads that wait for each other may take very long on a busy machine.
    yield from _threads(call, candidate)


def _in_other_kernels(group: Group, candidate: Callable[..., Candidate]) -> Iterator[Candidate]:
    """Attention and experts by the kernels that the model was not told to take."""
    model, settings = group.model, group.middle[0].settings
    if settings["attention"] == "eager" and getattr(model, "_supports_sdpa", False):
        yield candidate(
            "slow-attention", "attention is eager: its scores are written out", 'attn_implementation="sdpa"',
            within=lambda: _switched(model.set_attn_implementation, "sdpa", "eager"), where=group.loaded_at,
        )  # fmt: skip
    if settings["attention"] == "sdpa" and settings["kernel"] == "math":
        yield candidate(
            "slow-attention", "SDPA's fused kernels are switched off: its scores are written out",
            "leave sdpa_kernel(SDPBackend.MATH) and enable_flash_sdp(False) out", within=_fused,
        )  # fmt: skip
    if settings["experts"] == "eager" and _has_experts(model):
        yield candidate(
            "slow-experts", "experts run one after the other in a loop", 'experts_implementation="grouped_mm"',
            within=lambda: _switched(model.set_experts_implementation, "grouped_mm", "eager"), where=group.loaded_at,
        )  # fmt: skip


def _joined(names: Mapping[str, float]) -> str:
    return " and ".join(names)


def _repeat(
    noted: Noted,
    call: Call,
    model: Any,
    options: Mapping[str, object] | None = None,
    *,
    inference: bool = False,
    ids: Any = None,
) -> Run:
    """The same call again, of the same length, with some of its arguments changed."""
    args, named = noted.arguments or ((), {})
    named = {name: value for name, value in named.items() if name not in _NOT_AGAIN}
    if call.kind == "generate":
        named |= {"max_new_tokens": call.new_tokens, "min_new_tokens": call.new_tokens}
    named |= options or {}
    if named.get("assistant_model", True) is None:
        del named["assistant_model"]
    # What is advised is tried: inference_mode() leaves out more than no_grad() does.
    as_it_was = functools.partial(torch.set_grad_enabled, call.settings["gradients"] == "on")
    mode: Mode = torch.inference_mode if inference else as_it_was
    entry = model.generate if call.kind == "generate" else model
    if call.context_len and ids is None:
        return _behind(model, call, args, named, mode)

    def run() -> object:
        with mode():
            return entry(*args, **named)

    return run


def _behind(model: Any, call: Call, args: tuple[Any, ...], named: dict[str, Any], mode: Mode) -> Run:
    """A forward behind a cache, which is filled before the first run and cut back before each other."""
    filled: list[Any] = []

    def run() -> object:
        with mode():
            if not filled:
                ids = torch.zeros(call.batch_size, call.context_len, dtype=torch.long, device=model.device)
                filled.append(model(ids, use_cache=True).past_key_values)
            else:
                filled[0].crop(-call.prompt_len)
            return model(*args, **named, past_key_values=filled[0])

    return run


def _grows_by_a_token(calls: Sequence[Call]) -> bool:
    """Whether most of these forwards hand over one token more than the one before, and no cache."""
    grows = [after.prompt_len - before.prompt_len for before, after in itertools.pairwise(calls)]
    return len(grows) >= _FEWEST_ONE_BY_ONE and grows.count(1) >= 0.8 * len(grows) and not calls[0].context_len


def _loop_without_cache(group: Group) -> Candidate | None:
    """Forwards that hand over one more token each time: a loop that decodes without a cache."""
    calls = group.calls
    if not _grows_by_a_token(calls):
        return None
    kept = [(call, noted) for call, noted in zip(calls, group.notes, strict=True) if noted.arguments is not None]
    model, first, last = group.model, kept[0][0], kept[-1][0]
    runs = [_repeat(noted, call, model) for call, noted in kept]
    gradients = first.settings["gradients"] == "on"

    def as_is() -> None:
        for run in runs:
            run()

    def changed() -> None:
        with torch.set_grad_enabled(gradients):
            ids = torch.zeros(first.batch_size, first.prompt_len, dtype=torch.long, device=model.device)
            cache = model(ids, use_cache=True).past_key_values
            for _ in range(len(kept) - 1):
                cache = model(ids[:, :1], past_key_values=cache, use_cache=True).past_key_values

    return Candidate(
        "cache-off",
        f"each of {len(calls)} forwards computes the whole prompt again, which grows by one token",
        "hand past_key_values on, and only the new token",
        first.where,
        as_is,
        changed,
        (sum(call.seconds for call, _ in kept),),
        shape=f"{len(kept)} forwards of {first.prompt_len} to {last.prompt_len} tokens",
    )


def _without_reads(group: Group, read: Read) -> Candidate:
    """Forwards of a loop with as many reads behind each as the loop has, and without."""
    kept = [(call, noted) for call, noted in zip(group.calls, group.notes, strict=True) if noted.arguments is not None]
    middle = len(kept) // 2
    chosen = kept[max(0, middle - _IN_A_ROW // 2) : middle + _IN_A_ROW // 2]
    runs = [_repeat(noted, call, group.model) for call, noted in chosen]
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
        (sum(call.seconds for call, _ in chosen),),
        shape=f"{len(chosen)} forwards in a row",
    )


def _fused() -> contextlib.AbstractContextManager[None]:
    """Within, SDPA takes whichever of its kernels is quickest."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    every = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH)
    fused: contextlib.AbstractContextManager[None] = sdpa_kernel(list(every))
    return fused


@contextlib.contextmanager
def _eval_mode(model: Any) -> Iterator[None]:
    model.eval()
    try:
        yield
    finally:
        model.train()


def _frozen_head(model: Any) -> torch.Tensor | None:
    """The weight of a plain LM head that could not be trained. Of one that could, torch folds the last positions of a
    batch into one product; else it makes a batched one of copies of the weight (should_fold in torch's
    aten/src/ATen/native/LinearAlgebra.cpp)."""
    head = model.get_output_embeddings()
    if type(head) is not torch.nn.Linear or head.weight.requires_grad:
        return None
    return head.weight if head.weight.is_floating_point() and not head.weight.is_inference() else None


@contextlib.contextmanager
def _trainable(weight: torch.Tensor) -> Iterator[None]:
    weight.requires_grad_(True)
    try:
        yield
    finally:
        weight.requires_grad_(False)


@contextlib.contextmanager
def _switched(switch: Callable[[str], object], to: str, back: str) -> Iterator[None]:
    switch(to)
    try:
        yield
    finally:
        switch(back)


def _has_experts(model: Any) -> bool:
    config = model.config.get_text_config()
    return any(getattr(config, name, 0) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def _only_last_is_used(group: Group, recorder: Recorder) -> bool:
    """Whether these forwards are prompts of a loop, which goes on with their cache or without, and could be told so."""
    call, noted = group.middle
    arguments = noted.arguments[1] if noted.arguments else {}
    takes = "logits_to_keep" in inspect.signature(type(group.model).forward).parameters
    if not takes or call.prompt_len < 2 or "labels" in arguments or "logits_to_keep" in arguments:
        return False
    goes_on = any(other.shape[2] and other.model() is group.model for other in recorder.notes)
    return bool(call.context_len == 0 and (goes_on or _grows_by_a_token(group.calls)))


def _padding(call: Call, noted: Noted, model: Any, again: Run, own_s: tuple[float, ...]) -> Iterator[Candidate]:
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
        runs.append(_repeat(cut, call, model))

    def run() -> None:
        for each in runs:
            each()

    return run


def _threads(call: Call, candidate: Callable[..., Candidate]) -> Iterator[Candidate]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    own = int(call.settings["threads"])
    if call.settings["device"] != "cpu" or own == cores:
        return

    @contextlib.contextmanager
    def on_all() -> Iterator[None]:
        with _switched(torch.set_num_threads, cores, own):  # type: ignore[arg-type]
            yield

    yield candidate(
        "threads", f"torch computes with {own} thread{'s' if own != 1 else ''} on {cores} cores",
        f"torch.set_num_threads({cores})", within=on_all,
    )  # fmt: skip


def _in_other_forms(group: Group, call: Call, noted: Noted, candidate: Callable[..., Candidate]) -> Iterator[Candidate]:
    """The same call of a copy of the model in another form, where there is room for one."""
    for form in other_forms(group.model, call.settings["dtype"]):
        made: list[Any] = []

        def changed(form: Form = form, made: list[Any] = made) -> object:
            if not made:
                made.append(form.make())
            return _repeat(noted, call, made[0])()

        yield candidate(form.id, form.evidence, form.change, changed, where=group.loaded_at)


def _together(group: Group) -> Iterator[Candidate]:
    """Prompts that were passed one by one, as one batch; those that go on from an earlier answer are no such."""
    kept = [(call, noted) for call, noted in zip(group.calls, group.notes, strict=True) if noted.arguments is not None]
    if len(kept) < _FEWEST_ONE_BY_ONE or any(call.batch_size != 1 for call, _ in kept):
        return
    prompts = [_prompt(noted) for _, noted in kept]
    if any(prompt is None for prompt in prompts) or _goes_on(prompts):
        return
    chosen = [kept[len(kept) * index // min(_TOGETHER, len(kept))] for index in range(min(_TOGETHER, len(kept)))]
    ids = [_prompt(noted)[0] for _, noted in chosen]
    longest = max(map(len, ids))
    batch = torch.stack([torch.cat([row.new_zeros(longest - len(row)), row]) for row in ids])
    mask = torch.stack([torch.cat([row.new_zeros(longest - len(row)), torch.ones_like(row)]) for row in ids])
    runs = [_repeat(noted, call, group.model) for call, noted in chosen]
    call, noted = chosen[0]
    whole = copy.copy(noted)
    named = {name: value for name, value in (noted.arguments or ((), {}))[1].items() if name != "inputs"}
    whole.arguments = ((), {**named, "input_ids": batch, "attention_mask": mask})
    tokens = max(call.new_tokens for call, _ in chosen)
    options = {"max_new_tokens": tokens, "min_new_tokens": tokens}

    def as_is() -> None:
        for run in runs:
            run()

    yield Candidate(
        "one-by-one",
        f"{len(group.calls)} prompts are passed one by one",
        f"pass {len(chosen)} at a time, padded on the left",
        call.where,
        as_is,
        _repeat(whole, call, group.model, options),
        (sum(call.seconds for call, _ in chosen),),
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
