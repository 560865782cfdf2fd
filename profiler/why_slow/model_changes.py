"""Changes to a model: its weights' dtype, format, place and adapters, its kernels, the overhead of its steps."""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from profiler.device.device import describe
from profiler.device.machine import Machine, machine_for
from profiler.device.memory import available_bytes
from profiler.engines.caches import moving_window, static_cache, unwindowed
from profiler.errors import RequestError
from profiler.loading.request import dtype_name
from profiler.measure.linears import PackedLinear, dense_copies, kernel_of, packed_linears, replaced
from profiler.patching import patched, switched
from profiler.quant.storage import is_linear
from profiler.units import duration, scaled
from profiler.why_slow.floor import at_ceilings_s
from profiler.why_slow.plain_models import is_plain
from profiler.why_slow.repeat_call import CallGroup, Candidate, RepeatedCall, passed
from profiler.why_slow.watched_calls import device_map_of, is_spread

# The trial's copy of a model may take at most this share of the free memory.
_COPY_SHARE = 0.8


def frozen_weights(group: CallGroup) -> Candidate | None:
    """A change to an LM head that requires a gradient; None if its head does, or is no plain linear.

    If the weight requires a gradient, torch folds the last positions of a batch into one matmul. Otherwise it makes a
    batched matmul from copies of the weight (should_fold in torch's aten/src/ATen/native/LinearAlgebra.cpp).
    """
    head: Any = None if is_plain(group.model) else group.model.get_output_embeddings()
    weight = head.weight if type(head) is nn.Linear else None
    if weight is None or weight.requires_grad or not weight.is_floating_point() or weight.is_inference():
        return None
    return group.candidate(
        "frozen-weights", "weights are frozen, so the LM head copies its weight for each last position",
        "call model.get_output_embeddings().requires_grad_(True): within torch.no_grad() no gradient is recorded",
        within=lambda: switched(weight.requires_grad_, True, False),
    )  # fmt: skip


def dense_weights(group: CallGroup) -> Candidate | None:
    """A change to dense weights, on dense linears of random values in place of the packed ones."""
    call, model = group.call, group.model
    linears = packed_linears(model)
    if not linears or is_spread(model):
        return None
    dtype = torch.bfloat16 if is_plain(model) or model.dtype.itemsize == 1 else model.dtype
    device = torch.device(call.settings.device)
    copies = functools.cache(lambda: dense_copies(linears, dtype, _COPY_SHARE * available_bytes(device)))
    formats = " and ".join(dict.fromkeys(each.format for each in linears))
    return group.candidate(
        "slow-format", f"weights are packed ({formats})",
        "leave out the quantisation if the model fits without it", within=lambda: replaced(linears, copies()),
        release=copies.cache_clear, where=group.loaded_at, stand_in="dense linears of random values",
        explain=lambda: f", their kernel is {kernel_of([linears[0].module], dtype, call.batch_size, device)}",
    )  # fmt: skip


def _on_copy(group: CallGroup, make: Callable[[], Any]) -> dict[str, Any]:
    """The fields of a candidate whose call runs on a copy of the model, from the trial's first run to its end."""
    (call, noted), copied = group.middle, functools.cache(make)
    return {"changed": RepeatedCall(noted, call, copied).as_run, "release": copied.cache_clear}


def gathered_weights(group: CallGroup) -> Candidate | None:
    """A change to weights in one place, on a copy of the model; None if they are, or do not fit."""
    model = group.model
    if not is_spread(model) or not has_room_for_all(model):
        return None
    places = ", ".join(sorted(set(device_map_of(model).values())))
    turns = group.settings.placement
    return group.candidate(
        "offload", f"weights are spread over {places}{f': {turns}' if turns else ', and cross a link at every step'}",
        f'device_map={{"": "{model.device}"}}: all of them fit',
        **_on_copy(group, lambda: _gathered(model)), where=group.loaded_at,
        stand_in="a copy of the model in one place",
    )  # fmt: skip


def has_room_for_all(model: Any) -> bool:
    """Whether a copy of all weights fits next to the model on the device that computes, so that a trial can run it."""
    return bool(model.get_memory_footprint(return_buffers=False) <= _COPY_SHARE * available_bytes(model.device))


