"""What several commands share: options, exit codes, and the check of a value among few."""

from __future__ import annotations

from typing import Annotated

import typer

from profiler.errors import RequestError, near_misses

EXIT_WRONG = 1
EXIT_REQUEST = 2
EXIT_INCOMPLETE = 3
EXIT_INTERRUPTED = 130

QUANT_HELP = "none, int8, nf4, fp4 (bitsandbytes), int8wo, int4wo or fp8 (torchao)"
Plain = Annotated[bool, typer.Option("--plain", help="No colours and no box drawing.")]
Format = Annotated[str, typer.Option("--format", help="table or json (one document on stdout)")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]


def one_of(value: str, option: str, known: tuple[str, ...]) -> None:
    """Raises RequestError, with near misses, for a value that is not among the known ones."""
    if value not in known:
        raise RequestError(f"{option} {value!r} is unknown; use {', '.join(known)}.{near_misses(value, known)}")
