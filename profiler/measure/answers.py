"""Answers to a built-in text: greedy ones with and without drafts, in turn; those of the model without quantisation."""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from profiler.counting.floor import ceiling_times, verifying
from profiler.counting.operators import ModelWork
from profiler.counting.walk import walk
from profiler.device.clock import no_gc
from profiler.device.machine import Machine
from profiler.engines.transformers import greedy_tokens
from profiler.errors import RequestError
from profiler.facts.ceilings import Ceilings
from profiler.facts.measurements import DraftFloor, Drafting, Quality
from profiler.loading.config import load_config
from profiler.loading.load import load
from profiler.loading.meta_model import quiet_libraries
from profiler.loading.prompts import load_tokenizer
from profiler.loading.request import LoadedModel, ModelRequest, dtype_name, most_positions
from profiler.loading.source import check_weights, resolve, resolve_weights
from profiler.measure.subject import Subject
from profiler.patching import patched
from profiler.quant.registry import PLAIN

TEXT = (
    "The harbour was quiet in the morning. Two boats came back before the wind rose, and the men unloaded crates of"
    " mackerel on the wet stones. A child asked why the sea is salt, and her grandfather explained that rivers carry"
    " minerals from the hills, and that water leaves the sea as vapour while the salt remains. In 1872 the engineer"
    " wrote that the new bridge would cost forty thousand pounds, about three times the first estimate, because the"
    " ground under the northern pier was softer than anyone had supposed. To compute the mean of a list of numbers,"
    " add them together and divide the sum by how many there are: def mean(values): return sum(values) / len(values)."
    " Paris is the capital of France, and Rome that of Italy. When the lamp went out, nobody spoke for a while; then"
    " somebody laughed, and the talk began again where it had stopped."
)
"""Narrative, a date, an explanation, a line of code and two facts; written for this purpose."""


def text_ids(request: ModelRequest, option: str) -> list[int]:
    """Return the built-in text in the model's own tokens. Raises RequestError, naming `option`, without a tokenizer."""
    tokenizer = load_tokenizer(request.source, option, trust_remote_code=request.trust_remote_code)
    return list(tokenizer(TEXT).input_ids)


def compare_logits(reference: torch.Tensor, quantised: torch.Tensor) -> Quality:
    """Return the difference of two tensors of logits, [positions, vocabulary], of the same text."""
    expected = F.log_softmax(reference.float(), dim=-1)
    actual = F.log_softmax(quantised.float(), dim=-1)
    divergence = F.kl_div(actual, expected, log_target=True, reduction="none").sum(-1)
    same = expected.argmax(-1) == actual.argmax(-1)
    return Quality(float(divergence.mean()), float(same.float().mean()), len(expected))


def check_quality(loaded: LoadedModel, ids: Sequence[int]) -> Quality:
    """Compare a quantised model with its unquantised checkpoint, which is loaded next to it for one pass."""
    request = loaded.request
    quantised = _logits(loaded.module, ids, request.device)
    config = load_config(request.source, request.trust_remote_code)
    plain = load(replace(request, quant="none", quant_options=PLAIN), config)
    return compare_logits(_logits(plain.module, ids, request.device), quantised)


def _logits(module: Any, ids: Sequence[int], device: torch.device) -> torch.Tensor:
    with torch.inference_mode(), quiet_libraries():
        logits: torch.Tensor = module(input_ids=torch.tensor([list(ids)], device=device)).logits
    return logits[0].float().cpu()


NGRAM = "ngram"
"""Drafts that copy what followed the last tokens where the text had them before."""
_NGRAM_TOKENS = 10
"""Tokens of each: the default of transformers' `PromptLookupCandidateGenerator`."""
_TURNS = 3


@dataclass(frozen=True)
class Draft:
    """The drafts to try, and the prompt for it."""

    name: str
    """`ngram`, or the name of a draft model."""
    prompt: Sequence[int]
    request: ModelRequest | None
    """The draft model; None for n-grams."""


def draft_of(name: str, request: ModelRequest, config: Any, new_tokens: int) -> Draft:
    """Check a request for drafts. Raises RequestError for random weights, which accept none, or another vocabulary."""
    if request.weights != "checkpoint":
        raise RequestError(
            f"--draft {name}: {request.source.name} has random weights here, which accept no draft; give a checkpoint,"
            " or see from which acceptance drafts pay with `roofscope count --verify 4`."
        )
    longest = most_positions(config)
    prompt = text_ids(request, "--draft")[: None if longest is None else max(1, longest - new_tokens)]
    if name == NGRAM:
        return Draft(name, prompt, None)
    source = resolve(name)
    own = load_config(source, request.trust_remote_code)
    sizes = [int(each.get_text_config().vocab_size) for each in (own, config)]
    if sizes[0] != sizes[1]:
        raise RequestError(
            f"--draft {name}: its vocabulary has {sizes[0]} tokens, and that of {request.source.name} {sizes[1]}; use a"
            f" draft model with the same tokens, or --draft {NGRAM}."
        )
    drafting = replace(request, source=source, quant="none", weights=resolve_weights(source, "auto"))
    if drafting.weights != "checkpoint":
        raise RequestError(f"--draft {name} has no weights here, and random ones are never right; give a checkpoint.")
    check_weights(drafting)
    return Draft(source.name, prompt, drafting)


