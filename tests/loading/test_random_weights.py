"""Random weights: the right dtype and format, no full-precision copy, and a model that steps."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from loaded import loaded

from profiler.quant.registry import PLAIN, Quant, QuantOptions

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("weights", ["random", "checkpoint"])
def test_a_prefill_runs_the_operators_of_a_plain_one(tiny_folder: Path, weights: Any) -> None:
    """torch folds the last positions of a batch into one product if the weight requires gradients.

    Weights that transformers loads require them. Without gradients torch copies the weight for each position, and a
    prefill takes five times as long.
    """
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.bfloat16).eval()
    module = loaded(tiny_folder, torch.bfloat16, weights=weights).module
    assert operator_counts(module) == operator_counts(plain)
    with_gradients = operator_counts(plain)["aten::bmm"]
    assert with_gradients == operator_counts(plain.requires_grad_(False))["aten::bmm"] - 1


def operator_counts(model: Any) -> Counter[str]:
    """Count the calls of each operator in a prefill of a batch that computes the last logits only."""
    with torch.inference_mode(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(torch.arange(16).reshape(2, 8), logits_to_keep=1)
    return Counter({row.key: row.count for row in profile.key_averages()})


PEAK = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from loaded import load_config, loaded, resolve
from machines import HOST
import transformers, accelerate, bitsandbytes
transformers.AutoModelForCausalLM._model_mapping[type(load_config(resolve(sys.argv[2])))]
torch.randn(64, 64) @ torch.randn(64, 64)
HOST.reset_peak(); before = HOST.peak_bytes()
loaded(sys.argv[2], torch.bfloat16, quant=sys.argv[3], weights="random")
print((HOST.peak_bytes() - before) / 1e9)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("quant", "least_gb", "most_gb"), [("none", 2.0, 2.9), ("nf4", 0.5, 2.0)])
def test_no_wider_copy_of_the_model_ever_exists(quant: str, least_gb: float, most_gb: float) -> None:
    """TinyLlama is 2.2 GB in bfloat16, three times that with a float32 copy, and 0.75 GB in nf4 with its tables."""
    command = [sys.executable, "-c", PEAK, str(Path(__file__).parents[1]), "tinyllama-1.1b", quant]
    out = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert least_gb < float(out.stdout) < most_gb


FORMATS: list[tuple[Quant, QuantOptions, bool]] = [
    *(("nf4", options, fused) for options in (PLAIN, QuantOptions(double=True)) for fused in (False, True)),
    *((quant, PLAIN, False) for quant in ("fp4", "int8", "int8wo", "int4wo", "fp8")),
]


def layout(layer: Any) -> dict[str, Any]:
    """Describe a quantised weight by attribute: shape, dtype, bytes and order of tensors; other values unchanged."""
    weight = layer.weight
    parts: dict[str, Any] = {"type": type(weight).__name__}

    def add(key: str, value: Any) -> None:
        if isinstance(value, torch.Tensor) and hasattr(value, "__tensor_flatten__"):
            for name in value.__tensor_flatten__()[0]:
                add(f"{key}.{name}", getattr(value, name))
        elif isinstance(value, torch.Tensor):
            parts[key] = (tuple(value.shape), value.dtype, value.untyped_storage().nbytes(), value.is_contiguous())
        elif type(value).__name__ == "QuantState":
            for name, part in vars(value).items():
                if part is not None:
                    add(f"{key}.{name}", part)
        else:
            parts[key] = value

    add("data", weight.data)
    for name in ("quant_state", "SCB", "CB", "bnb_quantized", "blocksize", "quant_type", "compress_statistics"):
        if hasattr(weight, name):
            add(name, getattr(weight, name))
    if hasattr(layer, "state"):
        add("state.SCB", layer.state.SCB)
        add("state.CB", layer.state.CB)
    return parts


@pytest.mark.parametrize(("quant", "options", "fused"), FORMATS)
def test_random_weights_have_the_layout_of_quantised_ones(
    tiny_folder: Path, answer_cpu_probe: Callable[[bool], None], quant: Quant, options: QuantOptions, fused: bool
) -> None:
    """After the first step, tensors have the same shape, order, dtype and storage, and other attributes are equal.

    transformers initialises a Llama with a standard deviation of 0.02, like the random weights.
    """
    if quant in ("int8wo", "int4wo", "fp8"):
        pytest.importorskip("torchao")
    answer_cpu_probe(fused)
    quantised, random = (
        loaded(tiny_folder, torch.bfloat16, quant=quant, quant_options=options, weights=weights).module.model.layers[0]
        for weights in ("checkpoint", "random")
    )
    inputs = torch.randn(4096, 128, dtype=torch.bfloat16)
    for name in ("self_attn.k_proj", "mlp.up_proj", "mlp.down_proj"):
        layer = random.get_submodule(name)
        assert layout(layer) == layout(quantised.get_submodule(name))
        with torch.inference_mode():
            products = layer(inputs[:, : layer.in_features]).float()
        assert products.std().item() == pytest.approx(0.02 * layer.in_features**0.5, rel=0.1)
