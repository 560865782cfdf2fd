"""Shared by all groups: a check, an attempt at some checks, and the bench that they run on."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from traceback import clear_frames
from typing import Any, TypeVar

import torch

import profiler
from profiler.device.clock import now_s
from profiler.device.machine import Machine, clear_workspaces, machine_for
from profiler.errors import first_line
from profiler.facts.run_facts import Facts
from profiler.loading.config import load_config
from profiler.loading.load import load
from profiler.loading.request import ModelRequest, dtype_name
from profiler.loading.source import resolve
from profiler.store.folder import Run, read_facts, read_gathered

Made = TypeVar("Made")

_SAMPLES = 12
LARGE_CARD_BYTES = 22e9
"""Memory from which a card fits Mistral-7B in 16 bits (14.5 GB) and its runs."""
_RUN_S = 60.0
_CPU_RUN_S = 15.0
_RUN_SHARE = 0.3
KEPT_BYTES = 128 << 20
"""Bytes that a run may leave reserved by torch: cuBLAS's workspaces of new streams, 32 MiB each on Hopper."""


class NotRunError(Exception):
    """A check cannot be made here; the text has the reason."""


@dataclass
class Check:
    name: str
    passed: bool | None
    """None: not run or not judged; `why` has the reason."""
    value: Any = None
    threshold: str = ""
    why: str = ""

    def __post_init__(self) -> None:
        # numpy's booleans are neither True nor False to `is`, which counts checks.
        self.passed = None if self.passed is None else bool(self.passed)


def red(name: str, error: Exception) -> Check:
    return Check(name, False, why=f"{type(error).__name__}: {first_line(error)}"[:500])


def within(name: str, ratio: float, tolerance: float, value: Any = None) -> Check:
    return Check(name, abs(ratio - 1) < tolerance, ratio if value is None else value, f"within {tolerance:.0%}")


def random_numbers(name: str, device: torch.device, value: Any = None) -> Check:
    """Return a check that random numbers can be drawn: torch up to 2.11 cannot after a capture that failed."""
    try:
        torch.rand(8, device=device) + torch.randn(8, device=device)
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        return red(name, error)
    return Check(name, True, value, "torch.rand and torch.randn raise nothing")


@dataclass(frozen=True)
class Attempt:
    """Some checks that are made together. If it raises, it is a failed check, and the next attempt follows."""

    name: str
    run: Callable[[Bench], Iterable[Check]]
    least_s: float = 10.0
    cuda: bool = True
    package: str = ""

    def why_not(self, bench: Bench) -> str:
        """Return why it cannot start; empty if it can."""
        if self.cuda and not bench.cuda:
            return "needs a CUDA card"
        if self.package and find_spec(self.package) is None:
            return f"{self.package} is not installed"
        if bench.cuda and bench.left_s < self.least_s:
            return f"{max(0.0, bench.left_s):.0f} s were left, it may take {self.least_s:.0f}"
        return ""


