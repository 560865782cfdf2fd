"""`session.py FOUND run MODEL --tp N ...` is roofscope with fake ceilings; its torchrun starts this file N times.

Ceilings and overhead take most of a minute on a shared machine and are not under test, so they are fake. The tokens,
bytes and operators of the ranks are written to FOUND as soon as they are loaded. Each exchange between the ranks takes
`EXCHANGE_S` longer than gloo needs, in the measurement of the link and in the model alike.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed import run as torchrun

import profiler.ranks.process_group as machine_ranks
import profiler.ranks.run as job
import profiler.run.measure as measuring
from profiler.cli.app import main
from profiler.cli.measure import started_by_torchrun
from profiler.device.machine import machine_for
from profiler.engines.transformers import EagerEngine
from profiler.facts.ceilings import Ceiling, Ceilings, CeilingsRemeasured

sys.path.append(str(Path(__file__).parents[1]))
from greedy import greedy_tokens

IDS = torch.arange(24).reshape(2, 12) % 100
EXCHANGE_S = 0.03
SWEEP_BYTES = (1 << 10, 1 << 14, 1 << 18)


def fake_ceilings(*_: Any, **__: Any) -> Ceilings:
    ceiling = Ceiling(1e10, 1e10, 1e10, 9, "fake")
    compute = dict.fromkeys(("float32", "bfloat16"), ceiling)
    return Ceilings(compute, {"read": ceiling}, 1 << 28, True)


def write_state(joined: Any, alone: Any, group: Any, found: Path) -> None:
    """Write each rank's tokens, bytes, frozen parameters and matmuls as JSON, on rank 0."""
    from torch.distributed.tensor import DTensor

    tokens = greedy_tokens(EagerEngine(joined, machine_for(group.device)), IDS, 12)
    held = (*joined.parameters(), *joined.buffers())
    local = [each.to_local() if isinstance(each, DTensor) else each for each in held]
    every: list[Any] = [None] * group.size
    dist.all_gather_object(
        every,
        {
            "tokens": tokens.tolist(),
            "bytes": sum({tensor.data_ptr(): tensor.nbytes for tensor in local}.values()),
            "frozen": [name for name, param in joined.named_parameters() if not param.requires_grad],
            "matmuls": [matmuls_of(part) for part in (joined, alone)],
        },
    )
    if group.rank == 0:
        found.write_text(json.dumps({name: [one[name] for one in every] for name in every[0]}))


def matmuls_of(model: Any) -> dict[str, int]:
    """Count matmuls and attention kernels in a prefill of several prompts with logits of the last tokens."""
    with torch.inference_mode(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(IDS, logits_to_keep=1)
    counts = {event.key: event.count for event in profile.key_averages() if event.key.startswith("aten::")}
    return {name: counts[name] for name in sorted(counts) if name.endswith("mm") or "attention" in name}


def delay_exchanges() -> None:
    """Plant a slow link. `dist` is what the link is measured with; DTensor exchanges by `functional`."""

    def delayed(exchange: Any) -> Any:
        def slow(*args: Any, **named: Any) -> Any:
            time.sleep(EXCHANGE_S)
            return exchange(*args, **named)

        return slow

    for owner, name in ((dist, "all_reduce"), (functional, "all_reduce"), (functional, "all_gather_tensor")):
        setattr(owner, name, delayed(getattr(owner, name)))


def run(found: Path) -> None:
    if not started_by_torchrun():
        start = torchrun.main
        torchrun.main = lambda args: start([*args[:2], __file__, str(found), *args[4:]])
        main()
    load = job.load_share

    def loaded(request: Any, config: Any, group: Any) -> Any:
        joined, alone, work = load(request, config, group)
        write_state(joined, alone.module, group, found)
        return joined, alone, work

    job.load_share = loaded
    job.measure = fake_ceilings  # type: ignore[attr-defined]
    job.overhead_of_model = lambda *_: []  # type: ignore[attr-defined]
    machine_ranks.SWEEP_BYTES = SWEEP_BYTES
    measuring.remeasure_ceilings = lambda *_, **__: CeilingsRemeasured({}, {})  # type: ignore[attr-defined]
    delay_exchanges()
    main()


if __name__ == "__main__":
    run(Path(sys.argv.pop(1)))
