"""Commands that run as several ranks: under torchrun, or as the process that starts it."""

from __future__ import annotations

import subprocess
import sys

import typer

from profiler.cli.options import EXIT_INCOMPLETE


def started_by_torchrun() -> bool:
    """Return whether torchrun started this process, without importing torch, which takes a second."""
    if "torch" not in sys.modules and not sys.argv[0].endswith("__main__.py"):
        return False
    import torch.distributed as dist

    return bool(dist.is_available() and dist.is_torchelastic_launched())


def start_ranks(ranks: int) -> bool:
    """Run this command line again as `ranks` processes of torchrun, and return True; False under torchrun.

    Exits with `EXIT_INCOMPLETE` if a rank fails.
    """
    if started_by_torchrun():
        return False
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    if subprocess.run([*torchrun, "-m", "profiler", *sys.argv[1:]], check=False).returncode:
        raise typer.Exit(EXIT_INCOMPLETE)
    return True
