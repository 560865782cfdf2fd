"""Simulated observers of a card: torch's profiler, Nsight Compute, another process, hidden packages."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from .card import Card, Kernel
from .world import World

_KERNELS = {
    "cudnn attention": "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_simulated",
    "flash attention": "void pytorch_flash::flash_fwd_kernel<simulated>",
    "memory-efficient attention": "fmha_cutlassF_f16_aligned_64x64_rf_sm75(simulated)",
}
"""Names of attention kernels on real cards."""
_COLUMNS = ("ID", "Kernel Name", "Stream", "Metric Name", "Metric Unit", "Metric Value")


@contextlib.contextmanager
def listening(card: Card, listener: Callable[[Kernel], None]) -> Iterator[None]:
    """Call `listener` with every kernel of a card when it is sent, within the context."""

    class Log(list[Kernel]):
        def append(self, kernel: Kernel) -> None:
            super().append(kernel)
            listener(kernel)

    card.log = Log()
    try:
        yield
    finally:
        card.log = None


@dataclass
class Event:
    """The attributes of torch.autograd.profiler_util.FunctionEvent that the script uses; durations in microseconds."""

    name: str
    device_type: Any = torch.autograd.DeviceType.CPU
    kernels: list[Any] = field(default_factory=list)
    cpu_children: list[Event] = field(default_factory=list)


def kineto(world: World) -> Callable[..., contextlib.AbstractContextManager[Any]]:
    """Replace `profiler.device.machine.recorded`: a kernel belongs to the mark that launched it."""

    @contextlib.contextmanager
    def recorded(*, cuda: bool) -> Iterator[Any]:
        found: list[Event] = []
        marks: list[Event] = []

        @contextlib.contextmanager
        def record_function(name: str) -> Iterator[None]:
            mark = Event(name)
            found.append(mark)
            for above in marks[-1:]:
                above.cpu_children.append(mark)
            marks.append(mark)
            yield
            marks.pop()

        def listener(kernel: Kernel) -> None:
            own = kernel.work.name
            name = next((name for part, name in _KERNELS.items() if own.startswith(part)), own)
            launch = Event("a launch", kernels=[SimpleNamespace(name=name, duration=kernel.duration_s * 1e6)])
            for above in marks[-1:]:
                above.cpu_children.append(launch)
            found.append(launch)

        with listening(world.card, listener), mock.patch.object(torch.profiler, "record_function", record_function):
            yield SimpleNamespace(events=lambda: found)

    return recorded


def ncu(world: World, target: Callable[[str], None]) -> Callable[..., Any]:
    """Replace `subprocess.run` of Nsight Compute; its target runs in this process. It prints bytes of memory per
    kernel."""

    def run(command: Sequence[str], **_: Any) -> Any:
        card, rows, on = world.card, [",".join(f'"{name}"' for name in _COLUMNS)], []

        def listener(kernel: Kernel) -> None:
            if on:
                stream = card.streams.index(card.stream)
                for metric, nbytes in (("dram__bytes_read.sum", kernel.memory_bytes), ("dram__bytes_write.sum", 0)):
                    row = (len(rows), kernel.work.name.replace('"', ""), stream, metric, "byte", f"{nbytes:,}")
                    rows.append(",".join(f'"{value}"' for value in row))

        with (
            listening(card, listener),
            mock.patch.object(torch.cuda.profiler, "start", partial(on.append, True)),
            mock.patch.object(torch.cuda.profiler, "stop", on.clear),
        ):
            target(command[command.index("--ncu-target") + 1])
        return SimpleNamespace(returncode=0, stdout="==PROF== simulated\n" + "\n".join(rows), stderr="")

    return run


class Neighbour:
    """The second process that the script starts on the card."""

    def __init__(self, world: World, *_: Any, **__: Any) -> None:
        self._card = world.card
        self._truth_before = world.card.truth
        self._card.truth = self._truth_before.but(other_processes=1)

    def kill(self) -> None:
        self._card.truth = self._truth_before

    def wait(self) -> None:
        pass
