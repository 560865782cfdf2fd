"""Packages that only some features need, and the command that installs a missing one."""

from __future__ import annotations

from importlib import util

from profiler.errors import RequestError


def has(package: str) -> bool:
    """Whether `package`, named as `pip install` names it, is installed; it is not imported."""
    try:
        return util.find_spec(package.replace("-", "_")) is not None
    except ValueError:  # sys.modules holds None for it
        return False


def need(package: str, feature: str) -> None:
    """Raises RequestError where `package` is missing; its one line names `feature` and the command that installs it.

    `package` is named as `pip install` names it; its module has underscores instead of hyphens.
    """
    if not has(package):
        raise RequestError(f"{feature} needs {package}: pip install {package}.")
