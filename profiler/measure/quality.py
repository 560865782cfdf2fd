"""A sanity check of quantisation: next-token distributions of the quantised and the unquantised model."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from profiler.facts.measurements import Quality
from profiler.loading.config import load_config
from profiler.loading.load import load
from profiler.loading.meta_model import quiet_libraries
from profiler.loading.prompts import load_tokenizer
from profiler.loading.request import LoadedModel, ModelRequest
from profiler.quant.registry import PLAIN

TEXT = (
    "The harbour was quiet in the morning. Two boats came back before the wind rose, and the men unloaded crates of"
    " mackerel on the wet stones. A child asked why the sea is salt, and her grandfather explained that rivers carry"
    " minerals from the hills, and that water leaves the sea as vapour while the salt remains. In 1872 the engineer"
    " wrote that the new bridge would cost forty thousand pounds, about three times the first estimate, because the"
    " ground under the northern pier was softer than anyone had supposed. To compute the mean of a list of numbers,"
    " add them together and divide the sum by how many there are: def mean(values): return sum(values) / len(values)."
    " Paris is the capital of France, and Rome that of Italy. When the lamp went out, nobody spoke for a while; then"
    " somebody laughed, and the talk began again where it had stopped."
)
"""Narrative, a date, an explanation, a line of code and two facts; written for this purpose."""


def text_ids(request: ModelRequest, option: str) -> list[int]:
    """Return the built-in text in the model's own tokens. Raises RequestError, naming `option`, without a tokenizer."""
    tokenizer = load_tokenizer(request.source, option, trust_remote_code=request.trust_remote_code)
    return list(tokenizer(TEXT).input_ids)


def compare_logits(reference: torch.Tensor, quantised: torch.Tensor) -> Quality:
    """Return the difference of two tensors of logits, [positions, vocabulary], of the same text."""
    expected = F.log_softmax(reference.float(), dim=-1)
    actual = F.log_softmax(quantised.float(), dim=-1)
    divergence = F.kl_div(actual, expected, log_target=True, reduction="none").sum(-1)
    same = expected.argmax(-1) == actual.argmax(-1)
    return Quality(float(divergence.mean()), float(same.float().mean()), len(expected))


def check_quality(loaded: LoadedModel, ids: Sequence[int]) -> Quality:
    """Compare a quantised model with its unquantised checkpoint, which is loaded next to it for one pass."""
    request = loaded.request
    quantised = _logits(loaded.module, ids, request.device)
    config = load_config(request.source, request.trust_remote_code)
    plain = load(replace(request, quant="none", quant_options=PLAIN), config)
    return compare_logits(_logits(plain.module, ids, request.device), quantised)


def _logits(module: Any, ids: Sequence[int], device: torch.device) -> torch.Tensor:
    with torch.inference_mode(), quiet_libraries():
        logits: torch.Tensor = module(input_ids=torch.tensor([list(ids)], device=device)).logits
    return logits[0].float().cpu()
