"""How a user of transformers makes a change, and which options of `roofscope run` measure it on the whole model."""

from __future__ import annotations

from dataclasses import dataclass

from profiler.facts.measurements import COMPILED, EIGHT_BIT_CACHE, GRAPHED, REPEATED_HEADS, STATIC_CACHE, WITHOUT_CUDNN
from profiler.quant.registry import FORMATS

SIXTEEN_BIT_DTYPE = "a 16-bit dtype"
FOUR_BIT_WEIGHTS = "4-bit weights"
UNWINDOWED = "grouped heads on a cache that does not roll"


@dataclass(frozen=True)
class HowTo:
    """A line to paste, and options to add to the command of a run."""

    line: str
    options: str = ""


_STATIC = 'model.generate(..., cache_implementation="static")'
_HOW: dict[str, HowTo] = {
    STATIC_CACHE: HowTo("past_key_values=StaticCache(config=model.config, max_cache_len=...)", "--engine eager,static"),
    EIGHT_BIT_CACHE: HowTo('past_key_values=QuantizedCache("fp8", model.config)', "--cache dynamic,fp8"),
    WITHOUT_CUDNN: HowTo("torch.backends.cuda.enable_cudnn_sdp(False)"),
    UNWINDOWED: HowTo("model.config.sliding_window = None"),
    REPEATED_HEADS: HowTo("transformers.integrations.sdpa_attention.use_gqa_in_sdpa = lambda *_: False"),
}
_SIXTEEN_BITS = {SIXTEEN_BIT_DTYPE: None, "bfloat16": "bfloat16", "float16": "float16"}


def how_to(change: str, on_gpu: bool, sixteen_bit_dtype: str = "bfloat16") -> HowTo:
    """Return how a change is made; an empty line if it has none. What computes in 16 bits does so in that dtype.

    bitsandbytes computes in float32 by default, whatever the model's dtype (`BitsAndBytesConfig`).
    transformers' `generate` compiles the step of a static cache, and replays it as a graph, on a GPU only
    (generation/utils.py, `_valid_auto_compile_criteria`).
    """
    if change in _SIXTEEN_BITS:
        dtype = _SIXTEEN_BITS[change] or sixteen_bit_dtype
        return HowTo(f"from_pretrained(..., dtype=torch.{dtype})", f"--dtype {dtype}")
    quant = FORMATS.get("nf4" if change == FOUR_BIT_WEIGHTS else change)
    if quant is not None and quant.written:
        written = (not on_gpu and quant.written_on_cpu) or quant.written
        line = f"from_pretrained(..., quantization_config={written.format(dtype=sixteen_bit_dtype)})"
        return HowTo(line, f"--quant none,{quant.name}")
    if change in (GRAPHED, COMPILED):
        engine = "graph" if change == GRAPHED else "compile"
        line = _STATIC if on_gpu else "model.forward = torch.compile(model.forward)  # and a StaticCache"
        return HowTo(line, f"--engine eager,{engine}")
    return _HOW.get(change, HowTo(""))
