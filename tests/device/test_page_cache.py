"""Files that leave the page cache, and those that a process keeps there."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import pytest

from profiler.run.cold_start import forget

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="mincore and posix_fadvise are Linux's")

NBYTES = 64 * mmap.PAGESIZE


def test_a_mapped_file_stays_in_the_cache(tmp_path: Path) -> None:
    """Like a checkpoint that safetensors has mapped for a model on a CPU."""
    file = tmp_path / "weights"
    file.write_bytes(b"x" * NBYTES)
    with file.open("rb") as handle, mmap.mmap(handle.fileno(), NBYTES, access=mmap.ACCESS_READ) as view:
        assert view.read() == b"x" * NBYTES
        assert not forget([file])
    if not forget([file]):
        pytest.skip("this file system is in memory")
    assert file.read_bytes() == b"x" * NBYTES
    assert forget([file]), "it was read, and dropped again"
