"""Kernels replayed in isolation: the bytes read between the products of a decode step follow from the model's sizes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from subjects import of_caches, subject_of

from profiler.grid.cells import CellKey
from profiler.measure.kernels import _between_bytes, replay_kernels

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
