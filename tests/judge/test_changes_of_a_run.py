"""Savings of changes, from breakdowns made by hand: a 7B model in float16 at 1 TB/s, so 1 GB takes 1 ms.

Trials on a few layers predict the step of the whole model, and give a change.
"""

import csv
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from made_facts import KEY, breakdown, judged, pairs

from profiler.facts.change_ids import ChangeId
from profiler.facts.measurements import StepSamples, Trial
from profiler.facts.operators import COLLECTIVE, Cause, OperatorWork
from profiler.facts.overhead import Overhead
from profiler.grid.cells import Cell, CellKey, Phase
from profiler.judge.breakdown import StepCeilings
from profiler.judge.cell_stages import Judged
from profiler.judge.changes import Setting, changes, not_tried, promised_s, saves_clearly
from profiler.judge.regimes import Flag, Verdict
from profiler.judge.savings import ChangeEffect, EngineDifference, TrialResult, trial_results
from profiler.loading.changes import Circumstances

SETTING = Setting(1e12, 100e12, weight_bits=16.0, here=Circumstances(True, "float16", capability=8.0), weights=7e9)
CPU = replace(SETTING, here=Circumstances(False, "float32"))
MEMORY_BOUND = Verdict("memory-bound", "high", (), ())


def cell(
    *operators: OperatorWork, phase: Phase = "decode", batch: int = 1, verdict: Verdict = MEMORY_BOUND,
    parts: Mapping[Cause, float] | None = None, half_width_s: float = 0.0, more: Mapping[str, Any] | None = None,
    **terms: float,
) -> Judged:  # fmt: skip
    """A step of these operators, terms, `parts` of its redundant time, and `more` arguments of `judged`."""
    if parts:
        terms["redundant_s"] = sum(parts.values())
    key, split = CellKey(phase, Cell(batch, 512, 32)), breakdown({"overhead_s": half_width_s}, **terms)
    return judged(key, split, verdict, *operators, redundant_s=dict(parts or {}), **(more or {}))


def named(step: Judged, setting: Setting) -> dict[str, ChangeEffect]:
    """The changes of a step by their changes: formats and dtypes by their names."""
    return {effect.value or effect.id or effect.change: effect for effect in changes(step, setting)}


WIDE = replace(SETTING, compute_flops_per_s=20e12, weight_bits=32.0, cache_bits=32.0)
"""float32 at 20 TFLOP/s and 1 TB/s."""
FLOAT32 = replace(WIDE, sixteen_bit_flops_per_s=80e12)
EMULATED = replace(
    WIDE, memory_bytes_per_s=20e9, compute_flops_per_s=180e9, sixteen_bit_flops_per_s=20e9, here=CPU.here
)
"""A Zen 3 core without bfloat16 units: 180 GFLOP/s in float32, 20 GFLOP/s in bfloat16, and 20 GB/s."""
SETTINGS = {"WIDE": WIDE, "FLOAT32": FLOAT32, "EMULATED": EMULATED, "CPU": CPU}

CORE = OperatorWork("core", "attention", 32, "bfloat16", 0, 0, kv_bytes=1, activation_bytes=0)
ROLLING = replace(CORE, operator="rolling", kv_bytes=1, redundant_bytes={Cause.ROLLED_WINDOWS: 8e9})
MATMUL = OperatorWork("linears", "mlp", 32, "bfloat16", 0, int(1e9), kv_bytes=0, activation_bytes=int(14e9))
REDUCED = OperatorWork("all_reduce", COLLECTIVE, 64, "bfloat16", 0, 0, 0, 0)
CASES = list(csv.DictReader(Path(__file__).with_name("computed_changes.csv").read_text().splitlines()))


def operators_of(case: dict[str, str]) -> list[OperatorWork]:
    """Operators by name, or as `name FLOPs weight_bytes kv_bytes`."""
    named = {"core": CORE, "rolling": ROLLING, "product": MATMUL, "all_reduce": REDUCED}
    found = []
    for words in filter(None, case["work"].split("|")):
        name, *amounts = words.split()
        flops, weight_bytes, kv_bytes = (int(float(amount)) for amount in [*amounts, 0, 0, 0][:3])
        group = "lm_head" if name == "head" else "mlp"
        found.append(named.get(name) or OperatorWork(name, group, 1, "float32", flops, weight_bytes, kv_bytes, 0))
    return found


