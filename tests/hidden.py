"""The command line as it is where a package is missing.

`python tests/hidden.py gguf run ...` runs it in a process of its own, hurried, that can neither import gguf nor find
what its installation left behind.
"""

from __future__ import annotations

import importlib.metadata
import sys

import pytest
from hurry import hurry


def hide(patch: pytest.MonkeyPatch, package: str) -> None:
    """Within `patch` neither `import` nor `importlib.metadata` finds `package`, named as `pip install` names it."""
    found = importlib.metadata.Distribution.from_name

    def from_name(name: str) -> importlib.metadata.Distribution:
        if name.replace("_", "-").lower() == package:
            raise importlib.metadata.PackageNotFoundError(name)
        return found(name)

    module = package.replace("-", "_")
    for name in [name for name in sys.modules if name.startswith(f"{module}.")]:
        patch.delitem(sys.modules, name)
    patch.setitem(sys.modules, module, None)
    patch.setattr(importlib.metadata.Distribution, "from_name", from_name)


if __name__ == "__main__":
    lasting = pytest.MonkeyPatch()
    hide(lasting, sys.argv.pop(1))
    from profiler.cli.app import main

    hurry(lasting)
    main()
