"""Which changes work where, and how they are written."""

from __future__ import annotations

import importlib
import re
from dataclasses import replace

import pytest

from profiler.facts.change_ids import ChangeId
from profiler.loading.changes import Circumstances, possible_changes
from profiler.quant.registry import FORMATS

HOMES = ("transformers", "torchao.quantization", "torchao.prototype.quantization.int4")
H100 = Circumstances(True, "bfloat16", capability=9.0, kernel="cudnn", grouped_heads=True, layers=32, int4_group=128)
T4 = replace(H100, dtype="float16", capability=7.5, kernel="math")
CPU = Circumstances(False, "float32", kernel="flash", grouped_heads=True, threads=4, cores=2, layers=30, int4_group=64)
ON_GPU = "cuda-graph compiled-step compiled-forward 8-bit-cache eager-attention"


@pytest.mark.parametrize(
    ("here", "ids"),
    [
        (H100, f"float16 int4wo nf4 int8wo int8 {ON_GPU} without-cudnn"),
        # A T4 has no matmuls in bfloat16, torchao's kernels need 8.0, and grouped heads leave the math kernel.
        (T4, f"nf4 int8 {ON_GPU} repeated-heads"),
        (
            replace(H100, capability=8.0, kernel="flash", grouped_heads=False),
            f"float16 int4wo nf4 int8wo int8 {ON_GPU}",
        ),
        # generate compiles no model of bitsandbytes, and no graph replays a window.
        (
            replace(H100, quant="nf4"),
            "bfloat16 float16 int4wo int8wo int8 cuda-graph static-cache 8-bit-cache eager-attention without-cudnn",
        ),
        (
            replace(H100, windowed=True, quantised_cache=False),
            "float16 int4wo nf4 int8wo int8 compiled-step compiled-forward eager-attention without-cudnn unwindowed",
        ),
        (
            replace(H100, experts="grouped_mm", kernel="flash", int4_group=None),
            f"float16 nf4 int8wo int8 {ON_GPU} batched_mm eager",
        ),
        (
            CPU,
            "bfloat16 float16 int4wo nf4 int8wo int8 static-cache compiled-forward 8-bit-cache eager-attention 2",
        ),
        (
            replace(CPU, threads=2, cores=2, attention="eager", packs=False),
            "bfloat16 float16 static-cache compiled-forward 8-bit-cache sdpa-attention 1",
        ),
        (
            replace(CPU, threads=1, cores=2, attention="flex_attention", quantised_cache=False, packs=False),
            "bfloat16 float16 static-cache compiled-forward 2",
        ),
    ],
)
def test_only_changes_that_work_here_are_possible(here: Circumstances, ids: str) -> None:
    """Dtypes, formats, experts and threads are named by which they are."""
    assert [change.value or change.id for change in possible_changes(here)] == ids.split()


def test_a_change_is_written_as_its_user_writes_it_here() -> None:
    """bitsandbytes computes in float32 unless it is told otherwise, which a GPU without its units would notice."""
    lines = {change.phrase: change.line for change in possible_changes(CPU)}
    assert lines["bfloat16 weights"] == "from_pretrained(..., dtype=torch.bfloat16)"
    assert "dtype=torch.bfloat16, quantization_config=" in lines["nf4 weights"]
    assert lines["2 of 4 threads"] == "torch.set_num_threads(2)"
    assert "group_size=64" in lines["int4wo weights"]
    assert lines["torch.compile"] == (
        'model.forward = torch.compile(model.forward); model.generate(..., cache_implementation="static")'
    )
    on_t4 = {change.phrase: change.line for change in possible_changes(T4)}
    assert "bnb_4bit_compute_dtype=torch.float16" in on_t4["nf4 weights"]
    assert [phrase for phrase, line in on_t4.items() if not line] == ["one CUDA graph per step"]


@pytest.mark.parametrize("here", [CPU, H100], ids=["CPU", "H100"])
def test_every_name_of_a_line_exists(here: Circumstances) -> None:
    for change in possible_changes(here):
        for name in re.findall(r"[A-Z][A-Za-z0-9]+(?:Config|Cache)\b", change.line):
            assert any(hasattr(importlib.import_module(home), name) for home in HOMES), name


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "none"])
def test_generate_compiles_the_formats_whose_quantizer_says_so(name: str) -> None:
    from transformers.quantizers import auto

    method = "torchao" if FORMATS[name].package == "torchao" else f"bitsandbytes_{FORMATS[name].bits:.0f}bit"
    quantizer = object.__new__(auto.AUTO_QUANTIZER_MAPPING[method])
    assert FORMATS[name].compileable == bool(quantizer.is_compileable)


def test_unquantised_weights_are_asked_for_in_a_quantised_script() -> None:
    """A script that passes a quantization_config would keep it with the dtype alone."""
    dense, nf4 = (possible_changes(replace(H100, quant=quant)) for quant in ("none", "nf4"))
    lines = [{item.value: item.line for item in each if item.id is ChangeId.DTYPE} for each in (dense, nf4)]
    assert lines[0]["float16"] == "from_pretrained(..., dtype=torch.float16)"
    assert lines[1]["float16"] == "from_pretrained(..., dtype=torch.float16, quantization_config=None)"
