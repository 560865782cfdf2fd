"""The speed of Python on this machine: limits of CPU time are multiples of it, so they hold on any machine."""

from __future__ import annotations

import json
import time


def yardstick_s() -> float:
    """CPU seconds of a fixed piece of work, the least of three: writing and reading 20,000 rows of JSON."""
    rows = [{"batch_size": row, "latency_s": row / 3, "regime": "memory-bound"} for row in range(20_000)]
    took_s = []
    for _ in range(3):
        start_s = time.process_time()
        json.loads(json.dumps(rows))
        took_s.append(time.process_time() - start_s)
    return min(took_s)
