"""Quantise a model on request to a format, as transformers does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from profiler.device.device import compute_capability
from profiler.errors import ModelError, RequestError, RoofscopeError, describe_error
from profiler.packages import has, need
from profiler.quant.registry import FORMATS, Quant

_INT4_CAPABILITY = (8, 0)


@dataclass(frozen=True)
class QuantOptions:
    """How a 4-bit format of bitsandbytes is stored and computed; other formats have no such options."""

    double: bool = False
    """Whether the scales are quantised as well."""
    compute_dtype: torch.dtype | None = None
    """The dtype of matrix products; None: the model's dtype."""


PLAIN = QuantOptions()


def check_quant(quant: Quant, options: QuantOptions, dtype: torch.dtype, device: torch.device) -> None:
    """Check that this machine and the format support the options and the dtype. Raises RequestError with advice."""
    if options != PLAIN and not FORMATS[quant].has_options:
        raise RequestError(
            f"--double-quant and --compute-dtype apply to bitsandbytes' 4-bit formats, not to {quant!r};"
            f" use --quant {' or '.join(item.name for item in FORMATS.values() if item.has_options)}."
        )
    need_library(quant)
    if quant == "int4wo" and device.type == "cuda":
        if compute_capability(device) < _INT4_CAPABILITY:
            raise RequestError("--quant int4wo: torchao's int4 kernel needs compute capability 8.0; use --quant nf4.")
        if dtype != torch.bfloat16:
            raise RequestError("--quant int4wo: torchao's int4 kernel computes in bfloat16; use --dtype bfloat16.")


def need_library(quant: Quant) -> None:
    """Check that the library of this format is installed. Raises RequestError if it is missing."""
    if package := FORMATS[quant].package:
        need(package, f"--quant {quant}")


def can_quantise(quant: Quant) -> bool:
    """Whether the library that quantises to this format is installed, or none is needed."""
    package = FORMATS[quant].package
    return not package or has(package)


def quantise_modules(
    module: Any, quant: Quant, dtype: torch.dtype, options: QuantOptions = PLAIN, device: torch.device | None = None
) -> nn.Module:
    """Quantise the linear layers of a model on meta, as `from_pretrained` would; the head stays dense.

    `device`, where the model will run, decides the layout of 4-bit weights and whether fp8 inputs are quantised.
    Without it, bitsandbytes' weights have the layout after quantisation, and torchao's the layout on a CPU.
    Raises RequestError if the format's library is missing or no layer fits the format. Raises ModelError if a layer
    does not fit this CPU's kernel or the library fails.
    """
    library = FORMATS[quant].library
    if library is None:
        return cast(nn.Module, module)
    need_library(quant)
    try:
        return library().quantise(quant, module, dtype, options, device)
    except (RoofscopeError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # the library may raise anything
        raise ModelError(
            f"--quant {quant}: {FORMATS[quant].package} cannot quantise this model ({describe_error(error)});"
            " use another format, or none."
        ) from error


def quantization_config(
    quant: Quant, dtype: torch.dtype, options: QuantOptions, planned: Any, device: torch.device
) -> Any:
    """The `quantization_config` of `from_pretrained`: bitsandbytes' blocks of 64, LLM.int8(), or torchao's config.

    `planned` is the model on meta, whose widths decide the groups of int4wo. Raises RequestError for a format to
    which transformers cannot quantise while it loads.
    """
    library = FORMATS[quant].library
    if library is None:
        raise RequestError(f"--quant {quant}: transformers cannot quantise a checkpoint to it while loading.")
    return library().config(quant, dtype, options, planned, device)
