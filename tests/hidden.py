"""An installation that lacks a package."""

from __future__ import annotations

import importlib.metadata
import sys

import pytest


def hide(patch: pytest.MonkeyPatch, package: str) -> None:
    """Hide `package`, named as `pip install` names it, from `import` and from `importlib.metadata`."""
    original = importlib.metadata.Distribution.from_name

    def from_name(name: str) -> importlib.metadata.Distribution:
        if name.replace("_", "-").lower() == package:
            raise importlib.metadata.PackageNotFoundError(name)
        return original(name)

    module = package.replace("-", "_")
    for name in [name for name in sys.modules if name.startswith(f"{module}.")]:
        patch.delitem(sys.modules, name)
    patch.setitem(sys.modules, module, None)
    patch.setattr(importlib.metadata.Distribution, "from_name", from_name)
