"""The page computes what `count` computes, at 100 random settings for each kind of model."""

from __future__ import annotations

import random

import numpy as np
import pytest

from profiler.counting.cache import counted_model
from profiler.counting.grid_count import gpu_floors
from profiler.counting.memory_need import cache_bytes, memory_need, path_on
from profiler.counting.model_numbers import model_numbers
from profiler.explore.document import gpu_row, model_entry
from profiler.facts.step import Step
from profiler.gpu_profile.profile import roofs_called
from profiler.loading.source import resolve
from tests.explore.theory import Theory

SETTINGS = 100
KINDS = {
    "grouped heads": ("llama-3.1-70b", "nf4"),
    "windowed and full layers": ("gemma-2-9b", "int8"),
    "latent attention": ("deepseek-v2-lite", "none"),
    "mixture of experts": ("mixtral-8x7b", "fp8"),
    "transposed weights": ("gpt2", "none"),
    "weights that are published packed": ("gpt-oss-20b", "none"),
}


def settings(seed: str) -> list[tuple[int, int, int, int, int]]:
    """Random (batch, query, context, shared, asked), whose FLOPs int64 can count."""
    rng = random.Random(seed)
    found = []
    for _ in range(SETTINGS):
        query = rng.choice([1, int(2 ** rng.uniform(0, 13))])
        batch = int(2 ** rng.uniform(0, 20 - np.log2(query) if query > 1 else 12))
        context = rng.choice([0, int(2 ** rng.uniform(0, 17))])
        found.append((batch, query, context, rng.choice([0, int(rng.random() * context)]), rng.choice([1, query])))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_equal_to_the_last_flop_and_byte(kind: str) -> None:
    model, quant = KINDS[kind]
    counted, roofs = counted_model(resolve(model), quant=quant), roofs_called("H100 SXM")
    steps = settings(kind)
    batch, query, context, shared, asked = np.array(steps, dtype=np.int64).T
    step = Step(batch, query, context, shared, asked)
    work, cache = counted.work.work(step), cache_bytes(counted.work, batch, query + context, shared=shared)
    first = np.where(context > 0, context, query)  # a decode step needs the memory of the prefill before it
    path = path_on(counted.work, counted.attention, fuses_grouped_heads=roofs.fuses_grouped_heads)
    prefill = Step(batch, first - shared, shared, shared)
    need = memory_need(counted.work, counted.weight_bytes, prefill, query + context - first, path)
    floors = gpu_floors(roofs, counted.work, counted.dtype, step, need)
    shown = Theory().ask(model_entry(counted, quant), gpu_row(roofs), steps)
    assert len(shown) == len(steps) == SETTINGS
    for index, page in enumerate(shown):
        assert int(page["flops"]) == work.model_flops[index], steps[index]
        # Expected numbers of experts are not whole, so such bytes are compared after rounding.
        whole = np.issubdtype(np.asarray(work.model_bytes).dtype, np.integer)
        page_bytes = int(page["bytes"]) if whole else round(float(page["bytes"]))
        assert abs(page_bytes - round(work.model_bytes[index])) <= (0 if whole else 1), steps[index]
        assert int(page["cache_bytes"]) == cache[index]
        assert page["fast_flops"] == pytest.approx(float(work.model_flops[index]), rel=1e-13)
        assert page["fast_bytes"] == pytest.approx(float(work.model_bytes[index]), rel=1e-13)
        assert page["floor_s"] == pytest.approx(floors.floor_s[index], rel=1e-12)
        assert page["bound"] == floors.bound[index]
        assert page["fits"] == floors.fits[index]
        assert page["safe_bytes"] == pytest.approx(need.safe_bytes[index], rel=1e-12)


