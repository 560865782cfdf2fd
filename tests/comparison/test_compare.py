"""Comparison of two runs: when it gives a verdict, when it gives none, and which term moved.

Of different grids the common cells are compared, and a command measures the others.
"""

from dataclasses import replace
from pathlib import Path

import pytest
from sides import ceiling, drift_probe, key_of, side, timed

from profiler.comparison.command import compare as compare_folders
from profiler.comparison.command import compared
from profiler.comparison.compare import compare_sides
from profiler.comparison.gate import gate
from profiler.comparison.gate_formats import gate_github, gate_section
from profiler.comparison.side import NOT_RECORDED, CellTime, MatchKey, Resource, Side, differences, side_of_run
from profiler.comparison.text import change_words, comparison_sentences, difference_lines, measuring, next_step
from profiler.errors import RequestError
from profiler.facts.ceilings import Ceiling
from profiler.grid.cells import PHASES
from profiler.report.blocks import Lines
from profiler.store.folder import read_run

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "runs" / "reference" / "smollm2-135m-2-cores"
AGAIN = ROOT / "runs" / "reference" / "smollm2-135m-precisions" / "none"
OTHER_MACHINE = ROOT / "runs" / "reference" / "smollm2-135m-epyc"


def before() -> Side:
    return side({key_of(): timed(0.010, weights_s=0.006, overhead_s=0.003)})


def test_a_slower_host_is_reported_with_its_interval_and_its_term() -> None:
    """Overhead 3.0 -> 3.7 ms of 10 ms: 7 % (+- hypot(0.5, 0.5) %) slower, 0.7 ms of 0.7 ms."""
    after = side({key_of(): timed(0.0107, weights_s=0.006, overhead_s=0.0037)})
    [change] = compare_sides(before(), after).changes
    assert (change.verdict, change.moved) == ("slower", "overhead_s")
    assert change.change == pytest.approx(0.07)
    assert (change.low, change.high) == (pytest.approx(0.0625, abs=5e-4), pytest.approx(0.0776, abs=5e-4))
    assert change.terms["overhead_s"] == pytest.approx(0.0007)
    assert sum(change.terms.values()) == pytest.approx(change.after_s - change.before_s)


def test_a_term_that_hardly_gained_is_not_what_moved() -> None:
    """0.7 ms slower, of which weights gained 10 µs: the unexplained rest is not attributed to them."""
    after = side({key_of(): timed(0.0107, weights_s=0.00601, overhead_s=0.003)})
    spread = {key: replace(cell, half_widths_s={"unexplained_s": 0.001}) for key, cell in after.cells.items()}
    [change] = compare_sides(before(), replace(after, cells=spread)).changes
    assert (change.verdict, change.moved) == ("slower", None)
    assert change_words(change).endswith("slower: no term stands out")


@pytest.mark.parametrize(
    ("after", "says"),
    [
        (side({key_of(): timed(0.011)}, name="b"), "`roofscope judge b`"),
        (side({key_of(): timed(0.009)}, name="b"), "keep the change; `roofscope judge b`"),
        (side({key_of(): timed(0.009)}, name="b.json", tool="x"), "keep the change; `roofscope place b.json"),
        (side({key_of(): timed(0.01, 0.06)}), "measure both again with a larger --budget"),
        (side({key_of(): timed(0.01)}, settings={"model": "n"}), "measure both with the same model"),
    ],
)
def test_the_next_step_follows_from_the_verdicts(after: Side, says: str) -> None:
    assert next_step(compare_sides(before(), after)).startswith(says)


@pytest.mark.parametrize(
    ("first", "later", "verdict", "because"),
    [
        (timed(0.01), timed(0.01005), "same", ""),
        (timed(0.01), timed(0.0104, 0.06), "inconclusive", ""),
        (timed(0.0107), timed(0.01), "faster", ""),
        (timed(0.01, repetitions=1), timed(0.02, repetitions=1), "inconclusive", "one repetition each"),
        (timed(0.01), replace(timed(0.02), foreign_cores=0.9), "inconclusive", "others kept 0.9 cores busy"),
    ],
)
def test_a_claim_needs_a_clear_interval_two_repetitions_and_a_quiet_machine(
    first: CellTime, later: CellTime, verdict: str, because: str
) -> None:
    [change] = compare_sides(side({key_of(): first}), side({key_of(): later})).changes
    assert (change.verdict, change.because) == (verdict, because)
    assert change.moved is None or change.difference.is_claim


def test_the_machine_is_divided_out() -> None:
    """If memory and cores of a CPU are both 4 % slower, a step that took 4 % longer did not change."""
    after = side({key_of(): timed(0.0104, weights_s=0.00624, overhead_s=0.00312)}, **drift_probe(1.04, 1.04, at=1.0))
    comparison = compare_sides(before(), after)
    [change] = comparison.changes
    assert all(shift.claimed for shift in comparison.shifts)
    assert change.machine == pytest.approx(0.04, abs=1e-3)
    assert change.change == pytest.approx(0.0, abs=1e-3)
    assert change.verdict == "same"