@dataclass
class Bench:
    """A device, the models of the checks, a folder for runs, and the time that is left."""

    device: torch.device
    model: str
    small: str
    folder: Path
    minutes: float
    imports_s: float = 0.0
    """Seconds before this bench was made."""
    memory: list[dict[str, Any]] = field(default_factory=list)
    _made: dict[Callable[[Bench], Any], tuple[Any, Exception | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._started_s = now_s() - self.imports_s

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    @cached_property
    def machine(self) -> Machine:
        return machine_for(self.device)

    @property
    def spent_s(self) -> float:
        return now_s() - self._started_s

    @property
    def left_s(self) -> float:
        return 60 * self.minutes - self.spent_s

    @property
    def dtype(self) -> torch.dtype:
        """A 16-bit dtype that this device multiplies: float16 on cards without bfloat16 units (T4)."""
        old = self.cuda and torch.cuda.get_device_capability(self.device) < (8, 0)
        return torch.float16 if old else torch.bfloat16

    def on_a_card(self, name: str, passed: bool, value: Any, threshold: str) -> Check:
        why = "" if self.cuda else "judged on cards only"
        return Check(name, passed if self.cuda else None, value, threshold, why)

    def once(self, make: Callable[[Bench], Made]) -> Made:
        """Return the result of `make` for this bench, made once; after a failure the same error is raised again."""
        if make not in self._made:
            try:
                self._made[make] = make(self), None
            except Exception as error:
                clear_frames(error.__traceback__)  # they hold tensors
                self._made[make] = None, error
        made, error = self._made[make]
        if error is not None:
            raise error.with_traceback(None)
        return made

    def forget(self) -> None:
        """Forget the results of `once`, except runs, and free their memory."""
        self._made = {make: made for make, made in self._made.items() if made[1] or isinstance(made[0], Run)}
        free()

    def load(self, model: str, dtype: torch.dtype | None = None, quant: Any = "none", config: Any = None) -> Any:
        source = resolve(model)
        request = ModelRequest(source, self.device, dtype or self.dtype, quant)
        return load(request, config or load_config(source)).module

    def made_model(self, base: str, name: str, architecture: str, **changes: Any) -> str:
        """Return a folder with a model's changed config and no weights."""
        config = load_config(resolve(base))
        for key, value in {"architectures": [architecture], **changes}.items():
            setattr(config, key, value)
        config.save_pretrained(self.folder / name)
        return str(self.folder / name)

    def run(self, name: str, model: str | None = None, **options: Any) -> Run:
        """Return a run of the main model (or another) in a folder of that name."""
        requested: dict[str, Any] = {
            "budget_s": _RUN_S if self.cuda else _CPU_RUN_S,
            "new_tokens": 32 if self.cuda else 8,
            "dtype": dtype_name(self.dtype) if self.cuda else "float32",
            "device": str(self.device) if self.cuda else "cpu",
            **options,
        }
        requested["budget_s"] = min(requested["budget_s"], max(1.0, _RUN_SHARE * self.left_s))
        with self.watched(name):
            return profiler.profile(model or self.model, weights="random", out=self.folder / name, **requested)

    @contextmanager
    def watched(self, name: str) -> Iterator[None]:
        row: dict[str, Any] = {"run": name, "before": self.bytes_now(), "after": None}
        self.memory.append(row)
        yield
        row["after"] = self.bytes_now()

    def bytes_now(self) -> dict[str, int | None]:
        """Return the card's bytes: in tensors, reserved by torch, used by all (NVML), free to this process."""
        if not self.cuda:
            return {}
        free()
        return {
            "allocated": torch.cuda.memory_allocated(self.device),
            "reserved": torch.cuda.memory_reserved(self.device),
            "nvml_used": self.machine.source.read().memory_used_bytes,
            "available": self.machine.available_bytes(),
        }

    def memory_checks(self, since: int) -> Iterator[Check]:
        """Return checks that each run from this number on freed its memory, as did all together except the first."""
        grown_by_all = 0
        for number, row in enumerate(self.memory):
            if not row["after"]:  # neither a failed run nor a CPU has any
                continue
            value = {name: row["after"][name] - row["before"][name] for name in ("allocated", "reserved", "available")}
            grown_by_all += value["reserved"] if number else 0
            value["reserved_by_all_but_the_first"] = grown_by_all
            # The driver loads kernels at their first use, so its free memory falls: not judged.
            passed = max(value[name] for name in value if name != "available") < KEPT_BYTES
            if number >= since:
                name = f"memory is given back after the run {row['run']}"
                yield Check(name, passed, value, f"tensors' and torch's grow by less than {KEPT_BYTES >> 20} MiB")


def facts_of(run: Run) -> Facts:
    return read_facts(run.folder, run.document, read_gathered(run.folder))


def cells_measured(name: str, run: Run, value: object) -> Check:
    """Return the check that every cell was measured: not judged if the budget left some to a forecast."""
    statuses = list(run.cells["status"])
    forecast = statuses.count("forecast")
    passed = None if forecast and set(statuses) == {"ok", "forecast"} else set(statuses) == {"ok"}
    why = f"{forecast} of {len(statuses)} cells are forecast, since the budget ended first" if passed is None else ""
    return Check(name, passed, value, "ok", why)


def main_run(bench: Bench) -> Run:
    """Return the run of the main model, which several groups use."""
    lengths, batches = ([64, 512], [1, 4, 16]) if bench.cuda else ([16], [1, 2])
    return bench.run("main", prompt_lens=lengths, batch_sizes=batches)


def small_run(bench: Bench) -> Run:
    """Return the run of the small model in 16 bits, whose decode steps wait for the host on fast cards."""
    return bench.run("small", bench.small, prompt_lens=[32], batch_sizes=SMALL_BATCHES[bench.cuda], **BRIEF[bench.cuda])


SMALL_BATCHES = {True: [1, 8, 64], False: [1, 2]}
BRIEF: dict[bool, dict[str, Any]] = {
    True: {"budget_s": 20.0, "new_tokens": 16},
    False: {"dtype": "bfloat16", "no_trials": True},
}
"""Options on a card and on a CPU for runs in several weight formats, which need no long sweep."""


def replayed_s(bench: Bench, calls: Sequence[Callable[[], object]]) -> float:
    """Return the seconds of calls in one graph, each after a read of a buffer of twice the L2's size."""
    machine = bench.machine
    buffer = torch.zeros(2 * machine.info.last_level_cache_bytes // 4, device=bench.device)

    def every() -> None:
        for call in calls:
            call()

    samples: list[float] = []
    with torch.inference_mode():
        with machine.on_side_stream():
            every()
        replay = machine.capture(every)
        for _ in range(_SAMPLES):
            buffer.sum()
            marks = [machine.clock.mark()]
            replay()
            marks.append(machine.clock.mark())
            machine.clock.synchronize()
            samples += machine.clock.seconds(marks)
    return statistics.median(samples[2:]) / len(calls)


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        clear_workspaces()
        torch.cuda.empty_cache()
