"""Malicious and broken models: functions that spoil a copy of a valid one."""

import json
import os
import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
MARK = "it-ran"
"""A file of this name appears next to a model whose code was run."""
FLOAT32, STRING, UINT32 = 0, 8, 4
"""Values of ggml_type and gguf_metadata_value_type (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md)."""
Spoil = Callable[[Path], None]
"""Spoils a copy of a valid model."""


@dataclass
class Marking:
    """A pickle that leaves a mark when it is loaded."""

    mark: str

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.mark,)


def config(**changes: Any) -> Spoil:
    def spoil(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return spoil


def content(name: str, of_it: bytes) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / name).write_bytes(of_it)

    return spoil


def header(tensors: dict[str, Any]) -> Spoil:
    """Replace the checkpoint with this header, followed by zeros."""
    text = json.dumps(tensors).encode()
    return content(WEIGHTS, struct.pack("<Q", len(text)) + text + bytes(16 if tensors else 0))


def tensor(shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}


def pickled(name: str, index: str = "") -> Spoil:
    """Replace the weights with a pickle, which an index may name."""

    def spoil(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        (folder / name).write_bytes(pickle.dumps(Marking(str(folder / MARK))))
        if index:
            (folder / index).write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))

    return spoil


def remote_code(**changes: Any) -> Spoil:
    """Add code that leaves a mark when it is imported, and a config that names it.

    A chat template leaves the mark too if jinja renders it without a sandbox.
    """

    def spoil(folder: Path) -> None:
        code = f"import os\nos.makedirs({str(folder / MARK)!r}, exist_ok=True)\n"
        for name in ("configuration_own", "modeling_own", "quantizer_own", "tokenization_own", "__init__", "torch"):
            (folder / f"{name}.py").write_text(code)
        named = {
            "AutoConfig": "configuration_own.OwnConfig",
            "AutoModelForCausalLM": "modeling_own.OwnModel",
            "AutoModel": "modeling_own.OwnModel",
            "AutoTokenizer": ["tokenization_own.Own", None],
        }
        template = "{{ cycler.__init__.__globals__.os.makedirs(" + repr(str(folder / MARK)) + ", exist_ok=True) }}"
        (folder / "chat_template.jinja").write_text(template)
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "auto_map": named}))
        config(auto_map=named, custom_pipelines={"own": {"impl": "modeling_own.Own"}}, **changes)(folder)

    return spoil


def quantised_by(method: str) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": method}}


def gguf(tensors: int, pairs: int, body: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, pairs) + body


def text(value: bytes, claimed: int | None = None) -> bytes:
    return struct.pack("<Q", len(value) if claimed is None else claimed) + value


def named(architecture: bytes) -> bytes:
    return text(b"general.architecture") + struct.pack("<I", STRING) + text(architecture)


def layers(architecture: bytes, count: int) -> bytes:
    return text(architecture + b".block_count") + struct.pack("<II", UINT32, count)


def one_tensor(*sizes: int, offset: int = 0) -> bytes:
    return text(b"t") + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, FLOAT32, offset) + bytes(64)