def step_of(case: dict[str, str]) -> Judged:
    known = pairs(case["step"])
    ceiling, host_s, waits = (known.pop(name, 0.0) for name in ("ceiling_bytes_per_s", "host_pace_s", "waits"))
    known["ceilings"] = StepCeilings(ceiling or 1e12, Overhead(host_s, 0.0, waits=bool(waits)), overlaps=True)
    return cell(
        *operators_of(case),
        phase="prefill" if known.pop("prefill", 0) else "decode",
        batch=int(known.pop("batch", 1)),
        half_width_s=known.pop("half_width_ms", 0.0) / 1e3,
        parts={Cause[name]: ms / 1e3 for name, ms in pairs(case["redundant_ms"]).items()},
        more=known,
        **{f"{name}_s": ms / 1e3 for name, ms in pairs(case["terms_ms"]).items()},
    )


def setting_of(case: dict[str, str]) -> Setting:
    """A setting by its name, with fields of it or of its circumstances."""
    base, given = SETTINGS.get(case["setting"].partition(" ")[0], SETTING), pairs(case["setting"])
    of_here = {item.name: given.pop(item.name) for item in fields(Circumstances) if item.name in given}
    return replace(base, **given, here=replace(base.here, **of_here))


@pytest.mark.parametrize("case", CASES, ids=[f"{case['change']}: {case['reason']}" for case in CASES])
def test_a_change_saves_what_arithmetic_gives(case: dict[str, str]) -> None:
    effect, ms = named(step_of(case), setting_of(case)).get(case["change"]), float(case["saves_ms"])
    assert (effect.saves_s if effect else 0.0) == pytest.approx(ms / 1e3)
    if case["least_ms"]:
        assert effect.at_least_s == pytest.approx(float(case["least_ms"]) / 1e3)
    if case["amount"]:
        assert effect.amount == case["amount"]


def test_an_8_bit_cache_is_a_bound_with_its_doubt_that_no_answer_names() -> None:
    """Threads of 2024 to 2026 measured a loss (transformers #34096, sglang #30815, vLLM #48786)."""
    step = cell(kv_s=8e-3)
    effect = named(step, SETTING)[ChangeId.EIGHT_BIT_CACHE]
    assert effect.at_most
    assert "others measured slower steps" in effect.because
    assert effect not in not_tried(replace(step, changes=tuple(changes(step, SETTING))))


def small_kernels(*operators: OperatorWork, unexplained_s: float = 0.0, **more: Any) -> Judged:
    """A step of which small kernels lose 2.1 ms."""
    terms_s = {"weights_s": 4.85e-3, "kernel_s": 3.1e-3, "overhead_s": 18.15e-3, "unexplained_s": unexplained_s}
    return cell(*operators, more={"small_kernels_s": 2.1e-3, **more}, **terms_s)


def on_engine(name: str, saves_s: float, off_s: float, repetitions: int = 3) -> EngineDifference:
    low_s, high_s, terms = saves_s - off_s, saves_s + off_s, {"overhead_s": -saves_s}
    return EngineDifference(
        "decode", 1, 512, 528, 32, name, "eager", saves_s, low_s, high_s, terms, repetitions=repetitions
    )


@pytest.mark.parametrize(
    ("engine", "bases"),
    [
        (on_engine("compile", 18e-3, 0.1e-3), {"the engine compile": "measured"}),
        (on_engine("compile", 0.2e-3, 0.5e-3), {}),
        (on_engine("compile", 18e-3, 0.1e-3, repetitions=1), {"a compiled step on a static cache": "computed"}),
    ],
)
def test_a_measured_engine_replaces_what_is_computed_for_it(engine: EngineDifference, bases: dict[str, str]) -> None:
    """Also if it saves nothing beyond noise; one repetition is not enough."""
    found = changes(small_kernels(engines=(engine,)), SETTING)
    assert {effect.change: effect.basis for effect in found if effect.id is not ChangeId.FORMAT} == bases