def _gathered(model: Any) -> Any:
    """A copy with all weights on the device that computes, without accelerate's hooks."""
    from accelerate.hooks import remove_hook_from_module
    from accelerate.utils import set_module_tensor_to_device

    device, whole = model.device, copy.deepcopy(model)
    for module in whole.modules():
        hooks = getattr(module, "_hf_hook", None)
        for hook in getattr(hooks, "hooks", (hooks,)):
            offloaded = getattr(hook, "weights_map", None) or {}
            for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
                if tensor.is_meta:
                    set_module_tensor_to_device(module, name, device, value=offloaded[name])
    remove_hook_from_module(whole, recurse=True)
    whole.__dict__.pop("hf_device_map", None)
    return whole.to(device)


def cast_once(group: CallGroup) -> Candidate | None:
    """A change to weights that are cast before the calls; None if autocast keeps its casts from call to call.

    It keeps those of weights in 32 bits that require gradients, until the script leaves it (`cached_cast` in
    aten/src/ATen/autocast_mode.cpp). On a CPU without units for its dtype, the change leaves autocast out.
    """
    noted, device = group.middle[1], torch.device(group.settings.device)
    context, dtype = noted.context, noted.context.autocast
    weights = [weight for module in group.model.modules() if not isinstance(module, nn.Embedding)
               for weight in module.parameters(recurse=False)
               if weight.dim() > 1 and weight.is_floating_point() and weight.dtype != dtype]  # fmt: skip
    kept = context.keeps_casts and all(each.requires_grad and each.dtype == torch.float32 for each in weights)
    entered = [each.autocast for each in group.recorder.notes if each.name == noted.name]
    if dtype is None or not weights or (kept and len(set(entered)) < len(entered)):
        return None
    name, where = dtype_name(dtype), noted.autocast[1] or group.call.where
    if device.type == "cpu" and not _has_units(name):
        return group.candidate(
            "emulated-dtype", f"torch.autocast computes in {name}, for which this CPU has no matmul units",
            "leave out torch.autocast", within=lambda: patched(noted, context=replace(context, autocast=None)),
            where=where,
        )  # fmt: skip

    nbytes = scaled(sum(weight.nbytes for weight in weights), "B")
    return group.candidate(
        "autocast", f"torch.autocast casts {nbytes} of weights to {name} again in each forward",
        f"call model.to({dtype}) once, after loading", **_in_dtype(group, dtype), where=where,
    )  # fmt: skip


_WIDE = ("float32", "float64")
_UNITS = {
    "bfloat16": ("_is_avx512_bf16_supported", "_is_amx_tile_supported"),
    "float16": ("_is_amx_fp16_supported",),
}
"""By dtype: functions of torch that say whether this CPU has instructions to multiply its matrices."""


def other_dtype(group: CallGroup) -> Candidate | None:
    """A change to a dtype that may be faster, on a copy of the model; None if there is none."""
    model, dtype, device = group.model, group.settings.dtype, torch.device(group.settings.device)
    if is_spread(model) or packed_linears(model) or (name := _faster_dtype(device, dtype)) is None:
        return None
    wide, faster, about = dtype in _WIDE, getattr(torch, name), 0.0
    if wide and (subject := group.subject) is not None and device.type == "cuda":  # on a CPU, prompts may take longer
        # Half of the bytes, of what is at the ceilings: overhead and slow kernels may take as long in any dtype.
        at_ceilings = min(1.0, at_ceilings_s(group.call, subject) / max(group.call.steady_s, 1e-9))
        about = at_ceilings * (1 - faster.itemsize / getattr(torch, dtype).itemsize)
    return group.candidate(
        "wide-dtype" if wide else "emulated-dtype",
        f"weights are {dtype}{'' if wide else ', for which this device has no matmul units'}",
        f"call model.to(torch.{name}) after loading, or load it with dtype=torch.{name}", **_in_dtype(group, faster),
        where=group.loaded_at, about=about,
    )  # fmt: skip


def _in_dtype(group: CallGroup, dtype: torch.dtype) -> dict[str, Any]:
    """As `_on_copy`, on a copy on which `to(dtype)` is called. Raises RequestError if a copy is none."""
    model = group.model
    if any(isinstance(vars(each).get("forward"), FunctionType) for each in model.modules()):
        raise RequestError("a module's forward was replaced by a function, which in a copy would use its weights")

    def converted() -> Any:
        needs = sum(each.numel() for each in model.parameters()) * dtype.itemsize
        if needs > (free_bytes := _COPY_SHARE * available_bytes(torch.device(group.settings.device))):
            raise RequestError(
                f"its copy in {dtype_name(dtype)} needs {scaled(needs, 'B')}, and {scaled(free_bytes, 'B')} are free"
            )
        # Converted one by one, so that there is never a second model in the wide dtype.
        narrow = {id(each): nn.Parameter(each.detach().to(dtype), each.requires_grad)
                  for each in model.parameters() if each.is_floating_point()}  # fmt: skip
        return copy.deepcopy(model, narrow).to(dtype)

    return _on_copy(group, converted)


