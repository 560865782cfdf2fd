"""`%%why`: explain the time of one cell of a notebook."""

from __future__ import annotations

import argparse
import shlex
from typing import Any

from profiler.errors import RequestError
from profiler.why_slow.command import Watching, why


def register(shell: Any) -> None:
    """Register `%%why` with an IPython shell."""

    def why_cell(line: str, cell: str) -> Watching:
        """`%%why [--budget SECONDS]`: run this cell, and explain the time of its language models."""
        budget_s = _budget_s(line)
        with why(budget_s) as watching:
            shell.run_cell("# %%why\n" + cell)  # a first line, so that the others have their numbers
        return watching

    shell.register_magic_function(why_cell, "cell", "why")


def _budget_s(line: str) -> float | None:
    """The seconds after `--budget`; None without it. Raises RequestError for anything else."""
    options = argparse.ArgumentParser(prog="%%why", add_help=False, exit_on_error=False)
    options.add_argument("--budget", type=float)
    try:
        found, unknown = options.parse_known_args(shlex.split(line))
    except argparse.ArgumentError:
        found, unknown = argparse.Namespace(budget=None), [line]
    if unknown or (found.budget or 0.0) < 0:
        raise RequestError(f"%%why {line}: it takes --budget SECONDS and nothing else.")
    budget_s: float | None = found.budget
    return budget_s
