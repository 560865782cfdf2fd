"""Each test of `why` begins as a script does: with nothing compiled, in an interpreter that nothing has changed."""

import sys

import pytest


@pytest.fixture(autouse=True)
def nothing_is_compiled() -> None:
    """Another test of this process may have compiled code, whose logits `why` does not watch."""
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()
        dynamo.utils.counters.clear()
        dynamo.utils.clear_compilation_metrics()


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a script changes of the interpreter is set back."""
    for name, value in {"argv": [*sys.argv], "path": ["", *sys.path], "excepthook": sys.excepthook}.items():
        monkeypatch.setattr(sys, name, value)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
