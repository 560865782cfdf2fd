"""The registry of quantisation formats: one record per name of `--quant`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

from profiler.errors import RequestError, near_misses

Quant = str
"""The name of a format in `FORMATS`."""


def _lazily(function: str) -> Callable[..., Any]:
    """Wrap a function of `quant/`, given as `module.function`; imported at its first call to keep torch out of here."""

    def call(*args: Any, **named: Any) -> Any:
        module, _, name = function.rpartition(".")
        return getattr(import_module(f"profiler.quant.{module}"), name)(*args, **named)

    return call


@dataclass(frozen=True)
class QuantFormat:
    """A format that weights are quantised to on request."""

    name: str
    library: str = ""
    """The package that quantises, as pip names it; empty: none is needed."""
    bits: float = 16.0
    """Bits per weight, excluding scales."""
    multiplies_packed: bool = False
    """Whether its kernels multiply the packed weights directly, without a dense copy."""
    has_options: bool = False
    """Whether --double-quant and --compute-dtype apply."""
    least_capability: float = 0.0
    """The lowest CUDA compute capability with kernels (torchao's int4 and fp8, Triton's int8); 0: any."""
    published_as: str = ""
    """The format whose published results also apply to this one; empty: its own."""
    is_tried: bool = False
    """Whether a run tries it as a change."""
    is_profiled: bool = False
    """Whether a GPU profile (`ceilings --out`) times its matrix products."""
    in_doctor: bool = False
    """Whether `doctor` lists the presets that fit in it."""
    quantise: Callable[..., Any] | None = None
    """(module on meta, dtype, options, device) -> the module with the linears that `from_pretrained` makes."""
    config: Callable[..., Any] | None = None
    """(dtype, options, planned module, device) -> the `quantization_config` of `from_pretrained`."""
    dense_copy: Callable[..., Any] | None = None
    """(module, its stored weight) -> the call that writes a dense copy before a product; None: no copy is written."""


def _library_format(library: str, name: str, **settings: Any) -> QuantFormat:
    return QuantFormat(
        name,
        library,
        quantise=partial(_lazily(f"formats.quantise_with_{library}"), name),
        config=partial(_lazily(f"formats.{library}_config"), name),
        **settings,
    )


_bitsandbytes = partial(_library_format, "bitsandbytes")
_torchao = partial(_library_format, "torchao")


_FOUR_BIT_COPY = _lazily("conversions.bitsandbytes_4bit_copy")

FORMATS: dict[str, QuantFormat] = {
    item.name: item
    for item in (
        QuantFormat("none", published_as="dense"),
        _bitsandbytes("int8", bits=8, is_tried=True, in_doctor=True),
        _bitsandbytes(
            "nf4", bits=4, has_options=True, is_tried=True, is_profiled=True, in_doctor=True, dense_copy=_FOUR_BIT_COPY
        ),
        _bitsandbytes("fp4", bits=4, has_options=True, published_as="nf4", dense_copy=_FOUR_BIT_COPY),
        _torchao(
            "int8wo", bits=8, multiplies_packed=True, least_capability=8.0, is_tried=True, is_profiled=True,
            dense_copy=_lazily("conversions.torchao_int8_copy"),
        ),
        _torchao(
            "int4wo", bits=4, multiplies_packed=True, least_capability=8.0, is_tried=True, is_profiled=True
        ),
        _torchao("fp8", bits=8, least_capability=8.9, dense_copy=_lazily("conversions.torchao_fp8_copy")),
    )
}  # fmt: skip
"""By name, in the order in which messages list them."""


def known_quant(quant: str) -> Quant:
    """Return `quant` if it names a format. Raises RequestError, with near misses, if it does not."""
    if quant not in FORMATS:
        raise RequestError(f"--quant {quant!r} is unknown; use {', '.join(FORMATS)}.{near_misses(quant, FORMATS)}")
    return quant


def tried_formats() -> list[QuantFormat]:
    """Formats that a run tries as changes: fewest bits first, then those that multiply the packed weights."""
    return sorted(
        (item for item in FORMATS.values() if item.is_tried), key=lambda item: (item.bits, not item.multiplies_packed)
    )


def published_as(quant: str) -> str:
    """The format whose published results apply to `quant`; `quant` itself if `--quant` does not know it."""
    return (FORMATS[quant].published_as or quant) if quant in FORMATS else quant


def quant_help() -> str:
    """All formats by library, for help texts: `none, int8, nf4, fp4 (bitsandbytes), int8wo, int4wo, fp8 (torchao)`."""
    by_library: dict[str, list[str]] = {}
    for item in FORMATS.values():
        by_library.setdefault(item.library, []).append(item.name)
    return ", ".join(", ".join(names) + (f" ({library})" if library else "") for library, names in by_library.items())
