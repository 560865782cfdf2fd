"""A library's fallback to slower code is reported with its warning, a package to install and an upper bound."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import pytest
import torch
from hurry import with_effort
from planted_faults import groups_of
from transformers import MambaConfig, MambaForCausalLM
from transformers.models.mamba.modeling_mamba import MambaMixer
from transformers.utils import logging as transformers_logging

import profiler
from profiler.fallbacks import Fallback, cure_of, fallback_of
from profiler.run import pipeline
from profiler.why_slow.findings import Untried
from profiler.why_slow.module_times import ModuleTimes, fallback_findings, module_times
from profiler.why_slow.patches import watched
from profiler.why_slow.recorder import Recorder
from profiler.why_slow.render import note_lines, why_sentences
from profiler.why_slow.repeat_call import CallGroup

IDS = torch.ones(1, 6, dtype=torch.long)

# Warnings as the libraries print them. fallbacks.py lists the sources.
MAMBA_5 = (
    "`selective_scan_fn` is falling back to its reference PyTorch implementation because `mamba_ssm` is not installed. "
    "This is correct but much slower; install `mamba_ssm` for the optimized kernel."
)
MAMBA_5_10 = (
    "The fast path is not available because one of `(selective_state_update, selective_scan_fn, causal_conv1d_fn, "
    "causal_conv1d_update, mamba_inner_fn)` is None. Falling back to the mamba.py backend. To install follow "
    "https://github.com/state-spaces/mamba/#installation for mamba-ssm and install the kernels library using "
    "`pip install kernels` or https://github.com/Dao-AILab/causal-conv1d for causal-conv1d"
)
BITSANDBYTES = (
    "Failed to load CPU gemm_4bit_forward from kernels-community: No module named 'kernels'. Please make sure you "
    "already `pip install kernels` and the kernels >= 0.11.1"
)


@pytest.fixture
def mamba() -> Any:
    config = MambaConfig(hidden_size=16, num_hidden_layers=2, vocab_size=64, state_size=4, eos_token_id=None)
    return MambaForCausalLM(config).eval()


COMPILER = "torch._inductor.exc.InductorError: InvalidCxxCompiler: No working C++ compiler found in cpp.cxx: ('g++',)"


@pytest.mark.parametrize(
    ("text", "quoted", "module", "change"),
    [
        (MAMBA_5, "`selective_scan_fn` is falling back", "", "pip install mamba-ssm"),
        (MAMBA_5_10, "The fast path is not available", "", "pip install mamba-ssm causal-conv1d"),
        ("CUDA extension not installed.", "CUDA extension", "QuantLinear", "pip install gptqmodel"),
        (BITSANDBYTES, "Failed to load", "Linear4bit", "pip install kernels"),
        (f"WON'T CONVERT f.py\ndue to:\nTraceback:\n{COMPILER}\n\nSet X=1.", COMPILER, "", "a C++ compiler"),
        ("Enforce eager set, disabling torch.compile, CUDAGraphs", "Enforce eager set", "", "leave out enforce_eager"),
        ("Using default MoE config. Performance might be sub-optimal! Config file not found", "", "", "tune"),
        ("XForCausalLM has no vLLM implementation, falling back to Transformers.", "", "", "transformers"),
    ],
)
def test_a_warning_is_quoted_by_its_line_with_what_to_do(text: str, quoted: str, module: str, change: str) -> None:
    """Warnings of transformers, auto-gptq, bitsandbytes, torch, and vLLM 0.6 and 0.32, as their sources print them."""
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


def test_other_warnings_are_no_fallback() -> None:
    for text in (
        "Setting `pad_token_id` to `eos_token_id`:2 for open-end generation.",
        "`sdpa` attention does not support `output_attentions=True`.",
        "Warning: Detected no triton, on systems without Triton certain kernels will not work",
        # roofscope hides the package `kernels`, which would connect to a hub
        BITSANDBYTES.replace("No module named 'kernels'", "import of kernels halted; None in sys.modules"),
    ):
        assert fallback_of("library", text) is None


@pytest.mark.slow
def test_mamba_without_its_kernels(mamba: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with_effort(monkeypatch, script_floor=False)
    with profiler.why() as watching:
        mamba.generate(IDS, max_new_tokens=3, do_sample=False)
    found = watching.found
    [finding] = [item for item in found.findings if item.id == "fallback"]
    assert 0 < finding.saves_s <= found.seen.calls_s
    assert 'transformers warns "`selective_scan_fn` is falling back' in finding.evidence
    assert finding.change == "run it on a GPU after `pip install causal-conv1d mamba-ssm`: their kernels need one"
    [sentence] = [line for line in why_sentences(found) if "MambaMixer runs slower code" in line]
    assert ": at most " in sentence
    assert any("without its linears" in line for line in note_lines(found))


def test_a_warning_is_printed_and_one_that_the_script_mutes_is_recorded(mamba: Any) -> None:
    logger = logging.getLogger("transformers")
    logger.addHandler(printed := BufferingHandler(100))
    level = transformers_logging.get_verbosity()
    counts = []
    try:
        for verbosity in (transformers_logging.WARNING, transformers_logging.ERROR):
            transformers_logging.set_verbosity(verbosity)
            logging.Logger.warning_once.cache_clear()  # type: ignore[attr-defined]
            recorder = Recorder()
            with watched(recorder):
                mamba(IDS)
            assert {each.module for each in recorder.fallbacks} == {"MambaMixer"}
            counts.append(len(printed.buffer))
    finally:
        transformers_logging.set_verbosity(level)
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
    assert found.library == "bitsandbytes"
    assert found.packages == ()
    assert "use another format" in found.change


SLEEP_S = 0.02


def test_the_bound_is_the_time_in_the_modules_without_their_linears(
    mamba: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both mixers sleep, and so does a linear of the first. The bound excludes the linear, which is always needed."""
    forward, linear = MambaMixer.forward, mamba.backbone.layers[0].mixer.in_proj

    def slow(self: Any, *args: Any, **named: Any) -> Any:
        time.sleep(SLEEP_S)
        return forward(self, *args, **named)

    monkeypatch.setattr(MambaMixer, "forward", slow)
    linear.register_forward_hook(lambda *_: time.sleep(20 * SLEEP_S))
    [group] = groups_of(lambda: mamba(IDS))

    def times_of(group: CallGroup) -> ModuleTimes | None:
        return module_times(group, lambda _: True)

    fallback = Fallback("transformers", "slow", "MambaMixer", ("mamba-ssm",))
    untried = Untried()
    [finding] = fallback_findings([fallback], [group], times_of, untried)
    assert not untried.by_reason
    assert 2 * SLEEP_S * 0.9 <= finding.saves_s <= group.seconds - 20 * SLEEP_S * 0.9
    for module in ("NoSuchModule", ""):
        unknown = Fallback("torch", "slow", module, (), "install a C++ compiler")
        assert not list(fallback_findings([unknown], [group], times_of, untried))
        assert untried.lines(1.0) == ['install a C++ compiler: its seconds are unknown (torch warns "slow")']
