"""Runs over real prompts, which are the grid and choose the experts, and over unequal ones, which are padded."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hurry import hurry
from subjects import subject_of
from tokenized import EXPERTS, planted_mixture

import profiler
from profiler.engines.transformers import PaddedEngine
from profiler.errors import RequestError, RunError
from profiler.grid.cells import Cell
from profiler.judge.breakdown import TERMS
from profiler.measure.hooks_and_traces import experts_touched
from profiler.report.changes import conditions
from profiler.run.judge_folder import judge_folder
from profiler.run.options import Options
from profiler.run.validate import prepare, prepare_resume


@pytest.fixture(scope="module")
def one_expert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "one-expert"
    planted_mixture(folder, 1, all_alike=False)
    return folder


def _file(folder: Path, *lines: str) -> str:
    path = folder / "prompts.txt"
    path.write_text("\n".join(lines))
    return str(path)


@pytest.mark.parametrize("per_token", [1, 2, 3])
def test_if_all_tokens_choose_alike_they_touch_top_k_experts(per_token: int, tmp_path: Path) -> None:
    planted_mixture(tmp_path / "alike", per_token, all_alike=True)
    prompts = _file(tmp_path, "w1 w2 w3 w4 w5", "w6 w7 w8 w9 w10")
    subject, _ = subject_of(str(tmp_path / "alike"), prompt_lens=None, prompts=prompts)
    prefill, decode = experts_touched(subject, Cell(2, 5, 4))
    assert (prefill.key.phase, prefill.touched, prefill.experts) == ("prefill", per_token, EXPERTS)
    assert (decode.key.phase, decode.touched, decode.experts) == ("decode", per_token, EXPERTS)
    # Ten tokens that choose k of 8 experts each at random, and two in a decode step: E (1 - (1 - k/E)^T).
    assert prefill.expected == pytest.approx(8 * (1 - (1 - per_token / 8) ** 10))
    assert decode.expected == pytest.approx(8 * (1 - (1 - per_token / 8) ** 2))


def test_unequal_prompts_are_a_padded_batch(one_expert: Path, tmp_path: Path) -> None:
    subject, _ = subject_of(str(one_expert), prompt_lens=None, prompts=_file(tmp_path, "w1 w2 w3", "w4"))
    cell = next(cell for cell in subject.grid.cells if subject.grid.requests_of(cell))
    assert isinstance(subject.engines[cell.engine], PaddedEngine)
    assert (cell.batch_size, cell.prompt_len) == (2, 3)
    # transformers routes the padding, too: tokens 1 to 4, and the padding token 0.
    assert experts_touched(subject, cell)[0].touched == 5


def test_lengths_and_batches_that_are_given_cut_the_prompts(one_expert: Path, tmp_path: Path) -> None:
    prompts = _file(tmp_path, "w1 w2 w3", "w4", " ".join(["w5"] * 100))
    prepared = prepare(Options(model=str(one_expert), prompts=prompts, prompt_lens="2", batch_sizes=[3], device="cpu"))
    assert prepared.prompts.of(prepared.grid.cells[0]).tolist() == [[1, 2], [4, 4], [5, 5]]
    assert "--prompt-lens 2" in prepared.command
    assert prepared.command.count("--prompts prompts.txt") == 1
    assert prepare(replace(prepared.options, batch_sizes=None)).grid.batch_sizes == (1, 2), "those that the file fills"
    with pytest.raises(RequestError, match=r"prompts\.txt has 3 prompts, too few for a batch of 4"):
        prepare(replace(prepared.options, batch_sizes=[4]))


@pytest.mark.slow
def test_a_run_keeps_the_name_of_the_file_and_nothing_of_its_text(
    one_expert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurry(monkeypatch)
    prompts = _file(tmp_path, "w1 w2 w3 w1", "w3 w2 w1 w11")
    run = profiler.profile(
        str(one_expert), prompts=prompts, new_tokens=4, device="cpu", no_trials=True, out=tmp_path / "run"
    )
    assert (run.document.grid.prompt_lens, run.document.grid.batch_sizes) == ((4,), (1, 2))
    assert run.document.grid.prompts == "prompts.txt"
    assert [(row.phase, row.batch_size, row.touched) for row in run.document.experts_touched] == [
        ("prefill", 1, 3), ("decode", 1, 1), ("prefill", 2, 3), ("decode", 2, 1)
    ]  # fmt: skip
    few = replace(run.document, experts_touched=run.document.experts_touched[:1])
    [line] = conditions(replace(run, document=few)).blocks[0].lines
    assert "3.0 of 8 experts of a layer, 91 %" in line
    assert "(3.3, if" in line  # 8 (1 - (7/8)^4) = 3.31
    text = "".join(file.read_text() for file in sorted((tmp_path / "run").iterdir()) if file.suffix != ".png")
    assert "w3" not in text
    assert str(tmp_path) not in json.loads((tmp_path / "run" / "run.json").read_text())["command"]
    document = tmp_path / "run" / "run.json"
    document.write_text(document.read_text().replace('"finished": true', '"finished": false'))
    with pytest.raises(RunError, match=r"ran the prompts of prompts\.txt and does not hold them; give --prompts"):
        prepare_resume(tmp_path / "run", Options(model=str(one_expert), device="cpu"))
    again = prepare_resume(tmp_path / "run", Options(model=str(one_expert), device="cpu", prompts=prompts))
    assert again.prompts.real == ((1, 2, 3, 1), (3, 2, 1, 11))
    _file(tmp_path, "w1 w2 w3 w1", "w3 w2 w1 w12")
    with pytest.raises(RunError, match=r"ran other prompts than prompts\.txt has now"):
        prepare_resume(tmp_path / "run", Options(model=str(one_expert), device="cpu", prompts=prompts))


@pytest.mark.slow
def test_a_run_over_unequal_prompts(tmp_path: Path, profile_tiny: Callable[..., profiler.Run]) -> None:
    lengths = tmp_path / "lengths.txt"
    # Two batches of (16, 32, 16, 32): a quarter is padding; half of the sequences write half as many steps.
    lengths.write_text("16 5\n32 9\n16 5\n32 9\n" * 2)
    options = {"prompt_lens": f"ragged:{lengths}", "batch_sizes": [4], "new_tokens": 32}
    run = profile_tiny(**options, dtype="float32", budget_s=4)
    rows = {(row.phase, row.engine): row for row in run.results}
    assert set(rows) == {(phase, engine) for phase in ("prefill", "decode") for engine in ("padded", "eager")}
    padded, plain = rows["prefill", "padded"], rows["prefill", "eager"]
    assert (padded.prompt_len, padded.new_tokens, padded.padding) == (32, 9, 0.25)
    assert padded.tokens_per_s * padded.latency_s == pytest.approx(96)
    assert plain.tokens_per_s * plain.latency_s == pytest.approx(128)
    # Linears do a quarter less work for the prompts than for the padded shape; attention does even less.
    assert 0.70 < padded.model_flops / plain.model_flops < 0.75
    assert padded.executed_flops >= plain.model_flops
    step = rows["decode", "padded"]
    assert step.waiting_s == pytest.approx(step.latency_s * 0.25)
    for row in run.measured:
        assert sum(getattr(row, term) for term in TERMS) == pytest.approx(row.latency_s)
        assert (row.padding_s > 0) == (row.engine == "padded")
    costs = {item.phase: item for item in run.document.ragged}
    assert costs["prefill"].mask_s == pytest.approx(padded.mask_s)
    assert costs["decode"].padding_s == pytest.approx(step.padding_s)
    words = "\n".join(conditions(run).blocks[0].lines)
    assert words.count("25 %") == 2, "of the positions are padding, and of the time is waiting"
    # The run contains no home directory and no path of the machine.
    assert str(tmp_path) not in (run.folder / "run.json").read_text()
    assert run.document.command.count("ragged:lengths.txt") == 1
    kept = json.loads((run.folder / "run.json").read_text())
    judge_folder(run.folder)
    assert json.loads((run.folder / "run.json").read_text()) == kept
