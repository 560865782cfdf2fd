"""Compare the walk with torch's counter, for every causal-LM type of the installed transformers.

`python tests/counting/scoreboard.py` measures all types and writes the committed table again.
"""

import csv
import signal
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from shrink import configs
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from profiler.counting.crosscheck import Crosscheck, crosscheck
from profiler.facts.step import Step
from profiler.loading.cache_argument import cache_of
from profiler.loading.meta_model import build_on_meta, from_config, quiet_libraries

TABLE = Path(__file__).with_name("scoreboard.csv")
STEPS = (Step(2, 8, 0), Step(1, 12, 0), Step(3, 1, 10), Step(1, 1, 5))
RANK = {"equal": 0, "built": 0, "differs": 1, "not run": 2, "not built": 2}
_SECONDS_A_TYPE = 30
T = TypeVar("T")
_FEW_PARAMETERS = 500_000


def types() -> list[str]:
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def score(model_type: str) -> tuple[str, str]:
    """Return (`equal` | `differs` | `not run`, the parts or the reason), from two prefills and two decode steps."""

    def differing() -> list[str]:
        checks = [check for config in configs(model_type) for check in on_cpu_or_meta(config, _each_step)]
        return sorted({item.module for check in checks for item in check.differences})

    return tried(lambda: compared(differing()), "not run")


def tried(run: Callable[[], tuple[str, str]], failed: str) -> tuple[str, str]:
    """Return what `run` returns, within a time limit and without warnings; or (`failed`, the reason in one line)."""
    try:
        with quiet_libraries(), warnings.catch_warnings(), time_limit():
            warnings.simplefilter("ignore")
            return run()
    except Exception as error:
        return failed, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:100]}"


def compared(differing: list[str]) -> tuple[str, str]:
    """Return (`equal` | `differs`, what differs)."""
    return ("differs", "; ".join(differing)[:160]) if differing else ("equal", "")


def on_cpu_or_meta(config: Any, run: Callable[[nn.Module], T]) -> T:
    """Run a model on the CPU if it has few weights, and else on meta. If one fails, try the other.

    CPU kernels are compiled and those of meta are Python. Meta tensors have no values, but accept any dtype.
    """
    on_meta = build_on_meta(config, torch.bfloat16, attn="eager").eval()
    first, second = _on_cpu, lambda _: on_meta
    if sum(parameter.numel() for parameter in on_meta.parameters()) > _FEW_PARAMETERS:
        first, second = second, first
    try:
        return run(first(config))
    except (RuntimeError, NotImplementedError):
        return run(second(config))


def _on_cpu(config: object) -> nn.Module:
    torch.manual_seed(0)
    return from_config(config, torch.bfloat16, "eager").eval()


def _each_step(model: nn.Module) -> list[Crosscheck]:
    ids = torch.zeros(1, 2, dtype=torch.long, device=next(model.parameters()).device)
    with torch.no_grad():
        cached = cache_of(model(input_ids=ids)) is not None
    return [crosscheck(model, step) for step in STEPS if cached or not step.context]


@contextmanager
def time_limit() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError(f"more than {_SECONDS_A_TYPE} s")

    # The limit is CPU time of this process, because wall time includes other processes on the cores.
    old = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, _SECONDS_A_TYPE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, old)


def read_table(table: Path = TABLE) -> dict[str, tuple[str, str]]:
    with table.open(newline="") as file:
        return {row["type"]: (row["result"], row["detail"]) for row in csv.DictReader(file)}


def write_table(table: Path, names: Iterable[str], score: Callable[[str], tuple[str, str]]) -> None:
    results = [(name, *score(name)) for name in names]
    with table.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["type", "result", "detail"])
        writer.writerows(results)
    print(f"transformers {transformers.__version__}, {table.stem}: {Counter(row[1] for row in results)}")


if __name__ == "__main__":
    write_table(TABLE, types(), score)
