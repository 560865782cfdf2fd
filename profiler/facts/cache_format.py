"""Formats of a quantised KV cache: what transformers' QuantizedCache stores and converts, one entry per backend."""

from dataclasses import dataclass
from typing import Any

_FLOAT32_BYTES = 4


@dataclass(frozen=True)
class CacheFormat:
    """How a backend of transformers' QuantizedCache stores keys and values (cache_utils.py, 5.23)."""

    backend: str
    """The name of its backend in transformers: fp8, quanto or hqq."""
    bits: int
    """Bits of a stored element, without scales."""
    package: str
    """Its name for pip."""
    group_size: int | None = None
    """Elements that share a scale and a zero point, both in the model's dtype; None for one scale per tensor."""
    residual_tokens: int = 0
    """The newest tokens stay in the model's dtype until they are this many."""
    unpacked_bytes: float = 0.0
    """Bytes per element that its kernels move between the packed and the converted element, whatever the dtype."""
    dense_passes: int = 0
    """How often its kernels, and the concatenation after them, read or write an element in the model's dtype."""

    @property
    def name(self) -> str:
        """The name that a sentence uses, such as `fp8, 8 bits`."""
        return f"{self.backend}, {self.bits} bits"

    def element_bytes(self, itemsize: int) -> float:
        """Return the stored bytes of an element, with its share of scales; `itemsize` is that of the model's dtype.

        One scale per tensor counts as none.
        """
        scales = 2 * itemsize / self.group_size if self.group_size else 0.0
        return self.bits / 8 + scales

    def conversion_bytes(self, itemsize: int) -> float:
        """Return the bytes moved to convert one stored element, without reading it and without the attention kernel.

        fp8 converts through float32: it writes and reads it twice, then writes the model's dtype if that is narrower.
        """
        if self.group_size is None:
            narrowed = _FLOAT32_BYTES + itemsize if itemsize < _FLOAT32_BYTES else 0
            return 3 * _FLOAT32_BYTES + narrowed
        return self.unpacked_bytes + self.dense_passes * itemsize

    def workspace_bytes(self, itemsize: int) -> float:
        """Return the peak bytes per element of one layer's keys and values while they are converted."""
        if self.group_size is None:
            return (2 * _FLOAT32_BYTES + itemsize) / 2  # values in float32, twice, next to the converted keys
        return 2 * itemsize  # converted, and concatenated with the newest tokens

    def residual(self, decoded: Any) -> Any:
        """Return the tokens in the model's dtype after `decoded` steps, a number or an array; a prompt is packed."""
        return decoded % self.residual_tokens if self.residual_tokens else 0


CACHE_FORMATS: dict[str, CacheFormat] = {
    item.backend: item
    for item in (
        CacheFormat("fp8", 8, "transformers"),
        # optimum-quanto 0.2.7: unpacks to uint8, multiplies, subtracts in place; then transformers concatenates.
        CacheFormat("quanto", 4, "optimum-quanto", 64, 128, unpacked_bytes=2.0, dense_passes=4),
        # hqq 0.2.8: masks and shifts each half of a byte and copies it into the dtype, subtracts, multiplies.
        CacheFormat("hqq", 4, "hqq", 64, 128, unpacked_bytes=3.5, dense_passes=6),
    )
}
"""By backend, the most promising first: fp8 needs no further package."""
