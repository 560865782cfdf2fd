"""Card profiles on disk: one JSON file a card, those that come with roofscope and those of a folder of one's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from profiler.diagnosis.profile import PROFILE_SCHEMA, CardProfile
from profiler.errors import RequestError, near_misses
from profiler.units import visible_in

FOLDER = Path(__file__).parents[1] / "machine" / "profiles"
_ADAPTER = TypeAdapter(CardProfile)
_NO_SAMPLES: Any = {"__all__": {"seconds"}}
_LEFT_OUT: Any = {"ceilings": {**dict.fromkeys(("compute", "memory", "links"), _NO_SAMPLES), "host": {"seconds"}}}


def profile_json(profile: CardProfile) -> str:
    """The text of a profile; single samples are left out, so that it is small enough to share."""
    return _ADAPTER.dump_json(profile, indent=1, exclude=_LEFT_OUT).decode() + "\n"


def read_profile(path: Path) -> CardProfile:
    """Read a profile. Raises RequestError for a file that is none, or of another version."""
    try:
        content = visible_in(json.loads(path.read_text(encoding="utf-8")))
    except OSError:
        raise RequestError(
            f"there is no card profile at {path}; `roofscope ceilings --out {path}` makes one."
        ) from None
    except (ValueError, RecursionError):
        raise RequestError(f"{path} is no card profile: it is not JSON.") from None
    version = content.get("schema_version") if isinstance(content, dict) else None
    if version != PROFILE_SCHEMA:
        told = f"of version {version}, and this roofscope reads {PROFILE_SCHEMA}" if version else "no card profile"
        raise RequestError(f"{path} is {told}; measure the card again: `roofscope ceilings --out {path}`.")
    try:
        return _ADAPTER.validate_python(content)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise RequestError(f"{path} is a damaged card profile: {where}: {problem['msg']}.") from None


def profiles(folder: Path = FOLDER) -> dict[str, Path]:
    """The profiles of a folder by their file's name."""
    return {path.stem: path for path in sorted(folder.glob("*.json"))}


def profile_called(name: str) -> CardProfile:
    """A profile by its path, or one that comes with roofscope by its name. Raises RequestError."""
    path = Path(name)
    if path.suffix == ".json" or path.exists():
        return read_profile(path)
    known = profiles()
    if name in known:
        return read_profile(known[name])
    raise RequestError(
        f"no card profile is called {name!r}.{near_misses(name, known)} Known: {', '.join(known) or 'none'}; measure"
        " yours with `roofscope ceilings --out card.json`."
    )
