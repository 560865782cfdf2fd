"""The options of a run, defined once for the command line, `batch-test` and Python."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from profiler.engines.names import ANY_QUANTIZED, CACHES, ENGINE_NAMES, check_engine_name
from profiler.errors import RequestError
from profiler.facts.cache_format import CACHE_FORMATS
from profiler.grid.cells import DEFAULT_ENGINE
from profiler.grid.ragged import RAGGED, Ragged
from profiler.grid.ranges import check_new_tokens, values_of
from profiler.options import DTYPE_NAMES, check_device_name, listed, model_argument, one_of, option
from profiler.quant.registry import check_packed_dtype, check_quant_options, known_quant, quant_help

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_NEW_TOKENS = 32
"""Tokens of a grid that is named without them."""


@dataclass(frozen=True)
class Options:
    """The options of `roofscope run` and `batch-test`, and the arguments of `profiler.profile`.

    Lengths and sizes are numbers, or texts in the range grammar of the command line. Raises RequestError for a name
    that does not exist and for a value out of range, without importing torch.
    """

    model: str | None = model_argument(default=None, shown=DEFAULT_MODEL)
    prompt_lens: str | Sequence[int] | Ragged | None = option(
        None,
        "Prompt lengths: 128, or 64,256, or 64..2048*2; for unequal prompts ragged:32..512 or ragged:FILE.",
        shown="the first default grid for which there is time",
    )
    prompts: Path | str | None = option(
        None,
        "File of real prompts: a text per line, or JSON lines with prompt or messages. Their lengths are the grid;"
        " --prompt-lens cuts them to others.",
        metavar="FILE",
    )
    context_lens: str | Sequence[int] = option("", "Decode with this many tokens in the KV cache, without a prefill.")
    batch_sizes: str | Sequence[int] | None = option(
        None, "Batch sizes, in the same grammar.", shown="those of the default grid"
    )
    new_tokens: int | None = option(None, "Tokens to decode after each prompt.", shown="10 to 32, by the grid")
    dtype: str = option("auto", "auto, float32, bfloat16 or float16.")
    quant: str = option("none", f"{quant_help()}; or several: none,nf4.")
    double_quant: bool = option(False, "nf4, fp4: quantise the scales too.")
    compute_dtype: str = option("auto", "nf4, fp4: the dtype of the matmuls.")
    weights: str = option("auto", "auto, checkpoint or random (nothing is downloaded).")
    engine: str = option(
        DEFAULT_ENGINE,
        f"How the model is stepped: {', '.join(ENGINE_NAMES)}; or several: eager,vllm.",
    )
    cache: str = option(
        "",
        f"KV cache of eager steps: {ANY_QUANTIZED} (the first that works of {', '.join(CACHE_FORMATS)}); or several:"
        " dynamic,fp8.",
        shown="dynamic",
    )
    attn: str | None = option(None, "Attention implementation, such as sdpa or eager.")
    tp: int = option(1, "Ranks to split the model over (tensor parallelism), one per GPU; starts torchrun if needed.")
    device: str = option("auto", "auto, cpu, cuda or cuda:N; or several, one after the other: cuda:0,cuda:1.")
    out: Path | str | None = option(None, "Run folder (default: a new one under runs/).")
    budget_s: float | None = option(
        None,
        "Seconds from the loaded model to the answer; for each of several precisions or devices.",
        flag="budget",
        shown="60; a grid that you name is measured whole",
    )
    fresh: bool = option(
        False, "Measure ceilings, overhead and the first steps again instead of using those of the last day."
    )
    no_trials: bool = option(False, "Do not measure what other dtypes, formats, caches or attention would save.")
    breakdown: bool = option(False, "Add a pass that shows where the time goes inside a step.")
    trace: bool = option(False, "As --breakdown, with a Chrome trace of one decode step.")
    draft: str = option("", "Try speculative decoding at batch 1: ngram (lookup in the text), or a smaller model.")
    check_quality: bool = option(False, "Compare a quantised checkpoint's outputs with the original's.")
    trust_remote_code: bool = option(False, "Run the model's own code.")
    allow_pickle: bool = option(False, "Load .bin checkpoints, which can run code.")

    def __post_init__(self) -> None:
        # Imported late: `--help` needs no arrays and no presets.
        from profiler.facts.step import Attention
        from profiler.loading.source import Weights

        for quant in map(known_quant, listed(self.quant)):
            check_packed_dtype(self.dtype, quant)
            if self.double_quant or self.compute_dtype != "auto":
                check_quant_options(quant)
        for name in listed(self.engine):
            check_engine_name(name)
        for name in listed(self.cache):
            one_of(name, "--cache", (ANY_QUANTIZED, *CACHES))
        for name in listed(self.device):
            check_device_name(name)
        one_of(self.dtype, "--dtype", ("auto", *DTYPE_NAMES))
        one_of(self.compute_dtype, "--compute-dtype", ("auto", *DTYPE_NAMES))
        one_of(self.weights, "--weights", get_args(Weights))
        if self.attn is not None:
            one_of(self.attn, "--attn", get_args(Attention))
        lengths = {"--prompt-lens": self.prompt_lens, "--context-lens": self.context_lens}
        for flag, values in {**lengths, "--batch-sizes": self.batch_sizes}.items():
            if values and not isinstance(values, Ragged) and not str(values).startswith(RAGGED):
                values_of(values, flag)
        if self.new_tokens is not None:
            check_new_tokens(self.new_tokens)
        if self.budget_s is not None and not 0 < self.budget_s < math.inf:
            raise RequestError(f"--budget {self.budget_s:g} is not possible; give seconds above 0.")
        if self.tp < 1:
            raise RequestError(f"--tp {self.tp} is not possible; use 2 or more ranks, or omit --tp.")

    @property
    def names_grid(self) -> bool:
        """Whether lengths or sizes are given, as far as they are; else the run chooses a default grid."""
        return bool(self.prompt_lens or self.prompts or self.batch_sizes or self.context_lens)
