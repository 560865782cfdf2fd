"""Ranks on this machine's cores (gloo): the same tokens, the same bytes, a rank that is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from session import IDS, products_of
from transformers import AutoModelForCausalLM, LlamaConfig

from profiler.counting.count import count
from profiler.device.machine import machine_for
from profiler.engines.base import greedy_tokens
from profiler.engines.transformers import EagerEngine
from profiler.errors import RequestError
from profiler.facts.visits import Visit
from profiler.grid.cells import Cell
from profiler.run.options import Options
from profiler.run.tensor_parallel import RankTiming, rank_shares
from profiler.run.validate import prepare
from profiler.store.folder import read_run
from profiler.store.operators_csv import read_operators
from profiler.store.samples import read_facts_of

SESSION = Path(__file__).with_name("session.py")
NEW_TOKENS = 12
WAIT_S = 240
"""Importing torch and transformers once a rank takes a minute where others are at work."""


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


def torchrun(ranks: int, *arguments: str) -> list[str]:
    return [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(SESSION),
        *arguments,
    ]  # fmt: skip


def forked(ranks: int, *arguments: str) -> list[str]:
    """The same without torchrun: all ranks are forks of one process, which has imported all once."""
    return [sys.executable, str(SESSION.with_name("forked.py")), str(ranks), *arguments]


def check_found(found: Path, folder: Path, ranks: int) -> None:
    """The ranks generate what one device does, and hold what was counted of them, to the byte."""
    told = json.loads(found.read_text())
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    alone = EagerEngine(model, machine_for(torch.device("cpu")))
    expected = greedy_tokens(alone, IDS, NEW_TOKENS).tolist()
    assert told["tokens"] == [expected] * ranks
    share = count(str(folder), dtype="float32", prompt=8, tp=ranks).share
    assert share is not None
    assert max(told["bytes"]) == told["bytes"][0] == share.weight_bytes
    whole = sum(tensor.nbytes for tensor in model.parameters())
    assert whole < sum(told["bytes"]) < 1.2 * whole  # norms and frequencies are held by all
    check_operators(told, model, ranks)
    check_cores(told["cores"], ranks)
    assert all(loops and all(loops) for loops in told["loops"])  # none may preempt the thread whose lock it wants


def check_cores(own: list[list[int]], ranks: int) -> None:
    """Each rank has cores of its own, as many as another's or one more; where they are too few, one."""
    cores = len(os.sched_getaffinity(0))
    if cores >= ranks:
        assert sorted(core for of_one in own for core in of_one) == sorted(os.sched_getaffinity(0))
        assert max(map(len, own)) - min(map(len, own)) <= 1
    else:
        assert all(len(of_one) == 1 for of_one in own)
        assert max(own.count(of_one) for of_one in own) <= -(-ranks // cores)


def check_operators(told: Any, model: Any, ranks: int) -> None:
    """Weights could be trained, as a plain load leaves them, and a rank's prefill runs the products of a plain one.

    But for the LM head: transformers' hooks hand the kernel a local tensor, which could not be trained, so that torch
    makes a batched product of it (should_fold). A share by itself runs what the joined one does.
    """
    assert all(param.requires_grad for param in model.parameters())
    assert told["frozen"] == [[]] * ranks
    plain = products_of(model)
    assert plain["aten::mm"] == 3 * 7 + 1  # three layers of seven, and the LM head
    rank = {**plain, "aten::mm": 3 * 7, "aten::bmm": 1}
    assert told["products"] == [[rank, rank]] * ranks


@pytest.mark.slow
def test_four_ranks_run(folder: Path, tmp_path: Path) -> None:
    asked = ["run", str(folder), "--tp", "4", "--prompt-lens", "8", "--new-tokens", "4", "--quiet"]
    out, found = tmp_path / "run", tmp_path / "found.json"
    done = subprocess.run(
        forked(4, str(found), *asked, "--batch-sizes", "2", "--budget", "0.5", "--out", str(out)),
        capture_output=True, text=True, check=False, timeout=WAIT_S,
    )  # fmt: skip
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
        # 3 layers, each with two sums, one after the embedding, and the logits put together.
        assert sum(item.count for item in sent.values()) == 3 * 2 + 2
        assert sent["model.layers.*.mlp.down_proj.all_reduce"].bus_bytes == 3 * key.tokens * 64 * 4 * 2 * 3 / 4
        assert sent["lm_head.all_gather"].bus_bytes == key.cell.batch_size * 203 * 4 * 3 / 4
    assert {step.key for step in run.document.rank_steps} == {result.key for result in run.measured}
    for step in run.document.rank_steps:
        assert len(step.own_s) == 4
        assert min(step.own_s) > 0
    assert all(result.link_s > 0 for result in run.measured)
    told = (out / "report.md").read_text()
    assert "4 ranks, each with" in told
    assert "a plain torchrun gives neither" in told


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_others_and_is_named(folder: Path, tmp_path: Path) -> None:
    """The others end within 10 s, as far as this process sees it; what was measured is kept."""
    asked = ["run", str(folder), "--tp", "2", "--prompt-lens", "8", "--new-tokens", "4", "--quiet"]
    out, found = tmp_path / "killed", tmp_path / "found.json"
    long = [*asked, "--batch-sizes", "1,2,4,8", "--budget", "60", "--out", str(out)]
    command = torchrun(2, str(found), *long)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        victim = _second_rank(process.pid, out)
        os.kill(victim, signal.SIGKILL)
        killed_s = time.monotonic()
        text, _ = process.communicate(timeout=WAIT_S)
        ended_s = time.monotonic() - killed_s
    finally:
        process.kill()
    assert "rank 1 of 2 ended early; what was measured is in" in text, text[-2000:]
    assert process.returncode != 0
    kept = read_run(out)
    assert not kept.document.finished
    assert kept.measured
    check_found(found, folder, 2)
    if ended_s >= 10 and os.getloadavg()[0] > 2 * (os.cpu_count() or 1):
        pytest.skip(f"others keep this machine busy (load {os.getloadavg()[0]:.1f}): {ended_s:.0f} s say nothing")
    assert ended_s < 10


@pytest.mark.slow
def test_who_waits_for_a_rank_that_will_not_come_ends_when_torchrun_asks() -> None:
    """The wait is in C++, where no handler of Python's is heard; torchrun gives it 30 s, then kills it."""
    program = "from profiler.cli.app import *; from profiler.device.process_group import ProcessGroup;"
    program += "signal.signal(signal.SIGTERM,"
    program += "lambda *_: None); print(flush=True); ProcessGroup('cpu')"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=os.environ | ranks)
    try:
        assert process.stdout is not None
        process.stdout.readline()  # imported: what is left is the wait
        time.sleep(2)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == -signal.SIGTERM
    finally:
        process.kill()


