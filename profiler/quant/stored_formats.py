"""Formats in which others store weights, with their bits: they are counted, and none of them runs here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Literal

from profiler.data import rows_of
from profiler.errors import RequestError

_BITS = re.compile(r"(\d+(?:\.\d+)?) bits")
_MOST_BITS = 16
_FEW_BITS = 6


@dataclass(frozen=True)
class StoredFormat:
    """How a file stores the weights of a model; a row of stored_formats.csv, or a mean number of bits."""

    name: str
    bits: float
    """Per weight that it packs, with scales."""
    packs: Literal["all", "linears", "experts"] = "all"
    """`all`: `bits` is the mean of a whole file. `linears`: the head, embedding tables and norms stay in 16 bits.
    `experts`: all but the experts of a mixture stay so; of other models as `linears`."""
    products: str = ""
    """The dtype in which its kernels multiply, on GPUs that have a rate for it; empty: that of the model."""
    source: str = ""

    @property
    def published_as(self) -> str:
        """The format whose published results stand for its own: weights in about as many bits."""
        return "int4wo" if self.bits < _FEW_BITS else "int8wo"


@cache
def stored_formats() -> dict[str, StoredFormat]:
    """Return the formats of stored_formats.csv by name."""
    return {row.name: row for row in rows_of("stored_formats.csv", StoredFormat)}


def stored_format(quant: str) -> StoredFormat | None:
    """Return the format called `quant`, in any case, or the mean of `4.85 bits`; None for any other name."""
    if (match := _BITS.fullmatch(quant)) and 1 <= float(match[1]) <= _MOST_BITS:
        return StoredFormat(quant, float(match[1]))
    return stored_formats().get(quant.lower())


def quant_of(quant: str, bits: float) -> str:
    """Return the name of the format that --quant or --bits asks for; 0 bits: none are given. Raises RequestError."""
    if not bits:
        return quant
    if quant != "none":
        raise RequestError(f"--bits {bits:g} and --quant {quant} both say how weights are stored; give one of them.")
    if not 1 <= bits <= _MOST_BITS:
        raise RequestError(f"--bits {bits:g} is not possible; give the mean bits per weight, 1 to {_MOST_BITS}.")
    return f"{bits:g} bits"
