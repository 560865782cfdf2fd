"""Kernels of the Hugging Face hub in a model, and undone: those on this machine, as a trial downloads nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import huggingface_hub.constants

from profiler.device.device import compute_capability
from profiler.errors import RequestError, first_line
from profiler.patching import patched

_HOPPER = (9, 0)


def attention_kernel(model: Any) -> str | None:
    """The repository of the flash attention that transformers would load for a model on its device; None without one.

    It is that of FlashAttention-3 on Hopper, else of FlashAttention-2, if the model names none of its own.
    """
    from transformers import modeling_flash_attention_utils as flash

    device = model.device
    if not getattr(model, "_supports_flash_attn", False) or not hasattr(flash, "FLASH_ATTN_KERNEL_FALLBACK"):
        return None
    hopper = compute_capability(device) == _HOPPER
    usual = flash.FLASH_ATTN_KERNEL_FALLBACK[f"flash_attention_{3 if hopper else 2}"]
    names = getattr(model, "_compatible_flash_implementations", None) or [usual]
    runs_on: Any = getattr(flash, "FLASH_ATTN_KERNEL_DEVICES", {})
    return next((name for name in names if device.type in runs_on.get(name, ("cuda",))), None)


@contextlib.contextmanager
def with_attention(model: Any, name: str) -> Iterator[None]:
    """A context in which the model attends with a kernel. Raises RequestError if the kernel is not on this machine."""
    before = model.config._attn_implementation
    with _from_this_machine(f"the kernel {name}"):
        model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@contextlib.contextmanager
def with_layers(model: Any) -> Iterator[None]:
    """A context in which the model's layers run kernels, as with `use_kernels=True`.

    transformers cannot undo that, so the attributes of all modules are restored. Raises RequestError if there is no
    kernel for any layer on this machine.
    """
    parts = list(model.modules())
    before = [{**vars(part), "_modules": dict(part._modules)} for part in parts]
    try:
        with _from_this_machine("a kernel for its layers"):
            model.set_use_kernels(True)
        if all(vars(part).get("forward") is old.get("forward") and dict(part._modules) == old["_modules"]
               for part, old in zip(parts, before, strict=True)):  # fmt: skip
            raise RequestError("no kernel for its layers and this device is in the cache of the Hugging Face hub")
        yield
    finally:
        for part, old in zip(parts, before, strict=True):
            vars(part).clear()
            vars(part).update(old)


@contextlib.contextmanager
def _from_this_machine(what: str) -> Iterator[None]:
    """A context without downloads, whose errors become a RequestError. Code of others is not fetched to run it."""
    from transformers.integrations import hub_kernels

    if not hub_kernels.is_kernels_available():
        raise RequestError("the package `kernels`, in a version that transformers accepts, is not installed")
    try:
        with patched(huggingface_hub.constants, HF_HUB_OFFLINE=True):
            yield
    except Exception as error:
        raise RequestError(f"{what} is not on this machine, or does not fit it: {first_line(error)}") from error