def _passes(*pieces_s: tuple[float, float]) -> RankTiming:
    """A prefill and three steps of two exchanges, 1 ms each, all ranks in them every 11 ms: behind them this rank waits
    for its core and then works, from when to when is given for each piece of a pass."""
    works = list(pieces_s) * 4
    begun = [0.011 * number + until_s for number, (_, until_s) in enumerate(works)]
    ended = [0.011 * (number + 1) + from_s for number, (from_s, _) in enumerate([*works[1:], works[0]])]
    return RankTiming(0.022, (0.022,) * 3, tuple(begun), tuple(ended))


@pytest.mark.parametrize("one_clock", [True, False])
def test_every_exchange_waits_for_the_rank_that_comes_to_it_last(one_clock: bool) -> None:
    """Two ranks on cores of their own, pieces of 10 and 4 ms on one, of 7 and 10 on the other: 20 ms together."""
    found = rank_shares(
        Cell(1, 8, 4), [_passes((0, 0.010), (0, 0.004)), _passes((0, 0.007), (0, 0.010))], one_clock=one_clock
    )
    assert found.seconds("decode") == pytest.approx((0.014, 0.017))
    assert found.last_s("decode") == pytest.approx(0.020)
    assert found.last_s("prefill") == pytest.approx(0.020)


def test_ranks_that_take_turns_on_a_core() -> None:
    """5 ms each behind every exchange, one after the other: each works for half of the 20 that both take."""
    found = rank_shares(Cell(1, 8, 4), [_passes((0, 0.005), (0, 0.005)), _passes((0.005, 0.010), (0.005, 0.010))])
    assert found.seconds("decode") == pytest.approx((0.010, 0.010))
    assert found.last_s("decode") == pytest.approx(0.020)


def test_cells_without_exchanges_or_prefills() -> None:
    found = rank_shares(Cell(1, 8, 4), [RankTiming(None, (0.010,) * 3, (), ()), RankTiming(None, (0.012,) * 3, (), ())])
    assert found.seconds("prefill") == ()
    assert found.last_s("decode") == pytest.approx(0.012)


@pytest.mark.timing
def test_shares_and_link_add_up_to_a_step() -> None:
    """Over gloo as it is and over links slowed to three latencies and bandwidths: within 10 % (a prefill 15), of six
    steps in eight, since a machine that others share has bad moments."""
    script = Path(__file__).parents[1] / "benchmarks" / "ranks.py"
    done = subprocess.run(
        [sys.executable, str(script), "--batch-sizes", "1", "--turns", "3"],
        capture_output=True, text=True, check=False, timeout=WAIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    told = re.search(r"^(\d+) of 8 steps within 10 % \(prefill 15 %\)$", done.stdout, re.MULTILINE)
    assert told is not None, done.stdout
    assert int(told[1]) >= 6, done.stdout


def _second_rank(torchrun_pid: int, out: Path) -> int:
    """The process of rank 1, once a few cells were visited."""
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        samples = out / "samples.jsonl"
        if samples.exists() and sum(isinstance(fact, Visit) for fact in read_facts_of(out)) >= 2:
            children = psutil.Process(torchrun_pid).children()
            return next(child.pid for child in children if child.environ().get("RANK") == "1")
        time.sleep(0.2)
    raise AssertionError("no cell was visited")


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"tp": 3}, "8 query heads and 4 KV heads do not divide by 3"),
        ({"tp": 8}, "cuts the 4 KV heads of this model into pieces"),
        ({"tp": 2, "engine": "static"}, "steps with --engine eager alone"),
        ({"tp": 2, "quant": "nf4"}, "nf4 are packed"),
        ({"tp": 2, "trace": True}, "leave them out"),
        ({"tp": 0}, "give 2 or more ranks"),
    ],
)
def test_what_ranks_cannot_do_is_refused_before_anything_loads(
    folder: Path, asked: dict[str, object], words: str
) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        prepare(Options(model=str(folder), prompt_lens="8", new_tokens=4, **asked))
    assert "\n" not in str(caught.value)


def test_more_ranks_than_cards(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import profiler.run.validate as request

    monkeypatch.setattr(request, "resolve_device", lambda name: torch.device("cuda", 0))
    monkeypatch.setattr(request, "resolve_dtype", lambda *_: torch.float16)
    monkeypatch.setattr(request, "cards", lambda: 1)
    with pytest.raises(RequestError, match="this machine has 1 cards"):
        prepare(Options(model=str(folder), prompt_lens="8", new_tokens=4, tp=2))
