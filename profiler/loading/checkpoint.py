"""Find the files of a checkpoint, and check that they can be read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from profiler.errors import ModelError, RequestError, first_line
from profiler.loading.source import ModelSource, inside, read_json_file

if TYPE_CHECKING:
    from profiler.loading.request import ModelRequest


def check_weights(request: ModelRequest) -> None:
    """Check a checkpoint before anything slow. Raises ModelError for one that is missing, pickled or corrupt."""
    source = request.source
    if request.weights == "random" or source.path is None:
        return
    if source.kind == "gguf":
        if request.quant != "none":
            raise ModelError(
                "a GGUF file is dequantised while it loads, and transformers cannot quantise it again;"
                " use --quant none or the original checkpoint."
            )
        return  # loading its config already read the whole file
    files = weight_files(source.path)
    if not files:
        raise ModelError(f"the folder {str(source.path)!r} has a config.json but no weights; use --weights random.")
    pickles = [file for file in files if file.suffix != ".safetensors"]
    if pickles and not request.allow_pickle:
        raise ModelError(
            f"{pickles[0].name} is a pickle, which can run code when it is loaded; use a safetensors checkpoint,"
            " or --allow-pickle if you trust its source."
        )
    for file in files:
        if file.suffix == ".safetensors":
            _check_safetensors(file)


def weight_files(folder: Path) -> list[Path]:
    """Return the checkpoint's safetensors files, or its pickles if there are none.

    If there is an index, these are the files that it names. Raises ModelError if the index is invalid or incomplete.
    """
    for pattern, index_name in (
        ("*.safetensors", "model.safetensors.index.json"),
        ("pytorch_model*.bin", "pytorch_model.bin.index.json"),
    ):
        files = sorted(folder.glob(pattern))
        index = folder / index_name
        if index.is_file():
            files = _indexed_files(index)
        if files:
            return files
    return []


def _indexed_files(index: Path) -> list[Path]:
    weight_map = read_json_file(index).get("weight_map")
    names = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise ModelError(f"{index.name} is not valid; download the checkpoint again.")
    files = [inside(index.parent, name) for name in sorted(set(names))]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ModelError(f"the checkpoint has no {missing[0]}, which its index names; download it again.")
    return files


def _check_safetensors(file: Path) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as checkpoint:
            empty = not checkpoint.keys()
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(f"{file.name} cannot be read as a safetensors file: {first_line(error)}.") from None
    if empty:
        raise ModelError(f"{file.name} contains no tensors; download the checkpoint again.")


Weights = Literal["auto", "checkpoint", "random"]


def resolve_weights(source: ModelSource, weights: str) -> Literal["checkpoint", "random"]:
    """Resolve `--weights`: `auto` is `random` for a preset or a folder without weights, else `checkpoint`."""
    if weights not in get_args(Weights):
        raise RequestError(f"--weights {weights!r} is unknown; use {', '.join(get_args(Weights))}.")
    if weights != "auto":
        return "random" if weights == "random" else "checkpoint"
    if source.kind == "card":
        return "random"
    if source.kind == "folder" and source.path is not None and not weight_files(source.path):
        return "random"
    return "checkpoint"
