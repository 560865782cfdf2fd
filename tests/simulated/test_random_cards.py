"""Random cards, eight others each day, each compared with its own log: scenarios find only expected faults."""

import random
from datetime import date
from pathlib import Path

import pytest

from .oracle import Phase
from .scenario import Scenario, checked_cells, profiled
from .truth import GIB, Truth

pytestmark = pytest.mark.slow

_MODELS = {
    "mistral-7b-v0.1": 4, "qwen3-8b": 3, "llama-3.1-8b": 3, "smollm2-135m": 4, "gemma-2-9b": 2, "phi-3-mini": 3,
    "gpt2": 12, "mixtral-8x7b": 1, "deepseek-v2-lite": 2, "qwen3-30b-a3b": 1, "gpt-oss-20b": 2, "qwen2.5-0.5b": 4,
}  # fmt: skip
"""The layers are as many as leave out the sizes that an L2 serves in part."""
_IN_BFLOAT16 = ("mixtral-8x7b", "deepseek-v2-lite", "qwen3-30b-a3b", "gpt-oss-20b")
"""torch's matmul by experts accepts no other dtype."""


def drawn(seed: int) -> tuple[Scenario, Truth]:
    """Return a model on a card.

    The card has 0.2 to 4 TB/s, 40 to 300 FLOPs per byte, an L2 of 4 to 100 MiB, and 2.5 to 40 µs per launch.
    """
    choose = random.Random(seed)
    model, layers = choose.choice(list(_MODELS.items()))
    capability = choose.choice([(8, 0), (8, 9), (9, 0), *([] if model in _IN_BFLOAT16 else [(7, 5)])])
    bytes_per_s = 10 ** choose.uniform(11.3, 12.6)
    flops_per_s = bytes_per_s * choose.choice([40, 100, 200, 300])
    dtypes = ("bfloat16",) if model in _IN_BFLOAT16 else ("float16", "bfloat16")
    rates = {"float16": 1, "bfloat16": 1, "float32": 1 / 8, "tfloat32": 1 / 2, "int8": 2, "float8": 2}
    l2_bytes = choose.choice([4, 40, 100]) << 20
    truth = Truth(
        f"card {seed}", capability, 100, 80 * GIB, bytes_per_s,
        {name: rate * flops_per_s for name, rate in rates.items()}, l2_bytes, choose.choice([3, 4]) * bytes_per_s,
        l2_writes_back=l2_bytes > 4 << 20, launch_s=10 ** choose.uniform(-5.6, -4.4),
        smallest_kernel_s=choose.choice([1.5e-6, 3e-6]),
    )  # fmt: skip
    dtype = "float16" if capability < (8, 0) else choose.choice(dtypes)
    engine = choose.choice(["eager", "eager", "static", "graph", "compile"])
    if model == "gpt-oss-20b":  # the host moves the window of a static cache, which only a trace tells from its kernels
        engine = "eager"
    prompts, batches = (sorted(choose.sample(sizes, 2)) for sizes in ([32, 128, 512, 1000], [1, 4, 16, 64]))
    return Scenario(model, layers, dtype, engine, prompts, batches), truth


def right_labels(phase: Phase) -> set[str]:
    """Return the labels that the log of a card allows: a limit has nearly half of its time, and what has most of it
    is named. Redundant traffic is lost time, and bytes."""
    shares = {
        "overhead-bound": phase.exposed_overhead_s / phase.latency_s,
        "memory-bound": (phase.weights_s + phase.kv_s) / phase.device_s,
        "compute-bound": phase.compute_s / phase.device_s,
        "slow-kernels": phase.beside_s / phase.device_s,
    }
    labels = {label for label, share in shares.items() if share > 0.4}
    if shares["memory-bound"] + phase.traffic_s / phase.device_s > 0.4:
        labels.add("memory-bound")
    idles = shares.pop("overhead-bound")
    of_card = max(shares, key=lambda label: shares[label])
    if idles > 0.6:
        return {"overhead-bound"}
    if idles < 0.1 and shares[of_card] > 0.75 and of_card != "slow-kernels" and not phase.hides_small_kernels:
        return {of_card} | ({"mixed"} if idles > 0 else set())  # of a host that takes as long as its card
    return labels | {"mixed", "inconclusive"}


@pytest.mark.parametrize(
    ("exposed_s", "weights_s", "traffic_s", "labels"),
    [
        (0.7, 0.25, 0, {"overhead-bound"}), (0, 0.9, 0, {"memory-bound"}), (0.05, 0.9, 0, {"memory-bound", "mixed"}),
        (0, 0.3, 0, {"slow-kernels", "mixed", "inconclusive"}),
        (0, 0.3, 0.2, {"slow-kernels", "memory-bound", "mixed", "inconclusive"}),
    ],
)  # fmt: skip
def test_a_label_is_right_by_the_seconds_of_its_limit(
    exposed_s: float, weights_s: float, traffic_s: float, labels: set[str]
) -> None:
    on_card_s = 1 - exposed_s
    lost_s = on_card_s - weights_s
    step = Phase("eager", "decode", 1, 8, 1.0, on_card_s, exposed_s, 1, weights_s, 0, 0, 0, lost_s, traffic_s, 0, 0)
    assert right_labels(step) == labels


@pytest.mark.parametrize("number", range(8))
def test_a_random_card_obeys_the_rules_of_every_scenario(number: int, tmp_path: Path) -> None:
    scenario, truth = drawn(8 * date.today().toordinal() + number)
    run, _ = profiled(scenario, [truth], tmp_path)
    steps = list(checked_cells(scenario, truth, run, tmp_path))
    assert steps, (scenario, truth)
    sure = [(row["regime"], phase) for phase, row in steps if row["confidence"] != "low"]  # a report says so
    wrong = [(label, phase) for label, phase in sure if label not in right_labels(phase)]
    assert wrong == [], (scenario, truth)
