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
    from profiler.device.process_group import under_torchrun

    return under_torchrun()


def start_ranks(ranks: int) -> bool:
    """Run this command line again as `ranks` processes of torchrun, and return True; False under torchrun.

    Exits with `EXIT_INCOMPLETE` if a rank fails.
    """
    if started_by_torchrun():
        return False
    from profiler.device.process_group import torchrun_command

    if subprocess.run(torchrun_command(sys.executable, ranks, sys.argv[1:]), check=False).returncode:
        raise typer.Exit(EXIT_INCOMPLETE)
    return True
