"""The options of `forecast`: the cells, and the change of the run."""

from dataclasses import dataclass

from profiler.errors import RequestError
from profiler.grid.ranges import check_new_tokens, parse_values
from profiler.options import DTYPE_NAMES, one_of, option
from profiler.quant.registry import known_quant, quant_help, quant_of


@dataclass(frozen=True)
class ForecastRequest:
    """The cells to forecast, and the change of the run; empty texts and 0 mean the run's own values."""

    prompt_lens: str = option("", "Prompt lengths: 128, or 64..4096*2 (default: the run's).")
    batch_sizes: str = option("", "Batch sizes (default: the run's, and two doublings).")
    context_lens: str = option("", "Decode with this many tokens in the KV cache.")
    prefix: int = option(0, "--on: the first tokens of every prompt, cached before it.")
    new_tokens: int = option(0, "Tokens after each prompt (0: those of the run).")
    dtype: str = option("auto", "Another dtype; with RUN, one that it tried.")
    quant: str = option("none", f"{quant_help(counted=True)}; with RUN, one that it tried.")
    bits: float = option(0.0, "--on: in place of --quant, mean bits of all weights, such as 4.85.", shown="as counted")
    engine: str = option("", "With RUN: one of its engines, or static if it tried that. --on: eager or compiled.")
    threads: int = option(0, "With a RUN on a CPU: half its threads, if it tried that.")

    def __post_init__(self) -> None:
        for values, flag in (
            (self.prompt_lens, "--prompt-lens"),
            (self.batch_sizes, "--batch-sizes"),
            (self.context_lens, "--context-lens"),
        ):
            if values:
                parse_values(values, flag)
        if self.new_tokens:
            check_new_tokens(self.new_tokens)
        for value, flag in ((self.prefix, "--prefix"), (self.threads, "--threads")):
            if value < 0:
                raise RequestError(f"{flag} {value} is not possible; use 0 or more.")
        one_of(self.dtype, "--dtype", ("auto", *DTYPE_NAMES))
        known_quant(quant_of(self.quant, self.bits), counted=True)
