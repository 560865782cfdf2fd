"""Quantisation formats: one record per name of `--quant`, what each needs, and how a model is quantised to it.

Formats in which others store weights, with their bits, are only counted: none of them runs here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from profiler.data import rows_of
from profiler.errors import ModelError, RequestError, RoofscopeError, describe_error, near_misses
from profiler.packages import has, need

if TYPE_CHECKING:
    import torch
    from torch import nn

    from profiler.facts.step import StoredWeight

Quant = str
"""The name of a format in `FORMATS`."""
ConversionCall = Callable[[], object]


@dataclass(frozen=True)
class QuantOptions:
    """How a 4-bit format of bitsandbytes is stored and computed; other formats have no such options."""

    double: bool = False
    """Whether the scales are quantised as well."""
    compute_dtype: torch.dtype | None = None
    """The dtype of matmuls; None: the model's dtype."""


PLAIN = QuantOptions()


class Library(Protocol):
    """What the module of a library in `quant/` has for its formats; it may import torch."""

    def quantise(
        self, quant: Quant, module: Any, dtype: torch.dtype, options: QuantOptions, device: torch.device | None, /
    ) -> nn.Module:
        """Quantise the linears of a model on meta, as `from_pretrained` would."""

    def config(
        self, quant: Quant, dtype: torch.dtype, options: QuantOptions, planned: Any, device: torch.device | None, /
    ) -> Any:
        """Return the `quantization_config` of `from_pretrained`; `planned`, on meta, decides the groups of int4wo."""

    def stored(self, module: Any, /) -> StoredWeight:
        """Return how the weight of a linear is stored."""

    def random_weight(self, owner: Any, device: torch.device, std: float, /) -> nn.Parameter:
        """Return random values with a standard deviation of about `std` in the layout of the planned weight."""

    def dense_copy(self, quant: Quant, module: Any, weight: StoredWeight, /) -> ConversionCall | None:
        """Return the call that writes a dense copy before a matmul; None: no copy is written."""


def _bitsandbytes() -> Library:
    from profiler.quant import bitsandbytes

    return bitsandbytes


def _torchao() -> Library:
    from profiler.quant import torchao

    return torchao


@dataclass(frozen=True)
class QuantFormat:
    """A format that weights are quantised to on request."""

    name: str
    package: str = ""
    """The package that quantises, as pip names it; empty: none is needed."""
    library: Callable[[], Library] | None = None
    """Imports the code of the format's library, and with it torch; None: the weights stay dense."""
    weights: tuple[str, ...] = ()
    """The names of the classes that its weights have."""
    bits: float = 16.0
    """Bits per weight, excluding scales."""
    written: str = ""
    """The `quantization_config` of `from_pretrained`, as its user writes it: `{dtype}` is that of the matmuls, and
    `{group}` the number of inputs that share a scale."""
    written_on_cpu: str = ""
    """The same on a CPU; empty: as on a GPU."""
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
    compileable: bool = True
    """Whether transformers' `generate` compiles a model in it (`HfQuantizer.is_compileable`)."""


_WRITTEN_4_BITS = (
    'BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="{}", bnb_4bit_compute_dtype=torch.{{dtype}})'
)
FORMATS: dict[str, QuantFormat] = {
    item.name: item
    for item in (
        QuantFormat("none", published_as="dense"),
        QuantFormat(
            "int8", "bitsandbytes", _bitsandbytes, ("Int8Params",), bits=8, is_tried=True,
            compileable=False, written="BitsAndBytesConfig(load_in_8bit=True)",
        ),
        QuantFormat(
            "nf4", "bitsandbytes", _bitsandbytes, ("Params4bit",), bits=4, has_options=True, is_tried=True,
            compileable=False, written=_WRITTEN_4_BITS.format("nf4"),
        ),
        QuantFormat(
            "fp4", "bitsandbytes", _bitsandbytes, ("Params4bit",), bits=4, has_options=True, published_as="nf4",
            compileable=False, written=_WRITTEN_4_BITS.format("fp4"),
        ),
        QuantFormat(
            "int8wo", "torchao", _torchao, ("Int8Tensor",), bits=8, multiplies_packed=True, least_capability=8.0,
            is_tried=True, written="TorchAoConfig(Int8WeightOnlyConfig())",
        ),
        QuantFormat(
            "int4wo", "torchao", _torchao, ("Int4OpaqueTensor", "Int4TilePackedTo4dTensor"), bits=4,
            multiplies_packed=True, least_capability=8.0, is_tried=True,
            written='TorchAoConfig(Int4WeightOnlyConfig(group_size={group}, int4_packing_format="tile_packed_to_4d"))',
            written_on_cpu="TorchAoConfig(PrototypeInt4WeightOnlyConfig(group_size={group}))",
        ),
        QuantFormat(
            "fp8", "torchao", _torchao, ("Float8Tensor",), bits=8, least_capability=8.9,
            written="TorchAoConfig(Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()))",
            written_on_cpu="TorchAoConfig(Float8WeightOnlyConfig())",
        ),
    )
}  # fmt: skip
"""By name, in the order in which messages list them."""