def test_a_compiled_step_saves_the_host_and_most_of_its_small_kernels() -> None:
    """Of 26.1 ms the GPU works 8: 5.6 in matmuls, 0.2 in attention, 2.1 in 1,050 small kernels (an H100's figures).

    With 0.1 to 1/3 of the small kernels left, and attention up to three times as long, 6.1 to 7.0 ms remain. The
    compiled step of another run took 6.72. A graph of the same step is not compiled, so it is at least as slow.
    """
    lost_s = {"core": 0.2e-3, "linears": 0.8e-3}
    found = named(small_kernels(CORE, lost_s=lost_s), SETTING)[ChangeId.COMPILED_STEP]
    assert found.at_least_s is not None
    low_s, high_s = 26.1e-3 - found.saves_s, 26.1e-3 - found.at_least_s
    assert (low_s, high_s) == (pytest.approx(7.95e-3 - 0.9 * 2.1e-3), pytest.approx(7.95e-3 - 1.4e-3 + 0.4e-3))
    assert low_s < 6.72e-3 < high_s
    assert found.amount == "between 19.1 ms and 20.0 ms"
    doubted = named(small_kernels(CORE, lost_s=lost_s, unexplained_s=2e-3), SETTING)[ChangeId.COMPILED_STEP]
    assert doubted.at_least_s == pytest.approx(found.at_least_s), "time without a cause is not sure to go"
    nothing = StepSamples((), ())
    graph = Trial(KEY, "a graph", 32, 32, nothing, nothing, change=ChangeId.GRAPH)
    assert named(small_kernels(CORE, lost_s=lost_s, tried=(TrialResult(graph, 0.25, 0.01, 26e-3),)), SETTING)[
        ChangeId.COMPILED_STEP
    ].at_least_s == pytest.approx(26.1e-3 - 6.5e-3)


def test_no_change_for_a_step_above_its_ceiling_or_at_it() -> None:
    above = Verdict("memory-bound", "low", (), (Flag.ABOVE_CEILING,))
    assert changes(cell(weights_s=14e-3, verdict=above), SETTING) == []
    assert changes(cell(compute_s=14e-3), SETTING) == []


def test_other_formats_promise_by_their_bits() -> None:
    """nf4 has 4.5 bits and saves 10.06 of 14 ms, as in the table: 11.5 bits fewer than 16. Eight fewer promise 7 ms."""
    step = cell(weights_s=14e-3)
    found = promised_s([step], SETTING)
    assert found[ChangeId.FORMAT, "nf4"] == pytest.approx(10.0625e-3)
    assert found[ChangeId.FORMAT, "int8"] == pytest.approx(7e-3)


LINE = "from_pretrained(..., dtype=torch.bfloat16)"
OF_FLOAT32 = replace(SETTING, weight_bits=32.0, cache_bits=32.0, sixteen_bit_flops_per_s=100e12)


def stepped(layers: int, layer_s: float, rest_s: float) -> StepSamples:
    return StepSamples((layers * layer_s,) * 7, (rest_s,) * 7)


def shown(form: str, layers: int) -> Trial:
    return Trial(KEY, form, layers, 30, StepSamples((), ()), StepSamples((), ()))


def trial(layers: int, before: StepSamples, after: StepSamples, **more: Any) -> TrialResult:
    """The result of a trial of bfloat16 on `layers` of 30."""
    of = {"form": "bfloat16 weights", "line": LINE, "change": ChangeId.DTYPE, "value": "bfloat16", **more}
    [found] = trial_results([Trial(KEY, layers=layers, of_layers=30, before=before, after=after, **of)])
    return found


def tried(step_s: float, *results: TrialResult) -> list[ChangeEffect]:
    """The changes of a step that were tried; the last ones cost time."""
    of_step = replace(cell(weights_s=step_s), tried=results)
    return [item for item in changes(of_step, OF_FLOAT32) if item.basis == "tried"]


def test_a_change_is_compared_with_the_model_as_loaded() -> None:
    """Layers take a third of their time and the head stays the same: (4 + 10) / 34 of the step."""
    found = trial(6, stepped(6, 1e-3, 4e-3), stepped(6, 1e-3 / 3, 4e-3))
    assert found.ratio == pytest.approx(14 / 34)
    assert found.half_width == pytest.approx(0, abs=1e-9)
    [effect] = tried(34e-3, found)
    assert (effect.id, effect.value, effect.how) == (ChangeId.DTYPE, "bfloat16", LINE)
    assert effect.saves_s == pytest.approx(20e-3)
    assert effect.because == "the step then takes 14.0 ms, by 6 of 30 layers"
    step = cell(OperatorWork("linears", "mlp", 1, "float32", int(1e9), int(34e9), 0, 0), weights_s=34e-3)
    before, after = (changes(each, OF_FLOAT32) for each in (step, replace(step, tried=(found,))))
    lost = {item.value for item in before} - {item.value for item in after if item.basis == "computed"}
    assert lost == {"bfloat16"}, "a tried change replaces its own computed saving"


