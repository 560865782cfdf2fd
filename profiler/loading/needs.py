"""Packages that only some features need, and the command that installs a missing one."""

from __future__ import annotations

from importlib import util

from profiler.errors import RequestError
from profiler.machine.packages import install_command, is_too_old, version_of


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
