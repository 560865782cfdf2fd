"""vLLM in this process: its tokens, iterations and preemptions, and a run next to the eager engine."""

from __future__ import annotations

import csv
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from machines import HOST
from small_models import small_model

import profiler
from profiler.engines.vllm import VllmEngine, VllmRequirements
from profiler.errors import NoRoomError, RequestError
from profiler.facts.visits import Gap, Visit
from profiler.grid.cells import Cell
from profiler.judge.breakdown import TERMS
from profiler.loading.prompts import Prompts
from profiler.measure.sweep import VisitContext, visit
from profiler.run.judge_folder import judge_folder
from profiler.run.options import Options
from profiler.run.validate import prepare

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: .ci/vllm runs these"),
]

VOCAB, LAYERS, KV_HEADS, HEAD_DIM = 256, 2, 2, 32
BLOCK = 128
"""Tokens of a block of vLLM's cache on a CPU (platforms/cpu.py)."""
BLOCK_BYTES = 2 * LAYERS * KV_HEADS * HEAD_DIM * 4 * BLOCK
"""Keys and values of every layer in float32."""
BLOCKS = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with heads as wide as vLLM's CPU kernels require."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": VOCAB, "max_position_embeddings": 1024}
    path = tmp_path_factory.mktemp("models") / "tiny"
    small_model("Llama", **sizes, tie_word_embeddings=True).save_pretrained(path)
    return path


def engine_for(folder: Path, **more: Any) -> VllmEngine:
    """vLLM with that model's weights and a cache of 40 blocks, one of which always stays empty."""
    from transformers import AutoConfig

    config, cache_bytes = AutoConfig.from_pretrained(folder), BLOCKS * BLOCK_BYTES
    asked = (config, "LlamaForCausalLM", str(folder), "float32", 16, 600, 0, cache_bytes)
    return VllmEngine(VllmRequirements(*asked, **more), HOST)


@pytest.fixture(scope="module")
def engine(folder: Path) -> VllmEngine:
    return engine_for(folder)


def tokens_of_generate(folder: Path, ids: torch.Tensor, new_tokens: int) -> torch.Tensor:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    greedy: Any = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(ids, max_new_tokens=new_tokens, **greedy)[:, ids.shape[1] :]


def prompts(batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(1))


def call(engine: VllmEngine, batch: int, length: int, new_tokens: int) -> torch.Tensor:
    return engine.call(prompts(batch, length), new_tokens, lambda: None)


def test_its_greedy_tokens_are_those_of_transformers(engine: VllmEngine, folder: Path) -> None:
    marks: list[int] = []
    tokens = engine.call(prompts(3, 40), 24, lambda: marks.append(len(engine.scheduled)))
    assert tokens.tolist() == tokens_of_generate(folder, prompts(3, 40), 24).tolist()
    assert len(marks) == 25


def test_its_scheduler_distinguishes_prefill_from_decode(engine: VllmEngine) -> None:
    """Three prompts of 40 tokens at once, then 23 steps of three tokens; each sequence takes one block of 128."""
    call(engine, 3, 40, 24)
    rows = [
        (row.prefill_requests, row.prefill_tokens, row.decode_requests, row.decode_tokens, row.iterations)
        for row in engine.scheduled
    ]
    assert rows == [(3, 120, 0, 0, 1), (0, 0, 3, 3, 23)]
    assert engine.cache_used_bytes == 3 * BLOCK_BYTES
    assert engine.owned.cache_bytes == BLOCKS * BLOCK_BYTES
    assert engine.owned.cache_tokens == (BLOCKS - 1) * BLOCK


def test_a_chunked_prefill_is_reported_and_gives_the_same_tokens(engine: VllmEngine, folder: Path) -> None:
    """4500 prompt tokens at 4096 per iteration: finished prompts decode next to the rest of the others."""
    tokens = call(engine, 9, 500, 4)
    assert engine.owned.tokens_an_iteration == 4096
    first, second, *rest = engine.scheduled
    assert (first.prefill_requests, first.prefill_tokens, first.decode_requests) == (9, 4096, 0)
    assert (second.prefill_requests, second.prefill_tokens + second.decode_tokens) == (1, 404 + second.decode_requests)
    assert second.decode_requests == 8
    assert [(row.decode_requests, row.iterations) for row in rest] == [(9, 3)]
    assert tokens.tolist() == tokens_of_generate(folder, prompts(9, 500), 4).tolist()


@pytest.fixture(scope="module")
def caching(folder: Path) -> VllmEngine:
    """The same, for prompts whose first 256 tokens are cached: two blocks."""
    return engine_for(folder, prefix=2 * BLOCK)


def test_a_cached_prefix_is_not_read_again_and_kept_once(caching: VllmEngine, folder: Path) -> None:
    """Four prompts of 296 tokens, 256 of them common: 40 each are read, again at a second call with the same prompts.

    At most 2 blocks of the prefix and one for each sequence are in use.
    """
    ids = Prompts(VOCAB).of(Cell(4, 40, 8, 2 * BLOCK))
    assert ids.shape == (4, 296)
    assert (ids[:, : 2 * BLOCK] == ids[0, : 2 * BLOCK]).all()
    for _ in range(2):
        tokens = caching.call(ids, 8, lambda: None)
        rows = [
            (row.prefill_requests, row.prefill_tokens, row.decode_tokens, row.iterations) for row in caching.scheduled
        ]
        assert rows == [(4, 4 * 40, 0, 1), (0, 0, 4, 7)]
        assert caching.cache_used_bytes == (2 + 4) * BLOCK_BYTES
        assert tokens.tolist() == tokens_of_generate(folder, ids, 8).tolist()


