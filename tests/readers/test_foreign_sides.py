"""Another tool's file as one side of a comparison: how its figures are distinguished, and their intervals."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from foreign_files import FILES, changed, record, served

from profiler.comparison.command import compared, gated
from profiler.comparison.compare import Comparison, compare_sides
from profiler.comparison.gate_formats import budget_words
from profiler.comparison.side import read_side, side_of_file
from profiler.comparison.text import difference_lines
from profiler.errors import RequestError, RunError
from profiler.readers.detect import read_foreign

_EVEN = (0.99, 0.995, 1.0, 1.005, 1.01)


def row(step_s: float, spread: Sequence[float] = _EVEN, **values: object) -> dict[str, Any]:
    """A row of llama-bench -n 128 with repetitions of `step_s` times each of `spread`; `values` override its keys."""
    nanoseconds = [1e9 * 128 * step_s * share for share in spread]
    times = {"avg_ns": float(np.mean(nanoseconds)), "samples_ns": nanoseconds, "n_prompt": 0, "n_gen": 128}
    times["stddev_ns"] = float(np.std(nanoseconds, ddof=min(1, len(spread) - 1)))
    return record("llama-bench.json") | times | values


def without_samples(row: dict[str, Any]) -> dict[str, Any]:
    """The row without its repetitions, as in CSV."""
    return {name: value for name, value in row.items() if not name.startswith("samples")}


def written(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text(json.dumps(rows))
    return path


def markdown(path: Path, *rates: str, column: str = "threads", values: Sequence[object] = (8,)) -> Path:
    """Tables of tests of 16 new tokens as llama-bench prints them."""
    rows = [f"| llama 8B Q4_K | {value} | tg16 | {rate} |" for rate, value in zip(rates, values, strict=True)]
    path.write_text("\n".join([f"| model | {column} | test | t/s |", "| --- | ---: | --- | ---: |", *rows]))
    return path


def table(path: Path, *rates: str) -> Path:
    """A plain table of one shape, measured ten times."""
    rows = [f"1,512,128,{rate},10" for rate in rates]
    path.write_text("\n".join(["batch_size,prompt_len,new_tokens,tokens_per_s,repeats", *rows]) + "\n")
    return path


def changes(comparison: Comparison) -> dict[tuple[tuple[str, str], ...], float]:
    return {item.settings: item.change for item in comparison.changes}


@pytest.mark.parametrize("name", ["n_threads", "type_k", "model_type"])
def test_a_sweep_is_as_many_cells_as_it_has_rows(name: str, tmp_path: Path) -> None:
    """-t 1,2,4, of which only the second takes 2.5 times as long: no gate passes because of the last row."""
    before, after = (
        written(tmp_path / str(second_s), row(0.4, **{name: 1}), row(second_s, **{name: 2}), row(0.1, **{name: 4}))
        for second_s in (0.2, 0.5)
    )
    comparison = compared(before, after)
    [setting] = {own[0] for settings in changes(comparison) for own in settings}
    expected = {"1": 0.0, "2": 1.5, "4": 0.0}
    assert changes(comparison) == {((setting, value),): pytest.approx(by) for value, by in expected.items()}
    assert gated(before, after, "3%").outcome == "slower"
    assert f"decode 1 x 0, {setting} 2" in {item.name for item in comparison.changes}


def test_a_row_of_a_sweep_matches_only_its_setting(tmp_path: Path) -> None:
    """A file of one row has its threads as well; a table without that setting matches no row."""
    sweep = written(tmp_path / "a", *(row(step_s, n_threads=n) for step_s, n in ((0.4, 1), (0.2, 2), (0.1, 4))))
    one_row = written(tmp_path / "b", row(0.2, n_threads=2))
    for before, after in ((sweep, one_row), (one_row, sweep)):
        [change] = compared(before, after).changes
        assert change.change == pytest.approx(0.0)
        assert change.settings == (("threads", "2"),)
    with pytest.raises(RequestError, match=r"no cell in common: .* such as decode 1 x 0, threads 1 and"):
        compared(sweep, table(tmp_path / "c", "5.0"))


def test_markdown_has_a_sweep_in_shortened_columns(tmp_path: Path) -> None:
    before = markdown(tmp_path / "a", "10.00 ± 0.10", "20.00 ± 0.10", column="ngl", values=(10, 20))
    after = written(tmp_path / "b", row(0.1, n_gpu_layers=10), row(0.1, n_gpu_layers=20))
    assert changes(compared(before, after)) == {
        (("n_gpu_layers", "10"),): pytest.approx(0.0),
        (("n_gpu_layers", "20"),): pytest.approx(1.0),
    }


def test_two_rows_that_nothing_distinguishes_are_refused(tmp_path: Path) -> None:
    """99.9 and 200 tokens/s of one shape: neither takes precedence."""
    one, two = table(tmp_path / "a", "100.0"), table(tmp_path / "b", "99.9", "200")
    with pytest.raises(RequestError, match=r"holds decode 1 x 512 more than once, 10\.0 ms and 5\.00 ms"):
        compared(one, two)
    with pytest.raises(RequestError, match="keep one"):
        gated(one, written(tmp_path / "c", row(0.1), row(0.2)), "3%")


@pytest.mark.parametrize(("before", "after"), [("1.23 ± 0.00", "1.22 ± 0.00"), ("9.00", "1.00")])
def test_a_rate_without_a_spread_is_inconclusive(before: str, after: str, tmp_path: Path) -> None:
    """llama-bench's tables have a mean and a standard deviation, which is 0.00 for a single repetition."""
    files = (markdown(tmp_path / "a", before), markdown(tmp_path / "b", after))
    [change] = compared(*files).changes
    assert (change.verdict, change.because) == ("inconclusive", "spread unknown")
    gate = gated(*files, "0.5%")
    assert gate.outcome == "inconclusive"
    assert budget_words(gate) == "1 cell needs a file with every repetition"


