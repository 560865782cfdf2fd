"""A model on the meta device: its modules without their bytes, quantised layers in place."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from profiler.errors import ModelError, RequestError, first_line
from profiler.loading.request import ModelRequest
from profiler.packages import need
from profiler.quant.bitsandbytes import import_bitsandbytes
from profiler.quant.checkpoints import (
    PACKED_LINEARS,
    as_dense_config,
    form_options,
    plan_mxfp4,
    plan_packed,
    published_format,
)
from profiler.quant.formats import PLAIN, QuantOptions, quantise_modules, settle_four_bit
from profiler.quant.registry import Quant


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
    """The model of `config` on the meta device: every module and shape, no bytes.

    A checkpoint that comes quantised says so in its config; its layers are planned in that format, or with
    `as_run_here` in the one that transformers gives them on this machine. `device` is where it will run (None: nowhere
    in particular), which decides the layout of some formats. Raises RequestError where a format's library is missing,
    ModelError for a format that cannot be planned, or a layer that its kernel on this machine does not take.
    """
    with quiet_libraries(), torch.device("meta"):
        module = from_config(config, dtype, attn)
        if quant == "none" and (form := published_format(config)) is not None:
            return _plan_own_format(module, form, config, as_run_here, device)
        return quantise_modules(module, quant, dtype, options, device)


def plan(request: ModelRequest, config: Any) -> nn.Module:
    """The model of `request` on the meta device, as it would run on its device; random weights are always dense."""
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
    from transformers import AutoModelForCausalLM

    extra = {"attn_implementation": attn} if attn else {}
    # `load_config` leaves `auto_map` to a model that is trusted alone; unless told, transformers would ask and wait.
    trusted = hasattr(config, "auto_map")
    try:
        return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trusted, **extra)
    except (RequestError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a stranger's sizes may fail anywhere in it
        raise ModelError(f"transformers cannot build this model: {first_line(error)}.") from error


_FORMAT_LIBRARIES = ("bitsandbytes", "compressed-tensors", "torchao")
"""Each reads checkpoints whose `quant_method` is its own name."""


def _plan_own_format(
    module: nn.Module, method: str, config: Any, as_run_here: bool, device: torch.device | None
) -> nn.Module:
    from transformers.quantizers import AutoHfQuantizer

    if method in PACKED_LINEARS:
        return plan_packed(module, method, form_options(config))
    if method == "mxfp4" and not as_run_here:
        return plan_mxfp4(module)
    if method in _FORMAT_LIBRARIES:
        need(method, f"a checkpoint stored as {method}")
    try:
        if method == "bitsandbytes":
            import_bitsandbytes()
        quantizer = AutoHfQuantizer.from_config(config.quantization_config, pre_quantized=True)
        if as_run_here or method == "compressed-tensors":
            quantizer.validate_environment()
            if _runs_dense(quantizer):
                return module
        if method == "mxfp4":  # a CPU has no kernel without `use_kernels`; planning must fetch none for a card
            return plan_mxfp4(module) if device is not None and device.type != "cpu" else module
        quantizer.preprocess_model(model=module, device_map=None, keep_in_fp32_modules=None)
    except Exception as error:
        raise ModelError(
            f"this checkpoint is stored as {method!r}, which cannot be planned here: {first_line(error)}."
        ) from error
    settle_four_bit(module, device, "this checkpoint", "use the one that it was quantised from")
    return module


def _runs_dense(quantizer: Any) -> bool:
    """Whether transformers (5.23) turns the weights into dense ones, at loading or in the first forward pass.

    It does so with FP8 below compute capability 8.9 and MXFP4 without triton's kernels, and says so in the quantizer's
    own config once it has looked at the machine; with compressed-tensors unless its FP8 kernels are asked for.
    """
    if hasattr(quantizer, "use_fp8_kernel"):
        return not quantizer.use_fp8_kernel
    return bool(getattr(quantizer.quantization_config, "dequantize", False))


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Keep warnings and progress bars of transformers, accelerate and bitsandbytes off the screen."""
    import transformers
    from transformers.utils import logging as transformers_logging

    level = transformers.logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    loggers = [
        logging.getLogger(name) for name in ("accelerate", "bitsandbytes", "torch", "torchao", "huggingface_hub")
    ]
    levels = [logger.level for logger in loggers]
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), _quiet_tqdm():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(level)
        if bars:
            transformers.logging.enable_progress_bar()
        for logger, old in zip(loggers, levels, strict=True):
            logger.setLevel(old)


@contextlib.contextmanager
def _quiet_tqdm() -> Iterator[None]:
    """transformers' GGUF reader takes tqdm directly, so that its own switch for progress bars misses it."""
    try:
        import transformers.modeling_gguf_pytorch_utils as gguf_utils
    except ImportError:
        yield
        return
    original = getattr(gguf_utils, "tqdm", None)
    if original is None:
        yield
        return
    gguf_utils.tqdm = lambda iterable, *_args, **_kwargs: iterable
    try:
        yield
    finally:
        gguf_utils.tqdm = original