def test_a_decode_step_by_hand() -> None:
    """Mistral-7B: 7,241,732,096 weights of 2 bytes, of which a step does not read the embedding's 32,000 x 4,096.

    Matmuls take 2 FLOPs per weight, norms none, and attention 4 x 32 layers x 4,096 x 513; the cache has 131,072 bytes
    per token.
    """
    entry = model_entry(counted_model(resolve("mistral-7b-v0.1")), "none")
    [page] = Theory().ask(entry, gpu_row(roofs_called("T4")), [(1, 1, 512)])
    norms, embeddings = 65 * 4096, 32_000 * 4096
    matrices = 7_241_732_096 - embeddings - norms
    assert int(page["flops"]) == 2 * matrices + 4 * 32 * 4096 * 513
    logits_and_embedding = 2 * 32_000 + 2 * 4096
    assert int(page["bytes"]) == 2 * (matrices + norms) + 513 * 131_072 + logits_and_embedding


@pytest.mark.parametrize(
    ("model", "gpu", "context"),
    [
        ("mistral-7b-v0.1", "T4", 512),
        ("mistral-7b-v0.1", "H100 SXM", 8191),
        ("mistral-7b-v0.1", "RTX 4090", 4096),
        ("llama-3.1-70b", "T4", 512),  # 2 x 70.6e9 bytes of weights, more than a T4 has room for
    ],
)
def test_largest_batch(model: str, gpu: str, context: int) -> None:
    counted, roofs = counted_model(resolve(model)), roofs_called(gpu)
    [page] = Theory().ask(model_entry(counted, "none"), gpu_row(roofs), [(1, 1, context)])
    [numbers] = model_numbers(counted, context, (roofs,)).gpus
    assert page["largest_batch"] == numbers.largest_batch
    assert page["fits"] == (numbers.largest_batch > 0) == ("70b" not in model)


def test_a_narrower_kv_cache() -> None:
    """Mistral-7B: 2 x 32 layers x 8 heads x 128 = 65,536 elements per token; bits scale only the cache."""
    entry = model_entry(counted_model(resolve("mistral-7b-v0.1")), "none")
    gpu, theory, step = gpu_row(roofs_called("T4")), Theory(), (3, 1, 999)
    full, half = (theory.ask(entry, gpu, [step], bits=bits)[0] for bits in (16, 8))
    assert int(full["cache_bytes"]) == 3 * 1000 * 65_536 * 2
    assert int(half["cache_bytes"]) == 3 * 1000 * 65_536
    assert int(full["bytes"]) - int(half["bytes"]) == 3 * 1000 * 65_536
    assert full["flops"] == half["flops"]


def test_ranks() -> None:
    """Two ranks of Mistral-7B: half of the linears, and two all-reduces of the hidden states per layer.

    A decode of 4 sequences sends 4 x 4096 x 2 bytes in each of 64 all-reduces, and again for a split embedding. Over a
    ring of two each rank carries 2 x (2 - 1) / 2 = 1 times that.
    """
    counted = counted_model(resolve("mistral-7b-v0.1"), ranks=2)
    entry, gpu = model_entry(counted, "none", 2), gpu_row(roofs_called("A100 80GB SXM"))
    reduces = sum(item.count for item in entry.collectives)
    assert reduces >= 64
    slow, fast = ({"alpha_s": alpha, "bus_bytes_per_s": rate} for alpha, rate in ((1e-5, 1e9), (0.0, 1e30)))
    [page], [free] = (Theory().ask(entry, gpu, [(4, 1, 500)], link) for link in (slow, fast))
    blocks = 32 * 2 * (1e-5 + 4 * 4096 * 2 / 1e9)
    assert blocks <= page["link_s"] <= 1.2 * blocks
    assert page["floor_s"] == pytest.approx(free["floor_s"] + page["link_s"])
    whole = counted_model(resolve("mistral-7b-v0.1"))
    assert 0.49 < entry.weight_bytes / whole.weight_bytes < 0.53
    assert int(page["flops"]) == counted.work.work(Step(4, 1, 500)).model_flops
