"""The processes that share a model under torchrun, all on this machine: NCCL on GPUs, gloo on CPUs."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from profiler.data.links import Link, MessageTime, fit_link
from profiler.device.clock import time_calls
from profiler.device.device import make_current
from profiler.device.machine import Machine
from profiler.errors import RankError, RoofscopeError, first_line

_PATIENCE = timedelta(hours=2)
"""The other ranks wait while rank 0 works without them."""
_NOTICE_S = 3.0
"""torchrun ends the other ranks within this time after one has ended."""
SWEEP_BYTES = tuple((1 << 10) << step for step in range(17))
"""1 KiB to 64 MiB."""


class ProcessGroup:
    """The ranks of a run. Rank 0 leads: it sends orders, and the others wait for them and follow."""

    def __init__(self, device_type: str) -> None:
        # SIGTERM ends a process at once until all ranks are there, and on ranks other than 0 always: nothing is lost
        # then. A rank that waits in C++ would run no handler of Python's, and torchrun would wait half a minute for it.
        handler = signal.signal(signal.SIGTERM, signal.SIG_DFL)
        is_cpu = device_type == "cpu"
        self.device = torch.device("cpu") if is_cpu else torch.device("cuda", dist.get_node_local_rank())
        make_current(self.device)
        dist.init_process_group("gloo" if is_cpu else "nccl", timeout=_PATIENCE)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        # A separate group for orders: they must not mix with the model's messages, and need no card.
        self._orders = dist.new_group(backend="gloo", timeout=_PATIENCE)
        pids = [0] * self.size
        dist.all_gather_object(pids, os.getpid(), group=self._orders)
        self.helper_pids = tuple(pid for pid in pids if is_cpu and pid != os.getpid())
        """Process ids of the other ranks if they share the cores and the memory of this one."""
        if self.rank == 0:
            signal.signal(signal.SIGTERM, handler)

    def share_cores(self) -> bool:
        """Give each rank on a CPU its own cores, and gloo's event loops a policy that does not preempt.

        Call this after all process groups exist: every group has a loop, which spins on a lock for a whole slice if it
        preempted its owner (gloo/transport/tcp/pair.cc). Returns whether it had an effect.
        """
        if self.device.type != "cpu":
            return False
        cores = sorted(os.sched_getaffinity(0))
        first, last = (number * len(cores) // self.size for number in (self.rank, self.rank + 1))
        for thread in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # the thread has just ended, or a sandbox forbids it
                os.sched_setaffinity(int(thread.name), cores[first : max(last, first + 1)])
                if (thread / "comm").read_text().strip() == "gloo_tcp_loop":
                    os.sched_setscheduler(int(thread.name), os.SCHED_BATCH, os.sched_param(0))
        return True

    def order(self, order: object) -> None:
        """Send the next order to the other ranks (rank 0); None ends them."""
        with self.together():
            dist.broadcast_object_list([order], src=0, group=self._orders)

    def next_order(self) -> Any:
        """Wait for the next order of rank 0 and return it; None if rank 0 is gone."""
        orders: list[Any] = [None]
        with contextlib.suppress(RuntimeError):
            dist.broadcast_object_list(orders, src=0, group=self._orders)
        return orders[0]

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Turn a failure of shared work into RankError; torchrun interrupts this rank if another one has ended."""
        try:
            yield
        except RoofscopeError:
            raise
        except Exception as error:
            time.sleep(_NOTICE_S)
            raise RankError(f"a step failed on rank {self.rank} of {self.size}: {first_line(error)}") from error

    def measure_link(self, machine: Machine) -> Link:
        """Measure the mean time of all-reduces of 1 KiB to 64 MiB, on all ranks at once. Raises RankError."""
        with self.together():
            points = [MessageTime(self.size, nbytes, self._exchange_s(nbytes, machine)) for nbytes in SWEEP_BYTES]
        name = "gloo" if self.device.type == "cpu" else "NCCL"
        return fit_link(f"{name}, {self.size} ranks", points, "measured in this run")

    def _exchange_s(self, nbytes: int, machine: Machine) -> float:
        """Mean seconds of an all-reduce, from the last arrival to the first departure, with a layer's reads between."""
        calls = min(64, (256 << 20) // nbytes)  # which send at most 256 MiB
        exchange = partial(dist.all_reduce, torch.ones(nbytes // 4, device=self.device))
        weights, begun_s, ended_s = torch.ones(2 << 20), list[float](), list[float]()
        for _ in range(3):  # the first calls take longer
            exchange()
        if machine.clock.ahead:
            machine.clock.synchronize()
            seconds = torch.tensor(time_calls(exchange, machine.clock, 1, group=calls, drop_first=False))
        else:
            for _ in range(calls):
                weights.sum()
                begun_s.append(machine.now_s())
                exchange()
                ended_s.append(machine.now_s())
            begun, ended = torch.tensor([begun_s, ended_s], dtype=torch.float64)
            dist.all_reduce(begun, op=dist.ReduceOp.MAX, group=self._orders)
            dist.all_reduce(ended, op=dist.ReduceOp.MIN, group=self._orders)
            seconds = ended - begun
        dist.all_reduce(seconds, op=dist.ReduceOp.MIN, group=self._orders)
        return float(seconds.mean())
