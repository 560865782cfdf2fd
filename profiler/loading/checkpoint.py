"""The files of a checkpoint: which exist, and whether they can be read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from profiler.errors import ModelError, RequestError, first_line
from profiler.loading.source import ModelSource, inside, read_json_file

if TYPE_CHECKING:
    from profiler.loading.request import ModelRequest


def check_weights(request: ModelRequest) -> None:
    """Raises ModelError for a checkpoint that cannot be loaded, before anything slow: missing, pickled, corrupt."""
    source = request.source
    if request.weights == "random" or source.path is None:
        return
    if source.kind == "gguf":
        if request.quant != "none":
            raise ModelError(
                "a GGUF file is dequantised while it loads, and transformers cannot quantise it again;"
                " use --quant none, or give the original checkpoint."
            )
        return  # its config came from the same file, which was read whole for it
    files = weight_files(source.path)
    if not files:
        raise ModelError(f"the folder {str(source.path)!r} has a config.json but no weights; use --weights random.")
    pickles = [file for file in files if file.suffix != ".safetensors"]
    if pickles and not request.allow_pickle:
        raise ModelError(
            f"{pickles[0].name} is a pickle, which can run code when it is loaded; give a safetensors checkpoint,"
            " or --allow-pickle if you trust its source."
        )
    for file in files:
        if file.suffix == ".safetensors":
            _check_safetensors(file)
    return


def weight_files(folder: Path) -> list[Path]:
    """The checkpoint's files: safetensors if there are any, else pickles; those an index names, else all."""
    for pattern, index_name in (
        ("*.safetensors", "model.safetensors.index.json"),
        ("pytorch_model*.bin", "pytorch_model.bin.index.json"),
    ):
        files = sorted(folder.glob(pattern))
        index = folder / index_name
        if index.is_file():
            files = _indexed(index)
        if files:
            return files
    return []


def _indexed(index: Path) -> list[Path]:
    """The files that an index names, each in its own folder and there."""
    weight_map = read_json_file(index).get("weight_map")
    names = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise ModelError(f"{index.name} is not valid; download the checkpoint again.")
    files = [inside(index.parent, name) for name in sorted(set(names))]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ModelError(f"the checkpoint lacks {missing[0]}, which its index names; download it again.")
    return files


def _check_safetensors(file: Path) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            empty = not opened.keys()
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(f"{file.name} is no readable safetensors file: {first_line(error)}.") from None
    if empty:
        raise ModelError(f"{file.name} holds no tensor; download the checkpoint again.")


Weights = Literal["auto", "checkpoint", "random"]


def resolve_weights(source: ModelSource, weights: str) -> Literal["checkpoint", "random"]:
    """`auto` takes the checkpoint where one is named (hub id, folder with weights, GGUF) and random for a card."""
    if weights not in get_args(Weights):
        raise RequestError(f"--weights {weights!r} is unknown; use {', '.join(get_args(Weights))}.")
    if weights != "auto":
        return "random" if weights == "random" else "checkpoint"
    if source.kind == "card":
        return "random"
    if source.kind == "folder" and source.path is not None and not weight_files(source.path):
        return "random"
    return "checkpoint"
