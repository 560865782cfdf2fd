"""The processes that share a model under torchrun: NCCL on GPUs, gloo on CPUs."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from profiler.data.links import MessageTime
from profiler.device.machine import Machine
from profiler.errors import RankError, RoofscopeError, first_line

_PATIENCE = timedelta(hours=2)
"""The others wait while rank 0 works alone."""
_NOTICE_S = 3.0
"""A process that was killed is seen to be gone within this."""
SWEEP_BYTES = tuple((1 << 10) << step for step in range(17))
"""1 KiB to 64 MiB."""
_MOST_CALLS = 200
_LEAST_CALLS = 3
_LARGE_BYTES = 1 << 20
_WARM_CALLS = 3
_BETWEEN_BYTES = 8 << 20
_THREADS = Path("/proc/self/task")
_GLOO_LOOP = "gloo_tcp_loop"
_SMALL_ELEMENTS = 512
_HANDING_ON_S = 100e-6
"""Gloo's own threads on this core hand on what the others wait for: behind a rank that works at once they would do so
only when it comes to its next exchange, and ranks would work one after the other."""


def under_torchrun() -> bool:
    """Whether this process is one of several that torchrun started."""
    return bool(dist.is_available() and dist.is_torchelastic_launched())


def cards() -> int:
    """CUDA devices of this machine."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


@dataclass(frozen=True)
class _Peer:
    host: str
    pid: int


