"""The changes that are tried on a script's calls, and when each of them applies."""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from profiler.errors import describe_error
from profiler.patching import patched, switched
from profiler.units import several
from profiler.why_slow import batch_and_loop_changes, model_changes
from profiler.why_slow.findings import Untried
from profiler.why_slow.floor import made_s, with_all_logits
from profiler.why_slow.observations import Call
from profiler.why_slow.repeat_call import CallGroup, Candidate, passed
from profiler.why_slow.torch_context import ALL_KERNELS


@dataclass(frozen=True)
class Change:
    """A kind of change: the calls that it may apply to, and its trial; None if on closer look it does not apply."""

    id: str
    applies: Callable[[CallGroup], bool]
    trial: Callable[[CallGroup], Candidate | None]


def candidates(group: CallGroup, untried: Untried) -> Iterator[Candidate]:
    """The changes that apply to a group of calls; `untried` gets those that cannot be tried, and the reason."""
    for change in CHANGES:
        try:
            if change.applies(group) and (candidate := change.trial(group)) is not None:
                yield candidate
        except Exception as error:  # a user's model may fail in any way, and the answer is useful without this change
            untried.add(f"{change.id} ({group.call.where})", describe_error(error))


def _switch(
    name: str,
    applies: Callable[[CallGroup], bool],
    evidence: str | Callable[[CallGroup], str],
    change: str | Callable[[CallGroup], str] = "",
    within: Callable[[CallGroup], contextlib.AbstractContextManager[None]] | None = None,
    *,
    at_load: bool = False,
    instead: Callable[[Call], Call] | None = None,
    options: Callable[[CallGroup], dict[str, object]] = lambda _: {},
) -> Change:
    """A change to `options` of the call, or to what is set within a context; `at_load` at the line of the load.

    The words of options are followed by `change`. `instead` gives the changed call, whose shape says what it saves.
    """

    def trial(group: CallGroup) -> Candidate:
        words, cure = (text if isinstance(text, str) else text(group) for text in (evidence, change))
        given = options(group)
        more: dict[str, Any] = {"within": lambda: within(group)} if within else {}
        more |= {"about": group.saved_share([group.call], [instead(group.call)])} if instead else {}
        more |= {"where": group.loaded_at} if at_load else {}
        return group.candidate(name, words, passed(given) + cure, group.repeated(**given), **more)

    return Change(name, applies, trial)


@contextlib.contextmanager
def _in_eval_mode(model: Any) -> Iterator[None]:
    """A context in which no part of a model is in train mode; some may have been in eval mode before."""
    trains = [each for each in model.modules() if each.training]
    model.eval()
    try:
        yield
    finally:
        for each in trains:
            each.training = True


def _without_callbacks(group: CallGroup) -> Candidate | None:
    if not (group.call.left_out_s and (names := " and ".join(group.call.callbacks_s))):
        return None
    return group.candidate(
        "host-sync", f"{names} read every token on the host, which waits for the device",
        f"leave out {names}, or read only every few tokens", alone=True,
    )  # fmt: skip


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _runs_experts_in_turn(group: CallGroup) -> bool:
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return group.settings.experts == "eager" and any(
        getattr(group.model.config.get_text_config(), name, 0) for name in names
    )


def _unread_logits(group: CallGroup) -> Candidate | None:
    """A change to the last positions, if the script reads one of each row, or at most half of them from the end."""
    reads = [noted.read for _, noted in group.repeatable]
    known = [each for each in reads if each is not None and each.places]
    if not known or len(known) < len(reads):
        return None
    call, subject, tokens = group.call, group.subject, group.call.prompt_len
    keep, which = 1, "one of each row"
    if not all(each.at_most_one_per_row for each in known):
        keep = max(each.last for each in known)
        which = f"at most the last {keep}"
    if keep > tokens / 2:
        return None
    share_of_head = 1 - made_s([call], subject) / made_s([call], with_all_logits(subject)) if subject else 0.0
    on_the_left = "pad on the left, and " if keep == 1 and any(each.last > 1 for each in known) else ""
    return group.candidate(
        "all-logits", f"logits of all {tokens} positions are computed, and the script reads {which}",
        on_the_left + passed(options := {"logits_to_keep": keep}), group.repeated(**options),
        about=(tokens - keep) / max(1, tokens - 1) * share_of_head,
    )  # fmt: skip


