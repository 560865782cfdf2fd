"""Content-addressed files in the user's cache directory; failures to write are ignored."""

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
RECENT_S = 24 * 3600.0


def cache_path(kind: str, facts: Mapping[str, Any]) -> Path:
    """Return the path of a cached file of this kind; `facts` must determine its content."""
    base = os.environ.get("XDG_CACHE_HOME")
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    return (Path(base) if base else Path.home() / ".cache") / "roofscope" / kind / f"{key}.json"


def read_recent(path: Path, parse: Callable[[bytes], T]) -> T | None:
    """Return what a file of the last day has; None without such a file, or if `parse` raises ValueError."""
    try:
        return parse(path.read_bytes()) if time.time() - path.stat().st_mtime < RECENT_S else None
    except (OSError, ValueError):
        return None


def write_cache(path: Path, content: bytes) -> None:
    """Write a file atomically; do nothing if the disk refuses it."""
    draft = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_bytes(content)
        draft.replace(path)
    except OSError:
        pass
