"""Every format that this machine quantises to: exact bytes, random weights, the tokens of generate, and refusals."""

import math
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from greedy import greedy_tokens
from loaded import loaded
from machines import CPU, HOST
from small_models import small_model

from profiler.counting.operators import Linear
from profiler.counting.walk import walk
from profiler.device.memory import storage_bytes
from profiler.engines.transformers import EagerEngine
from profiler.errors import RequestError
from profiler.facts.step import Step
from profiler.loading.config import load_config
from profiler.loading.load import load
from profiler.loading.meta_model import plan
from profiler.loading.request import LoadedModel, ModelRequest
from profiler.loading.source import resolve
from profiler.measure.answers import check_quality, compare_logits, text_ids
from profiler.quant.registry import FORMATS, PLAIN, Quant, QuantOptions
from profiler.quant.storage import conversion_calls, model_storage_bytes, stored
from profiler.quant.torchao import quantise_linears

pytestmark = pytest.mark.cpu

DOUBLE = QuantOptions(double=True)

# Size of SmolLM2-135M's linears over their size in float16 (576 and 1536 inputs, groups of 64 for int4):
# 4.5 / 16, or 4.25 / 16 when repacked for a CPU's fused kernel, 8 bits and a float32 per row, 4 bits and two bfloat16
# per group of 64. The second column says whether the CPU has that kernel.
SHARES: list[tuple[Quant, bool, QuantOptions, float]] = [
    *((quant, fused, PLAIN, share / 16) for quant in ("nf4", "fp4") for fused, share in ((False, 4.5), (True, 4.25))),
    *(("nf4", fused, DOUBLE, share / 16) for fused, share in ((False, 4.127), (True, 4.25))),
    ("int8", False, PLAIN, 8.04 / 16), ("int8wo", False, PLAIN, 8.05 / 16), ("int4wo", False, PLAIN, 4.5 / 16),
    ("fp8", False, PLAIN, 8.04 / 16),
]  # fmt: skip


slow = pytest.mark.slow


def request_of(source: str, quant: Quant, options: QuantOptions = PLAIN, weights: Any = "checkpoint") -> ModelRequest:
    if FORMATS[quant].package == "torchao":
        pytest.importorskip("torchao")
    return ModelRequest(resolve(source), CPU, torch.bfloat16, quant, options, weights)


def loaded_by(request: ModelRequest) -> Any:
    return load(request, load_config(request.source)).module


def planned(request: ModelRequest) -> Any:
    return plan(request, load_config(request.source))