def test_a_spread_proves_at_least_two_repetitions(tmp_path: Path) -> None:
    """Two that deviate by 1.6 have an interval of 12.7 x 1.6 = 20 tokens/s: 16 % of 125, so 2 % less is no change.

    12.706 is Student's t of two repetitions. Half of the rate is less than 0.84 of it.
    """
    [same] = compared(markdown(tmp_path / "a", "125 ± 1.6"), markdown(tmp_path / "b", "122.00 ± 1.60")).changes
    assert same.verdict == "inconclusive"
    assert same.before.time.high_s / same.before.time.median_s - 1 == pytest.approx(12.706 * 1.6 / 125, rel=0.03)
    [half] = compared(markdown(tmp_path / "a", "125 ± 1.6"), markdown(tmp_path / "b", "62.5 +/- 0.8")).changes
    assert half.verdict == "slower"


def test_repetitions_without_a_spread_are_inconclusive(tmp_path: Path) -> None:
    """Ten repetitions each, 100.0 and 99.9 tokens/s; one of llama-bench -r 1."""
    [change] = compared(table(tmp_path / "a", "100.0"), table(tmp_path / "b", "99.9")).changes
    assert change.verdict == "inconclusive"
    once = [written(tmp_path / str(step_s), without_samples(row(step_s, (1.0,), stddev_ns=0))) for step_s in (0.1, 0.2)]
    assert compared(*once).changes[0].verdict == "inconclusive"
    with_samples = [written(tmp_path / str(step_s), row(step_s, (1.0,), stddev_ns=0)) for step_s in (0.1, 0.2)]
    assert compared(*with_samples).changes[0].because == "one run each"


def test_a_printed_figure_is_known_to_half_of_its_last_digit(tmp_path: Path) -> None:
    """0.05 tokens/s is 0.045 to 0.055, or 18.2 to 22.2 s; 0.5 s in a table is 0.45 to 0.55."""
    [printed] = read_side(markdown(tmp_path / "a", "0.05 ± 0.00")).cells.values()
    assert printed.time.low_s <= 1 / 0.055 < 1 / 0.045 <= printed.time.high_s
    path = tmp_path / "t.csv"
    path.write_text("batch_size,prompt_len,new_tokens,latency_s\n1,8,8,0.5\n")
    [timed] = read_side(path).cells.values()
    assert timed.time.low_s <= 0.45 < 0.55 <= timed.time.high_s