CHANGES = (
    _switch(
        "cache-off", lambda group: group.generates and group.settings.cache is False,
        "use_cache=False computes the whole prompt again at every token",
        options=lambda _: {"use_cache": True},
        instead=lambda call: replace(call, settings=replace(call.settings, cache=True)),
    ),
    Change("cache-off", lambda group: not group.generates, batch_and_loop_changes.loop_without_cache),
    Change(
        "host-sync", lambda group: not group.generates and len(group.calls) > 1, batch_and_loop_changes.without_reads
    ),
    _switch(
        "grad-on", lambda group: not group.generates and group.settings.gradients and not group.recorder.trained,
        "gradients are recorded, and nothing is differentiated", "call it within torch.inference_mode()",
        lambda _: torch.inference_mode(),
    ),
    _switch(
        "train-mode", lambda group: group.settings.training and not group.recorder.trained,
        "the model is in train mode", "call model.eval() after loading",
        lambda group: _in_eval_mode(group.model),
    ),
    Change("frozen-weights", lambda group: not group.settings.gradients, model_changes.frozen_weights),
    Change("padding", lambda group: group.call.padding > 0, batch_and_loop_changes.padding_change),
    Change("all-logits", lambda group: not group.generates, _unread_logits),
    _switch(
        "extra-outputs", lambda group: bool(group.settings.outputs),
        lambda group: f"{', '.join(group.settings.outputs)} are requested", ", unless they are used",
        options=lambda group: dict.fromkeys(group.settings.outputs, False),
    ),
    _switch(
        "slow-attention",
        lambda group: group.settings.attention == "eager" and getattr(group.model, "_supports_sdpa", False),
        "attention is eager: its scores are written out", 'call model.set_attn_implementation("sdpa") after loading',
        lambda group: model_changes.with_implementation(group.model, "attn", "sdpa"), at_load=True,
    ),
    _switch(
        "slow-attention", lambda group: group.settings.attention == "sdpa" and group.settings.math_attention,
        "SDPA's fused kernels are disabled: its scores are written out",
        "leave out sdpa_kernel(SDPBackend.MATH) and enable_flash_sdp(False)",
        lambda group: patched(group.middle[1], context=replace(group.middle[1].context, kernels=ALL_KERNELS)),
    ),
    _switch(
        "slow-experts", _runs_experts_in_turn,
        "experts run one after the other in a loop",
        'call model.set_experts_implementation("grouped_mm") after loading',
        lambda group: model_changes.with_implementation(group.model, "experts", "grouped_mm"), at_load=True,
    ),
    _switch(
        "beams", lambda group: group.settings.beams > 1, lambda group: f"{group.settings.beams} beams are followed",
        ", if its answers are good enough",
        instead=lambda call: replace(call, batch_size=call.batch_size // call.settings.times_computed),
        options=lambda _: {"num_beams": 1, "num_return_sequences": 1},
    ),
    Change("host-sync", lambda group: not group.settings.on_cpu, _without_callbacks),
    _switch(
        "assistant", lambda group: group.settings.assistant,
        "an assistant model drafts", options=lambda _: {"assistant_model": None},
    ),
    Change("uncompiled", model_changes.is_bound_by_host, model_changes.compiled_step),
    Change("unmerged-adapters", lambda _: True, model_changes.merged_adapters),
    Change("slow-format", lambda _: True, model_changes.dense_weights),
    Change("offload", lambda _: True, model_changes.gathered_weights),
    Change("autocast", lambda group: group.middle[1].context.autocast is not None, model_changes.cast_once),
    Change("wide-dtype", lambda group: group.middle[1].context.autocast is None, model_changes.other_dtype),
    Change(
        "one-by-one", lambda group: group.middle[1].watched.in_threads, batch_and_loop_changes.paged_batch_change
    ),
    Change("one-by-one", lambda _: True, batch_and_loop_changes.batching_change),
    Change("one-by-one", lambda _: True, batch_and_loop_changes.stacking_change),
    Change("shared-prefix", lambda group: group.generates, batch_and_loop_changes.prefix_change),
    # Last, since threads that wait for each other may take very long on a busy machine.
    _switch(
        "threads", lambda group: group.settings.on_cpu and group.settings.threads != _cores(),
        lambda group: f"torch computes with {several(group.settings.threads, 'thread', 'threads')} on {_cores()} cores",
        lambda _: f"torch.set_num_threads({_cores()})",
        lambda _: switched(torch.set_num_threads, _cores(), torch.get_num_threads()),
    ),
)  # fmt: skip
