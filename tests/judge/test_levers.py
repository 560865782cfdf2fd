"""Savings of changes, from breakdowns made by hand: a 7B model in float16 at 1 TB/s, so 1 GB takes 1 ms."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from profiler.data.datasheets import gpu_called
from profiler.facts.measurements import COMPILED, GRAPHED
from profiler.facts.operators import COLLECTIVE, Cause, OperatorWork
from profiler.grid.cells import Cell, CellKey
from profiler.judge.answer import answer
from profiler.judge.breakdown import TERMS, TimeBreakdown
from profiler.judge.cells import EngineDifference, JudgedCell, Lever, TrialResult, with_nearby_trials
from profiler.judge.levers import Setting, best_lever, floors_on, levers
from profiler.judge.regimes import Flag, Verdict

SETTING = Setting(1e12, 100e12, weight_bits=16.0, can_graph=True, weights=7e9)
MEMORY_BOUND = Verdict("memory-bound", "high", (), ())
KERNEL_BOUND = Verdict("kernel-bound", "high", (), ())


def cell(
    *operators: OperatorWork,
    batch: int = 1,
    verdict: Verdict = MEMORY_BOUND,
    depth: int = 512,
    parts: Mapping[str, float] | None = None,
    **terms: float,
) -> JudgedCell:
    """A decode step of these operators, terms and `parts` of its avoidable time."""
    named = dict.fromkeys(TERMS, 0.0) | terms
    if parts:
        named["avoidable_s"] = sum(parts.values())
    total = sum(named.values())
    device = named["weights_s"] + named["kv_s"] + named["compute_s"]
    split = TimeBreakdown(latency_s=total, device_s=device, floor_s=device, **named)
    key = CellKey("decode", Cell(batch, depth, 32))
    return JudgedCell(
        key, batch / total, 0.0, 0.0, 1e12, 100e12, split, verdict, operators=operators, avoidable_s=dict(parts or {})
    )


def with_levers(step: JudgedCell, setting: Setting = SETTING) -> JudgedCell:
    return replace(step, levers=tuple(levers(step, setting)))


def saved(found: list[Lever], change: str) -> float:
    return next((lever.saves_s for lever in found if lever.change.startswith(change)), 0.0)


def linears(flops: float, weight_bytes: float, kv_bytes: float = 0.0) -> OperatorWork:
    return OperatorWork(
        "linears", "mlp", 1, "float32", int(flops), int(weight_bytes), kv_bytes=int(kv_bytes), activation_bytes=0
    )


WIDE = replace(SETTING, compute_flops_per_s=20e12, weight_bits=32.0, cache_bits=32.0)
"""float32 at 20 TFLOP/s and 1 TB/s."""
FLOAT32 = replace(WIDE, sixteen_bit_flops_per_s=80e12)
EMULATED = replace(
    WIDE, memory_bytes_per_s=20e9, compute_flops_per_s=180e9, sixteen_bit_flops_per_s=20e9, can_graph=False
)
"""A Zen 3 core without bfloat16 units: 180 GFLOP/s in float32, 20 GFLOP/s in bfloat16, and 20 GB/s."""
SETTINGS = {"WIDE": WIDE, "FLOAT32": FLOAT32, "EMULATED": EMULATED}

HOST_BOUND = cell(weights_s=2e-3, dispatch_s=9e-3)
CORE = OperatorWork("core", "attention", 32, "bfloat16", 0, 0, kv_bytes=1, activation_bytes=0)
ROLLING = replace(CORE, operator="rolling", kv_bytes=1, avoidable_bytes={Cause.ROLLED_WINDOWS: 8e9})
PRODUCT = OperatorWork("linears", "mlp", 32, "bfloat16", 0, int(1e9), kv_bytes=0, activation_bytes=int(14e9))
REDUCED = OperatorWork("all_reduce", COLLECTIVE, 64, "bfloat16", 0, 0, 0, 0)
CASES = list(csv.DictReader(Path(__file__).with_name("levers.csv").read_text().splitlines()))


def pairs(text: str) -> dict[str, str]:
    return dict(item.split("=") for item in text.split() if "=" in item)


def operators_of(case: dict[str, str]) -> list[OperatorWork]:
    """Operators by name, or as `name FLOPs weight_bytes kv_bytes`."""
    named = {"core": CORE, "rolling": ROLLING, "product": PRODUCT, "all_reduce": REDUCED}
    found = []
    for words in filter(None, case["work"].split("|")):
        name, *amounts = words.split()
        flops, weight_bytes, kv_bytes = (int(float(amount)) for amount in [*amounts, 0, 0, 0][:3])
        group = "lm_head" if name == "head" else "mlp"
        found.append(named.get(name) or OperatorWork(name, group, 1, "float32", flops, weight_bytes, kv_bytes, 0))
    return found


def step_of(case: dict[str, str]) -> JudgedCell:
    known = pairs(case["step"])
    step = cell(
        *operators_of(case),
        batch=int(known.pop("batch", 1)),
        verdict=KERNEL_BOUND if known.pop("kernel_bound", "") else MEMORY_BOUND,
        parts={Cause[name]: float(ms) / 1e3 for name, ms in pairs(case["avoidable_ms"]).items()},
        **{f"{name}_s": float(ms) / 1e3 for name, ms in pairs(case["terms_ms"]).items()},
    )
    if half_width_ms := known.pop("half_width_ms", ""):
        step = replace(step, split=replace(step.split, half_widths_s={"dispatch_s": float(half_width_ms) / 1e3}))
    lost = dict(item.split(":") for item in known.pop("lost_ms", "").split(";") if item)
    step = replace(step, lost_s={name: float(ms) / 1e3 for name, ms in lost.items()})
    return replace(step, **{name: float(value) for name, value in known.items()})


def setting_of(case: dict[str, str]) -> Setting:
    base = SETTINGS.get(case["setting"].partition(" ")[0], SETTING)
    return replace(base, **{name: float(value) for name, value in pairs(case["setting"]).items()})


@pytest.mark.parametrize("case", CASES, ids=[f"{case['change']}: {case['reason']}" for case in CASES])
def test_a_change_saves_what_arithmetic_gives(case: dict[str, str]) -> None:
    change = GRAPHED if case["change"] == "GRAPHED" else case["change"]
    assert saved(levers(step_of(case), setting_of(case)), change) == pytest.approx(float(case["saves_ms"]) / 1e3)


def test_a_16_bit_dtype_saves_between_its_floors_and_its_roofs() -> None:
    """A float32 prefill of 400 ms: 250 at 20 TFLOP/s, 90 of kernel losses, 40 of operands, and 20 unexplained.

    At 80 TFLOP/s its 5 TFLOP need 62.5 ms. If its kernels lose as much as before, that saves 187.5 ms; if they lose
    nothing, and the other 60 ms halve, 400 - 62.5 - 30. On two cores of a Xeon 262 of 400 ms were saved by roofs of
    434 and 2835 GFLOP/s, where the floors differ by 216 ms.
    """
    parts = cell(linears(5e12, 1e6), compute_s=250e-3, kernel_s=90e-3, avoidable_s=40e-3, unexplained_s=20e-3)
    prefill = replace(parts, key=CellKey("prefill", Cell(8, 64, 32)), roof_bytes_per_s=1e12)
    (lever,) = (item for item in levers(prefill, FLOAT32) if item.change == "a 16-bit dtype")
    assert lever.at_least_s == pytest.approx(187.5e-3)
    assert lever.saves_s == pytest.approx(307.5e-3)
    assert lever.amount == "between 188 ms and 308 ms"
    linked = replace(prefill, split=replace(prefill.split, latency_s=500e-3, link_s=100e-3))
    (lever,) = (item for item in levers(linked, FLOAT32) if item.change == "a 16-bit dtype")
    # At most half of the bytes of an offloaded model still cross; perhaps none.
    assert (lever.at_least_s, lever.saves_s) == (pytest.approx(237.5e-3), pytest.approx(407.5e-3))


def test_few_rows_on_a_cpu_have_only_a_bound() -> None:
    """bfloat16 made a step of one sequence 3 ms slower on a Xeon, and 24 ms faster on an EPYC: no floor says which."""
    step = cell(linears(1e9, 20e9), weights_s=20e-3)
    found = levers(step, replace(WIDE, sixteen_bit_flops_per_s=80e12, can_graph=False))
    assert next(item for item in found if item.change == "a 16-bit dtype").amount == "at most 10.0 ms"


def test_a_trial_at_another_depth_gives_a_range() -> None:
    """bfloat16 saved 25 of 63 ms at depth 64. At depth 512 the step takes 25 ms more: half can be saved."""
    trial = TrialResult("bfloat16", 38 / 63, 0.02, 2, 30)
    shallow = replace(cell(batch=8, depth=64, weights_s=63e-3), tried=(trial,))
    deep = cell(batch=8, depth=512, weights_s=63e-3, kv_s=25e-3)
    other_batch = cell(batch=1, depth=512, weights_s=32e-3)
    setting = replace(WIDE, can_graph=False)
    found = levers(with_nearby_trials(deep, [shallow, deep]), setting)
    (lever,) = (item for item in found if item.change == "bfloat16")
    assert lever.basis == "computed"
    assert lever.at_least_s == pytest.approx(25e-3 - 0.02 * 63e-3)
    assert lever.saves_s == pytest.approx(25e-3 + 12.5e-3 + 0.02 * 63e-3)
    assert "tried at decode 8 x 64" in lever.because
    assert not with_nearby_trials(other_batch, [shallow]).tried_nearby
    unclear = replace(shallow, tried=(TrialResult("bfloat16", 0.95, 0.1, 30, 30, 55e-3),))
    found = levers(with_nearby_trials(deep, [unclear]), setting)
    assert "bfloat16" not in {item.change for item in found}, "its own step took 8 ms less than the cell"
    slower = replace(shallow, tried=(TrialResult("bfloat16", 1.13, 0.02, 2, 30),))
    deep = cell(linears(1e9, 63e9), batch=8, depth=512, weights_s=63e-3, kv_s=25e-3)
    found = levers(with_nearby_trials(deep, [slower]), FLOAT32)
    assert not {"bfloat16", "a 16-bit dtype"} & {item.change for item in found}, "it costs time there"


def test_an_8_bit_cache_that_was_not_tried_is_a_bound_with_its_doubt_and_no_advice() -> None:
    """Threads of 2024 to 2026 measured a loss, so no advice is better than a saving computed from bytes."""
    step = cell(kv_s=8e-3)
    [lever] = [item for item in levers(step, SETTING) if item.change == "an 8-bit KV cache"]
    assert lever.at_most
    assert "others measured slower ones (transformers #34096, sglang #30815, vLLM #48786)" in lever.because
    assert best_lever(with_levers(step)) != lever
    tried = replace(step, tried=(TrialResult("an 8-bit KV cache", 0.8, 0.01, 30, 30),))
    assert [item.basis for item in [best_lever(with_levers(tried))] if item] == ["tried"]


SMALL_KERNELS = replace(cell(weights_s=4.85e-3, kernel_s=3.1e-3, dispatch_s=18.15e-3), small_kernels_s=2.1e-3)


def on_engine(name: str, saves_s: float, off_s: float, visits: int = 3) -> EngineDifference:
    low_s, high_s, terms = saves_s - off_s, saves_s + off_s, {"dispatch_s": -saves_s}
    return EngineDifference("decode", 1, 512, 528, 32, name, "eager", saves_s, low_s, high_s, terms, visits=visits)


def test_a_measured_engine_replaces_what_is_computed_for_it() -> None:
    """Of 11 ms the host takes 9: a graph would save at most that, and the engine of this run saves 8.2 ms."""
    [best, *rest] = levers(replace(HOST_BOUND, engines=(on_engine("graph", 8.2e-3, 0.1e-3),)), SETTING)
    assert (best.change, best.basis, best.saves_s) == (GRAPHED, "measured", 8.2e-3)
    assert best.because == "the step takes 2.80 ms then; dispatch -8.20 ms"
    assert saved(rest, GRAPHED) == 0.0


def test_an_engine_within_noise_leaves_no_lever_and_one_visit_leaves_the_bound() -> None:
    noisy, once = on_engine("graph", 0.2e-3, 0.5e-3), on_engine("graph", 8.2e-3, 0.1e-3, visits=1)
    for engine, changes in ((noisy, []), (once, [GRAPHED])):
        found = levers(replace(HOST_BOUND, engines=(engine,)), SETTING)
        assert [item.change for item in found if "graph" in item.change.lower()] == changes


def test_a_compiled_step_saves_the_host_and_most_of_its_small_kernels() -> None:
    """Of 26.1 ms the GPU works 8: 5.6 in products, 0.2 in attention, 2.1 in 1,050 small kernels (an H100's figures).

    With 0.1 to 1/3 of the small kernels left, and attention up to three times as long, 6.1 to 7.0 ms remain. The
    compiled step of another run took 6.72.
    """
    step = replace(SMALL_KERNELS, operators=(CORE,), lost_s={"core": 0.2e-3, "linears": 0.8e-3})
    [found] = [item for item in levers(step, SETTING) if item.change == COMPILED]
    assert found.at_least_s is not None
    low_s, high_s = 26.1e-3 - found.saves_s, 26.1e-3 - found.at_least_s
    assert (low_s, high_s) == (pytest.approx(7.95e-3 - 0.9 * 2.1e-3), pytest.approx(7.95e-3 - 1.4e-3 + 0.4e-3))
    assert low_s < 6.72e-3 < high_s
    assert found.amount == "between 19.1 ms and 20.0 ms"
    assert "cache_implementation" in found.how
    assert found.measured_by == "--engine eager,compile"
    unknown = replace(step, split=replace(step.split, latency_s=28.1e-3, unexplained_s=2e-3))
    [doubted] = [item for item in levers(unknown, SETTING) if item.change == COMPILED]
    assert doubted.at_least_s == pytest.approx(found.at_least_s), "time without a cause is not sure to go"
    split = replace(step, operators=(CORE, REDUCED))
    assert {item.measured_by for item in levers(split, SETTING)} == {""}, "run --tp takes no engine and no format"


def test_a_tried_change_is_advised_before_a_computed_one() -> None:
    step = replace(SMALL_KERNELS, tried=(TrialResult(GRAPHED, 0.4, 0.01, 32, 32, 25e-3),))
    best = best_lever(with_levers(step))
    assert best is not None
    # The whole model was stepped: its step takes 0.4 x 25 ms, whatever the cell's own visits took.
    assert (best.change, best.basis, best.saves_s) == (GRAPHED, "tried", pytest.approx(16.1e-3))


def test_a_larger_batch_saves_by_its_measured_time() -> None:
    """At batch 8 a step takes 16 ms, or 2 ms per token, which is 12 ms less than at batch 1."""
    one, eight = cell(weights_s=14e-3), cell(batch=8, weights_s=14e-3, kv_s=2e-3)
    found = levers(one, SETTING, [one, eight, cell(batch=64, depth=9, weights_s=1e-3)])
    assert saved(found, "batch 8") == pytest.approx(12e-3)
    assert saved(levers(eight, SETTING, [one, eight]), "batch") == 0.0
    [lever] = [item for item in levers(replace(one, knee=154), SETTING, [one, eight]) if item.change == "batch 8"]
    assert lever.because.endswith("in steps of 16.0 ms; by the counts compute-bound from batch 154")


def test_another_card_by_its_roofs() -> None:
    """12 GB of float16 weights with 0.1 TFLOP are bound by bytes, 4 TFLOP with 1 GB by arithmetic.

    At 2 TB/s and 400 TFLOP/s they take 6 ms and 10 ms, each operator by the roof that limits it there. A GPU whose
    memory is too small has no floor.
    """
    rates = {"bandwidth_bytes_per_s": 2e12, "peak_fp16_flops_per_s": 400e12}
    twice = replace(gpu_called("A100 80GB SXM"), gpu="twice", usable_bytes=int(80e9), **rates)
    small = replace(twice, gpu="small", usable_bytes=int(16e9), bandwidth_bytes_per_s=9e12)
    products = OperatorWork("linears", "mlp", 1, "float16", int(0.1e12), int(12e9), kv_bytes=0, activation_bytes=0)
    core = OperatorWork("core", "attention", 1, "float16", int(4e12), 0, kv_bytes=int(1e9), activation_bytes=0)
    here = replace(cell(products, core, weights_s=12e-3, compute_s=40e-3), memory_bytes=20e9)
    setting = replace(SETTING, cards=(twice, small))
    assert floors_on(here, setting) == {"twice": pytest.approx(6e-3 + 10e-3), "small": None}
    found = levers(here, setting)
    assert saved(found, "another GPU (twice)") == pytest.approx(52e-3 - 16e-3)
    assert saved(found, "another GPU (small)") == 0.0
    assert "another GPU" not in " ".join(answer([with_levers(here, replace(setting, packs=False))], setting)), (
        "a run advises on its own GPU"
    )
    slow = replace(here, split=replace(here.split, latency_s=82e-3, kernel_s=10e-3, link_s=20e-3))
    assert [lever.change.partition(" ")[0] for lever in levers(slow, setting)][-1] == "another", "a GPU to rent is last"
    assert saved(levers(slow, setting), "another GPU (twice)") == pytest.approx(82e-3 - 16e-3), "no loss is certain"
    assert saved(levers(here, replace(setting, can_graph=False)), "another GPU") == 0.0, "not of a CPU"


def test_no_lever_for_a_step_above_its_roof_or_at_it() -> None:
    above = Verdict("memory-bound", "low", (), (Flag.ABOVE_ROOF,))
    assert levers(cell(weights_s=14e-3, verdict=above), SETTING) == []
    assert levers(cell(compute_s=14e-3), SETTING) == []


def test_short_products_have_a_fixed_cost() -> None:
    """On an H100 225 products of Mistral-7B's decode step took about 4.5 us + n / 3.2 TB/s: 1.02 ms of 5.64 in all."""
    sizes = {"k": (64, 8.4e6), "q": (64, 33.6e6), "gate": (96, 117.4e6), "head": (1, 262.2e6)}
    operators = tuple(
        OperatorWork(name, "mlp", count, "bfloat16", 1, int(count * nbytes), kv_bytes=0, activation_bytes=0)
        for name, (count, nbytes) in sizes.items()
    )
    lost_s = {name: count * (4.5e-6 + nbytes / 3.2e12 - nbytes / 4e12) for name, (count, nbytes) in sizes.items()}
    step = cell(*operators, weights_s=3.5e-3, kernel_s=sum(lost_s.values()))
    step = replace(step, lost_s=lost_s, roof_bytes_per_s=4e12)
    other = next(item for item in levers(step, SETTING) if item.change.startswith("other kernels"))
    assert "1.01 ms of it the fixed 4.50 us of each of 225" in other.because