def _faster_dtype(device: torch.device, dtype: str) -> str | None:
    """The dtype to try: 16 bits for wide ones; for 16 bits that a device emulates, a dtype that it has units for."""
    native = describe(device).sixteen_bit_dtype
    if dtype in _WIDE:
        return native
    if device.type == "cuda":  # only GPUs before Ampere lack BF16
        return native if (dtype, native) == ("bfloat16", "float16") else None
    if dtype not in _UNITS or _has_units(dtype):
        return None
    return "bfloat16" if _has_units("bfloat16") else "float32"


def _has_units(dtype: str) -> bool:
    return any(getattr(torch.cpu, name, lambda: False)() for name in _UNITS.get(dtype, ()))


# The rank of an adapter is at most this share of the smaller side of its linear.
_MOST_RANK = 0.5
# Pairs of inputs that show whether a module is linear.
_PAIRS = 32


def merged_adapters(group: CallGroup) -> Candidate | None:
    """A change to linears without their adapters, whose matmuls take as long as merged ones."""
    found = list(unmerged_adapters(group.model))
    if not found:
        return None
    kinds = " and ".join(dict.fromkeys(type(each.module).__name__ for each, _ in found))
    return group.candidate(
        "unmerged-adapters", f"{len(found)} linears compute an adapter next to their weight ({kinds})",
        "merge them once after loading: model.merge_and_unload() with peft, else add their product to the weight",
        within=lambda: replaced([each for each, _ in found], [base for _, base in found]), where=group.loaded_at,
        stand_in="the linears without their adapters, whose shapes are those of merged ones",
    )  # fmt: skip


def unmerged_adapters(parent: nn.Module) -> Iterator[tuple[PackedLinear, Any]]:
    """Each module that computes a linear and an adapter to it, and that linear alone, as a merged one would be.

    LoRA, DoRA and their kin are linear in their input, so each has one weight that computes the same.
    """
    for name, child in parent.named_children():
        base = _base_of(child)
        if base is not None and _is_linear_in_its_input(child, base.in_features):
            yield PackedLinear(parent, name, child), base
        else:
            yield from unmerged_adapters(child)


def _base_of(module: Any) -> Any:
    """The linear in a module whose other matrices are narrow and lead from its inputs to its outputs, else None."""
    linears = [each for each in module.modules() if is_linear(each) and isinstance(each, nn.Linear)]
    if not linears:
        return None
    base = max(linears, key=lambda each: each.in_features * each.out_features)
    ins, outs = base.in_features, base.out_features
    factors = [tuple(each.shape) for each in module.parameters() if each.dim() == 2 and each is not base.weight]
    ranks = {min(shape) for shape in factors}
    is_narrow = bool(ranks) and max(ranks) <= _MOST_RANK * min(ins, outs)
    leads = {max(shape) for shape in factors} == {ins, outs}
    if not (is_narrow and leads and len(factors) > 1):
        return None
    if base is module:  # a linear with matrices of its own
        base = nn.Linear(ins, outs, bias=module.bias is not None, device="meta")
        base.weight, base.bias = module.weight, module.bias
    return base


def _is_linear_in_its_input(module: Any, ins: int) -> bool:
    """Whether f(a) + f(b) = f(a + b) + f(0), except for rounding.

    A single pair of inputs may have the same signs in a narrow layer, where a ReLU is linear, too.
    """
    weight = next(each for each in module.parameters() if each.is_floating_point())
    pairs = torch.randn(2, _PAIRS, ins, generator=torch.Generator().manual_seed(0))
    a, b = pairs.to(weight.device, weight.dtype)
    try:
        with torch.no_grad():
            both, zero = module(a + b), module(torch.zeros_like(a))
            error = (module(a) + module(b) - both - zero).abs().max()
            return bool(error <= 16 * torch.finfo(weight.dtype).eps * (1 + both.abs().max()) * ins**0.5)
    except Exception:  # a module with other inputs
        return False


# Fewer tokens show no decode loop: the third step is captured.
_LEAST_TOKENS = 8
_WARM_STEPS = 2
# About the seconds to compile a decode step for the first time, and those per layer.
_COMPILE_S, _COMPILE_LAYER_S = 10.0, 1.0