@pytest.fixture
def fused(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether bitsandbytes sees AVX512-BF16, for which it repacks 4-bit weights; this CPU may lack it."""
    from bitsandbytes.nn import modules

    if request.param and not modules.has_avx512bf16():
        pytest.skip("this CPU lacks AVX512-BF16, which bitsandbytes' fused kernel needs")
    monkeypatch.setattr(modules, "has_avx512bf16", lambda: request.param)
    return bool(request.param)


CASES = [pytest.param(*case, marks=pytest.mark.ci if case[:3] == ("nf4", False, PLAIN) else slow) for case in SHARES]


@pytest.mark.parametrize(("quant", "fused", "options", "share"), CASES, indirect=["fused"])
def test_real_weights_in_every_format(
    short_folder: Path, quant: Quant, fused: bool, options: QuantOptions, share: float
) -> None:
    """Bytes planned on meta, bytes counted when loaded and storages are equal; the tokens are those of `generate`."""
    request = request_of(str(short_folder), quant, options)
    model, step = loaded_by(request), Step(1, 1, 8)
    counted = walk(model).work(step).weight_bytes
    assert counted == walk(planned(request)).work(step).weight_bytes
    # The head is tied to the embedding table, so a step reads everything except the rotary tables.
    assert counted == model_storage_bytes(model) - storage_bytes(model.buffers())
    linears = [op for op in walk(model).of_kind(Linear) if op.group != "lm_head"]
    in_16_bits = sum(op.count * op.weight.in_features * op.weight.out_features * 2 for op in linears)
    assert sum(op.count * op.weight.weight_bytes for op in linears) == pytest.approx(share * in_16_bits, rel=0.02)
    prompt = torch.tensor([[504, 3575, 282, 4649, 314]])  # "The capital of France is"
    expected = model.generate(prompt, max_new_tokens=8, min_new_tokens=8, do_sample=False)[:, 5:]
    assert torch.equal(greedy_tokens(EagerEngine(model, HOST), prompt, 8), expected)


def test_the_layout_for_tensor_cores_is_planned_with_its_padding() -> None:
    """576 inputs are padded to 1024, 9 groups of 64 to 16; two bfloat16 per group and output (torchao's tinygemm)."""
    quantization = pytest.importorskip("torchao.quantization")
    linear = torch.nn.Linear(576, 1536, bias=False, dtype=torch.bfloat16, device="meta")
    config = quantization.Int4WeightOnlyConfig(group_size=64, int4_packing_format="tile_packed_to_4d")
    quantise_linears(torch.nn.Sequential(linear), config)
    assert stored(linear).weight_bytes == 1536 * 1024 // 2 + 1536 * 16 * 2 * 2
    assert stored(linear).format == "int4wo"


@pytest.mark.parametrize(
    ("quant", "fused", "rows", "converts"),
    [
        *(("nf4", False, rows, True) for rows in (1, 64)), *(("nf4", True, rows, False) for rows in (1, 64)),
        ("int8", False, 1, True), ("int8wo", False, 1, True), ("fp8", False, 8, True), ("int4wo", False, 1, False),
    ],
    indirect=["fused"],
)  # fmt: skip
def test_the_kernel_that_converts(tiny_folder: Path, quant: Quant, fused: bool, rows: int, converts: bool) -> None:
    """On a CPU all kernels except the fused ones for 4 bits convert, and return the dense weight."""
    linear = loaded_by(request_of(str(tiny_folder), quant, weights="random")).model.layers[0].mlp.up_proj
    calls = conversion_calls([linear], rows, torch.bfloat16)
    assert bool(calls) == converts
    if not calls or quant in ("int8", "int8wo"):  # they apply their scales to the matmul
        return
    with torch.inference_mode():
        dense: Any = calls[0]()
        x = torch.randn(1, linear.in_features, dtype=torch.bfloat16)
        expected = linear(x).float()
        found = (x.float() @ dense.float().T) if dense.shape[1] == linear.in_features else x.float() @ dense.float()
        assert torch.allclose(found, expected, atol=0.05 * float(expected.abs().max()))


def test_divergence_of_two_known_distributions() -> None:
    """KL((1/2, 1/2) || (1/4, 3/4)) = ln(2 / sqrt 3) nats; the same first choice at one of two positions."""
    reference = torch.log(torch.tensor([[0.5, 0.5], [0.9, 0.1]]))
    other = torch.log(torch.tensor([[0.25, 0.75], [0.9, 0.1]]))
    found = compare_logits(reference, other)
    assert found.mean_kl_nats == pytest.approx(math.log(2 / math.sqrt(3)) / 2, rel=1e-5)
    assert (found.top1_agreement, found.tokens) == (0.5, 2)


@slow
def test_8_bits_stay_nearer_to_the_original_than_4(short_folder: Path) -> None:
    def quality(quant: Quant) -> Any:
        request = request_of(str(short_folder), quant)
        loaded: LoadedModel = load(request, load_config(request.source))
        return check_quality(loaded, text_ids(request, "--check-quality"))

    eight, four = quality("int8"), quality("nf4")
    assert 0 < eight.mean_kl_nats < four.mean_kl_nats < 0.5
    assert 0.5 < four.top1_agreement < eight.top1_agreement <= 1
    assert eight.tokens > 100


@pytest.mark.parametrize(
    ("fused", "matmul_dtype"), [(False, torch.float16), (True, torch.bfloat16)], indirect=["fused"]
)
def test_matmuls_run_in_the_compute_dtype(tiny_folder: Path, fused: bool, matmul_dtype: torch.dtype) -> None:
    """The exception is bitsandbytes' fused kernel on a CPU, which supports only bfloat16."""
    request = request_of(str(tiny_folder), "nf4", QuantOptions(compute_dtype=torch.float16), "random")
    assert stored(loaded_by(request).model.layers[0].mlp.up_proj).compute_dtype == matmul_dtype


def narrow_request(folder: Path, quant: Quant = "nf4", **widths: int) -> ModelRequest:
    """Return a request for a tiny Llama with unusual widths, as a folder with only a config."""
    small_model("Llama", **{"intermediate_size": 128, "num_hidden_layers": 1, **widths}).config.save_pretrained(folder)
    return request_of(str(folder), quant, weights="random")


@pytest.mark.parametrize(
    ("widths", "said"),
    [
        ({"intermediate_size": 96}, r"--quant nf4: .*inputs in multiples of 64, and .*mlp\.down_proj has 96; use --q"),
        ({"num_key_value_heads": 1}, r"outputs in multiples of 32, and .*self_attn\.k_proj has 16; use --quant int8"),
    ],
)
def test_a_width_that_the_fused_kernel_does_not_support_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, widths: dict[str, int], said: str
) -> None:
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: True)
    request = narrow_request(tmp_path, **widths)
    config = load_config(request.source)
    for refused in (plan, load):
        with pytest.raises(RequestError, match=said):
            refused(request, config)


@pytest.mark.parametrize(("quant", "fused"), [("nf4", False), ("int8", True)], indirect=["fused"])
def test_any_width_works_without_that_kernel(tmp_path: Path, quant: Quant, fused: bool) -> None:
    model = loaded_by(narrow_request(tmp_path, quant, intermediate_size=96, num_key_value_heads=1))
    assert stored(model.model.layers[0].mlp.down_proj).in_features == 96
    with torch.inference_mode():
        assert torch.isfinite(model(torch.arange(10)[None]).logits.float()).all()


