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
# In the names of models, and of settings of servers. MLX's groups of 64 have a scale and a bias of 16 bits each; those
# of llm-compressor's W4A16 are GPTQ's.
_IN_NAMES = re.compile(
    r"(?<![a-z0-9])(?:(?P<bits>\d(?:\.\d+)?)bpw|(?P<mlx>[2-8])-?bit|(?P<name>i?q[1-8]\w*|(?:int|fp|nf|w)[2-8](?:a\d+)?"
    r"|nvfp4|mxfp4|awq|gptq|bnb-4bit))(?![a-z0-9])"
)
_ALSO = {"fp4": "nvfp4", "int4": "gptq", "w4a16": "gptq", "bnb-4bit": "nf4"}
_WIDTHS = {"fp8": 8, "nf4": 4}  # of formats that run here as well
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


def format_in(text: str) -> str | None:
    """The format that a text has in its name, such as `Llama-3.1-8B-AWQ`: empty if it is not known, None without one."""
    widths: dict[str, float] = {}
    for found in _IN_NAMES.finditer(text.lower()):
        bits = found["bits"] or (found["mlx"] and f"{found['mlx']}.5")
        name = f"{bits} bits" if bits else _ALSO.get(found["name"], found["name"])
        form = stored_format(name)
        widths[name] = form.bits // 1 if form else _WIDTHS.get(name, 0)
    is_one = len(set(widths.values())) == 1 and 0 not in widths.values()
    return next(iter(widths)) if is_one else "" if widths else None


def quant_of(quant: str, bits: float) -> str:
    """Return the name of the format that --quant or --bits asks for; 0 bits: none are given. Raises RequestError."""
    if not bits:
        return quant
    if quant != "none":
        raise RequestError(f"--bits {bits:g} and --quant {quant} both say how weights are stored; give one of them.")
    if not 1 <= bits <= _MOST_BITS:
        raise RequestError(f"--bits {bits:g} is not possible; give the mean bits per weight, 1 to {_MOST_BITS}.")
    return f"{bits:g} bits"