def is_bound_by_host(group: CallGroup) -> bool:
    """Whether the steps of these calls on a GPU take the host longer than the GPU, as far as is known.

    Their cache grows, and a static one could take them: no beams, no drafts.
    """
    call, (gpu_s, host_s) = group.call, group.last_step_s or (0.0, 0.0)
    could = call.settings.beams == 1 and not call.settings.assistant and not call.context_len
    decodes = call.grows_a_cache and call.new_tokens >= _LEAST_TOKENS
    return could and decodes and host_s >= gpu_s and not is_spread(group.model)


def compiled_step(group: CallGroup) -> Candidate | None:
    """A change to the compiled step; None if transformers would not compile it.

    `generate` compiles its decode step if the cache is static (generation/utils.py of transformers 5.23:
    `_valid_auto_compile_criteria`), and the compiled step is replayed as a CUDA graph (`CompileConfig.mode`). The step
    is captured without torch.compile first, which takes no time to compile, and whose saving is never computed.
    """
    call, model, about = group.call, group.model, 0.0
    quantizer = getattr(model, "hf_quantizer", None)
    if model.config.is_encoder_decoder or not (quantizer is None or quantizer.is_compileable):
        return None
    words = "the host launches every step kernel by kernel"
    if known := group.last_step_s:
        gpu_s, host_s = known
        words = (
            f"the host needs at least {duration(host_s)} to launch a step,"
            f" and the GPU {duration(gpu_s)} at its ceilings"
        )
        about = max(0.0, 1 - gpu_s / host_s)
    layers = getattr(model.config.get_text_config(), "num_hidden_layers", 1)
    # A static cache for the whole answer, also for a shorter one, if transformers has that.
    sized = hasattr(model.generation_config, "max_cache_len")
    size = {"max_cache_len": call.prompt_len + call.new_tokens} if sized else {}
    static: dict[str, object] = {"cache_implementation": "static", **size}
    compiled = group.candidate(
        "uncompiled", words, f"{passed(static)}: generate then compiles the step, and replays it as a CUDA graph",
        group.repeated(**static), once_s=_COMPILE_S + _COMPILE_LAYER_S * layers, about=about,
    )  # fmt: skip
    made = functools.cache(lambda: _replacements(model, machine_for(model.device), call.prompt_len + call.new_tokens))
    return replace(
        compiled, within=lambda: patched(model, **made()), release=made.cache_clear, once_s=0.0,
        closer=(replace(compiled, about=0.0),), stand_in="its step as a CUDA graph without torch.compile",
    )  # fmt: skip


def _replacements(model: Any, machine: Machine, slots: int) -> dict[str, Callable[..., Any]]:
    """Methods with which `generate` on a static cache replays a captured step. Raises RequestError if no graph can."""
    cache = unwindowed(static_cache(model, slots), slots)
    if moving_window(cache):
        raise RequestError("the host moves this model's window, which a CUDA graph cannot replay")
    step = GraphOfStep(model, machine)

    def emptied(**_: object) -> Any:
        cache.reset()
        return cache

    return {"_prepare_static_cache": emptied, "get_compiled_call": lambda _config: step}


@dataclass
class GraphOfStep:
    """A step that becomes a CUDA graph at its third call; all calls have the same shapes."""

    run: Callable[..., Any]
    machine: Machine
    _calls: int = 0
    _inputs: Any = None
    """The (positional, named) arguments whose tensors the graph reads."""
    _output: Any = None
    _replay: Callable[[], object] | None = None

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Run the step with the arguments of the model's `forward`; the next call overwrites the output."""
        self._calls += 1
        if self._calls <= _WARM_STEPS:
            with self.machine.on_side_stream():
                return self.run(*args, **named)
        inputs = (args, named)
        if self._replay is None:
            self._inputs = tree_map_only(torch.Tensor, torch.clone, inputs)
            self._replay = self.machine.capture(self._step)
        for memory, value in zip(tree_leaves(self._inputs), tree_leaves(inputs), strict=True):
            if isinstance(value, torch.Tensor):
                memory.copy_(value)
        self._replay()
        return self._output

    def _step(self) -> None:
        args, named = self._inputs
        self._output = self.run(*args, **named)


@contextlib.contextmanager
def with_implementation(model: Any, part: str, name: str) -> Iterator[None]:
    """A context in which a model's `attn` or `experts` have another implementation; its towers get back their own."""
    attribute = f"_{part}_implementation"
    before = {id(each.config): (each.config, getattr(each.config, attribute))
              for each in model.modules() if hasattr(getattr(each, "config", None), attribute)}  # fmt: skip
    try:
        getattr(model, f"set{attribute}")(name)
        yield
    finally:
        for config, own in before.values():  # an outer one first, as it also sets those within
            setattr(config, attribute, own)
