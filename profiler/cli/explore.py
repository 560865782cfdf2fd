"""The command `explore`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from profiler.quant.registry import quant_help


def explore_command(
    model: Annotated[str, typer.Argument(help="Hub id, folder, .gguf file, or a preset's name.")],
    gpu: Annotated[str, typer.Option("--gpu", help="GPUs or GPU profiles (default: five common ones).")] = "",
    quant: Annotated[str, typer.Option(help=f"Several of {quant_help()} (default: all).")] = "",
    run: Annotated[Path | None, typer.Option(metavar="RUN", help="Add the measured cells of a run.")] = None,
    out: Annotated[Path | None, typer.Option(help="The page (default: MODEL-explore.html).")] = None,
) -> None:
    """Write an offline page with sliders: the limits of a model on GPUs."""
    from profiler.explore.command import DEFAULT_GPUS, explore_document
    from profiler.explore.page import explore_page
    from profiler.store.folder import read_run
    from profiler.store.writer import replace_file

    measured = None if run is None else read_run(run)
    document = explore_document(model, _names(gpu) or DEFAULT_GPUS, _names(quant), measured)
    path = out or Path(f"{Path(document.model).name}-explore.html")
    replace_file(path, explore_page(document))
    print(path)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())
