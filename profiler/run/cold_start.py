"""`--cold`: fresh processes from launch to answer, with their files out of the page cache, and steps after a pause."""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from profiler import effort
from profiler.data.room import idle_room_bytes
from profiler.device.clock import no_gc, now_s, time_calls, waited_s
from profiler.device.machine import Machine, machine_for
from profiler.engines.base import Engine
from profiler.engines.registry import ENGINES
from profiler.errors import RequestError
from profiler.facts.measurements import AfterIdle, FirstCalls, FreshStart
from profiler.grid.cells import Cell
from profiler.loading.load import load
from profiler.loading.meta_model import quiet_libraries
from profiler.quant.storage import model_storage_bytes
from profiler.run.validate import PreparedRun
from profiler.units import scaled

FROM_FILES = ("disk", "page cache")
"""Sources of weight files, one fresh process for each."""
_TIMEOUT_S = 900.0
_EXCLUSIVE = "CUDA-capable device(s) is/are busy or unavailable"
"""cudaErrorDevicesUnavailable: a second process gets it on a GPU in the mode EXCLUSIVE_PROCESS."""

_CHILD = "import sys; from profiler.run.cold_start import child; child(sys.argv[1])"


def fresh_starts(prepared: PreparedRun, machine: Machine, model_bytes: int) -> Iterator[FreshStart]:
    """Yield the times of fresh processes that load the model and answer one request with each engine.

    A checkpoint is read from the disk, and again from the page cache; random weights are drawn. A checkpoint that this
    process has mapped, as on a CPU, stays in the page cache, and nothing is then read from the disk.

    Raises RequestError if a process fails, or if a GPU has no room for a second copy of the `model_bytes` of weights.
    """
    if machine.is_cuda:
        machine.release()  # memory that torch caches here is not free for the other process
        room = idle_room_bytes("cuda", machine.available_bytes())  # the other process makes a context of its own
        if room < model_bytes:
            raise RequestError(
                f"--cold loads the model in a second process, and there is room for {scaled(room, 'B')} next to this"
                f" one's: its weights need {scaled(model_bytes, 'B')}. Use a smaller model or --quant nf4."
            )
    path, is_random = prepared.request.source.path, prepared.request.weights == "random"
    if is_random or path is None or not path.exists():
        yield start_fresh(prepared, "drawn" if is_random else "cached")
        return
    files = [path] if path.is_file() else [each for each in path.iterdir() if each.is_file()]
    for link in FROM_FILES if forget(files) else FROM_FILES[1:]:
        yield start_fresh(prepared, link)


def start_fresh(prepared: PreparedRun, link: str) -> FreshStart:
    """Run one fresh process and return its times. Raises RequestError if it fails or times out."""
    cell = prepared.grid.cells[0]
    options = replace(
        prepared.options,
        prompt_lens=[cell.prompt_len or cell.context_len],
        context_lens="",
        batch_sizes=[cell.batch_size],
        out=None,
        cold=False,
    )
    request = json.dumps({"options": asdict(options), "launched_unix_s": time.time()}, default=str)
    command = [sys.executable, "-c", _CHILD, request]
    try:
        process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise RequestError(f"a fresh process did not answer within {_TIMEOUT_S:g} s.") from None
    if process.returncode:
        reason = (process.stderr.strip().splitlines() or ["no reason given"])[-1]
        hint = "; the GPU accepts one process at a time (nvidia-smi -c DEFAULT)" if _EXCLUSIVE in reason else ""
        raise RequestError(f"a fresh process ended with exit code {process.returncode}: {reason}{hint}")
    times = json.loads(process.stdout.splitlines()[-1])
    engines = {name: FirstCalls(**calls) for name, calls in times.pop("engines").items()}
    return FreshStart(link=link, engines=engines, **times)


