"""Replays: each operator is called as the model calls it, after the bytes that its step reads in between."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from clocks import FakeClock
from machines import HOST, small
from subjects import of_caches, subject_of
from torch import nn

from profiler.grid.cells import CellKey
from profiler.measure.kernels import _between_bytes, replay_kernels
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


LAYERS, KV_HEADS, HEAD_DIM, FLOAT32 = 2, 2, 64 // 4, 4
TOKEN_BYTES = 2 * LAYERS * KV_HEADS * HEAD_DIM * FLOAT32
"""Bytes that the tiny Llama of the tests caches per token: keys and values of each layer."""
HIDDEN, MLP, VOCAB = 64, 128, 128
LAYER = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * KV_HEADS * HEAD_DIM + 3 * HIDDEN * MLP + 2 * HIDDEN
FREQUENCIES = 2 * HEAD_DIM // 2
WEIGHT_BYTES = FLOAT32 * (2 * VOCAB * HIDDEN + LAYERS * LAYER + HIDDEN + FREQUENCIES)
"""Embedding and head, layers, the last norm, and the frequencies of rotary positions, which are stored twice."""
NEW, SLOW = 8, 2 << 20
PAST_CACHES = 2 * SLOW


def quarters(nbytes: float) -> int:
    """Round to the nearest quarter of the weights, up to twice the size that is read as slowly as memory."""
    quarter = WEIGHT_BYTES / 4
    return int(min(round(nbytes / quarter) * quarter, PAST_CACHES))


def touched(key: CellKey) -> int:
    """Return the bytes of the KV cache that the middle step of a decode loop touches.

    The old tokens are read once. A cache that grows by copies also copies the old tokens and the new one once.
    """
    cell = key.cell
    context = cell.prompt_len + NEW // 2
    copied = context + 1 if cell.engine == "eager" else 0
    return cell.batch_size * (context + copied) * TOKEN_BYTES


def test_each_decode_step_is_given_its_own_bytes_between_its_products(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two caches, batches of 1, 8 and 64 after prompts of 16 and 200 tokens; prefills read nothing in between."""
    grid: dict[str, Any] = {"prompt_lens": [16, 200], "batch_sizes": [1, 8, 64], "new_tokens": NEW}
    subject, _ = subject_of(str(tiny_folder), **grid, engine="eager,static")
    given: list[int] = []

    def replay_linears(linears: Any, *_: Any, between_bytes: int, **__: Any) -> dict[Any, tuple[float, ...]]:
        given.append(between_bytes)
        return dict.fromkeys(linears, (1e-3,))

    monkeypatch.setattr("profiler.measure.kernels.replay_linears", replay_linears)
    monkeypatch.setattr("profiler.measure.kernels.replay_single_calls", lambda *_: iter(()))
    replays = list(replay_kernels(subject, subject.grid.cells, of_caches(SLOW), 1.0))
    of_linears = [replay for replay in replays if replay.operators]
    found = {key: nbytes for nbytes, replay in zip(given, of_linears, strict=True) for key in replay.keys}
    corners = {(batch, prompt) for batch in (1, 64) for prompt in (16, 200)}
    order = [(key.cell.batch_size, key.cell.prompt_len) for replay in of_linears for key in replay.keys]
    assert all(size in corners for size in order[:4]), "the corners come first"
    assert found == {
        key: 0 if key.phase == "prefill" else quarters(touched(key)) for cell in subject.grid.cells for key in cell.keys
    }
    of_decode = {nbytes for key, nbytes in found.items() if key.phase == "decode"}
    assert {0, PAST_CACHES} < of_decode, "the shortest KV cache rounds to 0, the largest fills all caches"
    assert len(given) < len(found), "cells with equal values share their replay"


def test_where_a_graph_is_replayed_nothing_is_read_between_its_products(tiny_folder: Path) -> None:
    """With graphs a buffer is read before the replay instead."""
    subject, _ = subject_of(str(tiny_folder), prompt_lens=[200], batch_sizes=[8], new_tokens=NEW)
    [cell] = subject.grid.cells
    decode = CellKey("decode", cell)
    machine: Any = SimpleNamespace(captures=True)
    assert _between_bytes(subject, decode, of_caches(SLOW)) == quarters(touched(decode)) > 0
    assert _between_bytes(replace(subject, machine=machine), decode, of_caches(SLOW)) == 0
