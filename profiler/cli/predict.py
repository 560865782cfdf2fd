"""The commands that predict: count, forecast, rent and explore."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar

from profiler.cli.options import LongOutput, asks
from profiler.cli.removed import removed
from profiler.data.ceiling_set import CeilingSet, ceilings_called
from profiler.data.datasheets import gpu_called
from profiler.errors import RequestError
from profiler.forecast.options import ForecastRequest
from profiler.grid.ranges import parse_values
from profiler.options import DTYPE_NAMES, argument, flag_of, listed, model_argument, one_of, option
from profiler.quant.registry import known_quant, quant_help, quant_of
from profiler.rent.options import RentOptions

_PLOTS = ("roofline", "kv")
_DEFAULT_BATCHES, _DEFAULT_LENS = "1..32*2", "128..2048*2"


@dataclass(frozen=True)
class CountOptions:
    """What `count` counts: one step, or a grid of them. Raises RequestError for options of one step with a grid."""

    model: str = model_argument()
    phase: str = option("decode", "prefill or decode.")
    batch: int = option(1, "Sequences.")
    prompt: int = option(512, "Prompt tokens.")
    context: int | None = option(None, "Cached tokens (default: none, or the prompt in decode).")
    prefix: int = option(0, "The first tokens of every prompt, cached once for all sequences.")
    verify: int = option(0, "Decode: drafted tokens that the step verifies (speculative decoding).")
    batch_sizes: str = option("", f"A grid: batch sizes, such as {_DEFAULT_BATCHES}.")
    prompt_lens: str = option("", f"A grid: prompt lengths, such as {_DEFAULT_LENS}.")
    context_lens: str = option("", "A grid: cached tokens of decode (default: prompt lengths).")
    dtype: str = option("auto", "auto (the checkpoint's), float32, bfloat16 or float16.")
    quant: str = option("none", f"{quant_help(counted=True)}.")
    bits: float = option(0.0, "In place of --quant: mean bits of all weights, such as 4.85.", shown="as counted")
    attn: str = option("auto", "What is executed: sdpa (a fused kernel), eager, or auto: as transformers would.")
    gpu: str = option("", "GPUs, such as 'T4,H100 SXM'.")
    plot: str = option("", f"Draw the grid: {', '.join(_PLOTS)}.")
    run: Path | None = option(None, "--plot roofline: add a run's cells.", metavar="RUN")
    out: Path | None = option(None, "--plot: a PNG or SVG file (default: MODEL-PLOT.png).")
    tp: int = option(1, "Ranks of tensor parallelism; counts one rank's share.")
    gemm_census: bool = option(False, "List the shape of every matmul.")
    crosscheck: bool = option(False, "Count again with torch's own counter.")
    trust_remote_code: bool = option(False, "Run the model's own code.")

    one_step: ClassVar = ("phase", "batch", "prompt", "context", "verify", "attn", "tp", "gemm_census", "crosscheck")

    @property
    def is_grid(self) -> bool:
        return bool(self.batch_sizes or self.prompt_lens or self.context_lens or self.plot)

    @property
    def stored_as(self) -> str:
        return quant_of(self.quant, self.bits)

    def __post_init__(self) -> None:
        from profiler.counting.requested_step import requested_step  # imported late: `--help` needs no arrays

        prefix = 0 if self.is_grid else self.prefix
        requested_step(self.phase, self.batch, self.prompt, self.context, prefix, self.verify)
        one_of(self.dtype, "--dtype", ("auto", *DTYPE_NAMES))
        one_of(self.attn, "--attn", ("auto", "sdpa", "eager"))
        known_quant(self.stored_as, counted=True)
        for name in listed(self.gpu):
            ceilings_called(name)
        sizes = {"--batch-sizes": self.batch_sizes, "--prompt-lens": self.prompt_lens}
        for flag, values in {**sizes, "--context-lens": self.context_lens}.items():
            if values:
                parse_values(values, flag)
        if self.tp < 1:
            raise RequestError(f"--tp {self.tp} is not possible; use 2 or more ranks, or omit --tp.")
        if sentence := removed(f"count --plot {self.plot}"):
            raise RequestError(sentence)
        if self.plot:
            one_of(self.plot, "--plot", _PLOTS)
        if self.run is not None and self.plot != "roofline":
            raise RequestError(f"--run: only --plot roofline shows measured cells, not {self.plot or 'a table'}.")
        given = [item for item in fields(self) if getattr(self, item.name) != item.default]
        if self.is_grid and (flags := [flag_of(item) for item in given if item.name in self.one_step]):
            raise RequestError(
                f"{', '.join(flags)}: for one step; a grid has --batch-sizes, --prompt-lens and --context-lens."
            )


@dataclass(frozen=True)
class CountOutput(LongOutput):
    format: str = option("table", "table, json or csv.")

    formats = ("table", "json", "csv")


@asks()
def count(options: CountOptions, output: CountOutput) -> None:
    """Count FLOPs, bytes and memory of steps without running them.

    Counts one step, or a grid with --batch-sizes, --prompt-lens, --context-lens or --plot.
    """
    gpus = {name: ceilings_called(name) for name in listed(options.gpu)}
    if options.is_grid:
        _count_grid(options, list(gpus.values()), output)
    else:
        _count_step(options, gpus, output)


def _count_step(options: CountOptions, gpus: dict[str, CeilingSet], output: CountOutput) -> None:
    from profiler.count.step import count_csv, count_document, count_sections
    from profiler.counting.count import count
    from profiler.counting.model_numbers import model_numbers

    try:
        counted = count(
            options.model,
            phase=options.phase,
            batch=options.batch,
            prompt=options.prompt,
            context=options.context,
            prefix=options.prefix,
            verify=options.verify,
            dtype=options.dtype,
            quant=options.stored_as,
            attn=options.attn,
            census=options.gemm_census,
            gpu_names=",".join(gpus),
            second_opinion=options.crosscheck,
            tp=options.tp,
            trust_remote_code=options.trust_remote_code,
        )
    except OverflowError:
        words = f"a {options.phase} of --batch {options.batch} is more work than 64-bit integers can count."
        raise RequestError(words) from None
    depth = options.prompt if options.context is None else options.context
    whole, ceilings = counted.whole, tuple(gpus.values())
    numbers = model_numbers(whole, max(1, depth), ceilings, options.prefix) if whole else None
    if output.format == "csv":
        print(count_csv(counted), end="")
    else:
        output.answer(lambda: count_document(counted, numbers), lambda: count_sections(counted, numbers))


def _count_grid(options: CountOptions, gpus: list[CeilingSet], output: CountOutput) -> None:
    from profiler.count.grid import grid_document, grid_frame, grid_sections
    from profiler.counting import cache, grid_count, model_numbers
    from profiler.loading.source import resolve

    source, quant = resolve(options.model), options.stored_as
    counted = cache.counted_model(source, options.dtype, quant, trust_remote_code=options.trust_remote_code)
    prompts = options.prompt_lens or ("" if options.context_lens else _DEFAULT_LENS)
    prompt_lens = parse_values(prompts, "--prompt-lens") if prompts else ()
    context_lens = parse_values(options.context_lens, "--context-lens") if options.context_lens else prompt_lens
    grid = grid_count.count_grid(
        source.name,
        counted,
        quant,
        batch_sizes=parse_values(options.batch_sizes or _DEFAULT_BATCHES, "--batch-sizes"),
        prompt_lens=prompt_lens,
        context_lens=context_lens,
        prefix=options.prefix,
        gpus=gpus,
    )
    grid_count.check_countable(grid, counted.work)
    if options.plot:
        from profiler.report.plots import save_figure, style, theory

        out = options.out or Path(f"{Path(source.name).name}-{options.plot}.png")
        with style.styled():
            figure = theory.draw_grid(grid, options.plot, f"--plot {options.plot}", "--gpu T4", options.run)
        save_figure(figure, out)
        print(out)
    elif output.format == "csv":
        print(grid_frame(grid).to_csv(index=False), end="")
    else:
        numbers = model_numbers.model_numbers(counted, max(context_lens), tuple(gpus), options.prefix)
        output.answer(lambda: grid_document(grid, numbers), lambda: grid_sections(grid, numbers))


@asks()
def forecast(
    *,
    source: str = argument("A run folder, or with --on a model.", "RUN|MODEL"),
    on: str = option("", "A GPU such as 'L4'."),
    request: ForecastRequest,
    output: LongOutput,
) -> None:
    """Predict the times of cells that were not measured.

    Prints the error of such forecasts too.
    """
    if on:
        gpu_called(on)
    elif not Path(source).is_dir():
        raise RequestError(f"{source!r} is not a run folder; pass one, or a model with --on GPU.")
    from profiler.forecast import command, screen

    answer = command.forecast_on(source, on, request) if on else command.forecast_run(Path(source), request)
    output.answer(lambda: answer, lambda: [screen.forecast_section(answer)])


@asks()
def rent(options: RentOptions, output: LongOutput) -> None:
    """Compare GPUs to rent for a model: fit, speed and cost.

    Names the engine, then which ranges of cost overlap.
    """
    from profiler.rent import command, text

    offers = command.rent(options)
    output.answer(lambda: offers, lambda: text.rent_sections(offers))


@asks()
def explore(
    model: str = model_argument(),
    gpu: str = option("", "GPUs (default: five common ones)."),
    quant: str = option("", f"Several of {quant_help()} (default: all)."),
    out: Path | None = option(None, "The page (default: MODEL-explore.html)."),
) -> None:
    """Write an offline page with sliders: the limits of a model on GPUs.

    It looks up what `count` prints, on a grid of batches and contexts.
    """
    from profiler.explore.command import DEFAULT_GPUS, explore_document, explore_page
    from profiler.store.folder import replace_file

    document = explore_document(model, listed(gpu) or DEFAULT_GPUS, listed(quant))
    path = out or Path(f"{Path(document.model).name}-explore.html")
    replace_file(path, explore_page(document))
    print(path)
