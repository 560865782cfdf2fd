"""Answers with and without drafts, which have the same tokens."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from machines import ceiling
from subjects import subject_of

from profiler.errors import RequestError
from profiler.facts.ceilings import READ, Ceilings
from profiler.facts.measurements import DraftFloor, Drafting
from profiler.measure import answers as measuring
from profiler.measure.answers import NGRAM, Draft, draft_of, measure_drafts
from profiler.measure.subject import Subject
from profiler.patching import patched
from profiler.store.folder import read_run

CEILINGS = Ceilings({"float32": ceiling(1e10)}, {READ: ceiling(1e10)}, 1 << 23, beyond_cache=True)
NEW_TOKENS, PROMPT_LEN = 16, 48


@pytest.fixture(scope="module")
def subject(short_folder: Path) -> Subject:
    """Six layers of a real model, which repeat themselves, on a grid of two batches."""
    return subject_of(str(short_folder), batch_sizes=[1, 8], new_tokens=NEW_TOKENS)[0]


def draft_for(subject: Subject, name: str) -> Draft:
    """The drafts on the beginning of the built-in text."""
    draft = draft_of(name, subject.request, subject.loaded.config, NEW_TOKENS)
    return replace(draft, prompt=draft.prompt[:PROMPT_LEN])


def drafting(subject: Subject, name: str) -> Drafting:
    with patched(measuring, _TURNS=1):
        return measure_drafts(subject, draft_for(subject, name), NEW_TOKENS, CEILINGS)


def check(found: Drafting) -> None:
    """The steps' tokens are the answer's: each gives what it accepted and one more."""
    assert found.same_tokens == found.new_tokens == NEW_TOKENS
    assert sum(found.accepted) + len(found.accepted) == NEW_TOKENS
    assert all(0 <= kept <= drafted for kept, drafted in zip(found.accepted, found.drafted, strict=True))
    for drafting_s, assisted_s in zip(found.drafting_s, found.assisted_s, strict=True):
        assert 0 < drafting_s < assisted_s or not found.steps


@pytest.mark.ci
def test_ngrams(subject: Subject) -> None:
    """The same lookup by hand: after the last two tokens, or else one, the ten that followed them at first."""
    found = drafting(subject, NGRAM)
    check(found)
    model: Any = subject.loaded.module
    ids = torch.tensor([draft_for(subject, NGRAM).prompt])
    with torch.inference_mode():
        tokens = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False)
    text, place, accepted = tokens[0].tolist(), PROMPT_LEN, []
    while place < len(text):
        proposed = looked_up(text[:place])
        right = 0
        while right < len(proposed) and place + right < len(text) - 1 and proposed[right] == text[place + right]:
            right += 1
        accepted.append(right)
        place += right + 1
    assert list(found.accepted) == accepted


def looked_up(text: list[int]) -> list[int]:
    for size in (2, 1):
        for start in range(len(text) - size):
            if text[start : start + size] == text[-size:]:
                return text[start + size : start + size + 10]
    return []


@pytest.mark.slow
def test_a_draft_that_is_the_model_itself_is_always_right(subject: Subject, short_folder: Path) -> None:
    """All drafts are accepted, so there are far fewer steps than tokens. A draft costs a step of the model."""
    found = drafting(subject, str(short_folder))
    check(found)
    assert found.accepted == found.drafted
    assert found.steps < NEW_TOKENS / 4
    # Ceilings of 1e10: a float32 weight takes 4 bytes and 2 FLOPs per row, so from 2 rows on arithmetic binds the
    # linears.
    one, eight = found.floors
    rows = 1 + one.drafted
    assert one.verifying_s == pytest.approx(max(1, rows / 2) * one.one_token_s, rel=0.05)
    assert eight.verifying_s == pytest.approx(rows * eight.one_token_s, rel=0.05)
    assert one.drafting_s == pytest.approx(one.drafted * one.one_token_s, rel=0.05)


def test_speedup_and_verdict() -> None:
    """Ten of eleven tokens come after the first step, in half of the time: 2 x 10 / 11."""
    floor = DraftFloor(1, 4, one_token_s=1.0, verifying_s=1.2, drafting_s=0.3)
    found = Drafting("d", 9, 12, 12, (4, 4, 4, 4), (1, 3, 2, 2), (5.0, 5.0), (1.0, 1.0), (10.0, 10.0), (floor,))
    assert found.tokens_per_step == 1 + 7 / 3
    assert found.speedups == pytest.approx((20 / 11, 20 / 11))
    assert found.pays is True
    assert replace(found, assisted_s=(5.0, 15.0)).pays is None
    # The plain answer ended with 15 tokens in 0.75 s after the first; the other went on, with 6 x 5 in a second.
    longer = Drafting("d", 9, 16, 15, (4,) * 7, (1, 4, 4, 4, 4, 4, 4), (1.0,), (0.1,), (0.75,), ())
    assert longer.speedups == (30 / 15 * 0.75,)
    assert replace(longer, new_tokens=1).pays is None


def test_refused_in_one_line(subject: Subject, tiny_folder: Path, roofscope: Callable[..., Any]) -> None:
    with pytest.raises(RequestError, match=r"its vocabulary has 128 tokens, and that of \S+ 49152; use a draft model"):
        drafting(subject, str(tiny_folder))
    with pytest.raises(RequestError, match="random ones are never right"):
        drafting(subject, "smollm2-135m")
    found = roofscope("run", "smollm2-135m", "--draft", "ngram")
    assert found.code == 2
    assert "has random weights here, which accept no draft" in found.err


@pytest.mark.ci
def test_whether_drafts_pay(gguf_file: Path, short_folder: Path, roofscope: Callable[..., Any], tmp_path: Path) -> None:
    """The whole model with its first six layers: measured at batch 1, and computed at batch 4."""
    arguments = ("run", str(gguf_file), "--prompt-lens", "16", "--batch-sizes", "1,4", "--new-tokens", "16")
    folder = tmp_path / "run"
    found = roofscope(
        *arguments, "--budget", "5", "--no-trials", "--full", "--draft", str(short_folder), "--out", str(folder)
    )
    assert found.code == 0, found.err
    screen = " ".join(found.out.split())
    assert f"drafts of {short_folder.name} at batch 1:" in screen
    assert "16, the same as without drafts" in screen
    drafting = read_run(folder).document.drafting
    assert drafting is not None
    assert [floor.batch for floor in drafting.floors] == [1, 4]
    assert "at batch 1: " in (folder / "report.html").read_text(encoding="utf-8")