class ProcessGroup:
    """The ranks of a run. Rank 0 leads: it gives orders, and the others wait for them and follow."""

    def __init__(self, device_type: str) -> None:
        # Until all are there, and on the others ever, there is nothing to keep: who waits in C++ for a rank that will
        # not come hears no handler of Python's, and torchrun waits half a minute for it.
        keeps = signal.signal(signal.SIGTERM, signal.SIG_DFL)
        local = dist.get_node_local_rank(0)
        self.device = torch.device("cpu") if device_type == "cpu" else torch.device("cuda", local)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        backend = "gloo" if self.device.type == "cpu" else "nccl"
        dist.init_process_group(backend, timeout=_PATIENCE)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.mesh = dist.init_device_mesh(self.device.type, (self.size,), mesh_dim_names=("tp",))
        # Orders go beside the model's own messages, and need no card.
        self._orders = dist.new_group(backend="gloo", timeout=_PATIENCE)
        self._peers: list[_Peer] = [_Peer("", 0)] * self.size
        dist.all_gather_object(self._peers, _Peer(socket.gethostname(), os.getpid()), group=self._orders)
        if self.rank == 0:
            signal.signal(signal.SIGTERM, keeps)

    def share_cores(self) -> bool:
        """Give each rank on a CPU cores of its own, and gloo's event loops no right to preempt, where Linux can.

        A loop tries again and again for a lock (`Pair::handleEvents`, gloo/transport/tcp/pair.cc), for a whole slice of
        the scheduler's where it has preempted the thread that holds it: of two ranks on two cores a message then takes
        2.8 ms instead of 0.3. A decode step with 26 exchanges took 39 ms, 31 with loops that wait, 24 with own cores as
        well. Every process group has a loop: to be called when all are made, transformers' own included.
        """
        if self.device.type != "cpu" or not (hasattr(os, "sched_setaffinity") and _THREADS.is_dir()):
            return False
        here = [rank for rank, peer in enumerate(self._peers) if peer.host == self._peers[self.rank].host]
        cores, number = sorted(os.sched_getaffinity(0)), here.index(self.rank)
        first, last = (each * len(cores) // len(here) for each in (number, number + 1))
        for thread in _THREADS.iterdir():
            with contextlib.suppress(OSError):  # one that has just ended, or a sandbox that forbids it
                os.sched_setaffinity(int(thread.name), cores[first : max(last, first + 1)])
                if (thread / "comm").read_text().strip() == _GLOO_LOOP:
                    os.sched_setscheduler(int(thread.name), os.SCHED_BATCH, os.sched_param(0))
        return True

    @property
    def one_clock(self) -> bool:
        """Whether all ranks are of one host."""
        return len({peer.host for peer in self._peers}) == 1

    @property
    def beside(self) -> tuple[int, ...]:
        """The other ranks' processes on this host."""
        own = self._peers[self.rank]
        return tuple(peer.pid for peer in self._peers if peer.host == own.host and peer.pid != own.pid)

    def order(self, order: object) -> None:
        """Tell the others what comes next (rank 0). Raises RankError where one of them is gone."""
        with self.together():
            dist.broadcast_object_list([order], src=0, group=self._orders)

    def next_order(self) -> Any:
        """What rank 0 wants next; None where it is gone."""
        held: list[Any] = [None]
        try:
            dist.broadcast_object_list(held, src=0, group=self._orders)
        except RuntimeError:
            return None
        return held[0]

    def gather(self, value: object) -> list[Any]:
        """Every rank's value, on rank 0; elsewhere nothing. Raises RankError where one of them is gone."""
        found: list[Any] | None = [None] * self.size if self.rank == 0 else None
        with self.together():
            dist.gather_object(value, found, dst=0, group=self._orders)
        return found or []

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Within, all ranks work; a failure on this one leaves the others waiting for it, so that it ends the run."""
        try:
            yield
        except RoofscopeError:
            raise
        except Exception as error:
            raise self.failure(error) from error

    def failure(self, error: BaseException | None = None) -> RankError:
        """What ended the group: ranks that are gone, or what failed here. torchrun ends the rest; it may wait."""
        with contextlib.suppress(ValueError):  # only a main thread has signals
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # what was measured is written first
        if lost := self.lost():
            names = " and ".join(map(str, lost))
            return RankError(f"rank {names} of {self.size} ended before its time")
        return RankError(f"a step failed on rank {self.rank}: {first_line(error) if error else 'no reason is known'}")

    def lost(self) -> tuple[int, ...]:
        """Ranks of this machine whose process is gone."""
        here = socket.gethostname()
        deadline_s = time.monotonic() + _NOTICE_S
        while True:
            found = [rank for rank, peer in enumerate(self._peers) if peer.host == here and _gone(peer.pid)]
            if found or time.monotonic() > deadline_s:
                return tuple(found)
            time.sleep(0.05)

    def meet(self) -> None:
        """Wait until all ranks are here, by a message as small as a decode step's.

        Raises RankError where one of them is gone.
        """
        with self.together():
            self._orders.allreduce([torch.zeros(_SMALL_ELEMENTS)]).wait()
        time.sleep(_HANDING_ON_S)

    def close(self) -> None:
        """End the group."""
        dist.destroy_process_group()

    def measure_exchange(self, machine: Machine, budget_s: float) -> tuple[MessageTime, ...]:
        """All-reduces of 1 KiB to 64 MiB, all ranks in step, each timed from when the last rank has come to it.

        The mean, as nccl-tests gives it: a step makes dozens of calls, and takes the sum of them, slow ones included.
        """
        return tuple(self._exchange(nbytes, machine, budget_s / len(SWEEP_BYTES)) for nbytes in SWEEP_BYTES)

    def _exchange(self, nbytes: int, machine: Machine, budget_s: float) -> MessageTime:
        message = torch.ones(nbytes // 4, dtype=torch.float32, device=self.device)
        seconds = partial(self._in_a_row_s if machine.clock.ahead else self._in_a_step_s, message, machine)
        seconds(_WARM_CALLS if nbytes < _LARGE_BYTES else 1)
        started_s = machine.now_s()
        seconds(1)
        # Rank 0 says for how many there is time: all must make the same number of calls.
        within = int(budget_s / max(machine.now_s() - started_s, 1e-9))
        calls = torch.tensor([max(_LEAST_CALLS, min(_MOST_CALLS, within))])
        dist.broadcast(calls, src=0, group=self._orders)
        return MessageTime(self.size, nbytes, seconds(int(calls)))

    def _in_a_row_s(self, message: torch.Tensor, machine: Machine, calls: int) -> float:
        """The mean of so many in a row: where the host runs ahead, what submits one is no part of it."""
        machine.clock.synchronize()
        marks = [machine.clock.mark()]
        for _ in range(calls):
            dist.all_reduce(message)
        marks.append(machine.clock.mark())
        machine.clock.synchronize()
        seconds = torch.tensor(machine.clock.seconds(marks), dtype=torch.float64)
        # A rank that comes early waits for the others: the last one's time is the exchange's.
        dist.all_reduce(seconds, op=dist.ReduceOp.MIN, group=self._orders)
        return float(seconds) / calls

    def _in_a_step_s(self, message: torch.Tensor, machine: Machine, calls: int) -> float:
        """The mean of so many, behind a read of more than a core's own caches hold, as a layer's weights are before
        its sum: each from when the last rank comes to it to when the first one goes on."""
        between, begun_s, ended_s = torch.ones(_BETWEEN_BYTES // 4), [], []
        for _ in range(calls):
            between.sum()
            begun_s.append(machine.now_s())
            dist.all_reduce(message)
            ended_s.append(machine.now_s())
        every: list[Any] = [None] * self.size
        dist.all_gather_object(every, (begun_s, ended_s), group=self._orders)
        marks_s = (np.array(each) for each in zip(*every, strict=True))
        return float(np.mean(in_common_s(*marks_s, one_clock=self.one_clock)))


def in_common_s(begun_s: NDArray[np.float64], ended_s: NDArray[np.float64], *, one_clock: bool) -> NDArray[np.float64]:
    """How long all ranks were in an exchange, from when each came to when each went on: [rank, ...] -> [...].

    From when the last one came to when the first one went on; where hosts have clocks of their own, the shortest stay,
    which is the last one's.
    """
    if one_clock:
        return np.asarray(ended_s.min(axis=0) - begun_s.max(axis=0))
    return np.asarray((ended_s - begun_s).min(axis=0))


@dataclass(frozen=True)
class IdleWatch:
    """When a rank came to each exchange that it left out and when it went on, on its host's clock, in order.

    Nothing where the host runs ahead of its device: it does not know when the device was there.
    """

    begun_s: list[float]
    ended_s: list[float]


@contextlib.contextmanager
def silent(group: ProcessGroup, machine: Machine) -> Iterator[IdleWatch]:
    """Within, nothing is exchanged: sums stay partial and gathered wholes are copies of this rank's piece.

    For the time of a rank's own work. What transformers (5.23) and DTensor call is replaced by name. Hosts that wait
    for their exchanges meet instead: ranks that take turns on a core begin and end each piece as in a step, and what
    follows finds caches as cold as behind an exchange.
    """
    import torch.distributed._functional_collectives as functional

    found = IdleWatch([], [])

    def skip() -> None:
        if not machine.clock.ahead:
            found.begun_s.append(machine.now_s())
            group.meet()
            found.ended_s.append(machine.now_s())

    def keeps(tensor: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        skip()
        return tensor

    def repeats(tensor: torch.Tensor, gather_dim: int, *_: object, **__: object) -> torch.Tensor:
        skip()
        return torch.cat([tensor] * group.size, dim=gather_dim)

    gathers = [name for name in ("all_gather_single", "all_gather_tensor") if hasattr(functional, name)]
    replaced: list[tuple[Any, str, Any]] = [(dist, "all_reduce", keeps), (functional, "all_reduce", keeps)]
    replaced += [(functional, name, repeats) for name in gathers]
    plain = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    try:
        for owner, name, other in replaced:
            setattr(owner, name, other)
        yield found
    finally:
        for owner, name, own in plain:
            setattr(owner, name, own)


def _gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has asked for yet still has a number (a zombie)."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (OSError, IndexError):
        return False


def torchrun_command(python: str, ranks: int, arguments: Sequence[str]) -> list[str]:
    """What starts this program once a rank, on this machine."""
    return [
        python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m", "profiler",
        *arguments,
    ]  # fmt: skip
