"""The least time of a script's calls on this machine: the counted work of their steps under its measured ceilings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from profiler.counting.attention import AttentionCore
from profiler.counting.floor import ceiling_times
from profiler.counting.module_kinds import not_run_for_text
from profiler.counting.operators import Elementwise, Embedding, Linear, ModelWork
from profiler.counting.walk import walk
from profiler.data.ceiling_set import CeilingSet
from profiler.device.contention import OwnClock
from profiler.device.machine import Machine, machine_for
from profiler.facts.step import Step
from profiler.loading.request import dtype_name
from profiler.measure.overhead import least_overhead_s
from profiler.quant.storage import stored
from profiler.roofs.measure import here_ceilings
from profiler.why_slow.call_record import CallRecord, models_of
from profiler.why_slow.findings import CallFloor
from profiler.why_slow.observations import Call, steady_s
from profiler.why_slow.plain_models import SeenAttention, is_plain


@dataclass(frozen=True)
class Subject:
    """A model's counted work, the measured ceilings of its device, and the time to launch it."""

    work: ModelWork
    under: CeilingSet
    dtype: str
    overhead_s: tuple[float, float] | None
    """(prefill, decode step); None if it cannot be measured."""
    overlaps: bool
    outside: tuple[str, ...] = ()
    """Names of the modules that are no part of `work`: towers, encoders, and attention to them."""
    encoder_decoder: bool = False


def floor_of_calls(
    calls: Sequence[Call], subjects: Mapping[str, Subject], outside_s: Mapping[int, float | None]
) -> CallFloor:
    """The least total time of all calls: the roofline time of their operators, and the least overhead of their steps.

    `subjects` are those of all models, by name. `outside_s` is the roofline time of each call's modules outside of its
    subject's work, by its number; None if unknown. Of a forward without tokens, these are all modules, and overhead is
    unknown. Overhead also counts as unknown if it would make the floor longer than the calls. Raises KeyError for a
    model without a subject.
    """
    left_out: dict[str, None] = {}
    total_s = overhead_s = needless_s = 0.0
    for before, call in zip([None, *calls], calls, strict=False):
        subject = subjects[call.model]
        if call.kind == "generate" and subject.encoder_decoder:
            call = replace(call, prompt_len=1, padding=0.0)  # the decoder begins with a start token
        more_s = outside_s.get(call.number, 0.0 if call.prompt_len else None)
        if more_s is None:
            left_out |= dict.fromkeys(subject.outside if call.prompt_len else (call.model,))
        total_s += more_s or 0.0
        if call.prompt_len:
            call_s, exposed_s = _least_s(_steps_needed(before, call), call, subject)
            total_s += call_s
            overhead_s += exposed_s
            needless_s += max(0.0, at_ceilings_s(call, subject) - (call_s - exposed_s))
    if overhead_s and total_s > steady_s(calls):  # a busy machine has disturbed its measurement
        without = {name: replace(subject, overhead_s=None) for name, subject in subjects.items()}
        return floor_of_calls(calls, without, outside_s)
    known_s = overhead_s if all(call.prompt_len and subjects[call.model].overhead_s for call in calls) else None
    return CallFloor(total_s, known_s, needless_s, tuple(left_out), subjects, frozenset(outside_s))


def subjects_of(notes: Sequence[CallRecord]) -> dict[str, Subject]:
    """What the floor depends on, by the names of `models_of`. Raises RequestError, see `subject_of`."""
    attention = {noted.architecture: noted.attention for noted in notes if noted.attention}
    models, subjects = models_of(notes), dict[tuple[str, int], Subject]()
    for noted in notes:
        if noted.name in models and noted.architecture not in subjects:
            subjects[noted.architecture] = subject_of(models[noted.name], attention.get(noted.architecture))
    return {noted.name: subjects[noted.architecture] for noted in notes if noted.name in models}


def subject_of(model: nn.Module, attention: SeenAttention | None = None) -> Subject:
    """What the floor of a model's calls depends on. Raises RequestError if its device has no measured ceilings."""
    work = plain_work(model, attention) if is_plain(model) else walk(model)
    encodes = not is_plain(model) and bool(model.config.is_encoder_decoder)
    encoder: Any = model.get_encoder() if encodes else None
    parts = {} if is_plain(model) else dict(model.named_modules())
    names = [name for name, each in parts.items() if each is encoder or (name and not_run_for_text(name, each))]
    outside = tuple(name for name in names if not any(name.startswith(f"{other}.") for other in names))
    within = tuple(f"{name}." for name, each in parts.items() if each is encoder)
    work = replace(work, operators=tuple(item for item in work.operators if not item.name.startswith(within)))
    parameter = next(model.parameters())
    dtype, machine = dtype_name(parameter.dtype), machine_for(parameter.device)
    timed = machine if machine.clock.ahead else Machine(parameter.device, clock=OwnClock())
    try:
        overhead_s = least_overhead_s(model, timed)
    except Exception:  # a class that cannot be built from only its config
        overhead_s = None
    return Subject(
        work, here_ceilings(work, dtype, small=True), dtype, overhead_s, machine.clock.ahead, outside, encodes
    )


