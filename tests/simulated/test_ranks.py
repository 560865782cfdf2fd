"""Two cards of known truth: which of them is too slow, and the effect of a link between them on a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from profiler.ranks.run import execute_ranks
from profiler.report.device import health_lines
from profiler.report.progress import QuietListener
from profiler.run.multi_run import device_healths, run_devices
from profiler.run.options import Options
from profiler.run.validate import prepare

from .ranks import LinkTruth, linked
from .scenario import Scenario
from .truth import A100
from .world import simulated

pytestmark = pytest.mark.slow
LAYERS, HIDDEN = 1, 4096


def asked(folder: Path, name: str, **more: Any) -> Options:
    """Return the options of a run of one layer of Mistral-7B in a subfolder."""
    model = str(Scenario("mistral-7b-v0.1", LAYERS).folder(folder))
    return Options(
        model=model, prompt_lens=[128], batch_sizes=[8], new_tokens=8, dtype="float16", weights="random", budget_s=2.0,
        out=folder / name, no_levers=True, **more,
    )  # fmt: skip


def test_the_slow_card_is_named(tmp_path: Path) -> None:
    """A layer of Mistral-7B is weights-bound at 1.4 TB/s.

    A card with 70 % of that memory bandwidth is slow, and its arithmetic is not.
    """
    devices = ["cuda:0", "cuda:1"]
    with simulated(A100, A100.but(bytes_per_s=0.7 * A100.bytes_per_s)):
        runs = run_devices(asked(tmp_path, "both"), devices, QuietListener())
        well, ill = device_healths(runs, devices)
    assert not well.ill
    assert ill.ill
    assert ill.memory_behind == pytest.approx(0.3, abs=0.05)
    assert ill.compute_behind < 0.05
    [line] = health_lines((well, ill))
    assert line.startswith("cuda:1 underperforms")
    assert "memory roof" in line


@pytest.mark.ci
@pytest.mark.parametrize(
    ("link", "binds"), [(LinkTruth(12e-6, 250e9), False), (LinkTruth(120e-6, 12e9), True)], ids=["NVLink", "PCIe"]
)
def test_a_link_of_known_truth_is_measured_and_found_in_every_step(
    link: LinkTruth, binds: bool, tmp_path: Path
) -> None:
    """Two A100 share a layer of Mistral-7B and its head: a rank reads 349 MB at 1.4 TB/s, 250 us of a decode step.

    Four messages take 48 us plus their bytes over NVLink. Over PCIe they take 480 us plus their bytes: more than half
    of a step.
    """
    batch, prompt = 8, 128
    with simulated(A100, A100) as world, linked(world.card, link, 2) as group:
        run = execute_ranks(prepare(asked(tmp_path, "run", tp=2, device="cuda")), QuietListener(), group)
    measured = run.document.ceilings.collective
    assert measured is not None
    assert measured.alpha_s == pytest.approx(link.alpha_s, rel=0.05)
    assert measured.bus_bytes_per_s == pytest.approx(link.bus_bytes_per_s, rel=0.05)
    for row in run.measured:
        rows = batch * prompt if row.phase == "prefill" else batch
        messages_s = (2 * LAYERS + 1) * link.seconds("all_reduce", rows * HIDDEN * 2, 2)
        true_s = messages_s + link.seconds("all_gather", batch * 32000 * 2, 2)
        assert row.link_s == pytest.approx(true_s, rel=0.05)
        assert abs(row.unexplained_s) < 0.1 * row.latency_s, "the link and the other terms are the step"
        if row.phase == "decode":
            assert (row.regime == "link-bound") is binds
            assert (true_s > row.latency_s / 2) is binds
