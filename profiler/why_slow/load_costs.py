"""What a load that converts weights costs, compared with one that only reads them."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from profiler.device.clock import now_s
from profiler.why_slow.findings import Finding, new_finding
from profiler.why_slow.observations import Observations

# A part of the weights of at most so many bytes is written and read.
_MOST_BYTES = 512 << 20


def conversion_findings(seen: Observations, models: Sequence[Any]) -> list[Finding]:
    """Time of the first load of each model whose weights are converted; later ones are reloads.

    `models` are those of the loads, or None. The time to read as many bytes is subtracted; without a model the finding
    is a bound.
    """
    findings = []
    known: set[str] = set()
    for load, model in zip(seen.loads, models, strict=True):
        if not load.conversion or load.source in known:
            continue
        known.add(load.source)
        read_s = read_weights_s(model)
        findings.append(
            new_finding(
                identity="slow-load",
                saves_s=max(0.0, load.seconds - (read_s or 0.0)),
                where=load.where,
                evidence=f"{load.conversion} at every start",
                change=load.instead,
                basis="at most: the time of this load"
                if read_s is None
                else "measured: the load, less the time to write its weights to a file and read them",
            )
        )
    return findings


def read_weights_s(model: Any) -> float | None:
    """Seconds to write as many bytes as a model's weights have to a file, and to read them; None if that fails.

    Of more than 512 MiB, a part is written and read, and represents all.
    """
    if model is None:
        return None
    weights = [tensor for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta]
    whole: int = sum(tensor.numel() * tensor.element_size() for tensor in weights)
    part = min(whole, _MOST_BYTES)
    try:
        with tempfile.TemporaryDirectory() as folder:
            file, start_s = Path(folder) / "weights", now_s()
            file.write_bytes(bytes(part))
            file.read_bytes()
            return (now_s() - start_s) * whole / max(1, part)
    except OSError:  # a full disk
        return None