@pytest.mark.parametrize("spread", [pytest.param(0.003, marks=pytest.mark.slow), 0.1])
@pytest.mark.parametrize("repeats", [2, 5])
def test_equal_machines_seldom_differ(spread: float, repeats: int, tmp_path: Path) -> None:
    """With 95 % intervals, at most one comparison of twenty between equal machines reports a difference.

    That is so for any number of repetitions and any spread.
    """
    rng = np.random.default_rng(repeats)
    rows = [[row(0.1, 1 + spread * rng.standard_normal(repeats), n_threads=n) for n in range(100)] for _ in "ab"]
    for sides in (rows, [list(map(without_samples, side_rows)) for side_rows in rows]):
        before, after = (side_of_file(read_foreign(written(tmp_path / "file", *side_rows))) for side_rows in sides)
        differs = [item.verdict in ("slower", "faster") for item in compare_sides(before, after).changes]
        assert len(differs) == 100
        assert sum(differs) <= 5


def test_decode_is_compared_per_token(tmp_path: Path) -> None:
    """2.5 ms per token, one by one or 3.2 of them every 8 ms, is the same for the user."""
    before, after = (served(tmp_path / str(accepted), acc_length=accepted) for accepted in (-1.0, 3.2))
    _, decode = compared(before, after).changes
    assert decode.phase == "decode"
    assert decode.change == pytest.approx(0.0)
    assert decode.before.time.median_s == pytest.approx(2.5e-3)


def test_copied_samples_are_refused(tmp_path: Path) -> None:
    """A cell is timed once per round; copied lines would halve every variance without new measurements."""
    folder = tmp_path / "run"
    shutil.copytree(FILES.parents[2] / "runs" / "reference" / "smollm2-135m-zen4", folder)
    samples = folder / "samples.jsonl"
    samples.write_text(samples.read_text() * 2)
    with pytest.raises(RunError, match=r"samples.jsonl contains a repetition of .* twice"):
        read_side(folder)


def test_gpus_and_quantisation_that_differ_are_named(tmp_path: Path) -> None:
    """Four GPUs share each step of a server with two pipeline stages."""
    server = {"tp_size": 4, "pp_size": 2, "quantization": "w4afp8"}
    before = changed(tmp_path / "one", "sglang-mtp.jsonl", {})
    after = changed(tmp_path / "other", "sglang-mtp.jsonl", {"server_info": server})
    words = [item.words for item in compared(before, after, tp=(8, 4)).differences]
    assert words == ["tp_size 8 -> 4", "quantization fp8 -> w4afp8"]
    for tp, message in (((2,), "says that 8 GPUs shared each step, not 2"), ((8, 4, 2), "each of the two sides")):
        with pytest.raises(RequestError, match=message):
            compared(before, after, tp=tp)


def test_settings_of_every_record_count(tmp_path: Path) -> None:
    """SGLang's --output-file appends, and exports of AIPerf may be joined: what differs tells records apart."""
    for name, setting, changes in (
        ("sglang-mtp.jsonl", "quantization", [{"server_info": {"quantization": each}} for each in "ab"]),
        ("aiperf.json", "model's name", [{"input_config": {"model": [each]}} for each in "ab"]),
    ):
        changed(tmp_path / "f", name, *changes)
        assert {cell.settings for cell in read_side(tmp_path / "f").cells} == {((setting, value),) for value in "ab"}
    unequal = ({"server_info": {"tp_size": gpus}} for gpus in (1, 8))
    with pytest.raises(RequestError, match="unequal numbers of GPUs"):
        read_side(changed(tmp_path / "f", "sglang-mtp.jsonl", *unequal))


def test_what_a_file_left_out_is_said(tmp_path: Path) -> None:
    """The file has one length of a decode less, and its others still match."""
    path = tmp_path / "f"
    path.write_text((FILES / "llama-bench-moe.md").read_text().rstrip()[:-20])
    comparison = compared(FILES / "llama-bench-moe.md", path)
    assert (len(comparison.changes), comparison.only_before, comparison.only_after) == (6, 1, 0)
    assert "after: row 7 is cut or broken" in difference_lines(comparison)[1]


def test_bits_that_only_one_table_names_are_no_known_equality(tmp_path: Path) -> None:
    plain, named = table(tmp_path / "plain.csv", "100"), tmp_path / "named.csv"
    named.write_text("batch_size,prompt_len,new_tokens,tokens_per_s,bits_per_weight\n1,512,128,120,4.85\n")
    assert difference_lines(compared(plain, named)) == [
        "no setting that both name differs", "after: only this file says bits per weight 4.85"
    ]  # fmt: skip
    assert difference_lines(compared(plain, plain)) == ["no known setting differs between the two"]
    assert difference_lines(compared(named, named)) == ["no known setting differs between the two"]
