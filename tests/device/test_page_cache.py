"""Files that leave the system's cache, and those that a process keeps there."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import pytest

from profiler.run.cold_start import forget

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="mincore and posix_fadvise are Linux's")

NBYTES = 64 * mmap.PAGESIZE


def test_a_file_that_is_mapped_stays_in_the_cache_until_it_is_not(tmp_path: Path) -> None:
    """As a checkpoint does that safetensors has mapped for a model on a CPU."""
    file = tmp_path / "weights"
    file.write_bytes(b"x" * NBYTES)
    with file.open("rb") as handle, mmap.mmap(handle.fileno(), NBYTES, access=mmap.ACCESS_READ) as view:
        assert view.read() == b"x" * NBYTES
        assert not forget([file])
    if not forget([file]):
        pytest.skip("this file system is memory itself")
    assert file.read_bytes() == b"x" * NBYTES
    assert forget([file]), "it has been read, and let go again"


def test_what_cannot_be_asked_is_not_known_to_be_gone(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert not forget([])
    assert not forget([tmp_path / "empty"])
    assert not forget([tmp_path / "missing"])
