"""Resolve a model name: a hub id, a local folder, a GGUF file, or a preset in models/."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from profiler.errors import ModelError, first_line, near_misses
from profiler.units import visible

SourceKind = Literal["card", "hub", "folder", "gguf"]

_PACKAGE = Path(__file__).resolve().parents[1]
# An installed wheel carries the cards inside the package; a checkout has them beside it.
_CARD_FOLDERS = (_PACKAGE / "models", _PACKAGE.parent / "models")
# The index of a model of 61 layers with 256 experts each (DeepSeek-V3) has 9 MB.
_MOST_JSON_BYTES = 100_000_000
_LONGEST_NAME = 100


class Card(BaseModel):
    """A model card in models/: the config.json facts of a well-known model, with where they come from."""

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
    """Where a model is."""

    kind: SourceKind
    name: str
    """As the run calls it: the card's name, the hub id, or the folder's or file's own name."""
    path: Path | None = None
    """The folder or GGUF file, when it is local."""
    hub_id: str | None = None
    card: Card | None = None


@cache
def card_names() -> tuple[str, ...]:
    """The names of all shipped cards, in alphabetical order."""
    return tuple(sorted(path.stem for path in _card_folder().glob("*.json")))


@cache
def load_card(name: str) -> Card:
    """The card called `name`. Raises ModelError when there is none or it cannot be read."""
    path = _card_folder() / f"{name}.json"
    try:
        return Card.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"no card called {name!r}.{near_misses(name, card_names())}") from None
    except ValidationError as error:
        raise ModelError(f"the card {path.name} is not valid: {error.errors()[0]['msg']}.") from None


def resolve(model: str) -> ModelSource:
    """Where `model` is: a path if one exists, else a card's name, else a hub id (`owner/name`).

    Nothing is read but the file system, and nothing is downloaded. Raises ModelError with near misses.
    """
    if not model.strip():
        raise ModelError("no model is named; give a hub id (owner/name), a folder, a .gguf file, or a card's name.")
    try:
        path = Path(model).expanduser()
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, ValueError, RuntimeError) as error:  # too long a name, a NUL, nobody's home
        reason = getattr(error, "strerror", None) or first_line(error)
        raise ModelError(f"{visible(model[:_LONGEST_NAME])!r} is no model's name: {reason}.") from None
    if is_folder:
        return _folder(path)
    if is_file:
        if path.suffix.lower() != ".gguf":
            raise ModelError(f"{path.name} is a file, but no GGUF file; give a folder with a config.json, or a .gguf.")
        return ModelSource("gguf", visible(path.stem), path=path)
    if model.lower().endswith(".gguf") or model.startswith((".", "/", "~")):
        raise ModelError(f"no file or folder at {model!r}.")
    if model.lower() in card_names():
        card = load_card(model.lower())
        return ModelSource("card", model.lower(), hub_id=card.hub_id, card=card)
    if model.count("/") == 1 and all(model.split("/")):
        return ModelSource("hub", model, hub_id=model, card=_card_of_hub_id(model))
    raise ModelError(
        f"unknown model {model!r}.{near_misses(model, card_names())}"
        " Give a hub id (owner/name), a folder, a .gguf file, or a name from `roofscope models`."
    )


def inside(folder: Path, name: str) -> Path:
    """The file `name` of a model's folder. Raises ModelError for one that lies elsewhere, or is no plain file.

    A folder of the hub's own cache is made of links to its neighbour `blobs`, which count as its own.
    """
    try:
        root = folder.resolve()
        if root.parent.name == "snapshots" and root.parents[1].name.startswith("models--"):
            root = root.parents[1]
        file = (folder / name).resolve()
    except (OSError, RuntimeError, ValueError):  # a loop of links, a NUL
        raise ModelError(f"the model names {name!r}, which is no file's name.") from None
    if not file.is_relative_to(root):
        raise ModelError(
            f"{name!r} leads out of the model's folder, and nothing else is read;"
            " give the folder that holds the files, or copy them into this one."
        )
    if file.exists() and not file.is_file():
        raise ModelError(f"{name!r} of the model's folder is no plain file.")
    return folder / name


def _folder(path: Path) -> ModelSource:
    for entry in sorted(path.iterdir()):
        if not entry.is_dir():
            inside(path, entry.name)
    config = path / "config.json"
    adapter = path / "adapter_config.json"
    if adapter.is_file():
        raise ModelError(
            f"the folder {str(path)!r} holds an adapter, which transformers would put on a model from elsewhere;"
            " merge the two (peft: merge_and_unload) and give the result."
        )
    if not config.is_file():
        ggufs = sorted(file.name for file in path.glob("*.gguf"))
        hint = f" It holds {ggufs[0]}: give that file." if ggufs else ""
        raise ModelError(f"the folder {str(path)!r} has no config.json, so it is no Hugging Face model.{hint}")
    read_json_file(config)
    return ModelSource("folder", visible(path.resolve().name), path=path)


def read_json_file(file: Path) -> dict[str, Any]:
    """An object of a model's folder. Raises ModelError for a file that holds none, or is larger than any such file."""
    try:
        size = file.stat().st_size
        if size > _MOST_JSON_BYTES:
            raise ModelError(f"{file} has {size} bytes, more than the {_MOST_JSON_BYTES} that are read of such a file.")
        content = json.loads(file.read_text(encoding="utf-8"))
    except RecursionError:
        raise ModelError(f"{file} is nested too deeply.") from None
    except (ValueError, OSError) as error:
        raise ModelError(f"{file} cannot be read as JSON: {first_line(error)}.") from None
    if not isinstance(content, dict):
        raise ModelError(f"{file} holds no JSON object.")
    return content


def _card_of_hub_id(hub_id: str) -> Card | None:
    return next((card for card in map(load_card, card_names()) if card.hub_id.lower() == hub_id.lower()), None)


def _card_folder() -> Path:
    for folder in _CARD_FOLDERS:
        if any(folder.glob("*.json")):
            return folder
    raise ModelError("the model cards are missing from this installation; reinstall roofscope.")
