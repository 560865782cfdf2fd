"""What is kept of the cards is what the walk counts today."""

from __future__ import annotations

import pytest
from counted import document

from profiler.job.count import model_work
from profiler.loading.catalog import card_names
from profiler.work.counted import counted
from profiler.work.step import Step

STEPS = (Step(4, 512, 0), Step(8, 1, 1024))


@pytest.mark.parametrize("card", card_names())
def test_what_is_kept_is_what_is_counted(card: str) -> None:
    """Where this fails after a change that is meant, `python tests/work/counted.py` writes the file anew."""
    kept, walked = counted(card), model_work(card)
    assert kept is not None
    assert document(kept) == document(walked)
    assert [kept.work(step) for step in STEPS] == [walked.work(step) for step in STEPS]


def test_what_is_not_kept_is_none() -> None:
    assert counted("a model that has no card") is None
