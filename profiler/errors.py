"""Errors that a user can act on, each with a one-line message and an exit code."""

import contextlib
import difflib
import re
from collections.abc import Callable, Iterable, Iterator
from traceback import clear_frames


class RoofscopeError(Exception):
    """An error with a one-line message for the user: what is wrong and what would work."""

    exit_code = 1


class RequestError(RoofscopeError):
    """An invalid request: its option, model, grid or device is not available."""

    exit_code = 2


class GridError(RequestError):
    """An invalid prompt length, batch size or range."""


class ModelError(RequestError):
    """A model that is unknown, unreadable, or incompatible with the options."""


class DeviceError(RequestError):
    """A device that does not exist, stopped working, or cannot do the request."""


class RankError(DeviceError):
    """A rank of a shared model ended or failed. torchrun waits for this process to end; measurements are kept."""

    exit_code = 3


class CaptureError(RequestError):
    """Work that cannot be recorded as a CUDA graph."""


class OutOfTimeError(RequestError):
    """Work that did not end within its share of a budget."""


class NoFreeMemoryError(RequestError):
    """Work that needs more memory than is available."""


class RunError(RequestError):
    """A run folder that cannot be written or read, or that belongs to something else."""


def near_misses(word: str, known: Iterable[str]) -> str:
    """Return ` Did you mean a or b?` for a mistyped word, or an empty string without a similar name."""
    names = {name.lower(): name for name in sorted(known)}
    completions = [name for name in names if word and name.startswith(word.lower())]
    close = (completions or difflib.get_close_matches(word.lower(), names, n=3, cutoff=0.5))[:3]
    return f" Did you mean {' or '.join(names[name] for name in close)}?" if close else ""


_LONG, _LONGEST = 160, 300
"""Characters from which a library's text is only its first sentence, and at most."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or two after a colon; of a library's long one the first sentence."""
    lines = (str(error).strip() or type(error).__name__).splitlines()
    text = f"{lines[0]} {lines[1].strip()}" if lines[0].endswith(":") and len(lines) > 1 else lines[0]
    if len(text) > _LONG and not isinstance(error, RoofscopeError):
        text = re.split(r"(?<=\w{2})[.:] (?=[A-Z])", text)[0]
    if len(text) > _LONGEST:
        text = text[:_LONGEST].rpartition(" ")[0] + " ..."
    return text.rstrip(". ")


def describe_error(error: BaseException) -> str:
    """Return the first line of an error, with its type unless it is roofscope's: `AttributeError: no such thing`."""
    line, kind = first_line(error), type(error).__name__
    return line if isinstance(error, RoofscopeError) or line == kind else f"{kind}: {line}"


@contextlib.contextmanager
def tolerate_errors(failed: Callable[[Exception], object] = lambda _: None) -> Iterator[None]:
    """Suppress an error within, after `failed` with it; a lost device or rank (DeviceError) and interrupts pass."""
    try:
        yield
    except DeviceError:
        raise
    except Exception as error:
        failed(error)
        clear_frames(error.__traceback__)  # they keep the tensors of the failed work alive
