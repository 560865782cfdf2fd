"""The requirements that stacks.py gives to pip, and its outcomes of steps."""

from __future__ import annotations

from pathlib import Path
from subprocess import CompletedProcess

import pytest
from stacks import STACKS, Step, judged, requirements

WHEEL = Path("roofscope.whl")


@pytest.mark.parametrize("name", ["bare", "bare-2.13"])
def test_a_bare_stack_asks_for_all_that_is_declared_but_what_it_lacks(name: str, tmp_path: Path) -> None:
    asked = requirements(name, WHEEL, tmp_path)
    assert {"pandas>=2.1", "pydantic>=2.6", "transformers==5.17.0", f"torch=={STACKS[name].pinned['torch']}"} <= {
        *asked
    }
    assert not any(word in text for text in asked for word in ("bitsandbytes", "gguf", "torchao", "compressed-tensors"))
    constraints = (tmp_path / "constraints.txt").read_text()
    assert "pandas==" in constraints
    assert "transformers==" not in constraints


def test_the_lowest_stacks_ask_for_the_lowest_versions(tmp_path: Path) -> None:
    """The extra `formats` requires a newer torch than the dependencies."""
    asked = requirements("lowest", WHEEL, tmp_path)
    assert {"torch==2.7.*", "transformers==5.10.1.*", "bitsandbytes==0.49.*"} <= {*asked}
    assert "torchao==0.18.*" not in asked
    asked = requirements("lowest-formats", WHEEL, tmp_path)
    assert {"torch==2.10.*", "transformers==5.10.1.*", "torchao==0.18.*"} <= {*asked}
    assert "torch==2.7.*" not in asked


REFUSED = "roofscope: --quant nf4 needs bitsandbytes: pip install bitsandbytes.\n"


@pytest.mark.parametrize(
    ("lacks", "code", "out", "err", "outcome"),
    [
        ("", 0, "1 passed\n", "", "ok"),
        ("", 1, "", "boom\n", "failed"),
        ("", 0, "SKIPPED [1] test.py:1: no card\n1 skipped\n", "", "not run"),
        ("bitsandbytes", 2, "", REFUSED, "refused"),
        ("bitsandbytes", 0, "done\n", "", "failed"),
        ("bitsandbytes", 1, "", REFUSED, "failed"),
        ("bitsandbytes", 2, "", f"a warning\n{REFUSED}", "failed"),
        ("torchao", 2, "", REFUSED, "failed"),
    ],
)
def test_how_a_step_is_judged(lacks: str, code: int, out: str, err: str, outcome: str) -> None:
    found, _ = judged(Step("a step", ["a", "command"], lacks), CompletedProcess([], code, out, err), ())
    assert found == outcome


@pytest.mark.parametrize(("line", "outcome"), [("roofscope 0.2.0 requires gguf", "ok"), ("a 1 requires b", "failed")])
def test_pip_may_only_miss_what_the_stack_lacks(line: str, outcome: str) -> None:
    ended = CompletedProcess([], 1, f"{line}, which is not installed.\n", "")
    assert judged(Step("pip check", ["pip", "check"]), ended, ("gguf",))[0] == outcome
