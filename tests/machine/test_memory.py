"""Memory of the host: what a process has freed is given back."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

# Blocks below malloc's threshold for pages of their own (128 KiB, mallopt(3)): the last one keeps the others' place.
SCRIPT = """
from machines import HOST
import psutil
own = psutil.Process()
blocks = [bytearray(64 << 10) for _ in range(2000)]
last = blocks.pop()
blocks.clear()
before = own.memory_info().rss
HOST.release()
print(before - own.memory_info().rss)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc_trim is glibc's")
def test_what_malloc_keeps_is_given_back() -> None:
    """128 MB of freed blocks below one that is used."""
    path = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, env=path)
    assert int(done.stdout) > 100e6
