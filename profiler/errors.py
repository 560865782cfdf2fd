"""Errors that a user can act on, each with one line and an exit code."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable, Iterable, Iterator
from traceback import clear_frames


class RoofscopeError(Exception):
    """An error whose message is one line for the user: what was wrong and what would work."""

    exit_code = 1


class RequestError(RoofscopeError):
    """The request was wrong: an option, a model, a grid or a device that cannot be had."""

    exit_code = 2


class GridError(RequestError):
    """A prompt length, batch size or range that is none."""


class ModelError(RequestError):
    """A model that is unknown, unreadable, or does not go with the options asked for."""


class DeviceError(RequestError):
    """A device that is not there, or cannot do what was asked."""


class CaptureError(RequestError):
    """Work that cannot be recorded as a CUDA graph."""


class NoRoomError(RequestError):
    """Work that needs more memory than there is for it."""


class RunError(RequestError):
    """A run folder that cannot be written, read, or belongs to something else."""


class RankError(RoofscopeError):
    """One of the ranks that share a model ended or failed, and with it the run: what was measured is kept."""

    exit_code = 3


def near_misses(word: str, known: Iterable[str], limit: int = 3) -> str:
    """` Did you mean a or b?` for a mistyped word, or an empty string when nothing is near."""
    names = sorted(known)
    begun = [name for name in names if word and name.startswith(word.lower())]
    close = (begun or difflib.get_close_matches(word.lower(), names, n=limit, cutoff=0.5))[:limit]
    return f" Did you mean {' or '.join(close)}?" if close else ""


def first_line(error: BaseException) -> str:
    """The first line of an error's text, with the next where that ends in a colon, without its full stop, cut to 300
    characters.
    """
    lines = (str(error).strip() or type(error).__name__).splitlines()
    text = f"{lines[0]} {lines[1].strip()}" if lines[0].endswith(":") and len(lines) > 1 else lines[0]
    return text.rstrip(". ")[:300]


def describe_error(error: BaseException) -> str:
    """`AttributeError: no such thing`: the first line of an error, with its type where that says more than its text."""
    line, kind = first_line(error), type(error).__name__
    return line if isinstance(error, RoofscopeError) or line == kind else f"{kind}: {line}"


def is_of_device(error: BaseException) -> bool:
    """Whether CUDA itself raised `error`: torch raises a RuntimeError, or a subclass, whose text names CUDA."""
    return isinstance(error, RuntimeError) and "CUDA" in str(error)


@contextlib.contextmanager
def tolerate_errors(failed: Callable[[Exception], object] = lambda _: None) -> Iterator[None]:
    """What fails within costs nothing but itself: `failed` is told, and what comes behind goes on.

    What ends a run still does: a device or a rank that is lost, and an interrupt.
    """
    try:
        yield
    except (DeviceError, RankError):
        raise
    except Exception as error:
        failed(error)
        clear_frames(error.__traceback__)  # they hold the tensors of what failed, which is to be given back
