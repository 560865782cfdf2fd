"""Which changes work where, and how they are written."""

import importlib
import re
from dataclasses import replace

import pytest

from profiler.loading.changes import Circumstances, possible_changes
from profiler.quant.registry import FORMATS

HOMES = ("transformers", "torchao.quantization", "torchao.prototype.quantization.int4")
H100 = Circumstances(True, "bfloat16", capability=9.0, kernel="cudnn", grouped_heads=True, layers=32, int4_group=128)
T4 = replace(H100, dtype="float16", capability=7.5, kernel="math")
CPU = Circumstances(False, "float32", kernel="flash", grouped_heads=True, threads=4, cores=2, layers=30, int4_group=64)


@pytest.mark.parametrize(
    ("here", "possible", "impossible"),
    [
        (H100, "float16 int4wo nf4 int8wo cuda-graph without-cudnn", "bfloat16 unwindowed repeated-heads"),
        # A T4 has no matmuls in bfloat16, torchao's kernels need 8.0, and grouped heads leave the math kernel.
        (T4, "nf4 int8 cuda-graph repeated-heads", "bfloat16 int4wo int8wo without-cudnn"),
        (replace(H100, capability=8.0, kernel="flash", grouped_heads=False), "int4wo", "without-cudnn repeated-heads"),
        # generate compiles no model of bitsandbytes, and no graph replays a window.
        (replace(H100, quant="nf4"), "bfloat16 int8wo static-cache", "nf4 compiled-step compiled-forward"),
        (replace(H100, windowed=True, quantised_cache=False), "compiled-step unwindowed", "cuda-graph 8-bit-cache"),
        (replace(H100, experts="grouped_mm", int4_group=None), "batched_mm eager nf4", "grouped_mm int4wo"),
        (CPU, "bfloat16 static-cache compiled-forward 8-bit-cache eager-attention 2", "cuda-graph compiled-step 4"),
        (replace(CPU, threads=2, attention="eager", packs=False), "sdpa-attention 1", "nf4 int8 eager-attention 2"),
        (replace(CPU, threads=1, attention="flex_attention"), "2", "1 sdpa-attention eager-attention"),
    ],
)  # fmt: skip
def test_only_changes_that_work_here_are_possible(here: Circumstances, possible: str, impossible: str) -> None:
    """Dtypes, formats, experts and threads are named by which they are."""
    found = {str(change.value or change.id) for change in possible_changes(here)}
    assert found >= {*possible.split()}
    assert not found & {*impossible.split()}


STATIC = 'cache_implementation="static")'


@pytest.mark.parametrize(
    ("here", "phrase", "words"),
    [
        (CPU, "bfloat16 weights", "from_pretrained(..., dtype=torch.bfloat16)"),
        # bitsandbytes computes in float32 unless it is told otherwise, which a GPU without its units would notice.
        (CPU, "nf4 weights", "dtype=torch.bfloat16, quantization_config="),
        (T4, "nf4 weights", "bnb_4bit_compute_dtype=torch.float16"),
        (CPU, "int4wo weights", "group_size=64"),
        (CPU, "2 of 4 threads", "torch.set_num_threads(2)"),
        (CPU, "torch.compile", f"model.forward = torch.compile(model.forward); model.generate(..., {STATIC}"),
        (H100, "float16 weights", "from_pretrained(..., dtype=torch.float16)"),
        # A script that passes a quantization_config would keep it with the dtype alone.
        (replace(H100, quant="nf4"), "float16 weights", "(..., dtype=torch.float16, quantization_config=None)"),
    ],
)
def test_a_change_is_written_as_its_user_writes_it_here(here: Circumstances, phrase: str, words: str) -> None:
    lines = {change.phrase: change.line for change in possible_changes(here)}
    assert words in lines[phrase]
    assert {phrase for phrase, line in lines.items() if not line} <= {"one CUDA graph per step"}


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
