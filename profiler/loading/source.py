"""Resolve a model name (a hub id, a local folder, a GGUF file, or a preset), and check the files of a checkpoint."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict

from profiler.errors import ModelError, first_line, near_misses
from profiler.units import visible

if TYPE_CHECKING:
    from profiler.loading.request import ModelRequest

_PACKAGE = Path(__file__).resolve().parents[1]
# An installed wheel has the presets inside the package; a checkout has them next to it.
_PRESETS = next(folder for folder in (_PACKAGE / "models", _PACKAGE.parent / "models") if folder.is_dir())
# The index of a model of 61 layers with 256 experts each (DeepSeek-V3) has 9 MB.
_MOST_JSON_BYTES = 100_000_000


class Preset(BaseModel):
    """A preset in models/: the config.json facts of a well-known model, with their source."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    hub_id: str
    license: str
    source: str
    params: int
    params_source: str
    config: dict[str, Any]
    gated: bool = False
    note: str = ""


@dataclass(frozen=True)
class ModelSource:
    """The location of a model. The kind `card` is a preset."""

    kind: Literal["card", "hub", "folder", "gguf"]
    name: str
    """The model's name in a run: the preset's name, the hub id, or the name of the folder or file."""
    path: Path | None = None
    """The folder or GGUF file of a local model."""
    hub_id: str | None = None
    preset: Preset | None = None


@cache
def presets() -> dict[str, Preset]:
    """Return all presets by name, in alphabetical order."""
    files = sorted(_PRESETS.glob("*.json"))
    return {file.stem: Preset.model_validate_json(file.read_text(encoding="utf-8")) for file in files}


def resolve(model: str) -> ModelSource:
    """Resolve a path, a preset or a hub id (`owner/name`) without a download. Raises ModelError with similar names."""
    if not model.strip():
        raise ModelError("no model is named; pass a hub id (owner/name), a folder, a .gguf file, or a preset.")
    try:
        path = Path(model).expanduser()
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, ValueError, RuntimeError) as error:  # a name that is too long, a NUL, an unknown user's home
        reason = getattr(error, "strerror", None) or first_line(error)
        raise ModelError(f"{visible(model[:100])!r} is not a model's name: {reason}.") from None
    if is_folder:
        return _resolve_folder(path)
    if is_file:
        if path.suffix.lower() != ".gguf":
            raise ModelError(f"{path.name} is not a GGUF file; pass a .gguf file or a folder with a config.json.")
        return ModelSource("gguf", visible(path.stem), path=path)
    if model.lower().endswith(".gguf") or model.startswith((".", "/", "~")):
        raise ModelError(f"no file or folder at {model!r}.")
    for name, preset in presets().items():  # `mixtral-8x7b-v0.1`, the end of its hub id, is `mixtral-8x7b`
        if model.lower() == name or preset.hub_id.lower().endswith(f"/{model.lower()}"):
            return ModelSource("card", name, hub_id=preset.hub_id, preset=preset)
    if model.count("/") == 1 and all(model.split("/")):
        same = (preset for preset in presets().values() if preset.hub_id.lower() == model.lower())
        return ModelSource("hub", model, hub_id=model, preset=next(same, None))
    raise ModelError(
        f"unknown model {model!r}.{near_misses(model, presets())}"
        " Pass a hub id (owner/name), a folder, a .gguf file, or a name from `roofscope models`."
    )


def _resolve_folder(path: Path) -> ModelSource:
    config = path / "config.json"
    if (path / "adapter_config.json").is_file():
        raise ModelError(
            f"the folder {str(path)!r} contains an adapter, which transformers would apply to a model from elsewhere;"
            ' merge the two and pass the result: python -c "from peft import AutoPeftModelForCausalLM as Model;'
            f" Model.from_pretrained({str(path)!r}).merge_and_unload().save_pretrained('merged')\" (pip install peft)."
        )
    if not config.is_file():
        ggufs = sorted(file.name for file in path.glob("*.gguf"))
        hint = f" It contains {ggufs[0]}: pass that file." if ggufs else ""
        raise ModelError(f"the folder {str(path)!r} has no config.json, so it is not a Hugging Face model.{hint}")
    read_json_file(config)
    return ModelSource("folder", visible(path.resolve().name), path=path)


def read_json_file(file: Path) -> dict[str, Any]:
    """Read a JSON object. Raises ModelError for a file with anything else, or with more than `_MOST_JSON_BYTES`."""
    try:
        size = file.stat().st_size
        if size > _MOST_JSON_BYTES:
            raise ModelError(f"{file} has {size} bytes; roofscope reads JSON files of at most {_MOST_JSON_BYTES}.")
        content = json.loads(file.read_text(encoding="utf-8"))
    except RecursionError:
        raise ModelError(f"{file} is nested too deeply.") from None
    except (ValueError, OSError) as error:
        raise ModelError(f"{file} cannot be read as JSON: {first_line(error)}.") from None
    if not isinstance(content, dict):
        raise ModelError(f"{file} is not a JSON object.")
    return content


def check_weights(request: ModelRequest) -> None:
    """Check a checkpoint before anything slow. Raises ModelError for one that is missing, pickled or corrupt."""
    source = request.source
    if request.weights == "random" or source.path is None or source.kind == "gguf":
        return  # loading the config of a GGUF file already read all of it
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
    """Return the safetensors files of a checkpoint, or else its pickles. Raises ModelError for an invalid index."""
    for pattern, index_name in (
        ("*.safetensors", "model.safetensors.index.json"),
        ("pytorch_model*.bin", "pytorch_model.bin.index.json"),
    ):
        index = folder / index_name
        files = _indexed_files(index) if index.is_file() else sorted(folder.glob(pattern))
        if files:
            return files
    return []


def _indexed_files(index: Path) -> list[Path]:
    weight_map = read_json_file(index).get("weight_map")
    names = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise ModelError(f"{index.name} is not valid; download the checkpoint again.")
    files = [index.parent / name for name in sorted(set(names))]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ModelError(f"the checkpoint has no {missing[0]}, which its index names; download it again.")
    return files


def _check_safetensors(file: Path) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as checkpoint:
            if not checkpoint.keys():
                raise ModelError(f"{file.name} contains no tensors; download the checkpoint again.")
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(f"{file.name} cannot be read as a safetensors file: {first_line(error)}.") from None


Weights = Literal["auto", "checkpoint", "random"]


def resolve_weights(source: ModelSource, weights: str) -> Literal["checkpoint", "random"]:
    """Resolve `--weights`: `auto` is `random` for a preset or a folder without weights, else `checkpoint`."""
    if weights != "auto":
        return "random" if weights == "random" else "checkpoint"
    is_bare = source.kind == "folder" and source.path is not None and not weight_files(source.path)
    return "random" if source.kind == "card" or is_bare else "checkpoint"
