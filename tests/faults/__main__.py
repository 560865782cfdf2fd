"""Try every fault, or a sample of them: python -m tests.faults --help"""

from __future__ import annotations

import os
import tempfile

# Read when torch is imported: a forked process must not wait for threads that it does not have.
os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": tempfile.mkdtemp()}

from . import clauses

if __name__ == "__main__":
    clauses.watch()
    from .campaign import main

    main()
