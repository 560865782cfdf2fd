"""Counts of any model: the bundled file, else the user cache, else a walk on the meta device."""

from __future__ import annotations

import hashlib
import json
from importlib import metadata
from pathlib import Path

from profiler.counting.preset_counts import CountedModel, counts_json, from_json, preset_counts
from profiler.loading.source import ModelSource
from profiler.user_cache import cache_path, write_cache

_PACKAGE = Path(__file__).resolve().parents[1]
# Whose modules, formats and layouts the walk goes over.
_LIBRARIES = ("torch", "transformers", "accelerate", "bitsandbytes", "torchao", "compressed-tensors", "gguf")


def counted_model(
    source: ModelSource,
    dtype: str = "auto",
    quant: str = "none",
    *,
    rented: bool = False,
    trust_remote_code: bool = False,
) -> CountedModel:
    """A model, counted: a card's count comes with the package, that of a file is kept once it was walked.

    `rented`: in 16 bits where no dtype is asked for and its own is wider. torch and transformers are loaded only where
    it is neither shipped nor kept. Raises RequestError or ModelError.
    """
    shipped = preset_counts(source.name, quant) if source.kind == "card" and dtype == "auto" else None
    if shipped is not None and not (rented and shipped.dtype == "float32"):
        return shipped
    config = _config(source)
    if config is None:
        return walked_model(source, dtype, quant, rented, trust_remote_code)
    path = cache_path(
        "walks", {"config": config, "asked": [dtype, quant, rented], "rules": rules_digest(), **library_versions()}
    )
    if (kept := _read(path)) is not None:
        return kept
    model = walked_model(source, dtype, quant, rented, trust_remote_code)
    write_cache(path, json.dumps(counts_json(model)).encode())
    return model


def walked_model(
    source: ModelSource, dtype: str, quant: str, rented: bool, trust_remote_code: bool = False
) -> CountedModel:
    from profiler.counting.meta import counted_on_meta

    return counted_on_meta(source, dtype, quant, rented=rented, trust_remote_code=trust_remote_code)


def _config(source: ModelSource) -> str | None:
    """What decides a model's config; None for that of a hub, which only the hub can tell."""
    if source.kind == "card" and source.card is not None:
        return json.dumps(source.card.config)
    if source.kind == "folder" and source.path is not None:
        return (source.path / "config.json").read_text(encoding="utf-8")
    if source.kind == "gguf" and source.path is not None:  # gigabytes: told by what a build tool goes by
        told = source.path.stat()
        return f"{source.path.resolve()} {told.st_size} {told.st_mtime_ns}"
    return None


def library_versions() -> dict[str, str]:
    found = {}
    for library in _LIBRARIES:
        try:
            found[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            continue
    return found


def rules_digest() -> str:
    """A digest of this package's own text: whichever rule changes, nothing is kept by the old one."""
    digest = hashlib.sha256()
    for file in sorted(_PACKAGE.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _read(path: Path) -> CountedModel | None:
    try:
        return from_json(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
