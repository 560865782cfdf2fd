"""`--cold`: start fresh processes and time them from launch to answer, with files out of the page cache."""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from profiler.device.clock import now_s
from profiler.device.machine import Machine, machine_for
from profiler.engines.registry import ENGINES
from profiler.errors import RequestError
from profiler.facts.measurements import FirstCalls, FreshStart
from profiler.loading.load import load
from profiler.loading.meta_model import quiet_libraries
from profiler.measure.visit import seeded_prompts
from profiler.quant.storage import model_storage_bytes
from profiler.run.validate import Prepared
from profiler.units import scaled

FROM_FILES = ("disk", "page cache")
"""Where the weights of one fresh process after the other come from, where they are files."""
_LONGEST_S = 900.0
_EXCLUSIVE = "CUDA-capable device(s) is/are busy or unavailable"
"""cudaErrorDevicesUnavailable, which a second process meets on a card in the mode EXCLUSIVE_PROCESS."""
_CONTEXT_BYTES = 1_000_000_000
"""A CUDA context with its libraries and cuBLAS workspaces: 0.3 to 0.9 GB, by card and torch version."""

_CHILD = "import sys; from profiler.run.cold_start import child; child(sys.argv[1])"


@dataclass(frozen=True)
class _Asked:
    """What a fresh process is to do, as it is handed over."""

    options: dict[str, object]
    launched_unix_s: float


def fresh_starts(prepared: Prepared, machine: Machine, model_bytes: int) -> Iterator[FreshStart]:
    """Fresh processes that load the model and answer one request with each engine: its checkpoint read from the disk,
    and once more from the system's cache of it; random weights are drawn. Raises RequestError where one fails, and
    where a card has no room for the `model_bytes` of weights next to those of this process.

    A checkpoint that this process has mapped, as on a CPU, stays in that cache: nothing comes from the disk then.
    """
    _refuse_a_second_process(machine, model_bytes)
    file = _weights_folder(prepared)
    if prepared.request.weights == "random" or file is None:
        yield start_fresh(prepared, "drawn" if prepared.request.weights == "random" else "cached")
        return
    for link in FROM_FILES if forget(_files(file)) else FROM_FILES[1:]:
        yield start_fresh(prepared, link)


def _refuse_a_second_process(machine: Machine, model_bytes: int) -> None:
    if not machine.is_cuda:
        return
    machine.release()  # what torch keeps here is not free there
    free_bytes = machine.available_bytes()
    if free_bytes < model_bytes + _CONTEXT_BYTES:
        raise RequestError(
            f"--cold loads the model in a second process, and {scaled(free_bytes, 'B')} are free next to this one's:"
            f" {scaled(model_bytes + _CONTEXT_BYTES, 'B')} are needed. Use a smaller model or --quant nf4."
        )


def start_fresh(prepared: Prepared, link: str) -> FreshStart:
    cell = prepared.grid.cells[0]
    options = replace(
        prepared.options,
        prompt_lens=[cell.prompt_len or cell.context_len],
        context_lens="",
        batch_sizes=[cell.batch_size],
        out=None,
        cold=False,
    )
    asked = _Asked(asdict(options), time.time())
    command = [sys.executable, "-c", _CHILD, json.dumps(asdict(asked))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_LONGEST_S)
    except subprocess.TimeoutExpired:
        raise RequestError(f"a fresh process did not answer within {_LONGEST_S:g} s.") from None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        hint = "; the card takes one process at a time (nvidia-smi -c DEFAULT)" if _EXCLUSIVE in reason else ""
        raise RequestError(f"a fresh process ended with {done.returncode}: {reason}{hint}")
    found = json.loads(done.stdout.splitlines()[-1])
    engines = {name: FirstCalls(**calls) for name, calls in found.pop("engines").items()}
    return FreshStart(link=link, engines=engines, **found)


def child(text: str) -> None:
    """The fresh process itself: what it took, as one line of JSON on stdout."""
    from profiler.run.options import Options
    from profiler.run.validate import prepare

    asked = json.loads(text)
    launch_s = time.time() - asked["launched_unix_s"]
    with quiet_libraries():
        prepared = prepare(Options(**asked["options"]))
        machine, cell = machine_for(prepared.request.device), prepared.grid.cells[0]
        start_s = now_s()
        loaded = load(prepared.request, prepared.config)
        machine.clock.synchronize()
        load_s = now_s() - start_s
        vocab_size = prepared.config.get_text_config().vocab_size
        ids = seeded_prompts(cell, vocab_size).to(machine.device)
        engines: dict[str, dict[str, float]] = {}
        for name in prepared.grid.engines:
            engine = ENGINES[name](loaded.module, machine)
            times = []
            with torch.inference_mode():
                start_s = now_s()
                engine.prepare(cell.batch_size, cell.slots)
                machine.clock.synchronize()
                preparation_s = now_s() - start_s
                for _ in range(2):
                    start_s = now_s()
                    engine.call(ids, cell.new_tokens, lambda: None).cpu()
                    times.append(now_s() - start_s)
            engines[name] = {"preparation_s": preparation_s, "first_s": times[0], "second_s": times[1]}
        nbytes = model_storage_bytes(loaded.module)
    print(json.dumps({"launch_s": launch_s, "load_s": load_s, "load_bytes": nbytes, "engines": engines}))


def _weights_folder(prepared: Prepared) -> Path | None:
    """Where the weights lie, where they are files of this machine."""
    path = prepared.request.source.path
    return path if path is not None and path.exists() else None


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else [each for each in path.iterdir() if each.is_file()]


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
