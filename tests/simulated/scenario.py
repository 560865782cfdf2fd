"""A scenario: a complete run for a model on simulated cards, and the truth of the same cells."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from profiler.cli.app import main
from profiler.cli.options import EXIT_INCOMPLETE
from profiler.loading.config import load_config
from profiler.loading.load import load
from profiler.loading.request import DTYPES, ModelRequest, Quant
from profiler.loading.source import resolve
from profiler.measure.short_model import shortened
from profiler.store.folder import Run, read_run

from . import oracle
from .truth import Truth
from .world import World, simulated

CEILINGS = 0.03
REST = 0.05
PROMPT_S = 100e-6
"""Time to copy a prompt to the card and a token back: two copies over the link, with their waits."""


@dataclass(frozen=True)
class Scenario:
    model: str
    layers: int | None = None
    dtype: str = "float16"
    engine: str = "eager"
    prompt_lens: Sequence[int] = (128, 512)
    batch_sizes: Sequence[int] = (1, 8)
    new_tokens: int = 8
    quant: Quant = "none"

    def folder(self, parent: Path) -> Path:
        """Return the model with some layers, as a folder with a config and no weights."""
        config = load_config(resolve(self.model))
        if self.layers is not None:
            config = shortened(config, self.layers)
        path = parent / f"{Path(self.model).name}-{self.layers or 'all'}-layers"
        config.save_pretrained(path)
        return path

    def options(self) -> dict[str, Any]:
        cells = {name: ",".join(map(str, getattr(self, name))) for name in ("prompt_lens", "batch_sizes")}
        how = {name: getattr(self, name) for name in ("dtype", "quant", "engine", "new_tokens")}
        return {**cells, **how, "no_trials": True}


def profiled(scenario: Scenario, truths: Sequence[Truth], parent: Path, **options: Any) -> tuple[Run, World]:
    """Return the run of `roofscope run` on these cards. Raises the error that ends it."""
    requested = {**scenario.options(), "fresh": True, "out": parent / "run", **options}
    folder = scenario.folder(parent)
    with simulated(*truths) as world, mock.patch("profiler.report.html.write_report"):  # these pages are not needed
        code = command_line("run", str(folder), **requested)
    run = read_run(requested["out"])
    assert code == (EXIT_INCOMPLETE if len(run.measured) < len(run.results) or run.document.failed else 0)
    return run, world


def command_line(*words: str, **options: Any) -> int:
    """Run a command in this process, with random weights. Return its exit code, or raise the error that ends it."""
    requested = {"device": "cuda", "weights": "random", **options}
    with (
        mock.patch.object(sys, "argv", ["roofscope", *words, *flags(requested), "--quiet", "--plain", "--debug"]),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        try:
            main()
        except SystemExit as ended:
            return int(ended.code or 0)
    raise AssertionError("a command ends by its exit code")


def flags(options: Mapping[str, Any]) -> list[str]:
    """Return the words of a command line; True is an option without a value."""
    named = {"--" + name.replace("_", "-"): value for name, value in options.items()}
    return [name if value is True else f"{name}={value}" for name, value in named.items()]


def true_phases(scenario: Scenario, truth: Truth, parent: Path) -> list[oracle.Phase]:
    source = resolve(str(scenario.folder(parent)))
    config, dtype = load_config(source), DTYPES[scenario.dtype]
    found = []
    with simulated(truth) as world, torch.inference_mode():
        if scenario.quant == "none":
            model = oracle.plain_model(config, dtype)
        else:
            model = load(ModelRequest(source, torch.device("cuda", 0), dtype, scenario.quant), config).module
        for engine in scenario.engine.split(","):
            found += oracle.phases(
                world, model, engine, scenario.batch_sizes, scenario.prompt_lens, scenario.new_tokens
            )
    return found


def checked_cells(
    scenario: Scenario, truth: Truth, run: Run, parent: Path
) -> Iterator[tuple[oracle.Phase, dict[str, Any]]]:
    """Yield each cell's truth and its row, after checking the rules that hold for every scenario.

    The loss of hidden small kernels is known only together with the unexplained rest. An L2 that serves a part of a
    decode step, up to twice its size, has no ceiling of its own: such a step is left out, as is a prefill whose
    activations may evict weights that fill half an L2 or more. An L2 of a third of what the small kernels of a layer
    move serves them better in a replay without the large ones: the difference is unexplained.
    """
    ceilings = run.document.ceilings
    assert ceilings.memory_bytes_per_s == pytest.approx(truth.bytes_per_s, rel=CEILINGS)
    for dtype, ceiling in ceilings.compute.items():
        assert ceiling.per_s == pytest.approx(truth.flops_per_s[dtype], rel=CEILINGS), dtype
    assert ceilings.launch["submit_s"] == pytest.approx(truth.launch_s, rel=REST)
    for phase, row in oracle.pairs(true_phases(scenario, truth, parent), run.cells):
        cell = f"{phase.engine} {phase.phase} {phase.batch_size} x {phase.prompt_len}"
        least, most = (0.5, 1) if phase.phase == "prefill" else (0.9, 2)
        if least < row["model_bytes"] / truth.l2_bytes < most:
            continue
        moved_bytes = phase.traffic_s * truth.bytes_per_s / scenario.layers
        replayed_alone = phase.traffic_s > REST * phase.latency_s and moved_bytes < 3 * truth.l2_bytes
        for name, true in (("latency_s", phase.latency_s), ("peak_memory_bytes", phase.peak_bytes)):
            assert row[name] == pytest.approx(true, rel=REST), f"{cell}: {name} is {true}, reported {row[name]}"
        if phase.phase == "prefill":
            beside_s = row["ttft_s"] - row["latency_s"]
            assert 0 <= beside_s < REST * phase.latency_s + PROMPT_S, f"{cell}: time to first token is {row['ttft_s']}"
        terms = {name: row[name] for name in ("weights_s", "kv_s", "compute_s", "dequantise_s", "link_s", "overhead_s")}
        unknown_s = row["unexplained_s"] if phase.hides_small_kernels or replayed_alone else 0.0
        terms["beside_s"] = row["kernel_s"] + row["redundant_s"] + row["dequantise_s"] + unknown_s
        for name, told_s in terms.items():
            true_s = getattr(phase, {"overhead_s": "exposed_overhead_s"}.get(name, name))
            assert abs(told_s - true_s) < REST * phase.latency_s, f"{cell}: {name} is {true_s}, reported {told_s}"
        left_s = row["unexplained_s"] - unknown_s
        assert abs(left_s) < REST * phase.latency_s, f"{cell}: {left_s} of {phase.latency_s} unexplained"
        yield phase, row