def test_a_prefix_of_part_of_a_block_is_refused(folder: Path) -> None:
    with pytest.raises(RequestError, match=r"--prefix 200: .* blocks of 128 tokens here; use a multiple, as 256\."):
        engine_for(folder, prefix=200)


def test_a_run_with_a_prefix(folder: Path, tmp_path: Path) -> None:
    """Its prefill is counted as 64 tokens after 256: two FLOPs per weight and token, and attention to all keys."""
    run = profiler.profile(
        str(folder), engine="vllm", prompt_lens=[320], prefix=256, batch_sizes=[1, 4], new_tokens=8, budget_s=5,
        no_levers=True, out=tmp_path / "run",
    )  # fmt: skip
    cells = {(cell.phase, cell.batch_size): cell for cell in run.results}
    prefill, decode = cells["prefill", 4], cells["decode", 4]
    assert (prefill.prompt_len, prefill.context_len) == (64, 256)
    assert (decode.prompt_len, decode.context_len) == (64, 324)
    assert run.document.grid.prefix == 256
    pairs = 64 * 256 + 64 * 65 // 2
    linears = 4 * 64 * 2 * LAYERS * (128 * 128 * 2 + 128 * KV_HEADS * HEAD_DIM * 2 + 3 * 128 * 256)
    assert prefill.model_flops == linears + 4 * 2 * VOCAB * 128 + 4 * LAYERS * pairs * 4 * 128
    assert decode.model_flops > 0
    assert judge_folder(tmp_path / "run").results == run.results


def test_a_full_cache_preempts_and_the_cell_has_no_number(engine: VllmEngine) -> None:
    """Nine prompts of 500 tokens fill 36 of 39 blocks.

    Eight of them are one token ahead, since their prompts ended before the ninth. At the twelfth step each of them
    needs a fifth block for token 513, but only three are free.
    """
    with pytest.raises(
        NoRoomError, match=r"preempted: \d of 9 sequences, from decode step 12 on.*tokens were recomputed"
    ):
        call(engine, 9, 500, 20)
    gap = visit(engine, Cell(9, 500, 20, engine="vllm"), 0, VisitContext(HOST, Prompts(VOCAB)))
    assert isinstance(gap, Gap)
    assert gap.status == "oom"
    assert "preempted" in gap.reason
    call(engine, 3, 40, 4)  # the next cell is not affected


def test_iterations_add_up_to_the_wall_time_of_the_call(engine: VllmEngine) -> None:
    """A machine that stops between two marks may disturb one visit, not three."""
    shares = []
    for number in range(3):
        timed = visit(engine, Cell(4, 256, 64, engine="vllm"), number, VisitContext(HOST, Prompts(VOCAB)))
        assert isinstance(timed, Visit)
        shares.append((timed.prefill_s + sum(timed.decode_s)) / timed.wall_s)
        if shares[-1] > 0.97:
            break
    assert 0.97 < max(shares) <= 1.0, shares


def test_a_run_with_vllm_and_eager(folder: Path, tmp_path: Path) -> None:
    run = profiler.profile(
        str(folder), prompt_lens=[16], batch_sizes=[1, 2], new_tokens=8, engine="eager,vllm", weights="random",
        budget_s=2, no_levers=True, out=tmp_path / "run",
    )  # fmt: skip
    table = csv.DictReader((run.folder / "cells.csv").read_text().splitlines())
    rows = {(row["engine"], row["phase"], row["batch_size"]): row for row in table}
    assert len(rows) == 8
    for (name, _, _), row in rows.items():
        assert row["status"] == "ok"
        assert sum(float(row[term]) for term in TERMS) == pytest.approx(float(row["latency_s"]))
        if name == "vllm":
            assert float(row["engine_s"]) > 0
            assert [float(row[term]) for term in ("kernel_s", "dequantise_s", "dispatch_s", "link_s")] == [0.0] * 4
        else:
            assert float(row["engine_s"]) == 0
    for phase in ("prefill", "decode"):
        mine, theirs = rows["eager", phase, "2"], rows["vllm", phase, "2"]
        assert [mine[name] for name in ("model_flops", "model_bytes")] == [
            theirs[name] for name in ("model_flops", "model_bytes")
        ]
    owned = json.loads((run.folder / "run.json").read_text())["engine"]["owned"]["vllm"]
    assert owned["load_s"] > 0
    assert owned["cache_used_bytes"] == 2 * BLOCK_BYTES <= owned["cache_bytes"]
    # As vLLM itself names them for a CPU and dense weights (platforms/cpu.py, layers/linear.py).
    assert (owned["attention"], owned["linears"]) == ("CPU_ATTN", "UnquantizedLinearMethod")
    differences = run.document.engine.differences
    assert len(differences) == 4
    for item in differences:
        before, after = (
            rows[name, item.phase, str(item.batch_size)]["latency_s"] for name in (item.against, item.engine)
        )
        assert not item.terms or sum(item.terms.values()) == pytest.approx(float(after) - float(before))
    explained = any(item.is_claim and item.terms for item in differences)
    assert ("roofscope plot . waterfall" in (run.folder / "report.md").read_text()) == explained
    assert "reserved for" in (run.folder / "report.html").read_text()
    before_json = (run.folder / "cells.csv").read_bytes()
    assert judge_folder(run.folder).folder == run.folder
    assert (run.folder / "cells.csv").read_bytes() == before_json


def test_a_model_that_vllm_does_not_know_is_refused_before_anything_loads(tmp_path: Path) -> None:
    from transformers import CpmAntConfig

    CpmAntConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, architectures=["CpmAntForCausalLM"]
    ).save_pretrained(tmp_path)
    with pytest.raises(RequestError, match="lacks CpmAntForCausalLM; use eager, static or compile"):
        prepare(Options(model=str(tmp_path), engine="vllm", weights="random"))