@pytest.mark.parametrize(
    ("form", "what"),
    [
        ("unquantised bfloat16", (ChangeId.DTYPE, "bfloat16")),
        ("int4wo", (ChangeId.FORMAT, "int4wo")),
        ("a static cache and one CUDA graph per step", (ChangeId.GRAPH, "")),
        ("torch.compile", (ChangeId.COMPILED_STEP, "")),
        ("1 of 2 threads", (ChangeId.THREADS, "1")),
        ("eager experts", (ChangeId.EXPERTS, "eager")),
        ("a padding mask and math attention", None),
    ],
)
def test_a_trial_of_an_older_run_is_known_by_its_name(form: str, what: tuple[ChangeId, str] | None) -> None:
    """It executed no line. A change that left only says what it cost."""
    half, twice = ((stepped(30, 1e-3, 0.0), stepped(30, layer_s, 0.0)) for layer_s in (0.5e-3, 2e-3))
    faster, slower = (trial(30, *sides, form=form, line="", change=None) for sides in (half, twice))
    assert (faster.trial.what, slower.trial.what) == (what, what)
    assert len(tried(30e-3, faster)) == (what is not None)
    assert len(tried(30e-3, slower)) == 1


def test_a_neighbour_in_one_of_two_turns_changes_nothing() -> None:
    """30 layers of 1 ms, 2.5 times as long in the first turn; the change takes half as long."""
    before = StepSamples((*[15e-3] * 5, *[6e-3] * 5), (0.0,) * 10)
    assert trial(6, before, StepSamples((3e-3,) * 10, (0.0,) * 10)).ratio == pytest.approx(0.5)


def test_a_cost_is_listed_last_and_an_uncertain_change_not_at_all() -> None:
    slower, unclear = TrialResult(shown("nf4", 6), 1.4, 0.1), TrialResult(shown("int8wo", 6), 0.97, 0.05)
    assert [(item.change, item.saves_s) for item in tried(20e-3, slower, unclear)] == [("nf4", pytest.approx(-8e-3))]


def test_layers_that_do_not_represent_the_whole_step_claim_less() -> None:
    """6 layers predict 34 ms. A saving of a tenth is a claim if the step took 34 ms, but not if it took 40 ms."""
    found = trial(6, stepped(6, 1e-3, 4e-3), stepped(6, 0.9e-3, 4e-3))
    assert [len(tried(step_s, found)) for step_s in (34e-3, 40e-3)] == [1, 0]
    assert found.half_width_at(40e-3, 0.0) == pytest.approx(1 - 34 / 40, rel=0.05)
    assert found.half_width_at(40e-3, 6.1e-3) == pytest.approx(found.half_width), "known to 6.1 ms, and 6 apart"


def test_float32_is_promised_where_16_bits_are_emulated() -> None:
    """8.6 GFLOP take 330 ms at 26 GFLOP/s, and at least 26.7 ms at 322."""
    emulated = replace(CPU, compute_flops_per_s=26e9, float32_flops_per_s=322e9)
    prefill = cell(
        OperatorWork("linears", "mlp", 1, "bfloat16", 8.6e9, 270_000_000, 0, 0), phase="prefill", compute_s=0.33
    )
    assert named(prefill, emulated)["float32"].saves_s == pytest.approx(0.33 - 8.6 / 322, rel=1e-3)
    assert "float32" not in named(prefill, CPU)
    assert "float32" not in named(prefill, replace(emulated, weight_bits=4.5)), "its weights stay packed"


def test_a_trial_of_the_whole_model_has_its_own_times() -> None:
    """A call of `generate` took 34 ms a step, and 31 with the change, where the run's own step takes 28."""
    found = trial(30, stepped(30, 1e-3, 4e-3), stepped(30, 0.9e-3, 4e-3))
    [effect] = tried(28e-3, found)
    assert effect.saves_s == pytest.approx(3e-3)
    assert effect.because == "the step then takes 31.0 ms"


@pytest.mark.parametrize(("ratio", "clear"), [(0.9, True), (0.93, False), (0.96, False)])
def test_a_saving_is_clear_if_its_lower_end_is_a_twentieth_of_the_step(ratio: float, clear: bool) -> None:
    found = TrialResult(shown("bfloat16", 30), ratio, 0.03, 20e-3)
    assert saves_clearly(cell(weights_s=20e-3), found) == clear
