"""Malicious and broken models: what spoils a copy of a valid one, and the words of the error line that refuses it."""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

Spoil = Callable[[Path], None]
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
MARK = "it-ran"
"""A file of this name appears next to a model whose code was run."""


def config(**changes: Any) -> Spoil:
    """Replace some keys of config.json."""

    def spoil(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return spoil


def quantised_by(method: str) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": method}}


def content(name: str, of_it: bytes) -> Spoil:
    """Replace a file by this content."""

    def spoil(folder: Path) -> None:
        (folder / name).write_bytes(of_it)

    return spoil


def index(name: str) -> Spoil:
    """Add an index that says that the weights are in `name`."""
    text = json.dumps({"metadata": {"total_size": 1}, "weight_map": {"lm_head.weight": name}})
    return content(INDEX, text.encode())


def header(tensors: dict[str, Any], data_bytes: int = 16) -> Spoil:
    """Replace the checkpoint with this header, followed by `data_bytes` zeros."""
    text = json.dumps(tensors).encode()
    return content(WEIGHTS, struct.pack("<Q", len(text)) + text + bytes(data_bytes))


def tensor(shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}


def linked(name: str, target: str) -> Spoil:
    """Replace a file by a symbolic link."""

    def spoil(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return spoil


def pickled(name: str, *, without_weights: bool = True) -> Spoil:
    """Add a pickle that leaves a mark when it is loaded."""

    def spoil(folder: Path) -> None:
        if without_weights:
            (folder / WEIGHTS).unlink()
        (folder / name).write_bytes(pickle.dumps(_Marking(str(folder / MARK))))

    return spoil


class _Marking:
    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.mark,)


def fifo(name: str) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return spoil


def both(*spoils: Spoil) -> Spoil:
    return lambda folder: [spoil(folder) for spoil in spoils][-1]


def adapter(base: str) -> Spoil:
    text = json.dumps({"peft_type": "LORA", "base_model_name_or_path": base})
    return content("adapter_config.json", text.encode())


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


CONFIGS: dict[str, tuple[Spoil, str]] = {
    "10^9 layers": (config(num_hidden_layers=10**9), "num_hidden_layers = 1000000000"),
    "layers below 0": (config(num_hidden_layers=-1), "num_hidden_layers = -1"),
    "width of 10^30": (config(hidden_size=10**30), "cannot build this model"),
    "width of NaN": (config(hidden_size=float("nan")), "'hidden_size' in its config.json is NaN"),
    "unknown type": (config(model_type="nonsense"), "model type `nonsense`"),
    "type that is a path": (config(model_type="../../../etc/passwd"), "model type `../"),
    "not a language model": (config(model_type="vit"), "generates text for 'vit'"),
    "unknown quantiser": (config(**quantised_by("nonsense")), "'nonsense', which cannot be planned"),
    "attention kernel from the hub": (config(attn_implementation="stranger/kernel"), "'stranger/kernel' from the hub"),
    "activation that is none": (config(hidden_act="__import__('os').system('id')"), "cannot build"),
    "10^7 characters of brackets": (content("config.json", b"[" * 10**7), "nested too deeply"),
    "not UTF-8": (content("config.json", b"\xff\xfe\x00"), "cannot be read as JSON"),
    "config.json outside": (linked("config.json", "/etc/passwd"), "leads out of"),
    "config.json is a pipe": (fifo("config.json"), "not a regular file"),
    "adapter of a file elsewhere": (adapter("../../etc/passwd"), "contains an adapter"),
    "own code for an unknown type": (remote_code(model_type="own"), "--trust-remote-code"),
    "own code and an own quantiser": (remote_code(**quantised_by("quantizer_own")), "'quantizer_own', which cannot be"),
}

CHECKPOINTS: dict[str, tuple[Spoil, str]] = {
    "index to ../ with the right ending": (index("../outside.safetensors"), "leads out of"),
    "index to a pickle": (both(pickled("pytorch_model.bin"), index("pytorch_model.bin")), "is a pickle"),
    "weights without an end": (linked(WEIGHTS, "/dev/zero"), "leads out of"),
    "weights are a pipe": (fifo(WEIGHTS), "not a regular file"),
    "other weights by name": (config(transformers_weights="../outside.safetensors"), "'../outside.safetensors'"),
    "header of 2^63 bytes": (content(WEIGHTS, struct.pack("<Q", 2**63) + b"{"), "header too large"),
    "offsets that overlap": (header({"a": tensor([2], 0, 8), "b": tensor([2], 4, 12)}), "offset for tensor `b`"),
    "shape that overflows": (header({"a": tensor([2**32, 2**32], 0, 16)}), "overflow"),
    "no tensor": (header({}, 0), "no tensors"),
    "pickle called safetensors": (pickled(WEIGHTS, without_weights=False), "cannot be read as a safetensors file"),
    "pickle in pytorch_model.bin": (pickled("pytorch_model.bin"), "is a pickle"),
}


def gguf(tensors: int, pairs: int, body: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, pairs) + body


def text(value: bytes, claimed: int | None = None) -> bytes:
    return struct.pack("<Q", len(value) if claimed is None else claimed) + value


_STRING, _UINT32 = 8, 4


def named(architecture: bytes) -> bytes:
    return text(b"general.architecture") + struct.pack("<I", _STRING) + text(architecture)


def one_tensor(*sizes: int, offset: int = 0) -> bytes:
    return text(b"t") + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, 0, offset) + bytes(64)


_LLAMA = named(b"llama")


def layers(architecture: bytes, count: int) -> bytes:
    return text(architecture + b".block_count") + struct.pack("<II", _UINT32, count)


GGUFS: dict[str, tuple[bytes, str]] = {
    "2^60 tensors": (gguf(2**60, 0), "claims 1152921504606846976 tensors"),
    "a string of 2^40 bytes": (gguf(0, 1, text(b"a", 2**40)), "ends within"),
    "unknown kind of value": (gguf(0, 1, text(b"a") + struct.pack("<I", 99)), "unknown kind, 99"),
    "a tensor of 2^62 numbers": (gguf(1, 1, _LLAMA + one_tensor(2**31, 2**31)), "4611686018427387904 weights"),
    "a tensor past the end": (gguf(1, 1, _LLAMA + one_tensor(4, offset=2**60)), "past the end"),
    "an unknown architecture": (gguf(0, 2, named(b"nonsense") + layers(b"nonsense", 2)), "nonsense is not supported"),
    "10^9 layers in GGUF": (gguf(0, 2, _LLAMA + layers(b"llama", 10**9)), "block_count = 1000000000"),
    "a pickle": (pickle.dumps(_Marking("/tmp/" + MARK)), "not a GGUF file"),
}
