"""The command in a report repeats its run; one command runs several precisions, with the worst exit code."""

from __future__ import annotations

import math
import shlex
import shutil
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from profiler.errors import RequestError, RunError
from profiler.grid.ranges import make_grid
from profiler.loading.request import ModelRequest
from profiler.loading.source import resolve
from profiler.quant.registry import QuantOptions
from profiler.run.options import Options
from profiler.run.screens import warnings_of
from profiler.run.validate import prepare_resume, repeating
from profiler.store.folder import Run, read_document, read_run

ROOT = Path(__file__).parents[2]
OTHER_THAN_DEFAULT = {
    "model": "smollm2-135m", "prompt_lens": "32,64", "prompts": Path("my prompts.txt"),
    "context_lens": "128", "batch_sizes": "3", "new_tokens": 9,
    "dtype": "bfloat16", "quant": "nf4", "double_quant": True, "compute_dtype": "float16", "weights": "random",
    "engine": "static", "cache": "fp8", "attn": "eager", "tp": 2, "device": "cuda:1", "out": "runs/mine",
    "budget_s": 7.5, "draft": "ngram",
    "fresh": True, "no_levers": True, "breakdown": True, "trace": True, "check_quality": True,
    "trust_remote_code": True, "allow_pickle": True,
}  # fmt: skip
"""Every option, with a value that is not its default."""


def test_every_option_is_in_the_command(roofscope, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    """The exceptions are the folder, which differs the next time, and the cache, which the engine names."""
    defaults = {item.name: item.default for item in fields(Options)}
    assert OTHER_THAN_DEFAULT.keys() == defaults.keys(), "a new option must be repeated too"
    assert [name for name, value in OTHER_THAN_DEFAULT.items() if value == defaults[name]] == []
    options = Options(**OTHER_THAN_DEFAULT)  # type: ignore[arg-type]
    request = ModelRequest(
        resolve("smollm2-135m"), torch.device("cuda:1"), torch.bfloat16, quant="nf4",
        quant_options=QuantOptions(True, torch.float16), weights="random", attn="eager",
    )  # fmt: skip
    read: list[Options] = []

    def prepare(asked: Options) -> None:
        read.append(asked)
        raise RequestError("only read.")

    monkeypatch.setattr("profiler.run.validate.prepare", prepare)
    _, *arguments = shlex.split(repeating(request, make_grid("32,64", "3", 9, "128", ["static"]), options))
    assert "only read" in roofscope(*arguments).err
    assert read == [replace(options, out=None, cache="")]


RUN = Path(__file__).parents[1] / "data" / "tiny_run"


def in_precision(quant: str) -> Run:
    """Return the stored run as if it were of another precision."""
    run = read_run(RUN)
    return replace(run, document=replace(run.document, model=replace(run.model, quant=quant)))


@pytest.mark.slow
def test_the_command_runs_each_and_prints_one_table(roofscope, tiny_folder: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    options = ["--quant", "none,nf4", "--dtype", "bfloat16", "--weights", "random", "--prompt-lens", "16"]
    options += ["--batch-sizes", "1", "--new-tokens", "8", "--budget", "1", "--quiet", "--out", str(tmp_path / "both")]
    found = roofscope("run", str(tiny_folder), *options)
    assert found.code == 0, found.err
    assert "speed-up" in found.out
    for name in ("none", "nf4"):
        assert read_run(tmp_path / "both" / name).document.model.quant == name
    wrong = roofscope("run", str(tiny_folder), "--quant", "none,nf5", "--prompt-lens", "16")
    assert wrong.code == 2
    assert "nf5" in wrong.err


REASON = "1 cell has no number (first: batch 1 x 64, failed: KeyError: 'planted')."


def with_a_gap(run: Run) -> Run:
    """Return the run with a failed first cell and the warning about it."""
    first, *others = run.results
    document = replace(run.document, warnings=(*run.document.warnings, REASON))
    return Run(run.folder, document, (replace(first, status="failed", latency_s=math.nan), *others))


@pytest.mark.parametrize(
    ("several", "output_format", "incomplete"),
    [
        (("--quant", "none,nf4"), "table", True),
        (("--quant", "none,nf4"), "json", False),
        (("--device", "cuda:0,cuda:1"), "json", True),
        ((), "table", True),
        ((), "table", False),
    ],
)
def test_a_cell_without_a_number_in_any_run_gives_its_exit_code_and_its_reason(  # type: ignore[no-untyped-def]
    roofscope, several: tuple[str, ...], output_format: str, incomplete: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds for two precisions, two devices and a batch test; the first run is always complete."""
    runs = [in_precision("none"), in_precision("nf4")]
    runs[1] = with_a_gap(runs[1]) if incomplete else runs[1]
    monkeypatch.setattr("profiler.run.multi_run.run_precisions", lambda *_: runs)
    monkeypatch.setattr("profiler.run.multi_run.run_devices", lambda *_: runs)
    monkeypatch.setattr("profiler.run.batch_test.prepare_batch_test", lambda *_: SimpleNamespace(warnings=()))
    monkeypatch.setattr("profiler.run.pipeline.execute", lambda *_: runs[1])
    command = ("run", "smollm2-135m", *several) if several else ("batch-test", "smollm2-135m")
    found = roofscope(*command, "--quiet", "--plain", "--format", output_format)
    assert found.code == (3 if incomplete else 0), found.err
    words = " ".join(found.out.split())
    assert ("KeyError: 'planted'" in words) is incomplete
    if several[:1] == ("--quant",) and incomplete and output_format == "table":
        assert f"! nf4: {REASON}" in words


def test_a_warning_of_all_precisions_is_said_once() -> None:
    both = [replace(run, document=replace(run.document, warnings=("others kept 2 cores busy.",)))
            for run in (in_precision("none"), in_precision("nf4"))]  # fmt: skip
    assert warnings_of(both) == ["others kept 2 cores busy."]
    assert warnings_of([both[0], with_a_gap(both[1])]) == ["others kept 2 cores busy.", f"nf4: {REASON}"]


def test_a_model_and_its_draft_are_quoted_and_without_their_folder(tiny_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_folder, tmp_path / "my model")
    request = ModelRequest(resolve(str(folder)), torch.device("cpu"), torch.float32)
    command = repeating(request, make_grid("32", "1", 8), Options(draft=str(folder)))
    assert command.startswith("roofscope run 'my model' ")
    assert command.endswith("--draft 'my model'")
    assert str(tmp_path) not in command


def test_a_run_with_a_cached_prefix_is_not_resumed(tmp_path: Path) -> None:
    """An older version measured one with vLLM; its cells have a context that no option gives any more."""
    document = (ROOT / "runs/reference/smollm2-135m-2-cores/run.json").read_text()
    old = document.replace('"finished": true', '"finished": false').replace(
        '"new_tokens":', '"prefix": 16, "new_tokens":', 1
    )
    (tmp_path / "run.json").write_text(old)
    assert read_document(tmp_path).grid.prefix == 16
    with pytest.raises(RunError, match="ran prompts with a cached prefix"):
        prepare_resume(tmp_path, Options())
