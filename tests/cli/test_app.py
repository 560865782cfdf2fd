"""The command line: fast and whole help, one clear line for each mistake, the same figures in formats of `count`."""

import csv
import io
import json
import math
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from cases import slow_except

from profiler import __version__
from profiler.cli.removed import REMOVED
from profiler.data.links import published_links
from profiler.engines.names import ENGINE_NAMES
from profiler.errors import RunError
from profiler.report.columns import EXPORTERS
from profiler.report.plots import PLOTS

RUNS = Path(__file__).parents[2] / "runs" / "reference"
RUN = str(RUNS / "smollm2-135m-zen4")
MISTAKES = list(csv.DictReader(Path(__file__).with_name("mistakes.csv").read_text().splitlines()))
MISTAKES += [{"command": f"count {'a' * 5000}", "says": "File name too long"}]


@pytest.mark.parametrize("name", REMOVED)
def test_what_was_removed_is_refused_in_one_line_that_names_what_to_use(name: str, roofscope) -> None:  # type: ignore[no-untyped-def]
    command, *further = name.split()
    refused = roofscope(command, *(["A", *further] if further else []))
    assert (refused.code, refused.out) == (2, "")
    assert refused.err == f"roofscope: `{name}` was removed; {REMOVED[name]}.\n"


def test_without_a_command_the_help_is_printed(roofscope) -> None:  # type: ignore[no-untyped-def]
    bare = roofscope()
    assert (bare.code, bare.err) == (0, "")
    assert bare.out == roofscope("--help").out


