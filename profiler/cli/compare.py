"""The commands compare, gate and place."""

from dataclasses import MISSING, dataclass
from pathlib import Path

import typer

from profiler.cli.options import EXIT_INCOMPLETE, EXIT_REQUEST, EXIT_WRONG, LongOutput, asks
from profiler.data.links import link_called
from profiler.errors import RequestError
from profiler.grid.ranges import parse_in_order
from profiler.json_document import dumped
from profiler.options import argument, option
from profiler.quant.registry import known_quant, quant_help, quant_of


@asks()
def compare(
    *,
    paths: list[Path] = argument("Two run folders, or other tools' result files.", "A B"),
    anyway: bool = option(False, "Show runs that are not comparable, no verdict."),
    tp: str = option("", "GPUs that shared each step, such as 4,8; default: as A and B say."),
    output: LongOutput,
) -> None:
    """Compare two runs cell by cell.

    Reports each change with its confidence interval, and the part of the time that changed.
    """
    if len(paths) != 2:
        raise RequestError(
            f"compare compares two runs, not {len(paths)}: roofscope compare BEFORE AFTER;"
            " `roofscope plot A B C throughput` draws several."
        )
    from profiler.comparison import command, text

    comparison = command.compared(*paths, anyway=anyway, tp=parse_in_order(tp, "--tp"))
    output.answer(lambda: dumped(command.comparison_document(comparison)), lambda: [text.changes_section(comparison)])


_GATE_EXITS = {"pass": 0, "slower": EXIT_WRONG, "not comparable": EXIT_REQUEST, "inconclusive": EXIT_INCOMPLETE}


@dataclass(frozen=True)
class GateOutput(LongOutput):
    format: str = option("table", "table, json, junit or github.")

    formats = ("table", "json", "junit", "github")


@asks()
def gate(
    *,
    base: Path = argument("The run folder to compare with.", "BASE"),
    new: Path = argument("The run folder of the change.", "NEW"),
    max_slowdown: str = option("3%", "Largest slowdown: 3%, or decode=3%,prefill=5%."),
    output: GateOutput,
) -> None:
    """Fail if a change makes a run slower than allowed.

    Exit codes: 0 pass, 1 slower with high confidence, 2 not comparable, 3 inconclusive.
    """
    from profiler.comparison import command
    from profiler.comparison.gate_formats import GATE_FORMATS, gate_section

    verdict = command.gated(base, new, max_slowdown)
    if output.format in GATE_FORMATS:
        print(GATE_FORMATS[output.format](verdict), end="" if output.format == "junit" else "\n")
    else:
        output.answer(lambda: dumped(command.gate_document(verdict)), lambda: [gate_section(verdict)])
    raise typer.Exit(_GATE_EXITS[verdict.outcome])


@asks()
def place(
    *,
    path: Path = argument("Another tool's result file, or a table.", "FILE"),
    model: str = option(MISSING, "The model that ran: hub id, folder, .gguf file, or a preset's name.", is_model=True),
    gpu: str = option("", "The GPU that it ran on, such as 'H100 SXM'."),
    here: bool = option(False, "Measure and use the ceilings of this device."),
    quant: str = option("none", f"{quant_help(counted=True)}."),
    bits: float = option(0.0, "In place of --quant: mean bits of all weights, such as 4.85.", shown="as the file says"),
    tp: int = option(0, "GPUs that shared each step.", shown="as the file says, or 1"),
    link: str = option(
        "", "nvlink3, nvlink4, nvlink5, pcie4x16, pcie5x16, xgmi, or alpha_us,GB/s; default: the GPU's."
    ),
    prompt_lens: str = option("", "Prompt length, for a file without shapes."),
    batch_sizes: str = option("", "Batch size, for a file without shapes."),
    new_tokens: str = option("", "New tokens, for a file without shapes."),
    output: LongOutput,
) -> None:
    """Compare another tool's results with the ceilings.

    Prints the floor of each result, the share of the ceiling that it attains, and doubts about it.
    """
    if here and gpu:
        raise RequestError("--here and --gpu name two devices; use one of the two.")
    known_quant(quant_of(quant, bits), counted=True)
    if link:
        link_called(link, max(2, tp))
    from profiler.place import command
    from profiler.place.place import placed_section

    shape = {"prompt_lens": prompt_lens, "batch_sizes": batch_sizes, "new_tokens": new_tokens}
    placed = command.place(path, model, gpu=gpu, here=here, quant=quant, bits=bits, tp=tp, link=link, **shape)
    output.answer(lambda: dumped(placed), lambda: [placed_section(placed)])