def test_a_drift_probe_that_wavers_or_contradicts_the_ceilings_divides_nothing() -> None:
    wavering, risen = drift_probe(1.04, 1.04, spread=0.2, at=1.0), drift_probe(1.04, 1.04, at=1.0)
    own: dict[Resource, Ceiling] = {"memory": ceiling(104e9), "compute": ceiling(1.04e12)}
    for doubtful in (wavering, {**risen, "ceilings": own}):
        after = side({key_of(): timed(0.0104)}, **doubtful)
        assert compare_sides(before(), after).changes[0].machine == 0


@pytest.mark.parametrize("spread", [0.001, 0.9])
@pytest.mark.parametrize("setting", ["threads", "instructions", "ONEDNN_MAX_CPU_ISA"])
def test_a_setting_that_halves_the_ceilings_is_no_drift(setting: str, spread: float) -> None:
    """A setting lowered the ceilings: nothing is divided out and compute moved, for any spread of the drift probe."""
    first = side({key_of(phase="prefill"): timed(0.010, compute_s=0.009)}, settings={setting: "2"})
    halved = side(
        {key_of(phase="prefill"): timed(0.019, compute_s=0.018)},
        settings={setting: "1"},
        **drift_probe(1.0, 2.0, spread=spread, at=1.0),
    )
    comparison = compare_sides(first, halved)
    assert comparison.shifts[1].claimed == (spread < 0.5)
    [change] = comparison.changes
    assert comparison.comparable
    assert [item.words for item in comparison.differences] == [f"{setting} 2 -> 1"]
    assert (change.verdict, change.moved, change.machine) == ("slower", "compute_s", 0)
    assert change.terms["compute_s"] == pytest.approx(0.009)


def test_a_ceiling_that_was_measured_otherwise_moves_no_term() -> None:
    """The same step under a memory ceiling that was measured 20 % higher: weights seem to need less, kernels more."""
    first = side({key_of(): timed(0.010, weights_s=0.006, kernel_s=0.001)})
    after = side(
        {key_of(): timed(0.0107, weights_s=0.005, kernel_s=0.002, overhead_s=0.0007)},
        **{**drift_probe(at=1.0), "ceilings": {"memory": ceiling(120e9), "compute": ceiling(1e12)}},
    )
    [change] = compare_sides(first, after).changes
    assert change.moved == "overhead_s"
    assert change.terms["weights_s"] == pytest.approx(0, abs=1e-12)
    assert change.terms["kernel_s"] == pytest.approx(0, abs=1e-12)
    assert sum(change.terms.values()) == pytest.approx(change.after_s - change.before_s)


def test_differences_are_ordered_by_their_weight() -> None:
    other = side({}, settings={"transformers": "5.23.0", "device": "another card"})
    assert [(item.words, item.weight) for item in differences(side({}), other)] == [
        ("device card -> another card", "refuses"),
        ("transformers 5.22.0 -> 5.23.0", "explains"),
    ]


def test_processors_of_one_name_are_distinguished() -> None:
    """Zen 4 (family 25) and Zen 5 (family 26) may both be named AMD EPYC; an older run does not say which it was."""
    zen4, zen5, older = (
        side({}, settings={"device": "AMD EPYC", "processor": processor})
        for processor in ("AuthenticAMD, family 25, model 17", "AuthenticAMD, family 26, model 2", NOT_RECORDED)
    )
    assert [item.weight for item in differences(zen4, zen5)] == ["refuses"]
    assert [item.weight for item in differences(older, zen5)] == ["explains"]
    assert difference_lines(compare_sides(zen4, zen4)) == ["no known setting differs between the two"]
    assert "several are named AMD EPYC" in difference_lines(compare_sides(older, older))[1]


def test_clocks_of_one_card_may_differ_a_little() -> None:
    first = side({}, clock_hz=1980e6)
    assert not differences(first, side({}, clock_hz=1965e6))
    assert differences(first, side({}, clock_hz=1410e6))[0].words == "clock 1980 MHz -> 1410 MHz"


def test_another_card_gets_no_verdict() -> None:
    comparison = compare_sides(before(), side({key_of(): timed(0.02)}, settings={"device": "another card"}))
    assert not comparison.comparable
    assert [item.verdict for item in comparison.changes] == ["inconclusive"]
    with pytest.raises(RequestError, match=r"not comparable: device .* -> AMD EPYC.* --anyway"):
        compared(REFERENCE, OTHER_MACHINE)
    frame = compare_folders(REFERENCE, OTHER_MACHINE, anyway=True)
    assert set(frame["verdict"]) == {"inconclusive"}


def test_two_real_runs_of_the_same_are_the_same() -> None:
    """The same model on the same machine forty minutes apart: nothing differs, and no cell changed beyond 3 %."""
    comparison = compared(REFERENCE, AGAIN)
    assert (len(comparison.changes), comparison.only_before, comparison.only_after) == (8, 24, 0)
    assert not comparison.differences
    assert {item.verdict for item in comparison.changes} <= {"same", "inconclusive"}
    assert all(abs(item.change) < 0.03 for item in comparison.changes)
    frame = compare_folders(REFERENCE, AGAIN)
    assert list(frame["after_s"] / frame["before_s"] - 1) == pytest.approx(list(frame["change"]))