@pytest.mark.parametrize("fused", [False, True], indirect=True)
def test_a_checkpoint_that_comes_in_4_bits_is_planned_as_it_lies_at_a_step(
    tiny_folder: Path, tmp_path: Path, fused: bool
) -> None:
    loaded_by(request_of(str(tiny_folder), "nf4", DOUBLE)).save_pretrained(tmp_path / "nf4")
    request = request_of(str(tmp_path / "nf4"), "none")
    here, on_meta = (stored(each.model.layers[0].mlp.up_proj) for each in (loaded_by(request), planned(request)))
    found, expected = ((each.format, each.weight_bytes, each.dense_from_rows) for each in (here, on_meta))
    assert found == expected
    assert here.weight_bytes < 64 * 128 * 16 / 8 / 2


@pytest.mark.parametrize("weights", ["random", "checkpoint"])
def test_a_prefill_runs_the_operators_of_a_plain_one(tiny_folder: Path, weights: Any) -> None:
    """torch folds the last positions of a batch into one matmul only if the weight requires gradients, as loaded."""
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.bfloat16).eval()
    module = loaded(tiny_folder, torch.bfloat16, weights=weights).module
    assert operator_counts(module) == operator_counts(plain)
    with_gradients = operator_counts(plain)["aten::bmm"]
    assert with_gradients == operator_counts(plain.requires_grad_(False))["aten::bmm"] - 1


def operator_counts(model: Any) -> Counter[str]:
    """Count the calls of each operator in a prefill of a batch that computes the last logits only."""
    with torch.inference_mode(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(torch.arange(16).reshape(2, 8), logits_to_keep=1)
    return Counter({row.key: row.count for row in profile.key_averages()})


PEAK = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from loaded import load_config, loaded, resolve
from machines import HOST
import transformers, accelerate, bitsandbytes
transformers.AutoModelForCausalLM._model_mapping[type(load_config(resolve(sys.argv[2])))]
torch.randn(64, 64) @ torch.randn(64, 64)
HOST.reset_peak(); before = HOST.peak_bytes()
loaded(sys.argv[2], torch.bfloat16, quant=sys.argv[3], weights="random")
print((HOST.peak_bytes() - before) / 1e9)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("quant", "least_gb", "most_gb"), [("none", 2.0, 2.9), ("nf4", 0.5, 2.0)])
def test_no_wider_copy_of_the_model_ever_exists(quant: str, least_gb: float, most_gb: float) -> None:
    """TinyLlama is 2.2 GB in bfloat16, three times that with a float32 copy, and 0.75 GB in nf4 with its tables."""
    command = [sys.executable, "-c", PEAK, str(Path(__file__).parents[1]), "tinyllama-1.1b", quant]
    out = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert least_gb < float(out.stdout) < most_gb


ATTRIBUTES = ("data", "quant_state", "SCB", "CB", "bnb_quantized", "blocksize", "quant_type", "compress_statistics")


def layouts(layer: Any) -> list[Any]:
    """Describe the attributes of a quantised weight, and the scales and integers of LLM.int8()'s state."""
    state = getattr(layer, "state", None)
    values = [getattr(layer.weight, name, None) for name in ATTRIBUTES] + ([state.SCB, state.CB] if state else [])
    return [type(layer.weight), *map(layout, values)]


def layout(value: Any) -> Any:
    """Describe shape, dtype, bytes and order of the tensors in a value; all other values stay as they are."""
    if hasattr(value, "__tensor_flatten__"):
        return [layout(getattr(value, name)) for name in value.__tensor_flatten__()[0]]
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype, value.untyped_storage().nbytes(), value.is_contiguous()
    if type(value).__name__ == "QuantState":
        return {name: layout(part) for name, part in vars(value).items() if part is not None}
    return value


@pytest.mark.parametrize(("quant", "fused", "options"), [case[:3] for case in SHARES], indirect=["fused"])
def test_random_weights_have_the_layout_of_quantised_ones(
    tiny_folder: Path, quant: Quant, fused: bool, options: QuantOptions
) -> None:
    """After the first step all attributes are equal. transformers initialises a Llama with a deviation of 0.02, too."""
    quantised, random = (
        loaded_by(request_of(str(tiny_folder), quant, options, weights)).model.layers[0]
        for weights in ("checkpoint", "random")
    )
    inputs = torch.randn(4096, 128, dtype=torch.bfloat16)
    for name in ("self_attn.k_proj", "mlp.up_proj", "mlp.down_proj"):
        layer = random.get_submodule(name)
        assert layouts(layer) == layouts(quantised.get_submodule(name))
        with torch.inference_mode():
            outputs = layer(inputs[:, : layer.in_features]).float()
        assert outputs.std().item() == pytest.approx(0.02 * layer.in_features**0.5, rel=0.1)
