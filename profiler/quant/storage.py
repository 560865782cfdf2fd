"""How the weights of a model are stored, random codes in their place, and the calls that convert between formats."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from profiler.device.memory import storage_bytes
from profiler.facts.step import StoredWeight
from profiler.patching import patched
from profiler.quant.registry import ConversionCall, library_of


def is_linear(module: nn.Module) -> bool:
    """Whether `module` multiplies its input by one weight matrix: nn.Linear, quantised linears, GPT-2's Conv1D."""
    has_sizes = all(isinstance(getattr(module, name, None), int) for name in ("in_features", "out_features"))
    has_weight = _packed_tensor(module) is not None or getattr(module, "weight", None) is not None
    return type(module).__name__ == "Conv1D" or (has_sizes and has_weight)


def own_params(module: Any) -> dict[int, int]:
    """Number of parameters in each own tensor, by `id`; packed weights count unpacked, scales and zero points as 0."""
    if (matrices := triton_mxfp4_matrices(module)) is not None:
        biases = {id(param): param.numel() for name, param in module.named_parameters() if name.endswith("_bias")}
        return {id(module): module.num_experts * sum(ins * outs for ins, outs in matrices), **biases}
    packed, weight = _packed_tensor(module), getattr(module, "weight", None)
    if packed is None and is_linear(module) and weight is not None and not weight.is_floating_point():
        packed = weight  # of any format, as a parameter or a buffer
    if packed is not None:
        bias = getattr(module, "bias", None)
        return {id(packed): module.in_features * module.out_features, **({} if bias is None else {id(bias): len(bias)})}
    counts = {id(param): param.numel() for param in module.parameters(recurse=False)}
    for name, param in module.named_parameters(recurse=False):
        if name.endswith("_blocks"):
            counts[id(param)] = 2 * param.numel()
        elif is_scale(name):
            counts[id(param)] = 0
    if is_gguf_table(module):
        counts[id(weight)] = module.num_embeddings * module.embedding_dim
    return counts


def is_gguf_table(module: nn.Module) -> bool:
    """Whether `module` is an embedding whose rows stay in GGUF blocks; a lookup unpacks only its own rows."""
    return type(module).__name__ == "GgufEmbedding"


def triton_mxfp4_matrices(module: Any) -> tuple[tuple[int, int], ...] | None:
    """(in_features, out_features) of an expert's matrices in triton's tensors, no parameters (5.23); else None."""
    if type(module).__name__ != "Mxfp4GptOssExperts":
        return None
    return (module.hidden_size, 2 * module.intermediate_size), (module.intermediate_size, module.hidden_size)


def is_scale(name: str) -> bool:
    """Whether a parameter with this name only scales a weight in MXFP4 (`_scales`) or FP8 (`weight_scale_inv`)."""
    return name.endswith(("_scales", "_scale_inv", "weight_scale", "activation_scale"))


def stored(module: nn.Module) -> StoredWeight:
    """How the weight of a linear-like module is stored. Raises ValueError for an unknown format."""
    weight = getattr(module, "weight", None)
    if (library := library_of(weight)) is not None:
        return library.stored(module)
    if hasattr(weight, "__tensor_flatten__"):  # torchao has more formats than those of `--quant`
        from profiler.quant import torchao

        return torchao.stored(module)
    if _packed_tensor(module) is not None:
        return _packed(module)
    if type(module).__name__ == "GgufLinear":
        # Its kernel computes in float32: it multiplies up to 8 rows by the blocks directly, and more rows by a dense
        # copy, one part at a time (transformers 5.23, integrations/gguf/utils.py).
        return stored_as("gguf", module, storage_bytes([weight]), torch.float32, dense_from_rows=9)
    if weight is not None and weight.is_floating_point() and weight.dim() == 2:
        return _matrix(module)
    raise ValueError(f"the weight of {type(module).__name__} has an unknown format")


def quant_state_tensors(state: Any) -> list[torch.Tensor]:
    """The tensors of a bitsandbytes 4-bit quantisation state: absmax and code book, also of the nested level."""
    if state is None:
        return []
    tensors = [state.absmax, state.code, getattr(state, "offset", None)]
    nested = quant_state_tensors(getattr(state, "state2", None))
    return [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)] + nested


def model_storage_bytes(model: Any) -> int:
    """Bytes of all storages of a loaded model: parameters, buffers, quantisation state. Shared storages count once."""
    tensors = [*model.parameters(), *model.buffers()]
    for param in model.parameters():
        tensors += quant_state_tensors(getattr(param, "quant_state", None))
        tensors.append(getattr(param, "SCB", None))
    for module in model.modules():
        state = getattr(module, "state", None)
        if state is not None and hasattr(state, "SCB"):
            tensors += [state.CB, state.SCB]
    return storage_bytes(tensors)


