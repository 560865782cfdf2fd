"""`torchrun tests/ranks/slowed.py ALPHA_US GB_PER_S run ...`: the run over an artificially slow link.

Every all-reduce first waits for the time of a link with this latency and bandwidth, in addition to gloo's time.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch.distributed as dist

from profiler.cli.app import main


def slow(alpha_s: float, bytes_per_s: float) -> None:
    plain = dist.all_reduce

    def all_reduce(tensor: Any, *args: Any, **options: Any) -> Any:
        nbytes = tensor.nbytes * 2 * (dist.get_world_size() - 1) / dist.get_world_size()
        time.sleep(alpha_s + nbytes / bytes_per_s)  # sleeping leaves the core to the other rank
        return plain(tensor, *args, **options)

    dist.all_reduce = all_reduce


if __name__ == "__main__":
    slow(float(sys.argv[1]) * 1e-6, float(sys.argv[2]) * 1e9)
    sys.argv = [sys.argv[0], *sys.argv[3:]]
    main()
