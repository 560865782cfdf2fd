"""What the system holds of files in memory: let go of it, and asked whether it did."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

_GONE = 0.01
"""Of all their pages: what is left of files that are read from the disk."""


def forget(files: Iterable[Path]) -> bool:
    """Ask the system to drop its cached pages of these files; whether they are gone, so that they come from the disk.

    Pages that a process has mapped stay (posix_fadvise(2), POSIX_FADV_DONTNEED), and so does a file system that is
    memory itself. Where the system does not tell, they are not known to be gone.
    """
    held = pages = 0
    for file in files:
        try:
            _drop(file)
            resident = _resident(file)
        except (OSError, AttributeError):  # no such file any more, or not Linux
            return False
        held += int(resident.sum())
        pages += len(resident)
    return pages > 0 and held <= _GONE * pages


def _drop(file: Path) -> None:
    handle = os.open(file, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a disk that is read alone has nothing to write
            os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)


def _resident(file: Path) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """[page]: whether it is in memory (mincore(2), the lowest bit of each); mapping a file reads nothing of it."""
    nbytes = file.stat().st_size
    if not nbytes:
        return np.zeros(0, np.bool_)
    found = np.zeros(-(-nbytes // mmap.PAGESIZE), np.uint8)
    with file.open("rb") as handle, mmap.mmap(handle.fileno(), nbytes, access=mmap.ACCESS_READ) as view:
        mapped = np.frombuffer(view, np.uint8)
        failed = ctypes.CDLL(None, use_errno=True).mincore(
            ctypes.c_void_p(mapped.ctypes.data), ctypes.c_size_t(nbytes), ctypes.c_void_p(found.ctypes.data)
        )
        del mapped  # a map that is looked at cannot be closed
    if failed:
        raise OSError(ctypes.get_errno(), "mincore", str(file))
    return (found & 1).astype(np.bool_)
