"""Compare the profiler with a simulated card of your own figures: python -m tests.simulated --help"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from .oracle import Phase, pairs
from .scenario import NEW_TOKENS, Scenario, apart, said, so
from .truth import Truth

_DTYPES = ("float16", "bfloat16", "float32")
_BUSY = ("weights_s", "kv_s", "compute_s", "dequantise_s", "kernel_s", "avoidable_s", "link_s")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.simulated", description=__doc__)
    parser.add_argument("--model", default="mistral-7b-v0.1", help="a card of models/")
    parser.add_argument("--layers", type=int, default=4, help="how many of its layers")
    parser.add_argument("--bandwidth", type=float, default=1.3e12, help="bytes/s of the card's memory")
    parser.add_argument(
        "--flops", default="float16=1.1e14", help="FLOP/s by dtype, with commas; the model runs in the first"
    )
    parser.add_argument("--launch", type=float, default=7e-6, help="seconds that a kernel costs the host")
    parser.add_argument("--memory", type=float, default=24e9, help="bytes of the card's memory")
    parser.add_argument("--l2", type=float, default=32e6, help="bytes of its L2, which is four times as fast")
    parser.add_argument("--engine", default="eager", choices=("eager", "static", "graph"))
    parser.add_argument("--prompt-lens", default="128,512")
    parser.add_argument("--batch-sizes", default="1,8")
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS)
    parser.add_argument("--format", default="json", choices=("json",))
    asked = parser.parse_args()
    json.dump(doubted(asked), sys.stdout, indent=2)
    print()


def doubted(asked: argparse.Namespace) -> dict[str, Any]:
    """Return the truth of a card and the profiler's figures for it."""
    flops = {name: float(value) for name, _, value in (part.partition("=") for part in asked.flops.split(","))}
    dtype = next(iter(flops))
    truth = Truth(
        "a simulated card", (8, 0), 100, int(asked.memory), asked.bandwidth,
        {**dict.fromkeys(_DTYPES, flops[dtype]), **flops}, int(asked.l2), 4 * asked.bandwidth, launch_s=asked.launch,
    )  # fmt: skip
    prompts, batches = ([int(part) for part in text.split(",")] for text in (asked.prompt_lens, asked.batch_sizes))
    scenario = Scenario(asked.model, asked.layers, dtype, asked.engine, prompts, batches, asked.new_tokens)
    with apart() as folder:
        known = so(scenario, truth, folder)
        run, _ = said(scenario, [truth], folder)
        ceilings, cells = run.document.ceilings, run.cells
    dispatch = ceilings.dispatch_s.get(asked.engine, {}).get("decode", {})
    launches = next(phase.launches for phase in known if phase.phase == "decode")
    return {
        "truth": {
            "memory_bytes_per_s": truth.bytes_per_s,
            "compute_flops_per_s": flops[dtype],
            "launch_s": truth.launch_s,
            "dispatch_s": launches * (truth.graph_launch_s if launches == 1 else truth.launch_s),
        },
        "recovered": {
            "memory_bytes_per_s": ceilings.memory_bytes_per_s,
            "compute_flops_per_s": ceilings.compute[dtype].per_s,
            "launch_s": ceilings.launch["submit_s"],
            "dispatch_s": next(iter(dispatch.values()), None),
        },
        "cells": [_beside(phase, row) for phase, row in pairs(known, cells)],
    }


def _beside(phase: Phase, row: dict[str, Any]) -> dict[str, Any]:
    said = {name: row[name] for name in ("latency_s", "regime", "confidence", "unexplained_s")}
    return {
        **{name: getattr(phase, name) for name in ("phase", "batch_size", "prompt_len")},
        "truth": {name: getattr(phase, name) for name in ("latency_s", "regime", "device_s", "exposed_dispatch_s")},
        "said": {**said, "device_s": sum(row[name] for name in _BUSY), "exposed_dispatch_s": row["dispatch_s"]},
    }


if __name__ == "__main__":
    main()
