"""Two cards of known truth: which is ill, and what a link between them does to a step."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest

from profiler.grid import Grid
from profiler.job.cards import AskedRanks, forecast_ranks
from profiler.job.forecast import Wanted
from profiler.job.options import Options
from profiler.job.several import device_healths, run_devices
from profiler.machine.links import link_called
from profiler.report.healths import health_lines
from profiler.report.progress import QuietListener

from .guard import why_not
from .scenario import Scenario
from .truth import A100
from .world import simulated

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]
LAYERS, HIDDEN = 1, 4096


@pytest.fixture(autouse=True)
def _no_kept_roofs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulated roof must never be kept beside measured ones."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_the_ill_card_is_named_and_a_link_binds_where_it_must(tmp_path: Path) -> None:
    """A layer of Mistral-7B, weights-bound at 1.4 TB/s: a card of 70 % of that memory is ill, and of no less
    arithmetic. Split over two, a layer sends two sums; behind NVLink they are small, behind a slow link they decide."""
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
    assert line.startswith("cuda:1 is ill")
    assert "memory roof" in line

    _links(runs[0].folder, runs[0].document.asked)


def _links(folder: Path, asked: Grid) -> None:
    """Theory: 2 sums a layer, one after the embedding, the logits gathered, each alpha + S x factor / bandwidth; the
    rest of a decode step is at least half of the weights read at the card's bandwidth."""
    batch = max(asked.batch_sizes)
    messages = 2 * LAYERS + 2
    for text, binds in (("10,250", False), ("2000,20", True)):
        link = link_called(text, 2)
        answer, _ = forecast_ranks(str(folder), "", Wanted(batch_sizes=str(batch)), AskedRanks("2", text), date.today())
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
