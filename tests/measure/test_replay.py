"""Replays: each operator is called as the model calls it."""

from __future__ import annotations

import statistics
import time

import pytest
import torch
from clocks import FakeClock
from machines import HOST, small
from torch import nn

from profiler.measure.replay import replay_calls, replay_linears

pytestmark = pytest.mark.cpu


class Seen(nn.Linear):
    """A linear layer that stores its last input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.shape, self.strides = tuple(x.shape), x.stride()
        return super().forward(x)


def test_the_last_positions_come_as_a_slice_of_hidden_states() -> None:
    """transformers passes `hidden_states[:, -1:, :]` to the LM head; torch may use another kernel for such strides."""
    layer, head = Seen(8, 8), Seen(8, 16)
    found = replay_linears(
        {"layer": [layer], "head": [head]},
        {"layer": 12, "head": 3},
        HOST,
        dtype=torch.float32,
        budget_s=0.01,
        sliced=["head"],
    )
    assert min(found["layer"]) > 0
    assert (layer.shape, layer.strides) == ((1, 12, 8), (96, 8, 1))
    states = torch.empty(3, 5, 8)[:, -1:, :]
    assert head.shape == tuple(states.shape)
    assert head.strides[0] > states.shape[-1], "the stride skips the earlier positions"


def test_page_faults_are_taken_off_the_call_that_took_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock adds one second per call: with 20 fresh pages at 20 ms, 0.6 s remain; without pages, 1 s remains."""
    faults = [0]
    monkeypatch.setattr("profiler.measure.replay.page_faults", lambda: faults[0])

    def call(pages: int) -> None:
        faults[0] += pages

    calls = {"fresh": [lambda: call(20)] * 2, "plain": [lambda: call(0)] * 2}
    found = replay_calls(calls, small(clock=FakeClock()), budget_s=0.1, page_fault_s=0.02)
    assert found["fresh"] == pytest.approx([0.6] * len(found["fresh"]))
    assert found["plain"] == pytest.approx([1.0] * len(found["plain"]))


def test_what_is_called_in_between_is_made_in_every_pass_and_not_timed() -> None:
    """Two layers of two operators, and 5 ms between them in each layer."""
    made: list[str] = []

    def between() -> None:
        made.append("between")
        time.sleep(0.005)

    calls = {name: [lambda name=name: made.append(name)] * 2 for name in ("first", "second")}
    found = replay_calls(calls, HOST, budget_s=0.05, between=[between, between])
    assert set(found) == {"first", "second"}
    assert max(statistics.median(seconds) for seconds in found.values()) < 0.001
    warm, passes = made[:2], made[2:]
    assert warm == ["first", "second"]
    assert passes[:6] == ["first", "second", "between"] * 2