@pytest.mark.parametrize(
    ("command", "names"),
    [("run", ENGINE_NAMES), ("place", published_links()), ("export", EXPORTERS), ("plot", PLOTS)],
)
def test_a_help_names_every_alternative(roofscope: Callable[..., Any], command: str, names: Iterable[str]) -> None:
    """Help texts list alternatives without importing them."""
    words = set(re.findall(r"[\w-]+", roofscope(command, "--help").out))
    assert set(names) <= words


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("co", "compare count"),
        ("run --bud", "--budget"),
        ("count smol", "smollm2-1.7b smollm2-135m"),
        ("place A --model gpt2", "gpt2"),
        ("judge ru", ""),  # a folder is left to bash, which completes files where there is no answer
    ],
)
def test_a_command_an_option_and_a_preset_are_completed(
    words: str, completed: str, roofscope: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = f"roofscope {words}"
    asked = {"_ROOFSCOPE_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words.split()))}
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    assert roofscope().out.split() == completed.split()


@pytest.mark.timing
@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_help_and_version_answer_at_once(argument: str) -> None:
    """At most three times the imports of a command line (1.0 to 1.4 at rest); those of torch take ten times as long."""

    def fastest_s(*command: str) -> float:
        times_s = []
        for _ in range(5):
            start_s = time.perf_counter()
            done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=True)
            times_s.append(time.perf_counter() - start_s)
        assert "-c" in command or __version__ in done.stdout or "Usage" in done.stdout
        return min(times_s)

    assert fastest_s("-m", "profiler", argument) < 3 * fastest_s("-c", "import typer, typer.core, rich.console")


@pytest.mark.parametrize("mistake", MISTAKES, ids=[mistake["says"] for mistake in MISTAKES])
def test_a_mistake_is_one_line_and_exit_code_2(roofscope, tmp_path: Path, monkeypatch, mistake: dict[str, str]) -> None:  # type: ignore[no-untyped-def]
    """`RUN` is a recorded run."""
    monkeypatch.chdir(tmp_path)
    done = roofscope(*(RUN if word == "RUN" else word for word in shlex.split(mistake["command"])))
    assert done.code == 2
    assert mistake["says"] in done.err
    assert done.err.count("\n") == 1
    assert "Traceback" not in done.err
    assert done.out == ""
    assert list(tmp_path.rglob("*.jsonl")) == [], "nothing remains"


BEFORE_TORCH = [mistake for mistake in MISTAKES if mistake.get("before_torch")]
"""Names that do not exist, and values out of range."""
EACH = f"""
import functools, sys
import typer.main
typer.main.get_command = functools.cache(typer.main.get_command)
from profiler.cli.app import main
for arguments in {[shlex.split(mistake["command"]) for mistake in BEFORE_TORCH]}:
    sys.argv = ["roofscope", *arguments]
    try:
        main()
    except SystemExit as ended:
        assert ended.code == 2
print("torch" in sys.modules)
"""


def test_options_check_themselves_before_torch_is_imported() -> None:
    done = subprocess.run([sys.executable, "-c", EACH], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
    lines = zip(BEFORE_TORCH, done.stderr.splitlines(), strict=True)
    assert all(mistake["says"] in line for mistake, line in lines)


def test_debug_shows_the_traceback(roofscope: Callable[..., Any]) -> None:
    with pytest.raises(RunError, match="no run folder"):
        roofscope("export", "/nowhere/run", "--debug")


@pytest.mark.parametrize(("error", "code"), [("CUDA error: invalid argument", 2), ("list index out of range", 1)])
def test_an_error_of_cuda_is_the_devices(roofscope, monkeypatch, error: str, code: int) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr("profiler.run.validate.prepare", Mock(side_effect=RuntimeError(error)))
    found = roofscope("run", "--out", "nowhere")
    assert (found.code, len(found.err.splitlines())) == (code, 1)
    assert error in found.err


GRID = ["--batch-sizes", "1,8", "--prompt-lens", "128,512", "--gpu", "T4,H100 SXM"]


def test_table_csv_and_json_have_the_same_figures(roofscope: Callable[..., Any]) -> None:
    table = roofscope("count", "mistral-7b-v0.1", *GRID, "--plain", "--full").out
    rows = list(csv.DictReader(io.StringIO(roofscope("count", "mistral-7b-v0.1", *GRID, "--format", "csv").out)))
    document = json.loads(roofscope("count", "mistral-7b-v0.1", *GRID, "--format", "json").out)
    assert len(rows) == len(document["rows"]) == 2 * 2 * 2 * 2, "phases, batch sizes, lengths, GPUs"
    for row, entry in zip(rows, document["rows"], strict=True):
        assert float(row["floor_s"] or "nan") == pytest.approx(entry["floor_s"] or math.nan, nan_ok=True)
        assert row["bound"] == entry["bound"]
    # 14.5 GB at the T4's 320 GB/s take 45 ms per step.
    [decode] = [row for row in rows if row["phase"] == "decode" and row["gpu"].startswith("T4")][:1]
    assert float(decode["tokens_per_s_at_most"]) == pytest.approx(22.4, rel=0.02)
    assert "decode 1 128 44.5 ms 22.5 memory" in " ".join(table.split())
    assert "KV cache:     131 kB per token" in table
    assert document["numbers"]["architecture"]["kv_heads"] == 8


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("", "add --gpu"),
        ("--gpu T4", "measure what the floor leaves out, on T4: roofscope run gpt2 --prompt-lens 512 --batch-sizes 1"),
        ("--gpu T4 --batch 8192", "find a GPU on which it fits: roofscope rent gpt2"),
        ("--gpu T4 --batch 8192 --quant nvfp4", "name a GPU with more memory; roofscope gpus lists them"),
        ("--gpu T4 --bits 4.85", "roofscope place FILE --model gpt2 --bits 4.85 --gpu 'T4'"),
        ("--gpu T4 --quant q4_k_m", "compare another tool's figures with the floor: roofscope place FILE --model gpt2"),
    ],
)
def test_count_ends_with_what_to_do_next(options: str, says: str, roofscope: Callable[..., Any]) -> None:
    shown = " ".join(roofscope("count", "gpt2", *options.split(), "--plain").out.split())
    assert says in shown.rpartition("next: ")[2]


@pytest.mark.parametrize("plot", slow_except(("kv",), ["roofline", "kv"]))
def test_pictures_are_drawn(plot: str, roofscope: Callable[..., Any], tmp_path: Path) -> None:
    out = tmp_path / "picture.svg"
    measured = ["--run", str(RUNS / "smollm2-135m-xeon-float32")] if plot == "roofline" else []
    found = roofscope("count", "smollm2-135m", *GRID, "--plot", plot, *measured, "--out", str(out))
    assert found.code == 0, found.err
    picture = out.read_text("utf-8")
    size = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', picture)
    assert size
    assert float(size[2]) < 1.2 * float(size[1]), "nothing is drawn far from the panels"
    assert "$" not in picture, "a mark in TeX, which is off"
