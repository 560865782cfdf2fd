"""Faults in runs on a simulated GPU: a call into a device, a driver, a library or the disk fails, or the process dies.

    python -m tests.faults [--sample 130] [--seed 0] [--only TEXT]

As in SQLite's `malloc_common.tcl`, the n-th call fails, once or from then on: the first, middle and last call of an API
in each stage of a run. As in TigerBeetle's VOPR, safety comes first; then, without the fault, one resume must end the
run as if there had been none. Each failure is printed with the text for `--only` that tries it again.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from pathlib import Path

# torch reads OMP_NUM_THREADS at import. A forked process must not wait for threads that it does not have.
os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": tempfile.mkdtemp()}

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `simulated`, as in pytest

from .campaign import SCENARIOS, planned, recorded, trials

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--sample", type=int, default=0, help="try so many, drawn by --seed (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="faults whose line has this text")
    parser.add_argument("--scenarios", default=",".join(SCENARIOS), help="of " + ", ".join(SCENARIOS))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="roofscope-faults-") as folder:
        recordings = {name: recorded(name, Path(folder)) for name in options.scenarios.split(",")}
        faults = [fault for each in recordings.values() for fault in planned(each) if options.only in str(fault)]
        number = min(options.sample or len(faults), len(faults))
        print(f"{number} of {len(faults)} faults", flush=True)
        failed = trials(recordings, random.Random(options.seed).sample(faults, number))
    print(f"{number} faults, {failed} after which something does not hold")
    sys.exit(1 if failed else 0)
