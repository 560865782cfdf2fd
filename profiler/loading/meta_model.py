"""Build a model on the meta device: all modules and shapes, with quantised layers, but no data."""

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from profiler.errors import ModelError, RequestError, first_line
from profiler.loading.request import ModelRequest, model_errors
from profiler.packages import need
from profiler.patching import patched, switched
from profiler.quant.bitsandbytes import import_bitsandbytes, settle_four_bit
from profiler.quant.checkpoints import (
    PACKED_LINEARS,
    as_dense_config,
    form_options,
    plan_mxfp4,
    plan_packed,
    published_format,
)
from profiler.quant.registry import PLAIN, Quant, QuantOptions, quantise_modules


def build_on_meta(
    config: Any,
    dtype: torch.dtype,
    quant: Quant = "none",
    attn: str | None = None,
    *,
    options: QuantOptions = PLAIN,
    device: torch.device | None = None,
    as_run_here: bool = False,
) -> nn.Module:
    """Build the model of `config` on the meta device, without data, in the format of its checkpoint.

    With `as_run_here`, in the format that transformers gives it on this machine. `device` is where the model will run
    (None if unknown); it decides the layout of some formats. Raises RequestError without a format's library, ModelError
    for a format that cannot be planned, or a layer that its kernel does not support.
    """
    with quiet_libraries(), torch.device("meta"):
        module = from_config(config, dtype, attn)
        if quant == "none" and (method := published_format(config)) is not None:
            return _plan_published_format(module, method, config, as_run_here, device)
        return quantise_modules(module, quant, dtype, options, device)


def plan(request: ModelRequest, config: Any) -> nn.Module:
    """Build the model of `request` on the meta device, as it would run on its device. Random weights are dense."""
    return build_on_meta(
        as_dense_config(config) if request.weights == "random" else config,
        request.dtype,
        request.quant,
        request.attn,
        options=request.quant_options,
        device=request.device,
        as_run_here=True,
    )


def from_config(config: Any, dtype: torch.dtype, attn: str | None) -> nn.Module:
    """Build the dense model of `config` on the current device. Raises ModelError if transformers cannot build it."""
    extra = {"attn_implementation": attn} if attn else {}
    # `load_config` removes `auto_map` unless the model is trusted; without the argument transformers would prompt.
    trusted = hasattr(config, "auto_map")
    try:
        return auto_class(config).from_config(config, dtype=dtype, trust_remote_code=trusted, **extra)
    except (RequestError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # invalid sizes may fail anywhere in transformers
        if isinstance(error, ImportError) and (text := config.get_text_config()) is not config:
            return from_config(text, dtype, attn)  # a tower needs another package: a step of text runs nothing of it
        raise ModelError(f"transformers cannot build this model: {first_line(error)}.") from error


def auto_class(config: Any) -> Any:
    """Return the class that builds a config: a causal LM, or one of pictures. Raises ModelError, also for encoders."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    if hasattr(config, "auto_map"):
        return AutoModelForCausalLM
    names: list[str] = getattr(config, "architectures", None) or []
    encodes = getattr(config, "is_encoder_decoder", False)
    is_part = encodes and names and not any(name.endswith("CausalLM") for name in names)
    if is_part or any(name.endswith("MaskedLM") for name in names):
        raise ModelError(
            f"{names[0]} is no causal LM: it runs an encoder, whose work is not counted; pass a model that"
            " decodes only."
        )
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(config) in auto._model_mapping:
            return auto
    raise ModelError(
        f"transformers has no model that generates text for {config.model_type!r}; pass the folder of a causal LM, or"
        " one whose config.json has only the text_config of this model."
    )


def _plan_published_format(
    module: nn.Module, method: str, config: Any, as_run_here: bool, device: torch.device | None
) -> nn.Module:
    from transformers.quantizers import AutoHfQuantizer

    if method == "mxfp4" and not as_run_here:
        return plan_mxfp4(module)
    if method in ("bitsandbytes", "compressed-tensors", "torchao"):  # methods that have the name of their library
        need(method, f"a checkpoint stored as {method}")
    with model_errors(f"this checkpoint is stored as {method!r}, which cannot be planned here"):
        if method in PACKED_LINEARS:
            return plan_packed(module, method, form_options(config))
        if method == "bitsandbytes":
            import_bitsandbytes()
        quantizer = AutoHfQuantizer.from_config(config.quantization_config, pre_quantized=True)
        if as_run_here or method == "compressed-tensors":
            quantizer.validate_environment()
            # transformers (5.23) makes some weights dense here, such as FP8 below compute capability 8.9.
            dequantises = getattr(quantizer.quantization_config, "dequantize", False)
            if dequantises or not getattr(quantizer, "use_fp8_kernel", True):
                return module
        if method == "mxfp4":  # a CPU has no kernel without `use_kernels`; planning must not download one for a GPU
            return plan_mxfp4(module) if device is not None and device.type != "cpu" else module
        quantizer.preprocess_model(model=module, device_map=None, keep_in_fp32_modules=None)
    settle_four_bit(module, device, "this checkpoint", "use the one that it was quantised from")
    return module


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Suppress warnings, logs and progress bars of transformers, accelerate and bitsandbytes."""
    from transformers import modeling_gguf_pytorch_utils as gguf_reader
    from transformers.utils import logging as transformers_logging

    had_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    no_logs = switched(logging.disable, logging.CRITICAL, logging.root.manager.disable)
    # transformers' GGUF reader uses tqdm directly and ignores the switch.
    no_bars = patched(gguf_reader, tqdm=lambda iterable, *_args, **_kwargs: iterable)
    try:
        with no_logs, no_bars, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if had_bars:
            transformers_logging.enable_progress_bar()
