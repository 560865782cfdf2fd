"""Scripts and cells keep their output, input, exceptions and exit code under `why`, which reports their calls."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import logging
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from docs.schemas import assert_follows
from hurry import with_effort
from IPython.core.interactiveshell import InteractiveShell
from machines import Others
from planted_faults import generate, groups_of, recorded, script, tiny_llama, tried
from small_models import small_model
from transformers.utils import logging as transformers_logging

import profiler
from profiler.device.clock import now_s
from profiler.errors import RequestError
from profiler.fallbacks import Fallback, cure_of, fallback_of
from profiler.patching import switched
from profiler.run import pipeline
from profiler.why_slow.command import explained, run_script, scripts_own_profiler, why_script
from profiler.why_slow.costs import fallback_findings, module_times
from profiler.why_slow.findings import Finding, TriedChange, Untried, judge_calls
from profiler.why_slow.observations import CallSettings, Recompilation
from profiler.why_slow.patches import watched
from profiler.why_slow.recorder import Recorder
from profiler.why_slow.render import html_why, why_document

HURRIED = Path(__file__).parents[1] / "hurry.py"
LOAD = """import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
ids = torch.ones(2, 8, dtype=torch.long)
"""


RUNS = {
    "arguments, streams and an exit code": (
        "import sys, os\n"
        "print(sys.argv[1:], input(), __name__, os.path.basename(__file__))\n"
        "print('message', file=sys.stderr)\n"
        "sys.exit(7)\n"
    ),
    "an exception": "def f():\n    raise ValueError('mine')\nf()\n",
    "an excepthook": "import sys\nsys.excepthook = lambda kind, *_: print(kind.__name__, file=sys.stderr)\n1 / 0\n",
    "annotations": "def g(x: int): pass\nraise ValueError(g.__annotations__, __builtins__)\n",
    # The interpreter waits for threads but ends the idle workers of a pool, which would never finish.
    "a thread, an idle pool and a text at the end": (
        "import sys, threading, time\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "pool = ThreadPoolExecutor(1)\n"
        "pool.submit(print, 'pool').result()\n"
        "threading.Thread(target=lambda: (time.sleep(0.5), print('thread'))).start()\n"
        "sys.exit('no')\n"
    ),
    # It runs no later code, also in a child.
    "os._exit": (
        "import os\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    os._exit(5)\n"
        "print('child', os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)\n"
        "try:\n"
        "    os._exit(7)\n"
        "finally:\n"
        "    print('never', flush=True)\n"
    ),
}


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["a module", *RUNS])
def test_a_script_runs_as_under_the_interpreter_and_has_one_answer(kind: str, tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text(RUNS.get(kind, RUNS["arguments, streams and an exit code"]))
    own = ["-m", "own"] if kind == "a module" else [str(script)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    plain, done = (
        subprocess.run(
            [sys.executable, *before, *own, "--plain", "-m", "x"], input="input\n", capture_output=True, text=True,
            check=False, timeout=120, cwd=tmp_path, env=environment,
        )
        for before in ([], ["-m", "profiler", "why"])
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (plain.returncode, plain.stdout)
    assert done.stderr.startswith(plain.stderr)
    assert done.stderr.removeprefix(plain.stderr).count("nothing to explain") == 1


@pytest.mark.parametrize("writable", [True, False])
def test_the_answer_and_the_exit_code_survive_a_folder_that_cannot_be_written(
    writable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative folder is where `why` was called, also if the script goes elsewhere."""
    with_effort(monkeypatch, script_floor=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "away").mkdir()
    if not writable:
        (tmp_path / "why").write_text("a file")
    script = tmp_path / "own.py"
    script.write_text(
        "import os, sys, torch\nfrom planted_faults import tiny_llama\nos.chdir('away')\n"
        "tiny_llama()(torch.ones(1, 8, dtype=torch.long))\nsys.exit(3)\n"
    )
    report = mock.Mock()
    assert why_script(script, "", [], Path("why"), contextlib.nullcontext(), report, budget_s=0.0) == 3
    [(found, folder, hints)] = [call.args for call in report.mock_calls]
    assert len(found.seen.calls) == 1
    assert (folder, (tmp_path / "why" / "why.json").exists()) == (Path("why") if writable else None, writable)
    assert [f"{tmp_path / 'why'} cannot be written" in line for line in hints] == [True] * (not writable)


