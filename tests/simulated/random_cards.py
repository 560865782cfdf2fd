"""Random cards from a seed, each compared with its own log: python -m tests.simulated.random_cards 20 --seed 1

Scenarios find only expected faults. Random cards must satisfy the same rules (`held`). For each card, the script prints
the first broken rule, and every cell whose regime differs from the log's.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from profiler.errors import RequestError

from .scenario import Scenario, held, said
from .truth import GIB, Truth

_MODELS = {
    "mistral-7b-v0.1": 4, "qwen3-8b": 3, "llama-3.1-8b": 3, "smollm2-135m": 6, "gemma-2-9b": 2, "phi-3-mini": 3,
    "gpt2": 6, "mixtral-8x7b": 1, "deepseek-v2-lite": 2, "qwen3-30b-a3b": 1, "gpt-oss-20b": 2, "qwen2.5-0.5b": 4,
}  # fmt: skip
"""Presets of `models/`, and the number of their layers."""
_IN_BFLOAT16 = ("mixtral-8x7b", "deepseek-v2-lite", "qwen3-30b-a3b", "gpt-oss-20b")
"""torch's product by experts accepts no other dtype."""


def drawn(seed: int) -> tuple[Scenario, Truth]:
    """Return a model on a card.

    The card has 0.2 to 4 TB/s, 40 to 300 FLOPs per byte, an L2 of 4 to 100 MiB, and 2.5 to 40 µs per launch.
    """
    choose = random.Random(seed)
    model, layers = choose.choice(list(_MODELS.items()))
    capability = choose.choice([(8, 0), (8, 9), (9, 0), *([] if model in _IN_BFLOAT16 else [(7, 5)])])
    bytes_per_s = 10 ** choose.uniform(11.3, 12.6)
    flops_per_s = bytes_per_s * choose.choice([40, 100, 200, 300])
    dtypes = ("bfloat16",) if model in _IN_BFLOAT16 else ("float16", "bfloat16")
    rates = {"float16": 1, "bfloat16": 1, "float32": 1 / 8, "tfloat32": 1 / 2, "int8": 2, "float8": 2}
    l2_bytes = choose.choice([4, 40, 100]) << 20
    truth = Truth(
        f"card {seed}", capability, 100, 80 * GIB, bytes_per_s,
        {name: rate * flops_per_s for name, rate in rates.items()}, l2_bytes, choose.choice([3, 4]) * bytes_per_s,
        l2_writes_back=l2_bytes > 4 << 20, launch_s=10 ** choose.uniform(-5.6, -4.4),
        smallest_kernel_s=choose.choice([1.5e-6, 3e-6]),
    )  # fmt: skip
    dtype = "float16" if capability < (8, 0) else choose.choice(dtypes)
    engine = choose.choice(["eager", "eager", "static", "graph", "compile"])
    if model == "gpt-oss-20b" and engine in ("graph", "compile"):
        engine = "static"  # no graph moves its window, and the host's time in uncaptured compiled code is not measured
    prompts, batches = (sorted(choose.sample(sizes, 2)) for sizes in ([32, 128, 512, 1000], [1, 4, 16, 64]))
    return Scenario(model, layers, dtype, engine, prompts, batches), truth


def disagreements(scenario: Scenario, truth: Truth, folder: Path) -> Iterator[str]:
    """Return the profiler's figures that differ from the card's log."""
    try:
        run, _ = said(scenario, [truth], folder)
        for phase, row in held(scenario, truth, run, folder):
            if row["regime"] not in phase.regimes:
                label = f"{row['regime']} ({row['confidence']}) for {' or '.join(sorted(phase.regimes))}"
                yield f"{phase.phase} {phase.batch_size} x {phase.prompt_len}: {label}"
    except AssertionError as error:
        yield str(error).partition("\n")[0]
    except RequestError as error:
        yield f"refused: {error}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.simulated.random_cards")
    parser.add_argument("cards", type=int, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="of the first; each further one has the next")
    requested = parser.parse_args()
    logging.disable(logging.CRITICAL)
    for seed in range(requested.seed, requested.seed + requested.cards):
        scenario, truth = drawn(seed)
        with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, XDG_CACHE_HOME=folder):
            found = list(disagreements(scenario, truth, Path(folder)))
        print(
            f"{truth.name}: {scenario.model} {scenario.dtype} {scenario.engine}, {truth.bytes_per_s:.2g} B/s,"
            f" {truth.flops_per_s[scenario.dtype]:.2g} FLOP/s, L2 {truth.l2_bytes >> 20} MiB,"
            f" {1e6 * truth.launch_s:.1f} us a launch: {'as it is' if not found else ''}",
            *found,
            sep="\n    ",
            flush=True,
        )


if __name__ == "__main__":
    main()
