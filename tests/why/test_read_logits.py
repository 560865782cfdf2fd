"""Logits note which positions a script reads, and otherwise behave as plain tensors."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from planted_faults import changes_to, tiny_llama

from profiler.why_slow.read_logits import watched_logits

ROWS, TOKENS, VOCABULARY = 3, 5, 7


LENGTHS = torch.tensor([2, 3, 5])
ONE_PER_ROW: dict[str, tuple[Callable[[Any], Any], int]] = {
    # read: (how, last positions that include it)
    "the last": (lambda x: x[:, -1], 1),
    "the last, as a slice": (lambda x: x[:, -1:], 1),
    "the last of one row": (lambda x: x[0, -1], 1),
    "the last of each row in turn": (lambda x: torch.stack([row[-1] for row in x]), 1),
    "the last of each length": (lambda x: x[torch.arange(ROWS), LENGTHS - 1], 4),
    "in 32 bits": (lambda x: x.float()[:, -1], 1),
    "after a softmax": (lambda x: x.softmax(-1)[:, -1], 1),
    "after argmax, of the last": (lambda x: x[:, -1].argmax(dim=-1), 1),
    "two columns, then the last": (lambda x: x[..., [2, 3]][:, -1], 1),
    "with a temperature": (lambda x: F.softmax(x[:, -1] / 0.7, dim=-1), 1),
}
MORE: dict[str, tuple[Callable[[Any], Any], int]] = {
    "the last two": (lambda x: x[1:2, -2:].log_softmax(-1).sum(), 2),
    "all but the last": (lambda x: x[:, :-1].float().log_softmax(-1), TOKENS),
    "a loss": (lambda x: F.cross_entropy(x.view(-1, VOCABULARY), torch.zeros(ROWS * TOKENS).long()), TOKENS),
    "the last, after a softmax of positions": (lambda x: x.softmax(1)[:, -1], TOKENS),
    "the last, after argmax of positions": (lambda x: x.argmax(dim=1)[:, -1], TOKENS),
    "one column of the last, after a softmax of it": (lambda x: x[..., 2].softmax(-1)[:, -1], TOKENS),
    "transposed": (lambda x: x.mT[..., -1], TOKENS),
    "its data": (lambda x: x.data[:, -2:], TOKENS),
    "all in numpy": (lambda x: torch.tensor(x.numpy().sum()), TOKENS),
    "a copy": (lambda x: copy.deepcopy(x), TOKENS),
    "pickled": (lambda x: pickle.loads(pickle.dumps(x)), TOKENS),
    "an operator of torch.ops": (lambda x: torch.ops.aten.add.Tensor(x, 1), TOKENS),
    "written to": (lambda x: x.index_fill_(1, torch.tensor([0]), 0.0), TOKENS),
}


@pytest.mark.parametrize("read", ONE_PER_ROW | MORE)
def test_a_read_has_the_values_of_a_plain_tensor_and_its_positions_are_known(read: str) -> None:
    how, last = (ONE_PER_ROW | MORE)[read]
    plain = torch.randn(ROWS, TOKENS, VOCABULARY)
    logits = watched_logits(plain.clone())
    found, expected = how(logits), how(plain)
    assert torch.equal(torch.as_tensor(found.tolist()), torch.as_tensor(expected.tolist()))
    assert (logits.read.at_most_one_per_row, logits.read.last) == (read in ONE_PER_ROW, last)


def test_a_shape_is_no_read() -> None:
    logits = watched_logits(torch.randn(ROWS, TOKENS, VOCABULARY))
    assert (logits.shape, len(logits), logits.dtype) == ((ROWS, TOKENS, VOCABULARY), ROWS, torch.float32)
    assert (logits.read.places, logits.read.last) == ([], 0)


IDS = torch.ones(2, 8, dtype=torch.long)
SCORERS: dict[str, tuple[Callable[[Any], Any], str | None]] = {
    "a reranker": (lambda model: model(IDS).logits[:, -1, [3, 5]].sum(), "pass logits_to_keep=1"),
    "rows of several lengths": (
        lambda model: model(IDS).logits[torch.arange(2), torch.tensor([4, 7])].sum(),
        "pad on the left, and pass logits_to_keep=1",
    ),
    "a continuation": (lambda model: model(IDS).logits[0, 5:-1].log_softmax(-1).sum(), "pass logits_to_keep=3"),
    "all positions": (lambda model: model(IDS).logits[:, :-1].log_softmax(-1).sum(), None),
    "a loss": (lambda model: model(IDS, labels=IDS).loss, None),
    "only the last computed": (lambda model: model(IDS, logits_to_keep=1).logits[:, -1].sum(), None),
    "one call of two reads all": (lambda model: [model(IDS).logits[:, -1].sum(), model(IDS).logits.sum()], None),
}


@pytest.mark.parametrize("scorer", SCORERS)
def test_logits_that_nobody_reads_are_left_out(scorer: str) -> None:
    script, change = SCORERS[scorer]
    model = tiny_llama()
    found = changes_to(lambda: script(model)).get("all-logits")
    assert (found.change if found else None) == change
    if found:
        assert found.changed().logits.shape[1] == int(found.change[-1])  # type: ignore[attr-defined]


def test_compiled_code_gets_plain_logits() -> None:
    """Its code is specialised to the class of a tensor."""
    model = tiny_llama()
    classes = []

    def run() -> None:
        torch.compile(lambda x: x, backend="eager")
        classes.append(type(model(IDS).logits))

    changes_to(run)
    assert classes == [torch.Tensor]
