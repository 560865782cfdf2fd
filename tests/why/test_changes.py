"""Changes, each on the smallest model where it applies; the script's model stays as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hurry import with_effort
from planted_faults import changes_to, tiny_llama
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import profiler
from profiler.device.clock import OwnTime
from profiler.facts.measurements import BatchTimes
from profiler.measure.dense_twins import dense_twins, packed_linears, replaced
from profiler.report.changes import paying_batches
from profiler.why_slow.weight_changes import unmerged_adapters

IDS = torch.ones(2, 8, dtype=torch.long)
LINEARS_OF_A_LAYER = 7


class WordLinear(nn.Module):
    """A linear of 4-bit integers in words of 32 bits, as in GPTQ, that unpacks them in every call."""

    def __init__(self, linear: nn.Linear, times: int = 1) -> None:
        super().__init__()
        self.in_features, self.out_features, self.times = linear.in_features, linear.out_features, times
        self.register_buffer("qweight", torch.zeros(linear.in_features // 8, linear.out_features, dtype=torch.int32))
        self.bias = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            parts = [(self.qweight >> (4 * place)) & 15 for place in range(8)]
            weight = torch.cat(parts, 0).to(x.dtype)
        return x @ weight


def with_linears(model: Any, make: Callable[[nn.Linear], nn.Module]) -> Any:
    """The model with other modules in place of the linears of its layers."""
    for layer in model.model.layers:
        for block in (layer.self_attn, layer.mlp):
            for name, child in list(block.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(block, name, make(child))
    return model


def with_bitsandbytes(name: str) -> Any:
    kind = getattr(pytest.importorskip("bitsandbytes").nn, name)

    def pack(linear: nn.Linear) -> nn.Module:
        packed = kind(linear.in_features, linear.out_features, bias=False)
        packed.load_state_dict(linear.state_dict())
        return packed.to("cpu")

    return with_linears(tiny_llama(hidden_size=64, intermediate_size=128), pack)


def with_torchao() -> Any:
    quantization = pytest.importorskip("torchao.quantization")
    model = tiny_llama(hidden_size=64, intermediate_size=128).to(torch.bfloat16)
    quantization.quantize_(model.model.layers, quantization.Int8WeightOnlyConfig())
    return model


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: with_linears(tiny_llama(), WordLinear), "WordLinear"),
        (lambda: with_bitsandbytes("Linear4bit"), "fp4"),
        (lambda: with_bitsandbytes("Linear8bitLt"), "int8"),
        (with_torchao, "int8wo"),
    ],
)
def test_dense_linears_take_the_place_of_packed_ones(make: Any, name: str) -> None:
    model = make()
    linears = packed_linears(model)
    assert [each.format for each in linears] == [name] * LINEARS_OF_A_LAYER
    before = [each.module for each in linears]
    twins = dense_twins(linears, model.dtype, 1e9)
    with torch.no_grad(), replaced(linears, twins):
        assert packed_linears(model) == []
        assert model(IDS).logits.isfinite().all()
        assert type(model.model.layers[0].mlp.up_proj) is nn.Linear
        assert model.model.layers[0].mlp.up_proj.weight.shape == (
            model.config.intermediate_size, model.config.hidden_size,
        )  # fmt: skip
    assert [each.module for each in packed_linears(model)] == before


def test_a_dense_model_has_no_packed_linears() -> None:
    assert packed_linears(tiny_llama()) == []
    assert packed_linears(tiny_llama().to(torch.bfloat16)) == []


def test_layers_share_dense_weights_where_memory_is_short() -> None:
    """With room for half of the float32 weights, four layers share the dense weights of two."""
    linears = packed_linears(with_linears(tiny_llama(num_hidden_layers=4), WordLinear))
    weights = sum(each.module.in_features * each.module.out_features for each in linears)
    twins = dense_twins(linears, torch.float32, 4 * weights / 2)
    assert len(twins) == len(linears) == 4 * LINEARS_OF_A_LAYER
    assert sum(twin.weight.numel() for twin in set(twins)) == weights / 2
    assert len(set(dense_twins(linears, torch.float32, 1.0))) == len({each.shape for each in linears})


def test_packed_weights_that_always_pay_name_all_batches() -> None:
    assert paying_batches([BatchTimes(batch, 1.0, 2.0) for batch in (1, 2, 4)]) == (
        "packed weights are faster at batch 1 to 4"
    )
    assert paying_batches([]) == ""


def test_the_break_even_batch_is_an_interval_where_rounds_disagree() -> None:
    ratios = [(0.5, 0.6), (0.9, 1.1), (0.95, 1.05), (1.4, 1.5)]
    times = [BatchTimes(2**number, 1.0, 1.0, pair) for number, pair in enumerate(ratios)]
    sides = "packed weights are faster at batch 1", "dense weights are faster at batch 8"
    assert paying_batches(times) == f"{sides[0]}; the rounds disagree at batch 2 to 4; {sides[1]}"


@pytest.mark.slow
@pytest.mark.ci
def test_a_slow_format_is_found_with_its_kernel_and_its_break_even_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    with_effort(monkeypatch, script_floor=False, script_least_s=60.0, script_repeats=1)
    model = with_linears(tiny_llama(num_hidden_layers=2), partial(WordLinear, times=50))
    with profiler.why() as watching:
        model.generate(IDS, max_new_tokens=4, do_sample=False)
    first = watching.found.findings[0]
    assert first.id == "slow-format"
    assert "weights are packed (WordLinear), their kernel is aten::" in first.evidence
    assert "and in a decode step dense weights are faster at batch 1 to " in first.evidence
    assert isinstance(model.model.layers[0].mlp.up_proj, WordLinear), "the script's model is unchanged"


class LowRank(nn.Module):
    """LoRA with children (Hu et al. 2021): W x + B A x."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


class Decomposed(LowRank):
    """DoRA (Liu et al. 2024): the rows of W + B A, with norms of their own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.base.weight + self.up.weight @ self.down.weight
        return nn.functional.linear(x, weight / weight.norm(dim=1, keepdim=True))


class Bottleneck(LowRank):
    """An adapter with an activation, which has no equal weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x).relu())


def adapted(kind: Any) -> Any:
    model = tiny_llama(num_hidden_layers=2)
    for layer in model.model.layers:
        layer.self_attn.q_proj = kind(layer.self_attn.q_proj)
        layer.mlp.up_proj = kind(layer.mlp.up_proj)
    return model.eval()


@pytest.mark.parametrize("kind", [LowRank, Decomposed])
def test_an_adapter_is_tried_merged_and_the_model_is_as_before(kind: Any) -> None:
    model = adapted(kind)
    with torch.no_grad():
        before = model(IDS).logits
    found = changes_to(lambda: model(IDS))["unmerged-adapters"]
    assert found.evidence == f"4 linears compute an adapter next to their weight ({kind.__name__})"
    with found.within():
        assert not [each for each in model.modules() if isinstance(each, LowRank)]
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, before)


@pytest.mark.parametrize("model", [tiny_llama(), adapted(Bottleneck)], ids=["none", "bottleneck"])
def test_what_has_no_equal_weight_is_no_adapter(model: Any) -> None:
    assert list(unmerged_adapters(model)) == []


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
