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


@pytest.mark.parametrize(
    ("version", "options", "words"),
    [
        (None, {}, "vLLM is not installed; pip install"),
        (None, {"engine": "eager,vllm"}, "vLLM is not installed"),
        ("0.9.2", {}, "vLLM 0.9.2 is too old; use 0.32 or newer"),
        ("0.32.0", {"quant": "nf4"}, "--quant nf4 needs transformers"),
        ("0.32.0", {"engine": "eager,vllm", "quant": "int8wo"}, "--quant int8wo needs transformers"),
        ("0.32.0", {"cold": True}, "--cold works only with transformers' engines"),
        ("0.32.0", {"context_lens": "2048"}, "use --prompt-lens instead of --context-lens"),
        (
            "0.32.0",
            {"engine": "eager", "prefix": 64},
            "--prefix 64: only vLLM has a cache of prefixes; use --engine vllm",
        ),
        ("0.32.0", {"engine": "eager,vllm", "prefix": 64}, "only vLLM has a cache of prefixes; use --engine vllm"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(
    version: str | None, options: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test pretends that this version of vLLM is installed, or none."""
    spec = None if version is None else importlib.machinery.ModuleSpec("vllm", None)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        vllm.importlib.util, "find_spec", lambda name, *rest: spec if name == "vllm" else find_spec(name, *rest)
    )
    monkeypatch.setattr(vllm, "version", lambda: version)
    with pytest.raises(RequestError) as caught:
        prepare(Options(model="smollm2-135m", **{"engine": "vllm", **options}))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_gguf_file_and_a_second_card() -> None:
    request: dict[str, Any] = {"quant": "none", "deepened": False, "architecture": "LlamaForCausalLM"}
    with pytest.raises(RequestError, match="cannot read a GGUF file"):
        vllm.check_vllm(device=torch.device("cpu"), kind="gguf", **request)
    with pytest.raises(RequestError, match="set CUDA_VISIBLE_DEVICES"):
        vllm.check_vllm(device=torch.device("cuda", 1), kind="hub", **request)
