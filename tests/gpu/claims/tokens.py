"""Equal greedy tokens from every engine; their times; the best compared with the memory ceiling."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from greedy import greedy_tokens

from profiler.engines.registry import ENGINES
from profiler.judge.breakdown import TERMS

from .bench import Attempt, Bench, Check

_LEAST_SHARE = 0.45
"""Of the memory ceiling. On an H100 a graph of Mistral-7B's step reached 0.53; slower memory hides more small
kernels."""
_LARGE_BYTES = 5e9
"""Bytes of weights from which small kernels are negligible at batch 1."""


def attempts(bench: Bench) -> Iterator[Attempt]:
    # Prompts of one length need no padding; a quantised cache gives other tokens. Compiling takes too long here:
    # questions.sh compares its tokens, and its time.
    alike = [name for name, engine in ENGINES.items() if not engine.pads and engine.cache_format is None]
    quick = [name for name in alike if name not in ("eager", "compile") and (bench.cuda or name != "graph")]
    for name in quick:
        yield Attempt(f"tokens: {name} = eager", partial(_tokens, name=name), cuda=name != "static")
    yield Attempt("engines side by side", partial(_engines, names=["eager", *quick]), least_s=60.0)


def _exact(bench: Bench) -> tuple[Any, list[list[int]]]:
    """Return the small model in float32, which has no near ties, and its eager tokens."""
    model = bench.load(bench.small, torch.float32)
    return model, _of(bench, model, "eager")


def _of(bench: Bench, model: Any, name: str) -> list[list[int]]:
    prompt = torch.arange(1, 17, device=bench.device)[None]
    found: list[list[int]] = greedy_tokens(ENGINES[name](model, bench.machine), prompt, 16).tolist()
    return found


def _tokens(bench: Bench, name: str) -> Iterator[Check]:
    model, eager = bench.once(_exact)
    own = _of(bench, model, name)
    yield Check(f"tokens: {name} = eager", own == eager, None if own == eager else [own, eager], "equal")


def _engines(bench: Bench, names: list[str]) -> Iterator[Check]:
    run = bench.run("engines", engine=",".join(names), prompt_lens=[128], batch_sizes=[1])
    decode = run.cells[run.cells["phase"] == "decode"]
    times = {row["engine"]: row["latency_s"] for row in decode.to_dict("records")}
    best = float(decode["bytes_per_s"].max()) / run.document.ceilings.memory_bytes_per_s
    large = run.document.model.storage_bytes > _LARGE_BYTES
    fastest = decode.sort_values("latency_s").iloc[0]
    missing = {term: float(fastest[term]) for term in TERMS if term not in ("weights_s", "kv_s")}
    lost = float(fastest["kernel_s"]) / float(fastest["latency_s"])
    value = {"share": best, "kernels_lose": lost, "step_s": times, "engine": fastest["engine"], "missing_s": missing}
    why = "" if large else "judged on models of 5 GB and more"
    passed = best >= _LEAST_SHARE if large else None
    yield Check("best engine / measured bandwidth, batch 1", passed, value, f">= {_LEAST_SHARE}", why)
    host = 1 - times["graph"] / times["eager"]
    eager = decode[decode["engine"] == "eager"].iloc[0]
    # A replay has gaps between its kernels, so near one half it agrees with either verdict.
    either = abs(host - 0.5) < 0.1 or eager["regime"] in ("mixed", "inconclusive")
    agree = either or (eager["regime"] == "overhead-bound") == (host >= 0.5)
    yield Check("overhead verdict agrees with graph replay", agree, {"saved": host, "regime": eager["regime"]})
