"""Counts of any model: the bundled file, else the user cache, else a walk on the meta device."""

import hashlib
import json
from contextlib import suppress
from pathlib import Path

from profiler.counting.preset_counts import CountedModel, counts_json, from_json, preset_counts
from profiler.counting.stored_bits import in_bits
from profiler.loading.source import ModelSource
from profiler.packages import version_of
from profiler.quant.registry import stored_format
from profiler.user_cache import cache_path, write_cache

# The walk depends on their modules, formats and layouts.
_LIBRARIES = ("torch", "transformers", "accelerate", "bitsandbytes", "torchao", "compressed-tensors", "gguf")


def counted_model(
    source: ModelSource,
    dtype: str = "auto",
    quant: str = "none",
    *,
    rented: bool = False,
    ranks: int = 1,
    trust_remote_code: bool = False,
) -> CountedModel:
    """Return a model's counts from the presets, the user cache or a walk, which is cached; only it imports torch.

    `dtype` `auto` is the model's own; with `rented`, and in a stored format, 16 bits if its own is wider. With `ranks`
    above 1, they are those of the tensor-parallel rank that has most. Raises RequestError or ModelError.
    """
    if form := stored_format(quant):
        dense = counted_model(source, dtype, rented=True, ranks=ranks, trust_remote_code=trust_remote_code)
        return in_bits(dense, form)
    preset = preset_counts(source.name, quant, ranks) if source.kind == "card" and dtype == "auto" else None
    if preset is not None and not (rented and preset.dtype == "float32"):
        return preset
    config, path = _config(source), None
    if config is not None:
        requested, versions = [dtype, quant, rented, ranks], {name: version_of(name) for name in _LIBRARIES}
        path = cache_path("walks", {"config": config, "requested": requested, "rules": rules_digest(), **versions})
        with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):  # no file, or one of no use
            return from_json(json.loads(path.read_bytes()))
    from profiler.counting.count import counted_on_meta

    model = counted_on_meta(source, dtype, quant, rented=rented, ranks=ranks, trust_remote_code=trust_remote_code)
    if path is not None:
        write_cache(path, json.dumps(counts_json(model)).encode())
    return model


def _config(source: ModelSource) -> str | None:
    """Return a text that identifies a model's config, or None for a model on a hub."""
    if source.kind == "card" and source.preset is not None:
        return json.dumps(source.preset.config)
    if source.kind == "folder" and source.path is not None:
        return (source.path / "config.json").read_text(encoding="utf-8")
    if source.kind == "gguf" and source.path is not None:  # gigabytes, so by size and time like a build tool
        stat = source.path.stat()
        return f"{source.path.resolve()} {stat.st_size} {stat.st_mtime_ns}"
    return None


def rules_digest() -> str:
    """Return a digest of this package's source, so that a changed rule invalidates the cache."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).resolve().parents[1].rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()
