"""vLLM where it is not installed: requests that cannot work, and records of a real one's scheduler."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from profiler.engines import vllm
from profiler.errors import RequestError
from profiler.facts.scheduler import OwnedModel, SchedulerIterations, in_rows, prefill_iterations, scheduled_of, trouble
from profiler.run.options import Options
from profiler.run.validate import prepare


@pytest.mark.parametrize(
    ("version", "options", "words"),
    [
        (None, {}, "vLLM is not installed; pip install"),
        (None, {"engine": "eager,vllm"}, "vLLM is not installed"),
        ("0.9.2", {}, "vLLM 0.9.2 is too old; use 0.32 or newer"),
        ("0.32.0", {"quant": "nf4"}, "--quant nf4 needs transformers"),
        ("0.32.0", {"engine": "eager,vllm", "quant": "int8"}, "--quant int8 needs transformers"),
        ("0.32.0", {"context_lens": "2048"}, "use --prompt-lens instead of --context-lens"),
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


RECORDS = Path(__file__).parents[1] / "data" / "vllm"
OWNED = OwnedModel("0.32.0", 1.0, "compiled", 1, 1, cache_tokens=1280, block_tokens=128, tokens_an_iteration=256)


def read(name: str) -> tuple[int, int, int, list[SchedulerIterations]]:
    """(batch, prompt length, new tokens, iterations) of a file of vLLM's records."""
    document = json.loads((RECORDS / f"{name}.json").read_text())
    records = [
        {**each, "iteration_details": SimpleNamespace(**each["iteration_details"])} for each in document["iterations"]
    ]
    iterations = [scheduled_of(SimpleNamespace(**record)) for record in records]
    return document["batch"], document["prompt_len"], document["new_tokens"], iterations


def test_a_prefill_is_distinguished_from_its_decode_steps() -> None:
    batch, prompt, new_tokens, iterations = read("plain")
    assert in_rows(iterations) == (
        SchedulerIterations(batch, batch * prompt, 0, 0, 0),
        SchedulerIterations(0, 0, batch, batch, 0, iterations=new_tokens - 1),
    )
    assert prefill_iterations(iterations) == 1
    assert trouble(iterations, batch, OWNED) is None


def test_a_chunked_prefill_is_accepted() -> None:
    """360 prompt tokens at 256 per iteration: 256, then 104 next to the two sequences that already decode."""
    batch, prompt, _, iterations = read("chunked")
    assert prefill_iterations(in_rows(iterations)) == 2
    assert [(row.prefill_tokens, row.decode_requests) for row in iterations[:3]] == [(256, 0), (104, 2), (0, 3)]
    assert sum(row.prefill_tokens for row in iterations) == batch * prompt
    assert trouble(iterations, batch, OWNED) is None


def test_a_preemption_is_reported_with_its_cost() -> None:
    """Ten blocks for six sequences: when each needs its second, at 129 tokens, only four of them get one.

    Two sequences are 2 and 1 tokens ahead of the rest because of the chunked prefill.
    """
    batch, prompt, _, iterations = read("preempted")
    assert sum(row.prefill_tokens for row in iterations) == batch * prompt
    text = trouble(iterations, batch, OWNED)
    assert text.startswith("preempted: 1 of 6 sequences, from decode step 9 on; its cache of 1280 tokens")
    recomputed = sum(row.decode_tokens - row.decode_requests for row in iterations)
    # The prompt and the generated tokens are recomputed, without the one token that is new.
    assert prompt <= recomputed + 1 <= prompt + 30
    assert f"{recomputed} tokens were recomputed" in text


def test_a_sequence_without_a_block_waits_although_there_is_room_for_tokens() -> None:
    batch, _, _, iterations = read("waiting")
    text = trouble(iterations, batch, OWNED)
    assert text.startswith("1 of 6 sequences had to wait for others to end: its cache of 1280 tokens")


def test_a_step_without_some_sequences_is_not_a_step_of_the_cell() -> None:
    batch, _, _, iterations = read("plain")
    assert "decode step 1 ran 3 of 4 sequences" in str(trouble(iterations, batch + 1, OWNED))
