"""Formats in which others store weights, with their bits: they are counted, and none of them runs here."""

import re
from dataclasses import dataclass
from functools import cache
from typing import Literal

from profiler.data import rows_of
from profiler.errors import RequestError

_BITS = re.compile(r"(\d+(?:\.\d+)?) bits")
_MOST_BITS = 16
# In names of models and in settings of servers. MLX's groups of 64 have a scale and a bias of 16 bits: `4bit` is 4.5.
_IN_NAMES = re.compile(
    r"(?<![a-z0-9])(?:i?q[1-8]\w*|(?:int|fp|nf|w)[2-8](?:a\d+)?|nvfp4|mxfp4|awq|gptq|(?:bnb-)?[2-8]bit"
    r"|b?f16|fp16)(?![a-z0-9])"
)
_ALSO = {"fp4": "nvfp4", "int4": "gptq", "w4a16": "gptq", "w8a8": "int8", "bnb-4bit": "nf4"}
_ALSO |= {f"{bits}bit": f"{bits}.5 bits" for bits in range(2, 9)}
_DENSE = "16 bits"
_ALSO |= dict.fromkeys(("f16", "fp16", "bf16"), _DENSE)
_WIDTHS = {"fp8": 8, "int8": 8, "nf4": 4}  # of formats that run here as well
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
    matmuls: str = ""
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
    """The format in a name such as `Llama-3.1-8B-AWQ-INT4`: None without one; empty if unknown, or of unlike widths."""
    names = [_ALSO.get(word, word) for word in _IN_NAMES.findall(re.sub(r" - ([sml])\w+", r"_\1", text.lower()))]
    names = [name for name in names if name != _DENSE] or names  # `bf16` may also name what was quantised
    widths = {form.bits // 1 if (form := stored_format(name)) else _WIDTHS.get(name) for name in names}
    return None if not names else names[0] if len(widths) == 1 and None not in widths else ""


def quant_of(quant: str, bits: float) -> str:
    """Return the name of the format that --quant, in any case, or --bits asks for; 0: no bits. Raises RequestError."""
    if not bits:
        return quant.lower()
    if quant != "none":
        raise RequestError(f"--bits {bits:g} and --quant {quant} both say how weights are stored; give one of them.")
    if not 1 <= bits <= _MOST_BITS:
        raise RequestError(f"--bits {bits:g} is not possible; give the mean bits per weight, 1 to {_MOST_BITS}.")
    return f"{bits:g} bits"


def flag_of(quant: str) -> str:
    """Return the option that asks for a format, such as ` --quant nf4` or ` --bits 4.85`; empty for none."""
    match = _BITS.fullmatch(quant)
    return "" if quant == "none" else f" --bits {match[1]}" if match else f" --quant {quant}"
