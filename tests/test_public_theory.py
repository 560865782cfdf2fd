"""The public functions of the theory: kernels in any dtype, grids, numbers and links, by arithmetic and datasheets."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pytest

from profiler import theory
from profiler.errors import RequestError


@pytest.mark.parametrize(
    ("dtype", "flops_per_byte"), [("float64", 0.25), ("float32", 0.5), ("bfloat16", 1.0), ("float8_e4m3fn", 2.0)]
)
def test_one_token_does_two_flops_per_weight(dtype: str, flops_per_byte: float) -> None:
    assert theory.matmul(1, 4096, 4096, dtype).intensity == pytest.approx(flops_per_byte, rel=1e-3)


def test_weights_of_another_dtype() -> None:
    """2 FLOPs over 4.5 bits are 3.56 FLOP/byte; activations in 16 bits lower that to 3.55."""
    packed = theory.matmul(1, 4096, 4096, "float16", weights="nf4")
    assert packed.bytes == 4096 * 4096 * 4.5 / 8 + 2 * 4096 * 2
    assert packed.intensity == pytest.approx(3.55, abs=0.005)


def test_attention_in_eight_bits_has_twice_the_intensity() -> None:
    """A long cache of as many KV heads has 1 FLOP/byte in 16 bits, so 2 in 8."""
    wide, narrow = (theory.attention_steps(4096, 4096, 128, dtype) for dtype in ("float16", "float8_e4m3fn"))
    assert [step.name for step in narrow] == ["QK^T", "softmax", "PV"]
    assert [step.intensity for step in narrow] == pytest.approx([2 * step.intensity for step in wide])
    step = theory.fused_attention(1, 100_000, 32, 32, 128, "float16", cache="float8_e4m3fn")
    assert step.intensity == pytest.approx(2.0, rel=1e-3)


def test_an_unknown_dtype_is_named() -> None:
    with pytest.raises(RequestError, match=r"'float17' is not known.*Did you mean float1"):
        theory.matmul(1, 1, 1, "float17")


def test_mistral_on_a_t4() -> None:
    """Two of 8 heads of 128 in 32 layers are 131,072 bytes per token; 14.29 GB at 320 GB/s take 44.65 ms."""
    numbers = theory.numbers("mistral-7b-v0.1", 512, gpus=["T4"], dtype="float16")
    assert numbers.kv_bytes_per_token == 131_072
    assert numbers.gpus[0].linears_compute_bound_from_batch == 204
    counted = theory.grid("mistral-7b-v0.1", gpus=["T4"], context_lens=[512], dtype="float16")
    assert counted.gpus[0].floor_s[0] == pytest.approx(44.65e-3, abs=5e-6)
    figure = theory.picture(counted, "roofline")
    assert figure.axes[0].get_title().startswith("T4")
    dashed = {line.get_label(): line.get_linestyle() for line in figure.axes[0].lines}
    assert dashed["float16, sustained: 24.0 TFLOP/s"] == "--"  # 40 SMs x 1024 FLOPs x 585 MHz, its base clock
    plt.close(figure)


def test_a_roofline_without_a_gpu_is_refused() -> None:
    counted = theory.grid("mistral-7b-v0.1", context_lens=[512])
    with pytest.raises(RequestError, match=r"the picture 'roofline' needs a GPU: add gpus=\["):
        theory.picture(counted, "roofline")


def test_the_picture_of_memory_needs_no_gpu() -> None:
    plt.close(theory.picture(theory.grid("mistral-7b-v0.1", context_lens=[512]), "kv"))


def test_a_link_by_name_and_by_numbers() -> None:
    """nccl-tests: an all-reduce over n ranks sends 2(n-1)/n of its bytes over each link."""
    assert theory.bus_share("all_reduce", 8) == 1.75
    typed = theory.link("10,100", 8)
    assert typed.seconds("all_reduce", 1e6, 8) == pytest.approx(10e-6 + 1.75e6 / 100e9)
    assert 200e9 < theory.link("nvlink4", 8).bus_bytes_per_s < 450e9, "a datasheet's 450 GB/s per direction"
