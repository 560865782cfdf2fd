"""Two cards of known truth: which of them is too slow, and the effect of a link between them on a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from profiler.data.links import link_called
from profiler.forecast.command import ForecastRequest
from profiler.forecast.options import RankOptions
from profiler.forecast.tensor_parallel import forecast_ranks
from profiler.grid.cells import Grid
from profiler.ranks.run import execute_ranks
from profiler.report.device import health_lines
from profiler.report.progress import QuietListener
from profiler.run.multi_run import device_healths, run_devices
from profiler.run.options import Options
from profiler.run.pipeline import execute
from profiler.run.validate import prepare
from profiler.why_slow.call_settings import pipelined_devices

from .card import Region
from .native import why_not
from .ranks import LinkTruth, linked
from .scenario import Scenario
from .truth import A100
from .world import simulated

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]
LAYERS, HIDDEN = 1, 4096


def test_the_slow_card_is_named_and_a_slow_link_binds(tmp_path: Path) -> None:
    """A layer of Mistral-7B is weights-bound at 1.4 TB/s.

    A card with 70 % of that memory bandwidth is slow; one with less arithmetic is not. Split over two cards, a layer
    sends two sums. Over NVLink they are small; over a slow link they decide.
    """
    scenario = Scenario("mistral-7b-v0.1", LAYERS, prompt_lens=[128], batch_sizes=[8])
    folder = scenario.folder(tmp_path)
    devices = ["cuda:0", "cuda:1"]
    with simulated(A100, A100.but(bytes_per_s=0.7 * A100.bytes_per_s)):
        options = Options(
            model=str(folder), prompt_lens=[128], batch_sizes=[8], new_tokens=scenario.new_tokens, dtype="float16",
            weights="random", budget_s=2.0, out=tmp_path / "both", no_levers=True,
        )  # fmt: skip
        runs = run_devices(options, devices, QuietListener())
        well, ill = device_healths(runs, devices)
    assert not well.ill
    assert ill.ill
    assert ill.memory_behind == pytest.approx(0.3, abs=0.05)
    assert ill.compute_behind < 0.05
    [line] = health_lines((well, ill))
    assert line.startswith("cuda:1 underperforms")
    assert "memory roof" in line

    _links(runs[0].folder, runs[0].document.asked)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("link", "binds"),
    [(LinkTruth(12e-6, 250e9), False), (LinkTruth(120e-6, 12e9), True)],
    ids=["NVLink", "PCIe"],
)
def test_a_link_of_known_truth_is_measured_and_found_in_every_step(
    link: LinkTruth, binds: bool, tmp_path: Path
) -> None:
    """Two A100 share a layer of Mistral-7B and its head: a rank reads 349 MB at 1.4 TB/s, 250 us of a decode step.

    Four messages take 48 us plus their bytes over NVLink. Over PCIe they take 480 us plus their bytes: more than half
    of a step.
    """
    batch, prompt = 8, 128
    folder = Scenario("mistral-7b-v0.1", LAYERS).folder(tmp_path)
    with simulated(A100, A100) as world, linked(world.card, link, 2) as group:
        options = Options(
            model=str(folder), prompt_lens=[prompt], batch_sizes=[batch], new_tokens=8, dtype="float16", tp=2,
            weights="random", budget_s=2.0, device="cuda", out=tmp_path / "run", no_levers=True,
        )  # fmt: skip
        run = execute_ranks(prepare(options), QuietListener(), group)
    measured = run.document.ceilings.collective
    assert measured is not None
    assert measured.alpha_s == pytest.approx(link.alpha_s, rel=0.05)
    assert measured.bus_bytes_per_s == pytest.approx(link.bus_bytes_per_s, rel=0.05)
    for row in run.measured:
        rows = batch * prompt if row.phase == "prefill" else batch
        messages_s = (2 * LAYERS + 1) * link.seconds("all_reduce", rows * HIDDEN * 2, 2)
        true_s = messages_s + link.seconds("all_gather", batch * 32000 * 2, 2)
        assert row.link_s == pytest.approx(true_s, rel=0.05)
        [rank_step] = [step for step in run.document.rank_steps if step.key == row.key]
        assert rank_step.predicted_s == pytest.approx(row.latency_s, rel=0.05)
        if row.phase == "decode":
            assert (row.regime == "link-bound") is binds
            assert (true_s > row.latency_s / 2) is binds


WHOLE = {2 * HIDDEN * outs for outs in (HIDDEN, 1024, 14336, 32000)}
"""Bytes of the weights of Mistral-7B in 16 bits."""


def test_narrower_kernels_of_known_truth_are_replayed_and_found_in_the_step_of_two(tmp_path: Path) -> None:
    """Kernels of any other width take 1.5 times as long here.

    With replays on one card, the forecast knows the time on two cards. Without them, it assumes that narrower kernels
    reach the same share of the roof as whole ones, and is wrong.
    """
    link = LinkTruth(12e-6, 250e9)
    folder = Scenario("mistral-7b-v0.1", LAYERS).folder(tmp_path)

    def planted(_: str, reads: list[Region], flops: float) -> float:
        weights = max((nbytes for _, nbytes in reads), default=0)
        return 1.5 if flops and weights > 1 << 22 and weights not in WHOLE else 1.0

    asked: dict[str, Any] = {
        "model": str(folder), "prompt_lens": [128], "batch_sizes": [8], "new_tokens": 8, "dtype": "float16",
        "weights": "random", "budget_s": 2.0, "device": "cuda", "no_levers": True,
    }  # fmt: skip
    with simulated(A100, A100) as world:
        for card in world.cards:
            card.core.times = planted
        execute(prepare(Options(out=tmp_path / "one", **asked)), QuietListener())
        typed = RankOptions("2", f"{1e6 * link.alpha_s:g},{1e-9 * link.bus_bytes_per_s:g}")
        answers = [forecast_ranks(str(tmp_path / "one"), "", ForecastRequest(batch_sizes="8"), typed, QuietListener())]
        with linked(world.card, link, 2) as group:
            two = execute_ranks(prepare(Options(out=tmp_path / "two", tp=2, **asked)), QuietListener(), group)
    answers.append(forecast_ranks(str(tmp_path / "one"), "", ForecastRequest(batch_sizes="8"), typed, QuietListener()))
    assert "replayed here" in answers[0].notes[0]
    assert "they were not replayed" in answers[1].notes[0], "the card is gone"
    taken_s = {row.phase: row.latency_s for row in two.measured}
    off = [
        {cell.phase: cell.times[1].latency_s / taken_s[cell.phase] - 1 for cell in answer.cells} for answer in answers
    ]
    assert abs(off[0]["decode"]) < 0.10
    assert abs(off[0]["prefill"]) < 0.15
    assert off[1]["decode"] < -0.15
    assert off[1]["prefill"] < -0.15


def test_layers_spread_by_a_device_map_run_card_after_card_and_are_reported() -> None:
    """With two of four layers each, two cards together work as long as a single card, and never at once."""
    alone, (first, second) = _step([]), _step(["model.layers.2", "model.layers.3", "model.norm", "lm_head"])
    assert alone[1] == []
    assert max(end_s for _, end_s in first) <= min(start_s for start_s, _ in second)
    assert _worked_s(first) + _worked_s(second) == pytest.approx(_worked_s(alone[0]), rel=0.05)


def _step(on_second: list[str]) -> list[list[tuple[float, float]]]:
    """Return the start and the end of each kernel of a step, by card."""
    from accelerate import dispatch_model

    config = LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8,
        num_hidden_layers=4, vocab_size=32000,
    )  # fmt: skip
    with simulated(A100, A100) as world:
        with torch.device("meta"):
            model = LlamaForCausalLM(config).to(torch.float16).eval()
        model = model.to_empty(device="cuda:0")
        assert pipelined_devices(model) == ""
        if on_second:
            names = ["embed_tokens", "rotary_emb", *(f"layers.{number}" for number in range(4)), "norm"]
            names = [*(f"model.{name}" for name in names), "lm_head"]
            model = dispatch_model(model, {name: f"cuda:{int(name in on_second)}" for name in names})
            assert pipelined_devices(model) == "layers run GPU after GPU: one of 2 works at a time"
        ids = torch.zeros(1, 1, dtype=torch.long, device="cuda:0")
        with torch.inference_mode():
            model(input_ids=ids, use_cache=False)
            for card in world.cards:
                card.log = []
            model(input_ids=ids, use_cache=False)
        return [
            [(kernel.start_s, kernel.start_s + kernel.duration_s) for kernel in card.log or []] for card in world.cards
        ]


def _worked_s(kernels: list[tuple[float, float]]) -> float:
    return sum(end_s - start_s for start_s, end_s in kernels)


def _links(folder: Path, asked: Grid) -> None:
    """Check the theory: 2 sums per layer, one after the embedding, and a gather of the logits.

    Each takes alpha + S x factor / bandwidth. The rest of a decode step is at least half of the weights at the card's
    bandwidth.
    """
    batch = max(asked.batch_sizes)
    messages = 2 * LAYERS + 2
    for text, binds in (("10,250", False), ("2000,20", True)):
        link = link_called(text, 2)
        answer = forecast_ranks(
            str(folder),
            "",
            ForecastRequest(batch_sizes=str(batch)),
            RankOptions("2", text),
            QuietListener(),
        )
        cell = next(cell for cell in answer.cells if cell.phase == "decode")
        one, two = cell.times
        sums = (2 * LAYERS + 1) * batch * HIDDEN * 2
        gathered = batch * 32000 * 2 / 2
        expected_s = messages * link.alpha_s + (sums + gathered) / link.bus_bytes_per_s
        assert two.link_s == pytest.approx(expected_s, rel=1e-6)
        assert (two.regime == "link-bound") is binds
        assert (two.link_s > two.latency_s / 2) is binds
        assert (two.latency_s > one.latency_s) is binds
        assert cell.worse_from == (2 if binds else None)