def test_runs_of_one_engine_each_are_compared_cell_by_cell() -> None:
    first = side({key_of(engine="eager"): timed(0.010)}, settings={"engine": "eager"})
    second = side({key_of(engine="static"): timed(0.008)}, settings={"engine": "static"})
    comparison = compare_sides(first, second)
    assert [item.verdict for item in comparison.changes] == ["faster"]
    assert [item.words for item in comparison.differences] == ["engine eager -> static"]
    both = side({key_of(engine=name): timed(0.010) for name in ("eager", "static")})
    assert [item.engine for item in compare_sides(first, both).changes] == ["eager"]


def test_a_cached_prefix_counts_to_the_depth() -> None:
    """Prompts of 64 tokens after 448 cached ones decode at a depth of 512, as the cell of another tool does."""
    cached = {phase: MatchKey(phase, 1, 64, 448, "vllm", ()) for phase in PHASES}
    assert [key.name for key in cached.values()] == ["prefill 1 x 512, 448 cached (vllm)", "decode 1 x 512 (vllm)"]
    theirs = {key_of(prompt_len=depth, engine=""): timed(depth / 1e5) for depth in (64, 512)}
    found = compare_sides(side({cached["decode"]: timed(512e-5)}), side(theirs, tool="llama-bench"))
    assert [(item.after.time.median_s, item.verdict) for item in found.changes] == [(512e-5, "same")]


def test_a_variable_of_the_environment_that_differs_is_named() -> None:
    run, name = read_run(REFERENCE), "TORCHINDUCTOR_COORDINATE_DESCENT_TUNING"
    tuned = replace(run, document=replace(run.document, software={**run.document.software, name: "1"}))
    for pair, said in (((run, tuned), "not recorded -> 1"), ((tuned, run), "1 -> not recorded")):
        comparison = compare_sides(*map(side_of_run, pair))
        assert comparison.comparable
        assert difference_lines(comparison)[0] == f"differs: {name} {said}"


LARGE = " --prompt-lens 64,256 --batch-sizes 1 --new-tokens 32"
SMALL = " --prompt-lens 64 --batch-sizes 1 --new-tokens 8"


def measured(grid: str, *lengths: int, settings: str = "") -> Side:
    """A default run, whose command names its `grid`, and its decodes after `lengths` prompt tokens."""
    command = f"roofscope run m{grid} --dtype float32 --device cpu --budget 60{settings}"
    return side({key_of(prompt_len=length): timed(0.01) for length in lengths}, command=command)


def repeated(grid: str, settings: str = "") -> str:
    return f"`roofscope run m --dtype float32 --device cpu{settings}{grid}`"


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        # The grid is the other run's, all else is the run's own; a named grid without a budget is measured whole.
        (measured(LARGE, 64, 256), measured(SMALL, 64, settings=" --no-trials"),
         f"1 cell is only in the first; to measure the second on the other grid: {repeated(LARGE, ' --no-trials')}."),
        (measured(SMALL, 64), measured(LARGE, 64, 256),
         f"1 cell is only in the second; to measure the first on the other grid: {repeated(LARGE)}."),
        # A cell of the same grid that had no number.
        (measured(LARGE, 64, 256), measured(LARGE, 64), "1 cell is only in the first."),
        # Another tool's file has no command.
        (measured(LARGE, 64, 256), side({key_of(prompt_len=64): timed(0.01)}), "1 cell is only in the first."),
    ],
)  # fmt: skip
def test_the_cells_of_one_side_are_counted_with_what_measures_them(before: Side, after: Side, said: str) -> None:
    comparison = compare_sides(before, after)
    assert comparison_sentences(comparison)[:2] == ["Of 1 common cell, 1 is the same.", said]
    verdict = gate(comparison, {"decode": 0.03})
    alone = gate(compare_sides(measured(SMALL, 64), measured(SMALL, 64)), {"decode": 0.03})
    assert (verdict.outcome, verdict.cells) == (alone.outcome, alone.cells)
    assert next(block.lines[0] for block in gate_section(verdict).blocks if isinstance(block, Lines)) == said
    assert f"::notice title=roofscope gate::{said}" in gate_github(verdict)


@pytest.mark.parametrize(
    "grid",
    [
        " --context-lens 4096 --batch-sizes 1,16 --new-tokens 32",
        " --prompts 'my prompts.txt' --prompt-lens 2,5 --batch-sizes 1 --new-tokens 8",
        """ --prompts 'what'"'"'s new.txt' --prompt-lens 2 --batch-sizes 1 --new-tokens 8""",
        " --prompt-lens ragged:32..512 --batch-sizes 4 --new-tokens 16",
    ],
)
def test_every_grid_can_be_taken_over_and_left(grid: str) -> None:
    other = measured(LARGE, 64)
    assert measuring("second", other, measured(grid)) == f"; to measure the second on the other grid: {repeated(grid)}"
    assert measuring("first", measured(grid), other) == f"; to measure the first on the other grid: {repeated(LARGE)}"
