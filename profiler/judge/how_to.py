"""How a user of transformers makes a change, and which options of `roofscope run` measure it on the whole model."""

from __future__ import annotations

from dataclasses import dataclass

from profiler.facts.measurements import COMPILED, EIGHT_BIT_CACHE, GRAPHED, REPEATED_HEADS, STATIC_CACHE, WITHOUT_CUDNN

SIXTEEN_BIT_DTYPE = "a 16-bit dtype"
FOUR_BIT_WEIGHTS = "4-bit weights"


@dataclass(frozen=True)
class HowTo:
    """A line to paste, and options to add to the command of a run."""

    line: str
    options: str = ""


_STATIC = 'model.generate(..., cache_implementation="static")'
_FOUR_BIT = 'from_pretrained(..., quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="{}"))'
_TORCHAO = "from_pretrained(..., quantization_config=TorchAoConfig({}()))"

_HOW: dict[str, HowTo] = {
    STATIC_CACHE: HowTo("past_key_values=StaticCache(config=model.config, max_cache_len=...)", "--engine eager,static"),
    EIGHT_BIT_CACHE: HowTo('past_key_values=QuantizedCache("fp8", model.config)', "--cache dynamic,fp8"),
    WITHOUT_CUDNN: HowTo("torch.backends.cuda.enable_cudnn_sdp(False)"),
    REPEATED_HEADS: HowTo("transformers.integrations.sdpa_attention.use_gqa_in_sdpa = lambda *_: False"),
    SIXTEEN_BIT_DTYPE: HowTo("from_pretrained(..., dtype=torch.bfloat16)", "--dtype bfloat16"),
    "bfloat16": HowTo("from_pretrained(..., dtype=torch.bfloat16)", "--dtype bfloat16"),
    "float16": HowTo("from_pretrained(..., dtype=torch.float16)", "--dtype float16"),
    FOUR_BIT_WEIGHTS: HowTo(_FOUR_BIT.format("nf4"), "--quant none,nf4"),
    "nf4": HowTo(_FOUR_BIT.format("nf4"), "--quant none,nf4"),
    "fp4": HowTo(_FOUR_BIT.format("fp4"), "--quant none,fp4"),
    "int8": HowTo(
        "from_pretrained(..., quantization_config=BitsAndBytesConfig(load_in_8bit=True))", "--quant none,int8"
    ),
    "int8wo": HowTo(_TORCHAO.format("Int8WeightOnlyConfig"), "--quant none,int8wo"),
    "int4wo": HowTo(_TORCHAO.format("Int4WeightOnlyConfig"), "--quant none,int4wo"),
    "fp8": HowTo(_TORCHAO.format("Float8DynamicActivationFloat8WeightConfig"), "--quant none,fp8"),
}


_ON_CPU = {"int4wo": "PrototypeInt4WeightOnlyConfig", "fp8": "Float8WeightOnlyConfig"}
"""torchao's configurations on a CPU, where they differ from those on a GPU (`quant/formats.py`)."""


def how_to(change: str, on_gpu: bool) -> HowTo:
    """Return how a change is made; an empty line if it has none.

    transformers' `generate` compiles the step of a static cache, and replays it as a graph, on a GPU only
    (generation/utils.py, `_valid_auto_compile_criteria`).
    """
    if change in (GRAPHED, COMPILED):
        engine = "graph" if change == GRAPHED else "compile"
        line = _STATIC if on_gpu else "model.forward = torch.compile(model.forward)  # and a StaticCache"
        return HowTo(line, f"--engine eager,{engine}")
    if change in _ON_CPU and not on_gpu:
        return HowTo(_TORCHAO.format(_ON_CPU[change]), f"--quant none,{change}")
    return _HOW.get(change, HowTo(""))
