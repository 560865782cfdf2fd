"""The page of real scripts has their answers, and `why` finds the causes in its fast scripts."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from real.__main__ import table
from real.corpus import saved_answers, scripts
from real.runs import run_why


def test_the_page_has_the_table() -> None:
    page = Path(__file__).parent / "real/README.md"
    assert table(saved_answers()) in page.read_text(), "run `python -m tests.why.real table`"


@pytest.mark.slow
@pytest.mark.timing
@pytest.mark.parametrize("name", ["embed_padded", "embed_notes", "chat"])
@pytest.mark.usefixtures("gguf_file")
def test_the_cause_comes_first(name: str) -> None:
    """The models are in bfloat16, which is a cause of its own on a CPU that emulates it."""
    [script] = scripts([name])
    found, emulates = run_why(script), not torch.cpu._is_avx512_bf16_supported()
    others = tuple(item for item in found.findings if not emulates or item[0] != "emulated-dtype")
    verdict = replace(found, findings=others).verdict(script)
    assert (verdict.first, verdict.false) == (True, ())