@dataclass
class _Answer:
    """One call of `generate`: its tokens, and what happened after its first forward pass."""

    tokens: list[int]
    later_s: float
    """Seconds from the end of the first forward pass, which reads the prompt, to the end."""
    lengths: list[int]
    """Tokens of the sequence at the beginning of each step."""
    drafted: list[int]
    drafting_s: list[float]


def measure_drafts(subject: Subject, draft: Draft, new_tokens: int, ceilings: Ceilings) -> Drafting:
    """Answer the prompt with and without drafts in turn, and compute the floors of both at the grid's batches.

    Both answer three times after a warm-up. Raises ModelError for a draft model that does not load.
    """
    machine, model = subject.machine, subject.loaded.module
    drafting, options, work = draft.request, dict[str, Any](prompt_lookup_num_tokens=_NGRAM_TOKENS), None
    if drafting is not None:
        assistant = load(drafting, load_config(drafting.source, drafting.trust_remote_code)).module
        options, work = {"assistant_model": assistant}, walk(assistant)
    prompt = torch.tensor([list(draft.prompt)], device=machine.device)
    assisted, plain = list[_Answer](), list[_Answer]()
    with torch.inference_mode(), no_gc(), quiet_libraries():
        for _ in range(1 + _TURNS):
            assisted.append(_answer(model, machine, prompt, new_tokens, options))
            plain.append(_answer(model, machine, prompt, new_tokens, {}))
    first, own = assisted[0], plain[0]
    ends = [*first.lengths[1:], len(draft.prompt) + len(first.tokens)]
    accepted = [end - begin - 1 for begin, end in zip(first.lengths, ends, strict=True)]
    typical = max(1, round(statistics.mean(first.drafted[1:] or first.drafted)))
    context = len(draft.prompt) + len(first.tokens) // 2
    agree = [mine == theirs for mine, theirs in zip(first.tokens, own.tokens, strict=False)]
    return Drafting(
        draft=draft.name,
        prompt_len=len(draft.prompt),
        new_tokens=len(own.tokens),
        same_tokens=(*agree, False).index(False),
        drafted=tuple(first.drafted),
        accepted=tuple(accepted),
        assisted_s=tuple(answer.later_s for answer in assisted[1:]),
        drafting_s=tuple(sum(answer.drafting_s[1:]) for answer in assisted[1:]),
        plain_s=tuple(answer.later_s for answer in plain[1:]),
        floors=tuple(_floors(subject, work, typical, context, ceilings)),
    )


def _floors(
    subject: Subject, drafting: ModelWork | None, drafted: int, context: int, ceilings: Ceilings
) -> Iterator[DraftFloor]:
    """Floors at the grid's batches. A draft model makes each draft in a step; copies of n-grams take no time here."""
    here, dtype = ceilings.ceiling_set(""), dtype_name(subject.request.dtype)

    def floor_s(of: ModelWork, batch: int, count: int) -> float:
        return float(sum(ceiling_times(of, verifying(batch, count, context), here, dtype)))

    for batch in subject.grid.batch_sizes:
        drafting_s = drafted * floor_s(drafting, batch, 0) if drafting is not None else 0.0
        one_s, verifying_s = (floor_s(subject.work, batch, count) for count in (0, drafted))
        yield DraftFloor(batch, drafted, one_s, verifying_s, drafting_s)


def _answer(model: Any, machine: Machine, prompt: torch.Tensor, new_tokens: int, options: dict[str, Any]) -> _Answer:
    """A greedy answer; `options` are those of assisted generation, or empty."""
    answer = _Answer([], math.nan, [], [], [])
    ends: list[float] = []

    def after_forward(*_: object) -> None:
        if not ends:
            machine.clock.synchronize()
            ends.append(machine.now_s())

    generator_of = model._get_candidate_generator

    def watched_generator(*args: Any, **named: Any) -> Any:
        generator = generator_of(*args, **named)
        candidates_of = generator.get_candidates

        def watched(input_ids: torch.Tensor, *args: Any, **named: Any) -> Any:
            start_s = machine.now_s()
            candidates = candidates_of(input_ids, *args, **named)
            answer.drafting_s.append(machine.now_s() - start_s)
            answer.lengths.append(input_ids.shape[1])
            answer.drafted.append(candidates[0].shape[1] - input_ids.shape[1])
            return candidates

        generator.get_candidates = watched
        return generator

    with model.register_forward_hook(after_forward), patched(model, _get_candidate_generator=watched_generator):
        [tokens] = greedy_tokens(model, prompt, new_tokens, **options)
    machine.clock.synchronize()
    answer.later_s = machine.now_s() - ends[0]
    answer.tokens = tokens.tolist()
    return answer
