"""Ranks on this machine's cores (gloo): the same tokens, the same bytes, a rank that is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from greedy import greedy_tokens
from session import IDS, products_of
from transformers import AutoModelForCausalLM, LlamaConfig

from profiler.counting.count import count
from profiler.device.machine import machine_for
from profiler.engines.transformers import EagerEngine
from profiler.errors import RequestError
from profiler.facts.visits import Visit
from profiler.grid.cells import Cell
from profiler.ranks.run import RankTiming, rank_shares
from profiler.run.options import Options
from profiler.run.validate import prepare
from profiler.store.folder import read_run
from profiler.store.operators_csv import read_operators
from profiler.store.samples import read_facts_of

SESSION = Path(__file__).with_name("session.py")
NEW_TOKENS = 12
WAIT_S = 240
"""Importing torch and transformers on every rank takes a minute on a busy machine."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 8 heads and 4 KV heads, whose vocabulary does not divide by the ranks."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_attention_heads=8, num_key_value_heads=4, num_hidden_layers=3,
        vocab_size=203, max_position_embeddings=256, tie_word_embeddings=False, initializer_range=0.2,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("ranks") / "model"
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return path


def torchrun(ranks: int, folder: Path, found: Path, out: Path, *more: str) -> list[str]:
    return [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(SESSION),
        str(found), "run", str(folder), "--tp", str(ranks), "--prompt-lens", "8", "--new-tokens", "4", "--quiet",
        "--out", str(out), *more,
    ]  # fmt: skip


def check_found(found: Path, folder: Path, ranks: int) -> None:
    """Check that the ranks generate the tokens of one device, and have exactly the counted bytes."""
    state = json.loads(found.read_text())
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    engine = EagerEngine(model, machine_for(torch.device("cpu")))
    expected = greedy_tokens(engine, IDS, NEW_TOKENS).tolist()
    assert state["tokens"] == [expected] * ranks
    share = count(str(folder), dtype="float32", prompt=8, tp=ranks).tp
    assert share is not None
    assert max(state["bytes"]) == state["bytes"][0] == share.weight_bytes
    whole = sum(tensor.nbytes for tensor in model.parameters())
    assert whole < sum(state["bytes"]) < 1.2 * whole  # every rank has all norms and frequencies
    check_operators(state, model, ranks)
    check_cores(state["cores"], ranks)
    assert all(loops and all(loops) for loops in state["loops"])  # none may preempt the thread with the lock


