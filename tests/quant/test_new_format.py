"""A new format is one record: checks, counts, trials and prices find it without a further edit."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from profiler.count.step import count_document
from profiler.counting.count import count
from profiler.errors import RequestError
from profiler.facts.change_ids import ChangeId
from profiler.loading.changes import Circumstances, possible_changes
from profiler.quant.registry import FORMATS, QuantFormat, known_quant, published_as, tried_formats


class Halved(nn.Linear):
    """A linear whose weights take one byte each."""


class Toybox(SimpleNamespace):
    """A library in one class, as others are in one module."""

    @staticmethod
    def quantise(_quant: str, module: nn.Module, *_: object) -> nn.Module:
        for parent in module.modules():
            for name, child in parent.named_children():
                if type(child) is nn.Linear and name != "lm_head":
                    linear = Halved(child.in_features, child.out_features, bias=False, device="meta")
                    linear.weight = nn.Parameter(linear.weight.to(torch.float8_e4m3fn), requires_grad=False)
                    setattr(parent, name, linear)
        return module


TOY = QuantFormat("toy8", library=Toybox, bits=8, is_tried=True, published_as="int8wo", written="ToyConfig()")


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> QuantFormat:
    monkeypatch.setitem(FORMATS, TOY.name, TOY)
    return TOY


@pytest.mark.usefixtures("toy")
def test_counts_store_its_bytes_and_messages_name_it() -> None:
    # SmolLM2-135M: 30 layers of 576 x (576 + 192 + 192 + 576) + 3 x 576 x 1536 weights in linears.
    in_linears = 30 * (576 * (576 + 192 + 192 + 576) + 3 * 576 * 1536)
    plain, toy = (count("smollm2-135m", dtype="bfloat16", quant=quant) for quant in ("none", "toy8"))
    assert plain.work.weight_bytes - toy.work.weight_bytes == in_linears
    assert count_document(toy).quant == "toy8"
    with pytest.raises(RequestError, match="Did you mean toy8"):
        known_quant("toy")


def test_trials_and_published_results_derive_from_it(toy: QuantFormat) -> None:
    assert tried_formats()[-1] is toy
    [change] = [each for each in possible_changes(Circumstances(True, "float16")) if each.value == toy.name]
    assert (change.id, change.line) == (ChangeId.FORMAT, "from_pretrained(..., quantization_config=ToyConfig())")
    assert published_as(toy.name) == "int8wo"
