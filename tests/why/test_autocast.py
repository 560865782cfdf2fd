"""Autocast over weights that it casts again, also in a plain loop whose calls share a cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from planted_faults import changes_to, recorded
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from profiler.why_slow import weight_changes

WIDTH, ENTRIES, STEPS = 32, 48, 4
LINEARS = 3
IDS = torch.ones(1, 1, dtype=torch.long)


@pytest.fixture(autouse=True)
def units(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that multiplies in bfloat16, whatever this one does."""
    monkeypatch.setattr(weight_changes, "_has_units", lambda _: True)


class Decoder(nn.Module):
    """One layer of attention with a cache that grows, and 48 x 32 weights of a table, which autocast leaves alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(ENTRIES, WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, ENTRIES, bias=False)

    def forward(self, ids: Any, past: Any = None) -> Any:
        x = self.table(ids)
        q, k, v = (y[:, None] for y in self.qkv(self.norm(x)).chunk(3, -1))
        if past:
            k, v = torch.cat([past[0], k], 2), torch.cat([past.pop(), v], 2)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v)[:, 0])
        return self.head(x), [k, v]


class Casts(TorchDispatchMode):
    """Counts weights that are cast."""

    count = 0

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function.name() in ("aten::_to_copy", "aten::to.dtype") and isinstance(args[0], nn.Parameter)
        return function(*args, **(kwargs or {}))


def autocast() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


def steps(model: nn.Module) -> None:
    past = None
    for _ in range(STEPS):
        _, past = model(IDS, past)


def steps_each_in_its_own(model: nn.Module) -> None:
    past = None
    for _ in range(STEPS):
        with autocast():
            _, past = model(IDS, past)


def in_one(model: nn.Module) -> None:
    with autocast():
        steps(model)


def in_inference_mode(model: nn.Module) -> None:
    with torch.inference_mode():
        in_one(model)


def decoder(*, frozen: bool) -> nn.Module:
    return Decoder().requires_grad_(not frozen).eval()


@pytest.mark.parametrize(
    ("frozen", "script", "is_tried"),
    [
        (True, in_one, True),
        (False, in_one, False),  # without gradients, autocast keeps casts of what could have some
        (False, steps_each_in_its_own, True),
        (False, in_inference_mode, True),
        (True, steps, False),
    ],
)
def test_weights_that_autocast_casts_again_are_tried_cast_once(
    frozen: bool, script: Callable[[nn.Module], None], is_tried: bool
) -> None:
    """By torch's own calls: each of the three linears' weights is cast in each step, or once for all steps."""
    model = decoder(frozen=frozen)
    with torch.no_grad(), Casts() as casts:
        script(model)
    assert casts.count == {True: STEPS * LINEARS, False: 0 if script is steps else LINEARS}[is_tried]
    assert ("autocast" in changes_to(lambda: script(model))) == is_tried


def test_a_trial_casts_no_linear_and_computes_the_same() -> None:
    model = decoder(frozen=True)
    weight = model.head.weight
    found = changes_to(lambda: in_one(model))
    change = found["autocast"]
    assert "wide-dtype" not in found
    assert change.where == f"test_autocast.py:{in_one.__code__.co_firstlineno + 1}"
    # 3 x 32 x 32 of qkv, 32 x 32 and 48 x 32 weights of 4 bytes
    assert "casts 22.5 kB of weights to bfloat16 again in each forward" in change.evidence
    expected: Any = change.as_is()
    with change.within(), torch.no_grad(), Casts() as casts:
        got: Any = change.changed()
    assert casts.count == 0
    assert torch.allclose(got[0], expected[0], atol=0.02)
    assert model.head.weight is weight


def test_where_the_dtype_is_emulated_autocast_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_changes, "_has_units", lambda _: False)
    model = decoder(frozen=True)
    change = changes_to(lambda: in_one(model))["emulated-dtype"]
    assert change.change == "leave out torch.autocast"
    with change.within():
        assert change.changed()[0].dtype == torch.float32  # type: ignore[index]
    assert change.as_is()[0].dtype == torch.bfloat16  # type: ignore[index]


def test_only_the_shapes_of_a_cache_are_kept_and_each_run_has_lists_of_its_own() -> None:
    """`Decoder` takes values out of the list that it gets, so a second run would lack them. Each id has 8 bytes."""
    model = decoder(frozen=True)
    recorder = recorded(lambda: steps(model))
    caches = [noted.arguments[0][1] for noted in recorder.notes if noted.arguments]
    assert [[each.shape[2] for each in cache or ()] for cache in caches] == [[], [1, 1], [2, 2], [3, 3]]
    assert all(each.is_meta for cache in caches for each in cache or ())
    assert sum(recorder.kept.storages.values()) == STEPS * 8
    change = changes_to(lambda: in_one(model))["autocast"]
    assert change.as_is()[1][0].shape == change.as_is()[1][0].shape  # type: ignore[index]
