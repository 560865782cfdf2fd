"""Does roofscope work from nothing but its wheel? In a fresh environment, with what the wheel itself declares.

    python tests/installs.py [--lowest] [--folder FOLDER]

Builds the wheel, installs it into a virtual environment of its own (with the versions of constraints.txt; with --lowest
at the lowest version of every dependency that pyproject.toml allows), and runs the commands below from another folder.
Takes minutes, and gigabytes where torch comes with CUDA. Exit code 0: all of them did what they should.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GRID = ["--prompt-lens", "8", "--batch-sizes", "1,2", "--new-tokens", "4", "--budget", "2", "--plain", "--quiet"]
COMMANDS = [
    ["--version"],
    ["doctor"],
    ["models"],
    ["count", "gpt2", "--crosscheck"],
    ["run", "smollm2-135m", *GRID, "--trace", "--out", "one"],
    ["run", "smollm2-135m", *GRID, "--engine", "static", "--out", "static"],
    ["run", "smollm2-135m", *GRID, "--quant", "nf4", "--out", "nf4"],
    ["run", "smollm2-135m", *GRID, "--quant", "int8", "--out", "int8"],
    ["compare", "one", "nf4"],
    ["report", "one", "nf4"],
    ["judge", "one"],
    ["forecast", "one", "--keep"],
    ["export", "one", "--format", "parquet", "--out", "one.parquet"],
    ["place", str(ROOT / "tests" / "data" / "foreign" / "llama-bench.csv"), "--model", "smollm2-135m", "--gpu", "T4"],
]


def lowest() -> list[str]:
    """`name==version.*` of every dependency: the lowest release that is allowed, or the last mend of it."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        return [f"{text.replace('>=', '==')}.*" for text in tomllib.load(file)["project"]["dependencies"]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lowest", action="store_true")
    parser.add_argument("--folder", type=Path, default=None, help="kept; made where it is missing")
    asked = parser.parse_args()
    folder = (asked.folder or Path(tempfile.mkdtemp(prefix="roofscope-installs-"))).resolve()
    work = folder / "work"
    work.mkdir(parents=True, exist_ok=True)
    python = folder / "venv" / "bin" / "python"
    if not python.exists():
        venv.create(folder / "venv", with_pip=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    pip = [str(python), "-m", "pip"]
    subprocess.run(
        [*pip, "wheel", "-q", "--no-deps", "-w", str(folder), str(ROOT)], check=True, env=environment, timeout=600
    )
    wheel = max(folder.glob("roofscope-*.whl"), key=lambda file: file.stat().st_mtime)
    versions = lowest() if asked.lowest else ["-c", str(ROOT / "constraints.txt")]
    subprocess.run(
        [*pip, "install", "-q", "--force-reinstall", "--no-deps", str(wheel)], check=True, env=environment, timeout=600
    )
    subprocess.run([*pip, "install", "-q", str(wheel), *versions], check=True, env=environment, timeout=3600)
    subprocess.run([*pip, "check"], check=True, env=environment, timeout=600)
    environment |= {"XDG_CACHE_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    failed = 0
    for arguments in COMMANDS:
        command = [str(python.with_name("roofscope")), *arguments]
        done = subprocess.run(
            command, cwd=work, env=environment, capture_output=True, text=True, timeout=1800, check=False
        )
        failed += done.returncode != 0
        print("works" if done.returncode == 0 else "FAILS", "roofscope", *arguments, flush=True)
        if done.returncode:
            print(done.stdout[-500:], done.stderr[-1500:], flush=True)
    print(f"{len(COMMANDS) - failed} of {len(COMMANDS)} work in {folder}")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
