"""Progress of a run on stderr: bars on a terminal, plain lines elsewhere, or nothing."""

import sys
import textwrap
from contextlib import AbstractContextManager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn

from profiler.measure.schedule import Progress as SweepProgress
from profiler.units import time_left

_EVERY_S = 30.0
_SPINNER = 4
"""Columns of the spinner, and of the gaps next to it and to an empty bar."""


class Listener(AbstractContextManager["Listener"]):
    """Receives the progress of a run, and prints nothing; the base class of the others, and of those of callers."""

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the progress from the screen."""

    def stage(self, text: str) -> None:
        """A new stage has begun."""

    def progress(self, progress: SweepProgress, total_cells: int) -> None:
        """A cell is about to be timed."""


def _words(progress: SweepProgress) -> tuple[str, str]:
    return f"batch {progress.cell.name}, repetition {progress.repetition}", time_left(progress.left_s)


class LineListener(Listener):
    """Plain lines, for logs and pipes: one per stage, and the cell that is timed every half minute."""

    _next_s = 0.0

    def stage(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def progress(self, progress: SweepProgress, total_cells: int) -> None:
        if progress.elapsed_s >= self._next_s:
            self._next_s = progress.elapsed_s + _EVERY_S
            print(", ".join(_words(progress)), file=sys.stderr, flush=True)


class BarListener(Listener):
    """A bar with the current cell and the time left, redrawn only between cells: no thread polls during timing."""

    def __init__(self, console: Console) -> None:
        self._bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[detail]}"),
            console=console,
            auto_refresh=False,
            transient=True,
        )
        self._bars.start()
        self._task: TaskID = self._bars.add_task("starting", total=None, detail="")
        self._bars.refresh()

    def close(self) -> None:
        self._bars.stop()

    def stage(self, text: str) -> None:
        whole_words = textwrap.shorten(text, self._bars.console.width - _SPINNER, placeholder=" ...")
        self._bars.update(self._task, description=whole_words, detail="", refresh=True)

    def progress(self, progress: SweepProgress, total_cells: int) -> None:
        words, left = _words(progress)
        done_s, total_s = progress.elapsed_s, progress.elapsed_s + progress.left_s or 1.0
        self._bars.update(self._task, completed=done_s, total=total_s, description=words, detail=left, refresh=True)
