"""Error of the forecast of a rank's share from a run of the whole model: python tests/benchmarks/narrower.py

On this CPU it makes a run and its forecast over `--tp` ranks with a link that takes no time: once with replayed
linears, once with an assumed share of their roof. Then it steps the share itself, taking turns with the whole model in
this process, and prints the measured speed-up next to both forecasts. It needs a machine without other work.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import profiler
from profiler.counting.tensor_parallel import keep_share
from profiler.device.machine import machine_for
from profiler.engines.transformers import EagerEngine
from profiler.forecast import tensor_parallel as cards
from profiler.forecast.command import ForecastRequest
from profiler.forecast.options import RankOptions
from profiler.forecast.shards import trained_alike
from profiler.forecast.tensor_parallel import RanksDocument, forecast_ranks
from profiler.loading.config import load_config
from profiler.loading.meta_model import from_config, quiet_libraries
from profiler.loading.request import DTYPES
from profiler.loading.source import resolve
from profiler.measure.visit import VisitContext, follow
from profiler.report.progress import QuietListener
from profiler.store.folder import read_run

WITHIN = {"prefill": 0.15, "decode": 0.10}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-0.5b")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch-sizes", default="1,4")
    parser.add_argument("--prompts", default="64,256")
    parser.add_argument("--budget", type=float, default=40.0)
    parser.add_argument("--turns", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        profiler.profile(
            options.model, dtype=options.dtype, prompt_lens=options.prompts, batch_sizes=options.batch_sizes,
            new_tokens=16, weights="random", budget_s=options.budget, no_levers=True, device="cpu",
            out=Path(folder) / "run",
        )  # fmt: skip
        replayed, assumed = forecasts(Path(folder) / "run", options.tp)
        cells = [key.cell for key in read_run(Path(folder) / "run").document.asked.keys]
    truth = shares(options, list(dict.fromkeys(cells)))
    print(assumed.notes[0], replayed.notes[0], sep="\n")
    print(f"{'step':<20} {'whole ms':>9} {'share ms':>9} {'faster':>7} {'assumed':>16} {'replayed':>16}")
    for one, other in zip(assumed.cells, replayed.cells, strict=True):
        whole_s, share_s = truth[one.phase, one.batch_size, one.prompt_len]
        gains = [cell.times[0].latency_s / cell.times[1].latency_s for cell in (one, other)]
        off = [whole_s / share_s / gain - 1 for gain in gains]
        columns = [
            f"{gain:5.2f} {100 * apart:+4.0f} % {'yes' if abs(apart) <= WITHIN[one.phase] else 'no':>3}"
            for gain, apart in zip(gains, off, strict=True)
        ]
        name = f"{one.phase} {one.batch_size} x {one.prompt_len}"
        print(
            f"{name:<20} {1e3 * whole_s:9.2f} {1e3 * share_s:9.2f} {whole_s / share_s:7.2f}"
            f" {columns[0]:>16} {columns[1]:>16}"
        )


def forecasts(run: Path, ranks: int) -> tuple[RanksDocument, RanksDocument]:
    """Return forecasts over a link that takes no time: with replayed linears, and with an assumed share of the roof."""
    sizes = read_run(run).document.grid
    request = ForecastRequest(
        prompt_lens=",".join(map(str, sizes.prompt_lens)), batch_sizes=",".join(map(str, sizes.batch_sizes))
    )
    free = RankOptions(str(ranks), "0,1e9")
    replayed = forecast_ranks(str(run), "", request, free, QuietListener())
    with mock.patch.object(cards, "machine_of", return_value="left out"):
        assumed = forecast_ranks(str(run), "", request, free, QuietListener())
    return replayed, assumed


def shares(options: Any, cells: list[Any]) -> dict[tuple[str, int, int], tuple[float, float]]:
    """Return (whole, share) in seconds of each step, taking turns in this process."""
    config, machine = load_config(resolve(options.model)), machine_for(torch.device("cpu"))
    whole, share = (drawn(config, DTYPES[options.dtype]) for _ in range(2))
    keep_share(share, options.tp)
    trained_alike(whole, share)
    fill(share)
    rows = share.get_input_embeddings().weight.shape[0]
    share.get_input_embeddings().register_forward_pre_hook(lambda _, args: (args[0] % rows, *args[1:]))
    engines, bench = (
        [EagerEngine(module, machine) for module in (whole, share)],
        VisitContext(machine, config.vocab_size),
    )
    seconds: dict[tuple[str, int, int], tuple[float, float]] = {}
    for cell in cells:
        taken: list[list[tuple[float, float]]] = [[], []]
        for turn in range(options.turns):
            for engine, times in zip(engines, taken, strict=True):
                prefill_s, decode_s = follow(engine, cell, cell.decode_steps, bench)
                if turn:  # shapes warm up in the first round
                    times.append((prefill_s, statistics.median(decode_s[1:])))
        # The minimum: delays from other work are not part of a step.
        of_whole, of_share = (tuple(min(times) for times in zip(*each, strict=True)) for each in taken)
        for index, phase in enumerate(("prefill", "decode")):
            seconds[phase, cell.batch_size, cell.prompt_len] = of_whole[index], of_share[index]
    return seconds


def drawn(config: Any, dtype: torch.dtype) -> Any:
    with quiet_libraries():
        module: Any = from_config(config, dtype, None).eval()
    fill(module)
    return module


def fill(module: nn.Module) -> None:
    with torch.no_grad():
        for param in module.parameters():
            param.normal_(std=0.02) if param.dim() > 1 else param.fill_(1.0)


if __name__ == "__main__":
    main()