def child(request_json: str) -> None:
    """Entry point of the fresh process: print its times as one line of JSON."""
    from profiler.run.options import Options
    from profiler.run.validate import prepare

    request = json.loads(request_json)
    launch_s = time.time() - request["launched_unix_s"]
    with quiet_libraries():
        prepared = prepare(Options(**request["options"]))
        machine, cell = machine_for(prepared.request.device), prepared.grid.cells[0]
        start_s = now_s()
        loaded = load(prepared.request, prepared.config)
        machine.clock.synchronize()
        load_s = now_s() - start_s
        ids = prepared.prompts.of(cell).to(machine.device)
        engines: dict[str, dict[str, float]] = {}
        for name in prepared.grid.engines:
            engine, wait = ENGINES[name](loaded.module, machine), machine.clock.synchronize
            with torch.inference_mode():
                preparation_s = waited_s(partial(engine.prepare, cell.batch_size, cell.slots), wait)
                call = partial(engine.call, ids, cell.new_tokens, lambda: None)
                times = [waited_s(lambda call=call: call().cpu(), wait) for _ in range(2)]  # type: ignore[misc]
            engines[name] = {"preparation_s": preparation_s, "first_s": times[0], "second_s": times[1]}
        nbytes = model_storage_bytes(loaded.module)
    print(json.dumps({"launch_s": launch_s, "load_s": load_s, "load_bytes": nbytes, "engines": engines}))


_MOST_RESIDENT = 0.01
"""Files whose resident pages are at most this share of all are read from the disk."""


def forget(files: Iterable[Path]) -> bool:
    """Ask the system to drop the cached pages of these files; return whether they are gone.

    Pages that a process has mapped stay cached (posix_fadvise(2), POSIX_FADV_DONTNEED), and so does a file system that
    is itself memory.
    """
    resident_pages = pages = 0
    for file in files:
        try:
            handle = os.open(file, os.O_RDONLY)
            try:
                with contextlib.suppress(OSError):  # a read-only disk has nothing to write
                    os.fsync(handle)
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(handle)
            is_resident = _resident(file)
        except OSError:  # the file is gone
            return False
        resident_pages += int(is_resident.sum())
        pages += len(is_resident)
    return pages > 0 and resident_pages <= _MOST_RESIDENT * pages


def _resident(file: Path) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """[page]: whether it is in memory (mincore(2), the lowest bit of each byte); mapping a file reads nothing of it."""
    nbytes = file.stat().st_size
    if not nbytes:
        return np.zeros(0, np.bool_)
    page_states = np.zeros(-(-nbytes // mmap.PAGESIZE), np.uint8)
    with file.open("rb") as handle, mmap.mmap(handle.fileno(), nbytes, access=mmap.ACCESS_READ) as view:
        mapped = np.frombuffer(view, np.uint8)
        failed = ctypes.CDLL(None, use_errno=True).mincore(
            ctypes.c_void_p(mapped.ctypes.data), ctypes.c_size_t(nbytes), ctypes.c_void_p(page_states.ctypes.data)
        )
        del mapped  # a map that is in use cannot be closed
    if failed:
        raise OSError(ctypes.get_errno(), "mincore", str(file))
    return (page_states & 1).astype(np.bool_)


# Decode steps before and after the pause.
_WARM_STEPS = 4
_STEPS = 4


def steps_after_idle(
    engine: Engine,
    cell: Cell,
    machine: Machine,
    pauses: Sequence[tuple[float, int]] = effort.STANDARD.idle_pauses,
    wait: Callable[[float], None] = time.sleep,
) -> Iterator[AfterIdle]:
    """Time the first decode steps of a cell after pauses in which this process uses no device.

    `pauses` are pairs of seconds and the number of repetitions.
    """
    clock = machine.clock
    slots = cell.depth + _WARM_STEPS + _STEPS + 1
    with torch.inference_mode(), no_gc():
        for silence_s, times in pauses:
            steps_s = []
            for _ in range(times):
                engine.announce(cell, None)
                engine.prepare(cell.batch_size, slots)
                state = engine.fill(cell.batch_size, cell.depth, slots)
                for _ in range(_WARM_STEPS):
                    state = engine.decode(state)

                def step() -> None:
                    nonlocal state
                    state = engine.decode(state)

                clock.synchronize()
                wait(silence_s)
                steps_s.append(tuple(time_calls(step, clock, _STEPS, drop_first=False)))
            yield AfterIdle(cell, silence_s, tuple(steps_s))