def plain_work(model: nn.Module, attention: SeenAttention | None) -> ModelWork:
    """The work of a plain model: its linears, tables and other parameters, and the attention that was seen.

    The last linear whose width is the vocabulary's is the LM head, and computes one position per sequence.
    """
    dtype = next(model.parameters()).dtype
    tables = [part for part in model.modules() if isinstance(part, nn.Embedding)]
    linears = {name: part for name, part in model.named_modules() if isinstance(part, nn.Linear)}
    vocabulary = max(table.num_embeddings for table in tables)
    head = next((name for name, part in reversed(linears.items()) if part.out_features == vocabulary), "")
    operators: list[Any] = [
        Embedding("table", table.weight.dtype, table.embedding_dim, table.weight.itemsize) for table in tables
    ]
    operators += [
        Linear(name=name, dtype=part.weight.dtype, weight=stored(part), activation_dtype=dtype,
               group="lm_head" if name == head else "mlp", rows="last" if name == head else "tokens")
        for name, part in linears.items()
    ]  # fmt: skip
    if attention:
        operators.append(AttentionCore(
            name="attention", count=attention.layers, dtype=dtype, query_heads=attention.query_heads,
            kv_heads=attention.kv_heads, qk_dim=attention.qk_dim, v_dim=attention.v_dim,
        ))  # fmt: skip
    counted = {id(each) for part in (*tables, *linears.values()) for each in part.parameters(recurse=False)}
    rest = sum(each.nbytes for each in model.parameters() if id(each) not in counted)
    if rest:
        operators.append(Elementwise("other parameters", dtype, 0, 0, weight_bytes=rest))
    params = sum(each.numel() for each in model.parameters())
    return ModelWork(tuple(operators), params, ())


def _steps_needed(before: Call | None, call: Call) -> Step:
    """The steps that a call needs: the prompt without padding, then a step per new token except the last.

    A forward with one token more than the one `before`, and without a cache, needs a step: a cache would have held the
    rest.
    """
    tokens = max(1, round(call.prompt_len * (1 - call.padding)))
    if before is not None and call.kind == "forward" and not call.context_len:
        same = (before.kind, before.where, before.model, before.batch_size, before.prompt_len + 1)
        if same == (call.kind, call.where, call.model, call.batch_size, call.prompt_len):
            return _steps_with_cache(replace(call, context_len=tokens - 1), 1)
    return _steps_with_cache(call, tokens)


def _least_s(step: Step, call: Call, subject: Subject) -> tuple[float, float]:
    """(seconds of a call's steps, overhead seconds in them)."""
    device_s = _ceiling_times(step, subject)
    # Compiled code is launched as one call, so these times do not bound it.
    prefill_s, decode_s = (None if call.settings.compiled else subject.overhead_s) or (0.0, 0.0)
    host_s = np.where(step.query > 1, prefill_s, decode_s)
    exposed_s = np.maximum(host_s - device_s, 0.0) if subject.overlaps else host_s
    return float(np.sum(device_s + exposed_s)), float(np.sum(exposed_s))


def made_s(calls: Sequence[Call], subject: Subject) -> float:
    """The least seconds of calls as they were made: all of their steps at the ceilings, with overhead."""
    return sum(_least_s(_steps_made(call), call, subject)[0] for call in calls)


def at_ceilings_s(call: Call, subject: Subject) -> float:
    """The seconds at the ceilings of a call as it was made, without overhead."""
    return float(np.sum(_ceiling_times(_steps_made(call), subject)))


def with_all_logits(subject: Subject) -> Subject:
    """The same model, whose LM head computes every position, as it does in a forward without `logits_to_keep`."""
    every = [replace(item, rows="tokens") if isinstance(item, Linear) and item.rows == "last" else item
             for item in subject.work.operators]  # fmt: skip
    return replace(subject, work=replace(subject.work, operators=tuple(every)))


def _steps_made(call: Call) -> Step:
    """The steps of a call as the script made it: with its padding, and without a cache if it had none."""
    if call.settings.cache is not False:
        return _steps_with_cache(call, call.prompt_len)
    queries = np.arange(call.prompt_len, call.prompt_len + max(1, call.new_tokens))
    return Step(np.full_like(queries, call.batch_size), queries, np.zeros_like(queries))


def _steps_with_cache(call: Call, tokens: int) -> Step:
    """The steps of a call and a prompt of so many tokens; `generate` gets those in its cache too, forwards do not."""
    computed = max(1, tokens - call.context_len) if call.kind == "generate" else tokens
    queries = np.array([computed, *[1] * (call.new_tokens - 1)])
    contexts = np.array([call.context_len, *range(tokens, tokens + call.new_tokens - 1)])
    return Step(np.full_like(queries, call.batch_size), queries, contexts)


def _ceiling_times(step: Step, subject: Subject) -> NDArray[np.float64]:
    return np.add(*ceiling_times(subject.work, step, subject.under, subject.dtype))
