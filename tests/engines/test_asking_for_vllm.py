"""`--engine vllm` refuses impossible requests in one line, before loading and mostly before importing vLLM."""

from __future__ import annotations

import importlib.machinery
import importlib.util
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
    text = str(caught.value)
    assert "\n" not in text
    return text


def pretend_version(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    """Pretend that this version of vLLM is installed, or none."""
    spec = None if version is None else importlib.machinery.ModuleSpec("vllm", None)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        vllm.importlib.util, "find_spec", lambda name, *rest: spec if name == "vllm" else find_spec(name, *rest)
    )
    monkeypatch.setattr(vllm, "version", lambda: version)


def test_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_version(monkeypatch, None)
    assert "vLLM is not installed; pip install" in refused()
    assert "vLLM is not installed" in refused(engine="eager,vllm")


def test_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_version(monkeypatch, "0.9.2")
    assert "vLLM 0.9.2 is too old; use 0.32 or newer" in refused()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"quant": "nf4"}, "--quant nf4 needs transformers"),
        ({"engine": "eager,vllm", "quant": "int8wo"}, "--quant int8wo needs transformers"),
        ({"cold": True}, "--cold works only with transformers' engines"),
        ({"context_lens": "2048"}, "use --prompt-lens instead of --context-lens"),
    ],
)
def test_what_it_cannot_do(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], words: str) -> None:
    pretend_version(monkeypatch, "0.32.0")
    assert words in refused(**options)


def test_only_vllm_caches_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_version(monkeypatch, "0.32.0")
    for engine in ("eager", "eager,vllm"):
        assert "--prefix 64: only vLLM has a cache of prefixes; use --engine vllm" in refused(engine=engine, prefix=64)


def test_a_gguf_file_and_a_second_card() -> None:
    request: dict[str, Any] = {"quant": "none", "deepened": False, "architecture": "LlamaForCausalLM"}
    with pytest.raises(RequestError, match="cannot read a GGUF file"):
        vllm.check_vllm(device=torch.device("cpu"), kind="gguf", **request)
    with pytest.raises(RequestError, match="set CUDA_VISIBLE_DEVICES"):
        vllm.check_vllm(device=torch.device("cuda", 1), kind="hub", **request)
