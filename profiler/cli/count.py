"""The command `count`: one step, or the theory of a grid."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from profiler.cli.options import Plain
from profiler.errors import RequestError
from profiler.options import one_of
from profiler.quant.registry import quant_help

if TYPE_CHECKING:
    from profiler.counting.floor import RoofSet
    from profiler.counting.grid_count import GridCount

_PLOTS = ("roofline", "map", "intensity", "latency", "kv")
_DEFAULT_BATCHES, _DEFAULT_LENS = "1..32*2", "128..2048*2"


def count_command(
    model: Annotated[str, typer.Argument(help="Hub id, folder, .gguf file, or a preset's name.")],
    phase: Annotated[str, typer.Option(help="prefill or decode.")] = "decode",
    batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
    prompt: Annotated[int, typer.Option(help="Prompt tokens.")] = 512,
    context: Annotated[int | None, typer.Option(help="Cached tokens (default: none, or the prompt in decode).")] = None,
    batch_sizes: Annotated[str, typer.Option(help=f"A grid: batch sizes, such as {_DEFAULT_BATCHES}.")] = "",
    prompt_lens: Annotated[str, typer.Option(help=f"A grid: prompt lengths, such as {_DEFAULT_LENS}.")] = "",
    context_lens: Annotated[str, typer.Option(help="A grid: cached tokens of decode (default: --prompt-lens).")] = "",
    dtype: Annotated[str, typer.Option(help="auto (the checkpoint's), float32, bfloat16 or float16.")] = "auto",
    quant: Annotated[str, typer.Option(help=f"{quant_help()}.")] = "none",
    attn: Annotated[
        str, typer.Option(help="What is executed: sdpa (a fused kernel), eager, or auto: as transformers would.")
    ] = "auto",
    gpu: Annotated[str, typer.Option("--gpu", help="GPUs or GPU profiles, such as 'T4,H100 SXM'.")] = "",
    plot: Annotated[str, typer.Option(help=f"Draw the grid: {', '.join(_PLOTS)}.")] = "",
    run: Annotated[Path | None, typer.Option(metavar="RUN", help="--plot roofline: add a run's cells.")] = None,
    out: Annotated[Path | None, typer.Option(help="--plot: a PNG or SVG file (default: MODEL-PLOT.png).")] = None,
    tp: Annotated[int, typer.Option("--tp", help="Ranks of tensor parallelism; counts one rank's share.")] = 1,
    gemm_census: Annotated[bool, typer.Option("--gemm-census", help="List the shape of every matmul.")] = False,
    crosscheck: Annotated[bool, typer.Option("--crosscheck", help="Count again with torch's own counter.")] = False,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run the model's own code.")] = False,
    plain: Plain = False,
    output_format: Annotated[str, typer.Option("--format", help="table, json or csv.")] = "table",
) -> None:
    """Count FLOPs, bytes and memory of steps without running them.

    Counts one step, or a grid with --batch-sizes, --prompt-lens, --context-lens or --plot.
    """
    one_of(output_format, "--format", ("table", "json", "csv"))
    from profiler.gpu_profile.roofs import roofs_called

    gpu_names = [name.strip() for name in gpu.split(",") if name.strip()]
    gpus = [roofs_called(name) for name in gpu_names]
    if batch_sizes or prompt_lens or context_lens or plot:
        single = {
            "--phase": phase != "decode",
            "--batch": batch != 1,
            "--prompt": prompt != 512,
            "--context": context is not None,
            "--attn": attn != "auto",
            "--tp": tp != 1,
            "--gemm-census": gemm_census,
            "--crosscheck": crosscheck,
        }
        if options := [name for name, is_given in single.items() if is_given]:
            raise RequestError(
                f"{', '.join(options)}: for one step; a grid has --batch-sizes, --prompt-lens and --context-lens."
            )
        sizes, precision, picture = (batch_sizes, prompt_lens, context_lens), (dtype, quant), (plot, run, out)
        _count_grid(
            model, sizes, precision, gpus, picture, output_format, plain=plain, trust_remote_code=trust_remote_code
        )
        return
    from profiler.counting.count import count
    from profiler.counting.document import count_csv, count_document
    from profiler.counting.model_numbers import model_numbers
    from profiler.json_document import json_text
    from profiler.report.console import screen
    from profiler.report.count import print_count

    sheets = [name for name, roofs in zip(gpu_names, gpus, strict=True) if roofs.name.endswith("datasheet")]
    try:
        counted = count(
            model,
            phase=phase,
            batch=batch,
            prompt=prompt,
            context=context,
            dtype=dtype,
            quant=quant,
            attn=attn,
            census=gemm_census,
            gpu_names=",".join(sheets),
            second_opinion=crosscheck,
            tp=tp,
            trust_remote_code=trust_remote_code,
        )
    except OverflowError:
        raise RequestError(f"a {phase} of --batch {batch} is more work than 64-bit integers can count.") from None
    depth = prompt if context is None else context
    numbers = model_numbers(counted.whole, max(1, depth), tuple(gpus)) if counted.whole else None
    if output_format == "json":
        print(json_text(count_document(counted, numbers)))
    elif output_format == "csv":
        print(count_csv(counted), end="")
    else:
        print_count(counted, numbers, screen(plain=plain))


def _count_grid(
    model: str,
    sizes: tuple[str, str, str],
    precision: tuple[str, str],
    gpus: list[RoofSet],
    picture: tuple[str, Path | None, Path | None],
    output_format: str,
    *,
    plain: bool,
    trust_remote_code: bool,
) -> None:
    from profiler.counting.cache import counted_model
    from profiler.counting.grid_count import count_grid
    from profiler.counting.model_numbers import model_numbers
    from profiler.grid.ranges import parse_values
    from profiler.json_document import json_text
    from profiler.loading.source import resolve
    from profiler.report.console import screen
    from profiler.report.count_grid import grid_blocks, grid_document, grid_frame, grid_title, number_blocks
    from profiler.report.terminal import print_blocks

    (batches, prompts, contexts), (dtype, quant), (plot, run, out) = sizes, precision, picture
    if plot:
        one_of(plot, "--plot", _PLOTS)
    source = resolve(model)
    counted = counted_model(source, dtype, quant, trust_remote_code=trust_remote_code)
    prompts = prompts or ("" if contexts else _DEFAULT_LENS)
    prompt_lens = parse_values(prompts, "--prompt-lens") if prompts else ()
    context_lens = parse_values(contexts, "--context-lens") if contexts else prompt_lens
    grid = count_grid(
        source.name,
        counted,
        quant,
        batch_sizes=parse_values(batches or _DEFAULT_BATCHES, "--batch-sizes"),
        prompt_lens=prompt_lens,
        context_lens=context_lens,
        gpus=gpus,
    )
    if plot:
        print(_draw(grid, plot, run, out or Path(f"{Path(source.name).name}-{plot}.png")))
        return
    numbers = model_numbers(counted, max(context_lens), tuple(gpus))
    if output_format == "json":
        print(json_text(grid_document(grid, numbers)))
    elif output_format == "csv":
        print(grid_frame(grid).to_csv(index=False), end="")
    else:
        print_blocks([grid_title(grid), *number_blocks(numbers), *grid_blocks(grid)], screen(plain=plain))


def _draw(grid: GridCount, plot: str, run: Path | None, out: Path) -> Path:
    """Draw the grid, and return the file. Raises RequestError if the picture needs a GPU or cannot show a run."""
    from profiler.report.plots import save_figure
    from profiler.report.plots.style import styled
    from profiler.report.plots.theory import NEED_GPU, THEORY_PLOTS, theory_roofline
    from profiler.store.folder import read_run

    if plot in NEED_GPU and not grid.gpus:
        raise RequestError(f"--plot {plot} needs a GPU: add --gpu T4, or several (`roofscope gpus` lists them).")
    if run is not None and plot != "roofline":
        raise RequestError(f"--run: only --plot roofline shows measured cells, not {plot}.")
    with styled():
        figure = theory_roofline(grid, read_run(run)) if run is not None else THEORY_PLOTS[plot](grid)
    save_figure(figure, out)
    return out
