"""The processes that share a model under torchrun: NCCL on GPUs, gloo on CPUs."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from profiler.data.links import Link, MessageTime, fit_link
from profiler.device.clock import now_s, time_calls
from profiler.device.device import make_current
from profiler.device.machine import Machine
from profiler.errors import RankError, RoofscopeError, first_line

_PATIENCE = timedelta(hours=2)
"""The other ranks wait while rank 0 works without them."""
_NOTICE_S = 3.0
"""A killed process is detected within this time."""
SWEEP_BYTES = tuple((1 << 10) << step for step in range(17))
"""1 KiB to 64 MiB."""
_LINK_S = 4.0
_MOST_CALLS = 200
_LEAST_CALLS = 3
_LARGE_BYTES = 1 << 20
_WARM_CALLS = 3
_WEIGHTS_BYTES = 8 << 20
_THREADS = Path("/proc/self/task")
_GLOO_LOOP = "gloo_tcp_loop"


class ProcessGroup:
    """The ranks of a run. Rank 0 leads: it sends orders, and the others wait for them and follow."""

    def __init__(self, device_type: str) -> None:
        # SIGTERM ends a process at once until all ranks are there, and on ranks other than 0 always: nothing is lost
        # then. A rank that waits in C++ for one that never comes would run no handler of Python's, and torchrun would
        # wait half a minute for it.
        handler = signal.signal(signal.SIGTERM, signal.SIG_DFL)
        local = dist.get_node_local_rank(0)
        self.device = torch.device("cpu") if device_type == "cpu" else torch.device("cuda", local)
        make_current(self.device)
        backend = "gloo" if self.device.type == "cpu" else "nccl"
        dist.init_process_group(backend, timeout=_PATIENCE)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.mesh = dist.init_device_mesh(self.device.type, (self.size,), mesh_dim_names=("tp",))
        # A separate group for orders: they must not mix with the model's messages, and need no card.
        self._orders = dist.new_group(backend="gloo", timeout=_PATIENCE)
        self._peers = [("", 0)] * self.size
        """Host and process id of each rank."""
        dist.all_gather_object(self._peers, (socket.gethostname(), os.getpid()), group=self._orders)
        if self.rank == 0:
            signal.signal(signal.SIGTERM, handler)

    def share_cores(self) -> bool:
        """Give each rank on a CPU its own cores, and gloo's event loops a policy that does not preempt.

        Call this after all process groups exist, transformers' included: every group has a loop. Returns whether it
        had an effect.

        A loop spins on a lock (`Pair::handleEvents`, gloo/transport/tcp/pair.cc), for a whole slice of the scheduler if
        it preempted the thread with the lock. Between two ranks on two cores a message then takes 2.8 ms instead of
        0.3. A decode step with 26 exchanges took 39 ms, 31 without preemption, and 24 with separate cores as well.
        """
        if self.device.type != "cpu":
            return False
        here = [rank for rank, (host, _) in enumerate(self._peers) if host == self._peers[self.rank][0]]
        cores, number = sorted(os.sched_getaffinity(0)), here.index(self.rank)
        first, last = number * len(cores) // len(here), (number + 1) * len(cores) // len(here)
        for thread in _THREADS.iterdir():
            with contextlib.suppress(OSError):  # the thread has just ended, or a sandbox forbids it
                os.sched_setaffinity(int(thread.name), cores[first : max(last, first + 1)])
                if (thread / "comm").read_text().strip() == _GLOO_LOOP:
                    os.sched_setscheduler(int(thread.name), os.SCHED_BATCH, os.sched_param(0))
        return True

    @property
    def helper_pids(self) -> tuple[int, ...]:
        """Process ids of the other ranks on this host."""
        own_host, own_pid = self._peers[self.rank]
        return tuple(pid for host, pid in self._peers if host == own_host and pid != own_pid)

    def order(self, order: object) -> None:
        """Send the next order to the other ranks (rank 0). Raises RankError if one of them is gone."""
        with self.together():
            dist.broadcast_object_list([order], src=0, group=self._orders)

    def next_order(self) -> Any:
        """Wait for the next order of rank 0 and return it; None if rank 0 is gone."""
        orders: list[Any] = [None]
        try:
            dist.broadcast_object_list(orders, src=0, group=self._orders)
        except RuntimeError:
            return None
        return orders[0]

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Turn a failure of work that all ranks share into RankError: the others would wait for this rank."""
        try:
            yield
        except RoofscopeError:
            raise
        except Exception as error:
            raise self.failure(error) from error

    def failure(self, error: BaseException | None = None) -> RankError:
        """Return what ended the group: lost ranks, or the failure here. Ignores SIGTERM from here on."""
        with contextlib.suppress(ValueError):  # only a main thread has signals
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's: the measurements are written first
        if lost := self.lost():
            names = " and ".join(map(str, lost))
            return RankError(f"rank {names} of {self.size} ended early")
        return RankError(f"a step failed on rank {self.rank}: {first_line(error) if error else 'unknown reason'}")

    def lost(self) -> tuple[int, ...]:
        """Return the ranks of this host whose process is gone, after at most 3 s."""
        here = socket.gethostname()
        deadline_s = now_s() + _NOTICE_S
        while True:
            ranks = tuple(rank for rank, (host, pid) in enumerate(self._peers) if host == here and _gone(pid))
            if ranks or now_s() > deadline_s:
                return ranks
            time.sleep(0.05)

    def close(self) -> None:
        """End the group."""
        dist.destroy_process_group()

    def measure_link(self, machine: Machine) -> Link:
        """Measure latency and bandwidth of all-reduces of 1 KiB to 64 MiB between the ranks, on all of them at once.

        It takes some 4 s. Times are means, like those of nccl-tests: a step makes dozens of calls and pays for all of
        them, slow ones included. Raises RankError if a rank is gone.
        """
        with self.together():
            points = [self._message_time(nbytes, machine, _LINK_S / len(SWEEP_BYTES)) for nbytes in SWEEP_BYTES]
        name = "gloo" if self.device.type == "cpu" else "NCCL"
        return fit_link(f"{name}, {self.size} ranks", points, "measured in this run")

    def _message_time(self, nbytes: int, machine: Machine, budget_s: float) -> MessageTime:
        message = torch.ones(nbytes // 4, dtype=torch.float32, device=self.device)
        self._exchange_s(message, machine, _WARM_CALLS if nbytes < _LARGE_BYTES else 1)
        started_s = machine.now_s()
        self._exchange_s(message, machine, 1)
        # All ranks must make the same number of calls, so rank 0 decides for how many there is time.
        affordable = int(budget_s / max(machine.now_s() - started_s, 1e-9))
        calls = torch.tensor([max(_LEAST_CALLS, min(_MOST_CALLS, affordable))])
        dist.broadcast(calls, src=0, group=self._orders)
        return MessageTime(self.size, nbytes, self._exchange_s(message, machine, int(calls)))

    def _exchange_s(self, message: torch.Tensor, machine: Machine, calls: int) -> float:
        """Mean seconds of `calls` exchanges, each from the arrival of the last rank to the departure of the first.

        Where the host runs ahead, they follow each other: submission takes no extra time, and the last rank waits
        least. Elsewhere each follows a read that displaces the core's caches, as a layer's weights do.
        """
        exchange, weights = partial(dist.all_reduce, message), torch.ones(_WEIGHTS_BYTES // 4)
        if machine.clock.ahead:
            machine.clock.synchronize()
            times_s = time_calls(exchange, machine.clock, 1, group=calls, drop_first=False)
            seconds = torch.tensor(times_s, dtype=torch.float64)
        else:
            begun_s, ended_s = [], []
            for _ in range(calls):
                weights.sum()
                begun_s.append(machine.now_s())
                exchange()
                ended_s.append(machine.now_s())
            begun, ended = torch.tensor([begun_s, ended_s], dtype=torch.float64)
            if len({host for host, _ in self._peers}) == 1:  # and so one clock
                dist.all_reduce(begun, op=dist.ReduceOp.MAX, group=self._orders)
                dist.all_reduce(ended, op=dist.ReduceOp.MIN, group=self._orders)
            seconds = ended - begun
        dist.all_reduce(seconds, op=dist.ReduceOp.MIN, group=self._orders)
        return float(seconds.mean())


def _gone(pid: int) -> bool:
    """Whether a process has ended, zombies included: one that its parent has not waited for keeps its pid."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
