"""What `--engine vllm` cannot do is refused in one line, before anything loads and mostly before vLLM is imported."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import subprocess
import sys
from typing import Any

import pytest
import torch

from profiler.engines import vllm
from profiler.errors import RequestError
from profiler.run.options import Options
from profiler.run.validate import prepare


def refused(**options: Any) -> str:
    with pytest.raises(RequestError) as caught:
        prepare(Options(model="smollm2-135m", **{"engine": "vllm", **options}))
    told = str(caught.value)
    assert "\n" not in told
    return told


def found_as(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    """Let vLLM be found, or not, whatever is installed here."""
    spec = None if version is None else importlib.machinery.ModuleSpec("vllm", None)
    found = importlib.util.find_spec
    monkeypatch.setattr(
        vllm.importlib.util, "find_spec", lambda name, *rest: spec if name == "vllm" else found(name, *rest)
    )
    monkeypatch.setattr(vllm, "version", lambda: version)


def test_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    found_as(monkeypatch, None)
    assert "vLLM is not installed; pip install" in refused()
    assert "vLLM is not installed" in refused(engine="eager,vllm")


def test_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    found_as(monkeypatch, "0.9.2")
    assert "vLLM 0.9.2 is too old; use 0.32 or newer" in refused()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"quant": "nf4"}, "--quant nf4 is made by transformers"),
        ({"engine": "eager,vllm", "quant": "int8wo"}, "--quant int8wo is made by transformers"),
        ({"cold": True}, "--cold starts transformers' engines alone"),
        ({"context_lens": "2048"}, "fills its cache by a prefill alone: use --prompt-lens"),
    ],
)
def test_what_it_cannot_do(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], told: str) -> None:
    found_as(monkeypatch, "0.32.0")
    assert told in refused(**options)


def test_a_gguf_file_and_a_second_card() -> None:
    asked: dict[str, Any] = {"quant": "none", "deepened": False, "architecture": "LlamaForCausalLM"}
    with pytest.raises(RequestError, match="reads no GGUF file"):
        vllm.check_vllm(device=torch.device("cpu"), kind="gguf", **asked)
    with pytest.raises(RequestError, match="set CUDA_VISIBLE_DEVICES"):
        vllm.check_vllm(device=torch.device("cuda", 1), kind="hub", **asked)


def test_a_vllm_that_does_not_import_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a torchvision of another torch lies beside it."""
    found_as(monkeypatch, "0.32.0")

    def broken(name: str) -> Any:
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(vllm, "import_vllm", broken)
    assert "vLLM does not import here: operator torchvision::nms does not exist." in refused()


def test_nothing_of_it_is_imported_unless_it_is_asked_for() -> None:
    """`profiler` and its command line know the engine by name, and need no vLLM for anything else."""
    code = "import sys, profiler, profiler.cli.app, profiler.engines.registry; sys.exit('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0