def _matrix(module: Any) -> StoredWeight:
    """A matrix of floats; FP8 has a scale per tensor, row or block (DeepSeek-V3: `weight_scale_inv`, 128 x 128)."""
    weight = module.weight
    outs, ins = reversed(weight.shape) if type(module).__name__ == "Conv1D" else weight.shape  # GPT-2's is transposed
    name = str(weight.dtype).removeprefix("torch.")
    is_float8 = name.startswith("float8")
    scales = [getattr(module, key, None) for key in ("weight_scale_inv", "weight_scale")] if is_float8 else []
    weight_bytes = weight.numel() * weight.element_size() + storage_bytes(scales)
    return StoredWeight("float8" if is_float8 else name, ins, outs, weight_bytes, _bias_bytes(module), weight.dtype)


def _packed(module: Any) -> StoredWeight:
    tensors = dict([*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)])
    tensors.pop("bias", None)
    floats = [tensor.dtype for tensor in tensors.values() if tensor.is_floating_point() and tensor.itemsize > 1]
    class_name = type(module).__name__.lower()
    method = next((method for method in ("gptq", "awq", "marlin", "exllama") if method in class_name), "packed")
    return stored_as(method, module, storage_bytes(tensors.values()), floats[0] if floats else torch.float16)


def stored_as(
    format_: str, module: Any, weight_bytes: int, compute_dtype: torch.dtype, **dense_rows: Any
) -> StoredWeight:
    return StoredWeight(
        format_,
        module.in_features,
        module.out_features,
        weight_bytes,
        _bias_bytes(module),
        compute_dtype,
        **dense_rows,
    )


def _bias_bytes(module: Any) -> int:
    bias = getattr(module, "bias", None)
    return 0 if bias is None else bias.numel() * bias.element_size()


def _packed_tensor(module: Any) -> torch.Tensor | None:
    names = ("qweight", "weight_packed")  # GPTQ and AWQ, compressed-tensors
    return next((tensor for name in names if (tensor := getattr(module, name, None)) is not None), None)


INT8_CODES = torch.arange(-128, 128)


def fill_random(tensor: torch.Tensor) -> torch.Tensor:
    """Fill `tensor` with random bytes. Drawing eight bytes at a time takes a sixth of the time."""
    data = tensor.view(-1).view(torch.uint8)
    data.zero_()  # all threads touch the new pages here; drawing uses one thread
    whole = len(data) // 8 * 8
    data[:whole].view(torch.int64).random_(-(2**63), None)
    data[whole:].random_(0, 256)
    return tensor


def rms(codes: torch.Tensor) -> float:
    """Return the root mean square of a format's codes, each equally likely."""
    return float(codes.float().square().mean().sqrt())


def conversion_calls(modules: Sequence[nn.Module], rows: int, activations: torch.dtype) -> list[ConversionCall]:
    """Calls of the conversion kernels that `modules` run for `rows` rows of input, one per module.

    They are loaded linears of one shape. A call writes a dense copy; for LLM.int8() it quantises the inputs and
    dequantises the results. Empty if nothing is converted outside the matmul.
    """
    weights = [stored(module) for module in modules]
    if all(weight.format == "int8" for weight in weights):
        return _llm_int8(modules, weights[0], rows, activations)
    if not all(weight.writes_dense_copy(rows) for weight in weights):
        return []
    library = library_of(modules[0].weight)
    pairs = zip(modules, weights, strict=True)
    copies = [library.dense_copy(weight.format, module, weight) for module, weight in pairs] if library else []
    return [copy for copy in copies if copy is not None]


def _llm_int8(
    modules: Sequence[Any], weight: StoredWeight, rows: int, activations: torch.dtype
) -> list[ConversionCall]:
    """All calls share one input and one result: a step makes both anew, but one pair per call would take gigabytes."""
    from bitsandbytes import functional

    device = modules[0].state.SCB.device
    inputs = torch.randn(rows, weight.in_features, dtype=activations, device=device)
    results = torch.randint(-1000, 1000, (rows, weight.out_features), dtype=torch.int32, device=device)

    def convert(scales: torch.Tensor, threshold: float) -> object:
        halves = inputs.to(torch.float16)
        if device.type == "cuda":
            _check_outliers(halves, threshold)
            threshold = 0.0
        _, row_scales, _ = functional.int8_vectorwise_quant(halves, threshold=threshold)
        return functional.int8_mm_dequant(results, row_scales, scales)

    return [partial(convert, module.state.SCB, module.state.threshold) for module in modules]


def without_waiting(module: Any, x: torch.Tensor) -> ConversionCall:
    """A call of a linear on `x` that a CUDA graph can capture.

    In LLM.int8() the host waits for a check of outliers (bitsandbytes 0.50, `int8_vectorwise_quant`). Random inputs
    have none, so this runs the check's kernels and ignores the result.
    """
    if stored(module).format != "int8":
        return partial(module, x)
    state = module.state

    def call() -> object:
        _check_outliers(x.to(torch.float16), state.threshold)
        with patched(state, threshold=0.0):
            return module(x)

    return call


def _check_outliers(halves: torch.Tensor, threshold: float) -> None:
    (halves.abs() >= threshold).any()
