"""Reject configs and GGUF files with impossible claims before a library reads them."""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

from profiler.errors import ModelError

MOST_PARTS = 4096
"""Most layers, experts, heads or labels of a model. The libraries build them one by one, so a huge number never ends.
The deepest published model has 1,000 layers (DeepNet, arXiv 2203.00555), the widest 2,048 experts (Switch-C, arXiv
2101.03961)."""
_PARTS = re.compile(
    r"(^|[_.])(layers?|blocks?|experts?|heads?|codebooks?|labels?)(_count|_count_kv)?$|^n_(layer|head)$|(^|_)depths?$"
)
_AT_LEAST_ONE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)


def check_claims(content: Mapping[str, Any]) -> None:
    """Check a parsed config.json. Raises ModelError if it has too many parts, a NaN, or its own weight file name."""
    for name, value in _values(content):
        if isinstance(value, float) and math.isnan(value):
            raise ModelError(f"{name!r} in its config.json is NaN; set it to a number.")
        if name == "transformers_weights":
            raise ModelError(
                f"its config.json names {value!r} as its weights; rename them to model.safetensors and delete that key."
            )
        check_count(name, value)


def check_count(name: str, value: object) -> None:
    """Raises ModelError if `name` is a number of parts and `value` is above `MOST_PARTS`."""
    if isinstance(value, int) and value > MOST_PARTS and _PARTS.search(name):
        raise ModelError(f"its configuration says {name} = {value}; roofscope reads models with at most {MOST_PARTS}.")


def check_sizes(config: Any) -> None:
    """Raises ModelError for a transformers config with a size below 1 or a sliding window below 0 (0 means none).

    An attribute that differs between layers is checked in each.
    """
    text = config.get_text_config()
    layers = list(text.per_layer_config) if getattr(text, "is_heterogeneous", False) else [text]
    for name, least in (*((name, 1) for name in _AT_LEAST_ONE), ("sliding_window", 0)):
        for value in {
            getattr(layer, name, None) for layer in layers if not isinstance(getattr(layer, name, None), list)
        }:
            if isinstance(value, int) and value < least:
                raise ModelError(f"its configuration says {name} = {value}, which is not possible.")


def _values(content: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every scalar in nested mappings and lists, with its key; an element of a list has the key of the list."""
    inner: Any
    stack = [(name, content)]
    while stack:
        name, inner = stack.pop()
        if isinstance(inner, Mapping):
            stack += [(str(key), value) for key, value in inner.items()]
        elif isinstance(inner, list):
            stack += [(name, value) for value in inner]
        else:
            yield name, inner


# Struct format by gguf_metadata_value_type, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
_VALUE_FORMS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING = 8
_ARRAY = 9
_MARK = b"GGUF"
_VERSIONS = (2, 3)
_MOST_DIMENSIONS = 4
# No model has more. A reader takes 30 us per pair, 80 us per tensor and 16 us per element, with objects for each.
_MOST_PAIRS = 2**12
_MOST_TENSORS = 2**15
# In all arrays: a vocabulary of 262,144 tokens with scores, types and half a million merges has 1.3 million.
_MOST_ELEMENTS = 2**21
# ggml's smallest blocks take 1.56 bits per weight (IQ1_S: 50 bytes for 256).
_MOST_WEIGHTS_PER_BYTE = 256 / 50


def check_gguf(file: Path) -> None:
    """Raises ModelError for a file that is not GGUF, is damaged, or claims more data than it contains."""
    try:
        with file.open("rb") as stream:
            if stream.read(len(_MARK)) != _MARK:
                raise ModelError(f"{file.name} is not a GGUF file: it does not begin with {_MARK.decode()!r}.")
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
                _Header(content).check()
    except (ValueError, OSError) as error:
        raise ModelError(f"{file.name} is a damaged GGUF file: {error}.") from None


class _Header:
    """Parses a file from its beginning. Raises ValueError at the first impossible claim."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self._at = len(_MARK)
        self._elements = 0

    def check(self) -> None:
        version = self._number("I")
        if version not in _VERSIONS:
            raise ValueError(f"its version is {version}; roofscope reads {' and '.join(map(str, _VERSIONS))}")
        tensors, pairs = self._number("Q"), self._number("Q")
        for noun, count, limit in (("tensors", tensors, _MOST_TENSORS), ("pairs", pairs, _MOST_PAIRS)):
            if count > limit:
                raise ValueError(f"it claims {count} {noun}")
        keys = {self._pair() for _ in range(pairs)}
        for _ in range(tensors):
            self._tensor()
        if not any(key.endswith(b".block_count") for key in keys):
            raise ValueError("it does not say how many layers the model has")

    def _pair(self) -> bytes:
        key = self._string()
        kind = self._number("I")
        if kind == _ARRAY:
            kind, length = self._number("I"), self._number("Q")
            self._elements += length
            if self._elements > _MOST_ELEMENTS or kind == _ARRAY:
                raise ValueError(f"{_quoted(key)} claims {length} elements" + " that are arrays" * (kind == _ARRAY))
        else:
            length = 1
        if kind == _STRING:
            for _ in range(length):
                self._string()
        elif kind not in _VALUE_FORMS:
            raise ValueError(f"{_quoted(key)} has an unknown kind, {kind}")
        elif length == 1:
            check_count(key.decode(errors="replace"), self._number(_VALUE_FORMS[kind]))
        else:
            self._skip(length * struct.calcsize(_VALUE_FORMS[kind]))
        return key

    def _tensor(self) -> None:
        name = self._string()
        dimensions = self._number("I")
        if dimensions > _MOST_DIMENSIONS:
            raise ValueError(f"the tensor {_quoted(name)} claims {dimensions} dimensions")
        weights = prod(self._number("Q") for _ in range(dimensions))
        _kind, offset = self._number("I"), self._number("Q")
        if weights > _MOST_WEIGHTS_PER_BYTE * len(self._content) or offset > len(self._content):
            raise ValueError(
                f"the tensor {_quoted(name)} claims {weights} weights at byte {offset}, past the end of the file"
            )

    def _string(self) -> bytes:
        length = self._number("Q")
        start = self._at
        self._skip(length)
        return self._content[start : self._at]

    def _number(self, form: str) -> int:
        start = self._at
        self._skip(struct.calcsize(form))
        value: int = struct.unpack_from(f"<{form}", self._content, start)[0]
        return value

    def _skip(self, count: int) -> None:
        if count > len(self._content) - self._at:
            raise ValueError("it ends within its header")
        self._at += count


def _quoted(name: bytes) -> str:
    return repr(name[:80].decode(errors="replace"))
