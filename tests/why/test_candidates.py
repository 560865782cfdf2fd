"""Changes without a planted-fault script are tried on the smallest model where each applies."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hurry import with_effort
from planted_faults import changes_to, tiny_llama
from torch.nn.attention import SDPBackend, sdpa_kernel

import profiler
from profiler.device.clock import OwnTime

IDS = torch.ones(1, 8, dtype=torch.long)


def generate(model: Any, **options: bool) -> None:
    model.generate(IDS, max_new_tokens=2, return_dict_in_generate=True, do_sample=False, **options)


def forward(model: Any, *backends: SDPBackend, **options: bool) -> None:
    with torch.no_grad(), sdpa_kernel([*backends]) if backends else contextlib.nullcontext():
        model(IDS, **options)


@pytest.mark.parametrize(
    ("script", "change"),
    [
        (partial(generate, output_hidden_states=True), "extra-outputs"),
        (partial(forward, output_hidden_states=True), "extra-outputs"),
        (lambda model: forward(model, SDPBackend.MATH), "slow-attention"),
        (forward, "threads"),
    ],
)
def test_a_change_is_tried(script: Callable[[Any], None], change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial runs and restores the number of threads. The saving depends on the machine and is not checked."""
    with_effort(monkeypatch, script_floor=False, script_least_s=60.0, script_repeats=1)
    cores = torch.get_num_threads() + (change == "threads")
    monkeypatch.setattr("os.sched_getaffinity", lambda _process: set(range(cores)), raising=False)
    model = tiny_llama().to(torch.bfloat16)
    with profiler.why() as watching:
        script(model)
    assert change in {trial.id for trial in watching.found.tried}
    assert watching.found.not_tried == ()
    assert torch.get_num_threads() + (change == "threads") == cores


def test_a_copy_in_another_dtype_gets_features_in_it() -> None:
    """The script passes sounds or images in the dtype of its model. The copy in bfloat16 gets them in bfloat16."""
    model = tiny_llama()
    found = changes_to(lambda: model(inputs_embeds=torch.randn(1, 4, 32)))["wide-dtype"]
    assert found.changed().logits.dtype == torch.bfloat16  # type: ignore[attr-defined]


@pytest.mark.parametrize(("waits", "own_s"), [((3, 3), 0.2), ((3, 4), 5.0)])
def test_time_of_other_processes_is_excluded(
    waits: tuple[int, int], own_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 5 s of wall time with 0.2 s of CPU time, the rest is excluded unless the thread itself waited."""
    core, wall, waited = iter((1.0, 1.2)), iter((10.0, 15.0)), iter(waits)
    monkeypatch.setattr("profiler.device.clock.thread_time", lambda: next(core))
    monkeypatch.setattr("profiler.device.clock.now_s", lambda: next(wall))
    monkeypatch.setattr("profiler.device.clock.core_waits", lambda: next(waited))
    assert OwnTime().seconds() == pytest.approx(own_s)