def format_of(weight: object) -> QuantFormat | None:
    """Return the first format whose class a weight has; None for other weights."""
    return next((item for item in FORMATS.values() if type(weight).__name__ in item.weights), None)


def library_of(weight: object) -> Library | None:
    """Return the library whose class a weight has; None for other weights."""
    found = format_of(weight)
    return found.library() if found and found.library else None


def known_quant(quant: str, *, counted: bool = False) -> Quant:
    """Return `quant` if it is a format that runs, or that can be `counted`. Raises RequestError with near misses."""
    if quant in FORMATS or (counted and stored_format(quant)):
        return quant
    known = [*FORMATS, *([*stored_formats(), "or --bits N"] if counted else ())]
    why = "is only counted, and does not run here" if stored_format(quant) else "is unknown"
    raise RequestError(f"--quant {quant!r} {why}; use {', '.join(known)}.{near_misses(quant, known)}")


def tried_formats() -> list[QuantFormat]:
    """Formats that a run tries as changes: fewest bits first, then those that multiply the packed weights."""
    return sorted(
        (item for item in FORMATS.values() if item.is_tried), key=lambda item: (item.bits, not item.multiplies_packed)
    )


def published_as(quant: str) -> str:
    """The format whose published results apply to `quant`; `quant` itself if `--quant` does not know it."""
    if form := stored_format(quant):
        return form.published_as
    return (FORMATS[quant].published_as or quant) if quant in FORMATS else quant


def quant_help(*, counted: bool = False) -> str:
    """All formats by package, for help texts: `none, int8, nf4, fp4 (bitsandbytes), int8wo, int4wo, fp8 (torchao)`."""
    by_package: dict[str, list[str]] = {}
    for item in FORMATS.values():
        by_package.setdefault(item.package, []).append(item.name)
    own = ", ".join(", ".join(names) + (f" ({package})" if package else "") for package, names in by_package.items())
    return f"{own}; or as others store them: nvfp4, mxfp4, awq, gptq, q4_k_m and its sisters" if counted else own


def check_packed_dtype(name: str, quant: Quant) -> None:
    """Raises RequestError for a quantisation format with float32, which undoes its saving."""
    if quant != "none" and name == "float32":
        raise RequestError(
            f"--quant {quant} with --dtype float32 would save nothing: every matmul would run in float32."
            " Use --dtype bfloat16, float16 or auto."
        )


def check_quant_options(quant: Quant) -> None:
    """Raise RequestError for a format without the options of bitsandbytes' 4-bit formats."""
    if not FORMATS[quant].has_options:
        raise RequestError(
            f"--double-quant and --compute-dtype apply to bitsandbytes' 4-bit formats, not to {quant!r};"
            f" use --quant {' or '.join(item.name for item in FORMATS.values() if item.has_options)}."
        )


def check_quant(quant: Quant, dtype: torch.dtype, device: torch.device) -> None:
    """Check that this machine supports the format in this dtype. Raises RequestError with advice."""
    need_library(quant)
    if quant == "int4wo" and device.type == "cuda":
        import torch

        from profiler.device.device import compute_capability

        if compute_capability(device) < (8, 0):
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

    `device`, where it will run, decides the layout of 4-bit weights, and whether fp8 inputs are quantised. Raises
    RequestError without the format's library, ModelError if a layer does not fit it or the library fails.
    """
    library = FORMATS[quant].library
    if library is None:
        return cast("nn.Module", module)
    need_library(quant)
    import torch

    try:
        return library().quantise(quant, module, dtype, options, device)
    except (RoofscopeError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # the library may raise anything
        raise ModelError(
            f"--quant {quant}: {FORMATS[quant].package} cannot quantise this model ({describe_error(error)});"
            " use another format, or none."
        ) from error


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
    def is_mean(self) -> bool:
        """Whether it is a mean number of bits, such as `4.85 bits`, and not a named format, which has a source."""
        return not self.source

    @property
    def published_as(self) -> str:
        """The format whose published results stand for its own: weights in about as many bits."""
        return "int4wo" if self.bits < 6 else "int8wo"


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