@pytest.mark.slow
def test_an_interrupted_script_is_explained(tiny_folder: Path, tmp_path: Path) -> None:
    """The answer covers all calls until the interrupt, each with the user's line."""
    calls = "for _ in range(2):\n    print(model.generate(ids, max_new_tokens=4, do_sample=False).shape[0])\n"
    script = tmp_path / "own.py"
    script.write_text(LOAD + calls + "raise KeyboardInterrupt\n")
    command = [sys.executable, str(HURRIED), "why", "--out", str(tmp_path / "why"), str(script), str(tiny_folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout) == (130, "2\n2\n")
    assert "Interrupted: up to here" in done.stderr
    document = json.loads((tmp_path / "why" / "why.json").read_text())
    assert_follows("why", document)
    assert document["interrupted"]
    assert [call["where"] for call in document["calls"]] == ["own.py:6", "own.py:6"]
    assert {call["new_tokens"] for call in document["calls"]} == {4}
    assert [load["where"] for load in document["loads"]] == ["own.py:3"]
    assert "<h1>Why is" in (tmp_path / "why" / "why.html").read_text()


@pytest.mark.ci
def test_recompilations_are_reported_and_add_no_graph_breaks() -> None:
    """Two shapes of a model that is compiled per shape cause one recompilation, and the graph has no wrapper."""
    compiled = torch.compile(tiny_llama(), backend="eager", dynamic=False)
    texts = [torch.ones(1, length, dtype=torch.long) for length in (8, 8, 12)]
    start_s = now_s()
    seen = recorded(lambda: [compiled(text) for text in texts]).seen("s.py")
    wall_s = now_s() - start_s
    assert [(call.words, call.settings.compiled) for call in seen.calls] == [
        ("forward 1 x 8", True), ("forward 1 x 8", True), ("forward 1 x 12", True),
    ]  # fmt: skip
    assert not torch._dynamo.utils.counters["graph_break"]
    [recompilation] = seen.recompilations
    assert 0 < recompilation.seconds <= wall_s
    assert judge_calls(seen, []).findings[0].id == "recompiles"
    later = recorded(lambda: compiled(texts[2])).seen("s.py")
    assert later.recompilations == (), "earlier recompilations do not belong to this block"


@pytest.mark.slow
def test_graph_breaks_are_reported_with_their_reason() -> None:
    """A print before the layer breaks the graph; breaks before the block are not counted."""
    model, breaks = tiny_llama(), torch._dynamo.utils.counters["graph_break"]
    breaks["an earlier one"] = 3
    model.model.layers[0].register_forward_pre_hook(lambda *_: print(end=""))
    compiled = torch.compile(model, backend="eager")
    [broken] = recorded(lambda: compiled(torch.ones(1, 8, dtype=torch.long))).seen("s.py").graph_breaks
    assert broken.count == breaks.total() - 3
    assert "print" in broken.reason


@pytest.mark.parametrize(("cache", "change"), [("DynamicCache", "static"), ("", "pad to few lengths")])
def test_a_static_cache_is_advised_for_compiled_code(cache: str, change: str) -> None:
    """With a growing cache, each token is a new shape for the compiled code."""
    call = generate(0, 4.0, settings=CallSettings(cache_class=cache))
    [finding] = judge_calls(script(5.0, call, recompilations=(Recompilation(9.0, "a shape"),)), []).findings
    assert (finding.id, finding.saves_s) == ("recompiles", 4.0), "not more than the calls"
    assert change in finding.change


SETTINGS = CallSettings("float32", attention="sdpa", cache=False, training=True)
TWO = script(20.0, generate(0, 2.0, settings=SETTINGS), generate(1, 6.0, settings=SETTINGS))


def test_what_a_change_costs_other_calls_is_subtracted() -> None:
    """It saves 1.5 s of a call of 2 s. The other call of 6 s takes 0.6 s longer; or 6 s, and nothing is saved.

    Another trial of the same calls is no cost of others. A saving under 2 % of the script is no finding.
    """
    assert not judge_calls(TWO, [tried(0.015, 0, 1)]).findings
    for other, saved_s in ((tried(-0.1, 1), [0.9]), (tried(-1.0, 1), []), (tried(-1.0, 0), [1.5])):
        found = judge_calls(TWO, [tried(0.75, 0), other])
        assert [item.saves_s for item in found.findings] == pytest.approx(saved_s)


def test_what_did_not_run_comes_after_what_did() -> None:
    """A computed saving of 5 s and a bound of 6 s never lead; a stand-in of 2 s is named as one."""
    more = [Finding("beams", 5.0, "s.py:4", "beams", "one", "computed", "by the ceilings"),
            Finding("offload", 6.0, "s.py:4", "a link", "none", "at most", "by its bandwidth")]  # fmt: skip
    trials = [tried(0.25, 0, 1, id="uncompiled", stand_in="a graph"), tried(0.1, 0, 1)]
    found = judge_calls(TWO, trials, more=more)
    assert [(item.basis, round(item.saves_s, 1)) for item in found.findings] == [
        ("stand-in", 2.0), ("tried", 0.8), ("at most", 6.0), ("computed", 5.0),
    ]  # fmt: skip


def test_another_dtype_is_no_finding_until_all_calls_of_the_model_are_tried() -> None:
    """It saves 0.75 of 2 s of steps. The prompts take 6 s, and may then take four times as long."""
    steps, prompts = tried(0.75, 0, id="wide-dtype"), tried(0.1, 1, id="wide-dtype")
    found = judge_calls(TWO, [steps])
    assert (found.findings, len(found.not_tried)) == ((), 1)
    [finding] = judge_calls(TWO, [steps, prompts]).findings
    assert finding.saves_s == pytest.approx(1.5 + 0.6)
    other_model = replace(TWO, calls=(TWO.calls[0], replace(TWO.calls[1], model="Other")))
    assert judge_calls(other_model, [steps]).findings


@pytest.mark.parametrize(
    ("device", "busy", "warned"), [("cpu", 1.5, True), ("cpu", 0.1, False), ("cuda:0", 0.9, False)]
)
def test_busy_cores_are_a_warning(device: str, busy: float, warned: bool) -> None:
    """Calls with two threads need both cores; calls on a GPU need one."""
    here = script(20.0, generate(0, 1.0, settings=replace(SETTINGS, device=device, threads=2)))
    recorder = mock.Mock(seen=lambda *_, **__: here, foreign=Others(busy, 2))
    found = explained(recorder, "s.py", interrupted=True)
    assert ["1.5 of 2 cores busy" in text for text in why_document(found).warnings] == [True] * warned
    assert ("1.5 of 2 cores busy" in html_why(found)) == warned


def test_a_notebook_is_refused_with_an_alternative(tmp_path: Path) -> None:
    notebook = tmp_path / "own.ipynb"
    notebook.write_text('{"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}')
    with pytest.raises(RequestError, match=r"is a notebook.*jupyter nbconvert --to script .*own\.ipynb.*%%why"):
        run_script(notebook, [])


def test_a_script_has_its_own_file_named_profiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code of this package that is first imported while the script runs is still found, and all of it afterwards."""
    (tmp_path / "profiler.py").write_text("def timed(): return 'mine'\n")
    script = tmp_path / "own.py"
    script.write_text(
        "import profiler, sys\nprint(profiler.timed(), __import__('profiler').__file__, file=sys.stderr)\n"
    )
    monkeypatch.delitem(sys.modules, "profiler.why_slow.torch_context", raising=False)
    errors = io.StringIO()
    with scripts_own_profiler(tmp_path), contextlib.redirect_stderr(errors):
        assert run_script(script, []) == 0
        assert sys.modules["profiler"].timed() == "mine"
        assert importlib.import_module("profiler.why_slow.torch_context").TorchContext
    assert errors.getvalue() == f"mine {tmp_path / 'profiler.py'}\n"
    assert sys.modules["profiler"] is profiler
    with scripts_own_profiler(Path(profiler.__file__).parents[1]):
        assert sys.modules["profiler"] is profiler


def test_a_folder_named_profiler_is_refused_before_the_script_runs(tmp_path: Path) -> None:
    (tmp_path / "profiler").mkdir()
    (tmp_path / "profiler" / "__init__.py").write_text("")
    (tmp_path / "own.py").write_text("raise SystemExit(3)\n")
    with pytest.raises(RequestError, match=f"{tmp_path}/profiler has the name of roofscope's own package: rename"):
        why_script(tmp_path / "own.py", "", [], None, contextlib.nullcontext(), lambda *_: None)


def test_a_cell_runs_in_the_notebook_and_has_an_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The cell's names and its exception are the notebook's. The second line below `%%why` is line 3."""
    with_effort(monkeypatch, script_floor=False)
    shell = InteractiveShell()
    shell.run_line_magic("load_ext", "profiler")
    shell.user_ns |= {"model": tiny_llama()}
    cell = "import torch\nfound = model.generate(torch.ones(1, 8, dtype=torch.long), max_new_tokens=2)\n"
    watching = shell.run_cell_magic("why", "--budget 0", cell)
    assert shell.user_ns["found"].shape == (1, 10)
    [call] = watching.found.seen.calls
    assert (call.where, call.words) == ("cell:3", "generate 1 x 8 + 2")
    assert repr(watching).startswith("this block spent")
    assert "generate 1 x 8 + 2" in repr(watching)
    assert repr(shell.run_cell_magic("why", "", "1 / 0\n")) == "No language model was called."
    assert "ZeroDivisionError" in "".join(capsys.readouterr())


IDS = torch.ones(1, 6, dtype=torch.long)

# Warnings as the libraries print them. fallbacks.py lists the sources.
MAMBA_5 = (
    "`selective_scan_fn` is falling back to its reference PyTorch implementation because `mamba_ssm` is not installed. "
    "This is correct but much slower; install `mamba_ssm` for the optimized kernel."
)
BITSANDBYTES = (
    "Failed to load CPU gemm_4bit_forward from kernels-community: No module named 'kernels'. Please make sure you "
    "already `pip install kernels` and the kernels >= 0.11.1"
)


@pytest.fixture
def mamba() -> Any:
    return small_model("Mamba", state_size=4)


COMPILER = "torch._inductor.exc.InductorError: InvalidCxxCompiler: No working C++ compiler found in cpp.cxx: ('g++',)"


@pytest.mark.parametrize(
    ("text", "quoted", "module", "change"),
    [
        (MAMBA_5, "`selective_scan_fn` is falling back", "", "pip install mamba-ssm"),
        ("CUDA extension not installed.", "CUDA extension", "QuantLinear", "pip install gptqmodel"),
        (BITSANDBYTES, "Failed to load", "Linear4bit", "pip install kernels"),
        (f"WON'T CONVERT f.py\ndue to:\nTraceback:\n{COMPILER}\n\nSet X=1.", COMPILER, "", "a C++ compiler"),
        ("Enforce eager set, disabling torch.compile, CUDAGraphs", "Enforce eager set", "", "leave out enforce_eager"),
    ],
)
def test_a_warning_is_quoted_by_its_line_with_what_to_do(text: str, quoted: str, module: str, change: str) -> None:
    """Warnings of transformers, auto-gptq, bitsandbytes, torch and vLLM 0.6, as their sources print them."""
    found = fallback_of("library", text)
    assert found.text.startswith(quoted)
    assert found.text in text
    assert found.module == module
    assert change in cure_of([found], on_gpu=True)


@pytest.mark.slow
def test_a_run_writes_and_prints_what_a_library_warned_of(
    profile_tiny: Callable[..., profiler.Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = pipeline.time_cells

    def warn_and_measure(*args: Any) -> None:
        logging.getLogger("transformers.integrations").warning(MAMBA_5)
        measure(*args)

    monkeypatch.setattr(pipeline, "time_cells", warn_and_measure)
    run = profile_tiny()
    [fallback] = run.document.fallbacks
    assert fallback.packages == ("mamba-ssm",)
    [sentence] = [line for line in run.document.warnings if "selective_scan_fn" in line]
    assert sentence.endswith("run it on a GPU after `pip install mamba-ssm`: its kernels need one.")


def test_a_script_with_vllm_gets_its_warnings_and_the_command_that_times_the_model(tmp_path: Path) -> None:
    script = tmp_path / "serve.py"
    script.write_text(
        "import logging, sys, types\n"
        "sys.modules['vllm'] = types.ModuleType('vllm')\n"
        "logging.getLogger('vllm.config').warning('Enforce eager set, disabling torch.compile and CUDAGraphs.')\n"
    )
    command = [sys.executable, "-m", "profiler", "why", "--out", str(tmp_path / "why"), str(script)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0
    assert "roofscope run MODEL --engine vllm" in done.stderr
    assert 'vllm warns "Enforce eager set' in done.stderr
    assert "leave out enforce_eager" in done.stderr


def test_libraries_that_only_the_answer_imports_print_no_notes(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """What the script's own code prints and warns of stays."""
    with_effort(monkeypatch, script_floor=False)

    def notes(*_: object) -> list[TriedChange]:
        logging.getLogger("torchao").warning("Failed to load _C.so")
        warnings.warn("deprecated", FutureWarning, stacklevel=1)
        return []

    monkeypatch.setattr("profiler.why_slow.trials.try_changes", notes)
    model = tiny_llama()
    with profiler.why():
        logging.getLogger("own").warning("mine")
        model(IDS)
    assert capfd.readouterr().err.splitlines() == ["mine"]


def test_other_warnings_are_no_fallback() -> None:
    for text in (
        "Setting `pad_token_id` to `eos_token_id`:2 for open-end generation.",
        "`sdpa` attention does not support `output_attentions=True`.",
        "Warning: Detected no triton, on systems without Triton certain kernels will not work",
        # roofscope hides the package `kernels`, which would connect to a hub
        BITSANDBYTES.replace("No module named 'kernels'", "import of kernels halted; None in sys.modules"),
    ):
        assert fallback_of("library", text) is None


def test_a_warning_is_printed_and_one_that_the_script_mutes_is_recorded(mamba: Any) -> None:
    logger = logging.getLogger("transformers")
    logger.addHandler(printed := BufferingHandler(100))
    before = transformers_logging.get_verbosity()
    counts = []
    for level in (transformers_logging.WARNING, transformers_logging.ERROR):
        logging.Logger.warning_once.cache_clear()  # type: ignore[attr-defined]
        recorder = Recorder()
        with switched(transformers_logging.set_verbosity, level, before), watched(recorder):
            mamba(IDS)
        assert {each.module for each in recorder.fallbacks} == {"MambaMixer"}
        counts.append(len(printed.buffer))
    logger.removeHandler(printed)
    assert counts[1] == counts[0] >= 2


def test_pythons_warnings_are_recorded_and_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    text = "int8_linear_matmul has no usable (hip|cu)blasLt algo for shape; falling back to fp32 matmul."
    shown: list[str] = []
    monkeypatch.setattr(warnings, "showwarning", lambda message, *_: shown.append(str(message)))
    before = warnings.showwarning
    with watched(recorder):
        warnings.showwarning(RuntimeWarning(text), RuntimeWarning, "/lib/site-packages/bitsandbytes/ops.py", 1)
    assert warnings.showwarning is before
    assert shown == [text]
    [found] = recorder.fallbacks
    assert (found.library, found.packages) == ("bitsandbytes", ())
    assert "use another format" in found.change


SLEEP_S = 0.02


def test_the_bound_is_the_time_in_the_modules_without_their_linears(mamba: Any) -> None:
    """Both mixers sleep, and so does a linear of the first. The bound excludes the linear, which is always needed."""
    mixers = [layer.mixer for layer in mamba.backbone.layers]
    for mixer in mixers:
        mixer.register_forward_hook(lambda *_: time.sleep(SLEEP_S))
    mixers[0].in_proj.register_forward_hook(lambda *_: time.sleep(20 * SLEEP_S))
    [group] = groups_of(lambda: mamba(IDS))
    times_of = partial(module_times, affordable=lambda _: True)
    fallback = Fallback("transformers", "slow", "MambaMixer", ("mamba-ssm",))
    untried = Untried()
    [finding] = fallback_findings([fallback], [group], times_of, untried)
    assert not untried.by_reason
    assert 2 * SLEEP_S * 0.9 <= finding.saves_s <= group.seconds - 20 * SLEEP_S * 0.9
    unknown = Fallback("torch", "slow", "", (), "install a C++ compiler")
    assert not list(fallback_findings([unknown], [group], times_of, untried))
    assert untried.lines(1.0) == ['install a C++ compiler: its seconds are unknown (torch warns "slow")']
