"""Models in plain PyTorch: how they are recorded, counted and repeated, also where autocast casts their weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from planted_faults import changes_to, groups_of, recorded, tiny_llama
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from profiler.data.ceiling_set import CeilingSet
from profiler.facts.step import Step
from profiler.why_slow import model_changes
from profiler.why_slow.costs import module_times
from profiler.why_slow.floor import floor_of_calls, plain_work, subjects_of

WIDTH, ENTRIES, STEPS = 32, 48, 4
LINEARS = 3


@pytest.fixture(autouse=True)
def units(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that multiplies in bfloat16, whatever this one does."""
    monkeypatch.setattr(model_changes, "_has_units", lambda _: True)


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


def decoder(*, frozen: bool = False) -> nn.Module:
    return Decoder().requires_grad_(not frozen).eval()


def ids(tokens: int) -> torch.Tensor:
    return torch.ones(1, tokens, dtype=torch.long)


def cache(tokens: int) -> list[torch.Tensor]:
    """Keys and values [batch, heads, tokens, width]."""
    return list(torch.zeros(2, 1, 1, tokens, WIDTH))


class Wrapped(nn.Sequential):
    """A transformers model inside another module, as peft wraps it."""


def test_a_cached_step_has_its_context() -> None:
    model = decoder()

    def run() -> None:
        _, past = model(ids(8))
        model(ids(1), past)
        model.head(torch.ones(1, 1, WIDTH))  # a part of a model is not a model
        nn.CrossEntropyLoss()(torch.ones(1, 4), torch.ones(1, dtype=torch.long))

    seen = recorded(run).seen("script")
    assert [call.words for call in seen.calls] == ["forward 1 x 8", "forward 1 x 1 @ 8"]
    assert {call.model for call in seen.calls} == {"Decoder"}
    assert "__call__" not in vars(Decoder)
    assert "__init_subclass__" not in vars(nn.Module)
    assert F.scaled_dot_product_attention.__module__ != "profiler.why_slow.recorder"


def test_a_model_of_transformers_in_a_module_is_recorded_itself() -> None:
    wrapped = Wrapped(tiny_llama())
    seen = recorded(lambda: wrapped(ids(4))).seen("script")
    assert [call.model for call in seen.calls] == ["LlamaForCausalLM"]


@pytest.mark.parametrize(
    "compile_",
    [
        lambda model: model.compile(backend="eager"),
        lambda model: setattr(model, "forward", torch.compile(model.forward, backend="eager")),
    ],
)
@pytest.mark.parametrize("make", [Decoder, tiny_llama])
def test_a_model_that_compiles_itself_counts_as_compiled(compile_: Callable[[Any], None], make: Any) -> None:
    model = make().eval()
    compile_(model)
    with torch.compiler.set_stance("force_eager"):
        notes = recorded(lambda: model(ids(4))).notes
    assert [(noted.settings.compiled, noted.arguments) for noted in notes] == [(True, None)]


def test_its_work_is_that_of_torchs_counter() -> None:
    """One token attends to 9 keys, and torch's counter counts the same matmuls."""
    model = decoder()
    recorder = recorded(lambda: model(ids(1), cache(8)))
    work = plain_work(model, recorder.notes[0].attention)
    # torch's counter does not know the fused kernel of a CPU.
    with FlopCounterMode(display=False) as counter, torch.inference_mode(), sdpa_kernel(SDPBackend.MATH):
        model(ids(1), cache(8))
    assert work.work(Step(1, 1, 8)).model_flops == counter.get_total_flops()
    # Only the last position reaches the head.
    assert work.work(Step(1, 5, 0)).model_flops == (2 * (5 * 4 * WIDTH * WIDTH + WIDTH * ENTRIES) + 2 * 2 * WIDTH * 15)
    assert work.params == sum(parameter.numel() for parameter in model.parameters())


def test_its_calls_have_a_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    ceilings = CeilingSet("known", 1e9, {"float32": 1e9}, 0)
    monkeypatch.setattr("profiler.why_slow.floor.here_ceilings", lambda *_, **__: ceilings)
    model = decoder()
    [group] = groups_of(lambda: model(ids(1), cache(8)))
    floor = floor_of_calls(group.calls, subjects_of(group.notes), {})
    # A step of one token reads each weight of 4 bytes for two FLOPs, and the keys and values of 8 tokens.
    weights = sum(parameter.numel() for parameter in model.parameters()) - ENTRIES * WIDTH
    nbytes = 4 * (weights + WIDTH + ENTRIES + 2 * WIDTH * 9)
    assert floor.seconds == pytest.approx(nbytes / 1e9, rel=0.01)
    assert floor.overhead_s is None
    assert module_times(group, lambda _seconds: True, floor.subjects["Decoder"]) is not None


def test_a_loop_that_computes_its_text_again_is_tried_with_single_tokens() -> None:
    """Its texts are no batch: each is the one before and a token more."""
    model = decoder()

    def run() -> None:
        text = ids(8)
        for _ in range(8):
            text = torch.cat([text, model(text)[0][:, -1:].argmax(-1)], dim=1)

    found = changes_to(run)
    assert found["cache-off"].change == "keep the keys and values of earlier tokens, and pass only the new token"
    lengths: list[int] = []
    model.register_forward_pre_hook(lambda _module, args: lengths.append(args[0].shape[1]))
    found["cache-off"].changed()
    assert lengths == [8, *[1] * 7]
    assert "one-by-one" not in found


class Casts(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function.name() in ("aten::_to_copy", "aten::to.dtype") and isinstance(args[0], nn.Parameter)
        return function(*args, **(kwargs or {}))


def steps(model: nn.Module) -> None:
    past = None
    for _ in range(STEPS):
        _, past = model(ids(1), past)


def steps_each_in_its_own(model: nn.Module) -> None:
    past = None
    for _ in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16):
            _, past = model(ids(1), past)


def in_one(model: nn.Module) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        steps(model)


@pytest.mark.parametrize(
    ("frozen", "script", "is_tried"),
    [
        (True, in_one, True),
        (False, in_one, False),  # without gradients, autocast keeps casts of what could have some
        (False, steps_each_in_its_own, True),
        (False, torch.inference_mode()(in_one), True),
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
    assert change.where == f"test_plain_models.py:{in_one.__code__.co_firstlineno + 1}"
    # 3 x 32 x 32 of qkv, 32 x 32 and 48 x 32 weights of 4 bytes
    assert "casts 22.5 kB of weights to bfloat16 again in each forward" in change.evidence
    expected: Any = change.as_is()
    with change.within(), torch.no_grad(), Casts() as casts:
        got: Any = change.changed()
    assert casts.count == 0
    assert torch.allclose(got[0], expected[0], atol=0.02)
    assert model.head.weight is weight


def test_where_the_dtype_is_emulated_autocast_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_changes, "_has_units", lambda _: False)
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
