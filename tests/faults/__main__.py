"""Try every fault, or a sample of them: python -m tests.faults --help"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

# torch reads OMP_NUM_THREADS at import. A forked process must not wait for threads that it does not have.
os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": tempfile.mkdtemp()}

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `simulated`, as in pytest

from .campaign import main

if __name__ == "__main__":
    main()