def check_cores(own: list[list[int]], ranks: int) -> None:
    """Check that ranks have separate cores, in equal numbers up to one; with too few cores, one each."""
    cores = len(os.sched_getaffinity(0))
    if cores >= ranks:
        assert sorted(core for of_one in own for core in of_one) == sorted(os.sched_getaffinity(0))
        assert max(map(len, own)) - min(map(len, own)) <= 1
    else:
        assert all(len(of_one) == 1 for of_one in own)
        assert max(own.count(of_one) for of_one in own) <= -(-ranks // cores)


def check_operators(state: Any, model: Any, ranks: int) -> None:
    """Check that weights are trainable, as after a plain load, and that a rank's prefill runs the same products.

    The LM head differs: transformers' hooks pass a local tensor to the kernel, which is not trainable, so torch makes
    it a batched product (should_fold). A separate share runs the same products as the joined one.
    """
    assert all(param.requires_grad for param in model.parameters())
    assert state["frozen"] == [[]] * ranks
    plain = products_of(model)
    assert plain["aten::mm"] == 3 * 7 + 1  # three layers of seven, and the LM head
    rank = {**plain, "aten::mm": 3 * 7, "aten::bmm": 1}
    assert state["products"] == [[rank, rank]] * ranks


@pytest.mark.slow
def test_four_ranks_run(folder: Path, tmp_path: Path) -> None:
    out, found = tmp_path / "run", tmp_path / "found.json"
    command = torchrun(4, folder, found, out, "--batch-sizes", "2", "--budget", "0.5")
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr[-2000:]
    check_found(found, folder, 4)
    run = read_run(out)
    assert run.document.ranks == 4
    assert run.document.finished
    assert run.model.storage_bytes == json.loads(found.read_text())["bytes"][0]
    link = run.document.ceilings.collective
    assert link is not None
    assert [point.nbytes for point in link.points] == [1 << 10, 1 << 14, 1 << 18]
    for key, operators in read_operators(out).items():
        sent = {item.operator: item for item in operators if item.group == "collective"}
        # Two sums in each of 3 layers, one after the embedding, and the gathered logits.
        assert sum(item.count for item in sent.values()) == 3 * 2 + 2
        assert sent["model.layers.*.mlp.down_proj.all_reduce"].bus_bytes == 3 * key.tokens * 64 * 4 * 2 * 3 / 4
        assert sent["lm_head.all_gather"].bus_bytes == key.cell.batch_size * 203 * 4 * 3 / 4
    assert {step.key for step in run.document.rank_steps} == {result.key for result in run.measured}
    for step in run.document.rank_steps:
        assert len(step.own_s) == 4
        assert min(step.own_s) > 0
    assert all(result.link_s > 0 for result in run.measured)
    report = (out / "report.md").read_text()
    assert "4 ranks, each with" in report
    assert "a plain torchrun gives neither" in report


@pytest.mark.slow
def test_a_killed_rank_ends_the_others_and_is_named(folder: Path, tmp_path: Path) -> None:
    """The others end sooner than the run took to measure its first cell, and the measurements are kept."""
    out, found = tmp_path / "killed", tmp_path / "found.json"
    command = torchrun(2, folder, found, out, "--batch-sizes", "1,2,4,8", "--budget", "60")
    began_s = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        victim = _second_rank(process.pid, out)
        os.kill(victim, signal.SIGKILL)
        killed_s = time.monotonic()
        text, _ = process.communicate(timeout=WAIT_S)
        ended_s = time.monotonic() - killed_s
    finally:
        process.kill()
    assert "rank 1 of 2 ended early; the measurements are in" in text, text[-2000:]
    assert process.returncode != 0
    run = read_run(out)
    assert not run.document.finished
    assert run.measured
    check_found(found, folder, 2)
    assert ended_s < killed_s - began_s


def _passes(*pieces_s: tuple[float, float]) -> list[RankTiming]:
    """Return one pass: a prefill and three steps of two exchanges of 1 ms, which all ranks reach every 11 ms.

    After each exchange this rank waits for its core and then works; `pieces_s` has the start and end of each piece.
    """
    works = list(pieces_s) * 4
    begun = [0.011 * number + until_s for number, (_, until_s) in enumerate(works)]
    ended = [0.011 * (number + 1) + from_s for number, (from_s, _) in enumerate([*works[1:], works[0]])]
    return [RankTiming(0.022, (0.022,) * 3, tuple(zip(begun, ended, strict=True)))]


@pytest.mark.parametrize("one_clock", [True, False])
def test_every_exchange_waits_for_the_last_rank(one_clock: bool) -> None:
    """Two ranks on separate cores, with pieces of 10 and 4 ms on one, 7 and 10 on the other: 20 ms together."""
    steps = rank_shares(
        Cell(1, 8, 4), [_passes((0, 0.010), (0, 0.004)), _passes((0, 0.007), (0, 0.010))], one_clock=one_clock
    )
    assert steps.seconds("decode") == pytest.approx((0.014, 0.017))
    assert steps.last_s("decode") == pytest.approx(0.020)
    assert steps.last_s("prefill") == pytest.approx(0.020)


def test_ranks_that_take_turns_on_a_core() -> None:
    """5 ms each after every exchange, one after the other: each works for half of the 20 ms of both."""
    steps = rank_shares(Cell(1, 8, 4), [_passes((0, 0.005), (0, 0.005)), _passes((0.005, 0.010), (0.005, 0.010))])
    assert steps.seconds("decode") == pytest.approx((0.010, 0.010))
    assert steps.last_s("decode") == pytest.approx(0.020)


def test_cells_without_exchanges_or_prefills() -> None:
    """The medians of three passes of each rank."""
    ranks_s = [(0.009, 0.010, 0.020), (0.011, 0.012, 0.013)]
    every = [[RankTiming(None, (step_s,) * 3, ()) for step_s in passes_s] for passes_s in ranks_s]
    steps = rank_shares(Cell(1, 8, 4), every)
    assert steps.seconds("prefill") == ()
    assert steps.seconds("decode") == pytest.approx((0.010, 0.012))
    assert steps.last_s("decode") == pytest.approx(0.012)


@pytest.mark.timing
def test_shares_and_link_add_up_to_a_step() -> None:
    """Over gloo, and over links slowed to three latencies and bandwidths: within 10 % (prefill 15 %).

    Six of eight steps suffice, since a shared machine may be disturbed.
    """
    script = Path(__file__).parents[1] / "benchmarks" / "ranks.py"
    done = subprocess.run(
        [sys.executable, str(script), "--batch-sizes", "1", "--turns", "3"],
        capture_output=True, text=True, check=False, timeout=WAIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    match = re.search(r"^(\d+) of 8 steps within 10 % \(prefill 15 %\)$", done.stdout, re.MULTILINE)
    assert match is not None, done.stdout
    assert int(match[1]) >= 6, done.stdout


def _second_rank(torchrun_pid: int, out: Path) -> int:
    """Return the process id of rank 1 after two visits of cells."""
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        samples = out / "samples.jsonl"
        if samples.exists() and sum(isinstance(fact, Visit) for fact in read_facts_of(out)) >= 2:
            children = psutil.Process(torchrun_pid).children()
            return next(child.pid for child in children if child.environ().get("RANK") == "1")
        time.sleep(0.2)
    raise AssertionError("no cell was visited")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tp": 8}, "cuts the 4 KV heads of this model into pieces"),
        ({"tp": 2, "engine": "static"}, "works only with --engine eager"),
        ({"tp": 2, "trace": True}, "leave them out"),
    ],
)
def test_impossible_requests_for_ranks_are_refused_before_loading(
    folder: Path, options: dict[str, object], words: str
) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        prepare(Options(model=str(folder), prompt_lens="8", new_tokens=4, **options))
    assert "\n" not in str(caught.value)
