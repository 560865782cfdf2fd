"""Ranks on this machine's cores (gloo): the same tokens, the same bytes, a rank that is killed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from greedy import greedy_tokens
from machines import HOST
from session import EXCHANGE_S, IDS, matmuls_of
from small_models import small_model
from transformers import AutoModelForCausalLM

from profiler.counting.count import count
from profiler.engines.transformers import EagerEngine
from profiler.facts.repetitions import Repetition
from profiler.ranks.run import OWN_CORES
from profiler.store.folder import read_facts_of, read_run
from profiler.store.operators_csv import read_operators

pytestmark = pytest.mark.slow

SESSION = Path(__file__).with_name("session.py")
RUNS = Path(__file__).parents[2] / "runs" / "reference"
NEW_TOKENS = 12
WAIT_S = 240
"""Importing torch and transformers on every rank takes a minute on a busy machine."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 8 heads and 4 KV heads, whose vocabulary does not divide by the ranks."""
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 3, "vocab_size": 203}
    path = tmp_path_factory.mktemp("ranks") / "model"
    small_model("Llama", **sizes, max_position_embeddings=256, initializer_range=0.2).save_pretrained(path)
    return path


def session(ranks: int, folder: Path, found: Path, out: Path, *more: str) -> list[str]:
    return [
        sys.executable, str(SESSION), str(found), "run", str(folder), "--tp", str(ranks), "--device", "cpu",
        "--prompt-lens", "8", "--new-tokens", "4", "--quiet", "--out", str(out), *more,
    ]  # fmt: skip


def check_found(found: Path, folder: Path, ranks: int) -> None:
    """Check that the ranks generate the tokens of one device, have the counted bytes, and run the same matmuls.

    The LM head differs: transformers' hooks pass a local tensor to the kernel, which is not trainable, so torch makes
    it a batched matmul (should_fold). A separate share runs the same matmuls as the joined one. Weights are trainable,
    as after a plain load.
    """
    state = json.loads(found.read_text())
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected = greedy_tokens(EagerEngine(model, HOST), IDS, NEW_TOKENS).tolist()
    assert state["tokens"] == [expected] * ranks
    share = count(str(folder), dtype="float32", prompt=8, tp=ranks).tp
    assert share is not None
    assert max(state["bytes"]) == state["bytes"][0] == share.weight_bytes
    whole = sum(tensor.nbytes for tensor in model.parameters())
    assert whole < sum(state["bytes"]) < 1.2 * whole  # every rank has all norms and frequencies
    assert all(param.requires_grad for param in model.parameters())
    assert state["frozen"] == [[]] * ranks
    plain = matmuls_of(model)
    assert plain["aten::mm"] == 3 * 7 + 1  # three layers of seven, and the LM head
    rank = {**plain, "aten::mm": 3 * 7, "aten::bmm": 1}
    assert state["matmuls"] == [[rank, rank]] * ranks


def test_four_ranks_run(folder: Path, tmp_path: Path) -> None:
    """2 sums in 3 layers, one after the embedding, and the logits: 8 exchanges, with a delay that the link shows."""
    out, found = tmp_path / "run", tmp_path / "found.json"
    command = session(4, folder, found, out, "--batch-sizes", "2", "--budget", "0.5")
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
        assert sum(item.count for item in sent.values()) == 8
        assert sent["model.layers.*.mlp.down_proj.all_reduce"].bus_bytes == 3 * key.tokens * 64 * 4 * 2 * 3 / 4
        assert sent["lm_head.all_gather"].bus_bytes == key.cell.batch_size * 203 * 4 * 3 / 4
    assert link.alpha_s > EXCHANGE_S
    assert OWN_CORES in run.document.warnings
    for result in run.measured:
        assert result.latency_s > 8 * EXCHANGE_S
        assert 0.95 * 8 * EXCHANGE_S < result.link_s < 1.2 * result.latency_s
        assert result.regime == "link-bound"
    assert "4 ranks, each with" in (out / "report.html").read_text()


def test_a_killed_rank_ends_the_others_and_is_named(folder: Path, tmp_path: Path) -> None:
    """torchrun interrupts rank 0, which keeps the measurements, sooner than it took to measure its first cell."""
    out, found = tmp_path / "killed", tmp_path / "found.json"
    command = session(2, folder, found, out, "--batch-sizes", "1,2,4,8", "--budget", "60")
    began_s = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        victim = _second_rank(process.pid, out)
        cores = sorted(os.sched_getaffinity(0))
        assert os.sched_getaffinity(victim) == set(cores[len(cores) // 2 :]), "the second of two ranks has its half"
        os.kill(victim, signal.SIGKILL)
        killed_s = time.monotonic()
        text, _ = process.communicate(timeout=WAIT_S)
        ended_s = time.monotonic() - killed_s
    finally:
        process.kill()
    assert "interrupted; the measurements are in" in text, text[-2000:]
    assert text.endswith("roofscope: rank 1 was ended by SIGKILL.\n"), text[-2000:]
    assert process.returncode == 3
    run = read_run(out)
    assert not run.document.finished
    assert run.measured
    check_found(found, folder, 2)
    assert ended_s < killed_s - began_s


START = """
import sys
import typer
from profiler.cli.measure import group_of
try:
    group_of("--tp", 2, "cpu")
except typer.Exit as end:
    sys.exit(end.exit_code)
"""
"""Runs the command line of its arguments on two ranks, as `run --tp 2` and `ceilings --link 2` do."""


@pytest.mark.ci
def test_ranks_that_end_with_exit_code_3_print_their_report_and_no_traceback() -> None:
    """The gate cannot decide between these runs, on either rank."""
    runs = [str(RUNS / f"smollm2-135m-xeon-{name}") for name in ("float32", "minute")]
    command = [sys.executable, "-c", START, "gate", *runs, "--plain"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=WAIT_S)
    assert done.returncode == 3, done.stderr
    assert "open: not decided" in done.stdout, "torchrun ends the second rank when the first has ended"
    assert "Traceback" not in done.stderr
    assert "torch" not in done.stderr


def _second_rank(torchrun_pid: int, out: Path) -> int:
    """Return the process id of rank 1 after two repetitions of cells."""
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        samples = out / "samples.jsonl"
        if samples.exists() and sum(isinstance(fact, Repetition) for fact in read_facts_of(out)) >= 2:
            children = psutil.Process(torchrun_pid).children()
            return next(child.pid for child in children if child.environ().get("RANK") == "1")
        time.sleep(0.2)
    raise AssertionError("no cell was timed")
