"""Error of a step over several ranks, predicted from its ranks' own shares and the link.

    python tests/benchmarks/ranks.py

Runs two ranks (or `--ranks`) of one model on this machine's cores. The link is slowed on purpose to three latencies and
bandwidths. Under each, all-reduces are swept, and every step takes turns with the ranks' own shares, without exchanges.
Prints the prediction next to the measurement. It needs a machine without other work.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pandas as pd
import torch
import torch.distributed as dist
from transformers import LlamaConfig

from profiler.cli.run import started_by_torchrun
from profiler.counting.operators import Collective
from profiler.data.links import fit_link
from profiler.device.machine import machine_for
from profiler.engines.transformers import EagerEngine
from profiler.facts.step import ExecutionPath, Step
from profiler.grid.cells import Cell
from profiler.loading.meta_model import quiet_libraries
from profiler.measure.sweep import follow
from profiler.ranks.process_group import ProcessGroup
from profiler.ranks.run import Ranks, RankTiming, own_work, rank_shares
from profiler.run.options import Options
from profiler.run.validate import prepare

SLOWED = ((0.0, 1000.0), (200.0, 4.0), (1000.0, 1.0), (4000.0, 0.25))
"""(latency in us, GB/s) in addition to gloo's own; the first is gloo unchanged."""
SWEEP_S = 1.5
WITHIN = {"prefill": 0.15, "decode": 0.10}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--model", help="a card, a folder or a hub id; else a small Llama of 12 layers")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch-sizes", default="1,4")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--turns", type=int, default=4)
    arguments = parser.parse_args()
    if not started_by_torchrun():
        ranks = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={arguments.ranks}", __file__]
        with tempfile.TemporaryDirectory() as folder:
            model = [] if arguments.model else ["--model", _small(folder)]
            done = subprocess.run([sys.executable, *ranks, *sys.argv[1:], *model], check=False)
        sys.exit(done.returncode)
    options = Options(
        model=arguments.model, tp=arguments.ranks, dtype=arguments.dtype, prompt_lens=[arguments.prompt],
        batch_sizes=arguments.batch_sizes, new_tokens=16, device="cpu", weights="random", out=Path("unused"),
    )  # fmt: skip
    prepared = prepare(options)
    group = ProcessGroup("cpu")
    machine = machine_for(group.device)
    with quiet_libraries():
        held = Ranks(prepared, group, machine)
    engine = EagerEngine(held.share.joined, machine)
    rows = [
        row
        for alpha_us, gb_per_s in SLOWED
        for row in _under(held, engine, prepared.grid.cells, (alpha_us * 1e-6, gb_per_s * 1e9), arguments.turns)
    ]
    if group.rank == 0:
        print(pd.DataFrame(rows).to_string(index=False))
        print(f"{sum(row['within'] == 'yes' for row in rows)} of {len(rows)} steps within 10 % (prefill 15 %)")
    group.close()


def _small(folder: str) -> str:
    LlamaConfig(
        hidden_size=512, intermediate_size=1536, num_attention_heads=8, num_key_value_heads=4, num_hidden_layers=12,
        vocab_size=8192, max_position_embeddings=2048, architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)  # fmt: skip
    return folder


def _under(
    held: Ranks, engine: EagerEngine, cells: tuple[Cell, ...], planted: tuple[float, float], turns: int
) -> Iterator[dict[str, str]]:
    """Return a row for each step under one link; rank 0 prints them."""
    group, machine = held.group, held.machine
    with slowed(*planted):
        link = fit_link("gloo", group.measure_exchange(machine, SWEEP_S), "measured")
    for cell in cells:
        own: list[RankTiming] = []
        whole: list[Any] = []
        for turn in range(turns):
            share = own_work(engine, cell, cell.decode_steps, held.bench, group)
            dist.barrier()  # no rank waits in the first exchange for a slower one
            with slowed(*planted):
                joint = follow(engine, cell, cell.decode_steps, held.bench)
            if turn:  # shapes warm up in the first round
                own.append(share)
                whole.append(joint)
        every = group.gather(own)
        for key in cell.keys if every else ():
            share = rank_shares(cell, every)
            if key.phase == "prefill":
                measured_s = statistics.median(prefill for prefill, _ in whole)
            else:
                measured_s = statistics.median(step for _, decode in whole for step in decode[1:])
            step, path = Step.of(key), ExecutionPath()
            link_s = sum(
                each.count * link.seconds(each.kind, float(each.each(step, path).link_bytes), each.ranks)
                for each in held.work.operators
                if isinstance(each, Collective)
            )
            predicted_s = share.last_s(key.phase) + link_s
            off = predicted_s / measured_s - 1
            yield {
                "link": f"{1e6 * planted[0]:.0f} us, {planted[1] / 1e9:g} GB/s",
                "step": key.name,
                "own ms": " ".join(f"{1e3 * seconds:.2f}" for seconds in share.seconds(key.phase)),
                "waiting": f"{1e3 * share.last_s(key.phase):.2f}",
                "link ms": f"{1e3 * link_s:.2f}",
                "predicted": f"{1e3 * predicted_s:.2f}",
                "measured": f"{1e3 * measured_s:.2f}",
                "off": f"{100 * off:+.0f} %",
                "within": "yes" if abs(off) <= WITHIN[key.phase] else "no",
            }


@contextmanager
def slowed(alpha_s: float, bytes_per_s: float) -> Iterator[None]:
    """Within the context, every all-reduce first waits as long as a link of that latency and bandwidth would need."""
    plain = dist.all_reduce

    def all_reduce(tensor: Any, *args: Any, **options: Any) -> Any:
        nbytes = tensor.nbytes * 2 * (dist.get_world_size() - 1) / dist.get_world_size()
        time.sleep(alpha_s + nbytes / bytes_per_s)  # sleeping leaves the core to the other rank
        return plain(tensor, *args, **options)

    with mock.patch.object(dist, "all_reduce", all_reduce):
        yield


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
