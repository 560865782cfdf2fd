"""Slower code that a library falls back to, read from its own warnings, with the package that is missing."""

import contextlib
import functools
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Fallback:
    """A library's warning that it runs slower code than it could."""

    library: str
    text: str
    """The warning itself."""
    module: str
    """The class of the module that runs the slower code; empty if it is unknown."""
    packages: tuple[str, ...]
    """Distributions that would provide the faster code."""
    change: str = ""
    """What to do where no package is missing."""


# Words of a warning, and the package that is missing: transformers 5.23, 5.10 (three), auto-gptq (two),
# bitsandbytes on a CPU, transformers 5.23, vLLM 0.7. Sources: integrations/hub_kernels.py of transformers 5.23,
# models/mamba/modeling_mamba.py and models/qwen3_next/modeling_qwen3_next.py of transformers 5.10,
# nn_modules/qlinear/qlinear_cuda.py and modeling/_base.py of AutoGPTQ, backends/cpu/ops.py of bitsandbytes 0.50,
# quantizers/quantizer_mxfp4.py of transformers 5.23, v1/sample/ops/topk_topp_sampler.py of vLLM.
_PACKAGES = (
    (r"falling back to its reference PyTorch implementation because `([\w-]+)` is not installed", ""),
    (r"fast path is not available .*github\.com/state-spaces/mamba", "mamba-ssm"),
    (r"fast path is not available .*github\.com/fla-org/flash-linear-attention", "flash-linear-attention"),
    (r"fast path is not available .*github\.com/Dao-AILab/causal-conv1d", "causal-conv1d"),
    (r"^CUDA extension not installed", "gptqmodel"),
    (r"^Exllama kernel is not installed", "gptqmodel"),
    (r"Failed to load CPU gemm_4bit_forward", "kernels"),
    (r"^MXFP4 quantization requires the `kernels` package", "kernels"),
    (r"please install FlashInfer", "flashinfer-python"),
)

# Other warnings of slower code, and what to do about it: bitsandbytes 0.50 (nn/modules.py, backends/cuda/ops.py),
# torch 2.13 (_inductor/exc.py), vLLM 0.6 (config.py: "not fully optimized yet") and 0.32 (config/vllm.py,
# v1/sample/ops/topk_topp_sampler.py, model_executor/model_loader/utils.py, and below model_executor:
# layers/quantization/utils/marlin_utils_fp8.py and fp8_utils.py, layers/quantization/auto_awq.py,
# layers/fused_moe/fused_moe.py, kernels/linear/__init__.py).
_CHANGES = (
    (r"bnb_4bit_compute_dtype=torch\.float32 \(default\)", "pass bnb_4bit_compute_dtype=torch.float16"),
    (r"int8_linear_matmul has no usable|not aligned for fast kernel", "use another format: no kernel takes this shape"),
    (r"No working C\+\+ compiler found", "install a C++ compiler: torch.compile needs one"),
    (r"Cannot find a working triton installation", "pip install triton: torch.compile needs it"),
    (r"^Enforce eager set", "leave out enforce_eager: vLLM then compiles its step, for GPUs into a CUDA graph"),
    (r"GPU does not have native support for FP[48]", "use a format that this GPU has units for, such as int8 (W8A8)"),
    (r"Falling back to unoptimized AWQ kernels", "use a checkpoint whose shapes Marlin takes (groups of 128, say)"),
    (r"falling back to the slow and unoptimized emulation", "use a format that this GPU has units for"),
    (r"^FlashInfer top-p/top-k sampling unavailable", "leave out top_k and top_p, or give FlashInfer what it needs"),
    (r"quantization is not fully optimized yet", "leave out quantization=...: vLLM then chooses its fastest kernels"),
    (r"has no vLLM implementation, falling back", "expect the speed of transformers: vLLM lacks this architecture"),
    (
        r"^Using default [\w ]+ config\. Performance might be sub-",
        "tune the kernel for this GPU (vLLM's benchmarks/kernels)",
    ),
)

# Modules that run slower code after a warning at import or load, when none of them exists yet.
_MODULES = ((r"CUDA extension|Exllama", "QuantLinear"), (r"MXFP4", "Experts"), (r"gemm_4bit_forward", "Linear4bit"))
_LONGEST_QUOTE = 240
# Python's words for a package that is hidden on purpose, as roofscope hides `kernels` from bitsandbytes.
_HIDDEN = "None in sys.modules"
# Packages whose kernels run on a GPU only.
_FOR_GPUS = {"mamba-ssm", "flash-linear-attention", "causal-conv1d", "gptqmodel", "flashinfer-python"}


@contextlib.contextmanager
def library_warnings(record: Callable[[str, str], None]) -> Iterator[None]:
    """Within, `record`, whose errors are suppressed, gets (library, text) of each warning, also of silent loggers."""
    log, show = logging.Logger.warning, warnings.showwarning

    @functools.wraps(log)
    def logged(self: logging.Logger, msg: object, *args: Any, **named: Any) -> None:
        with contextlib.suppress(Exception):
            text = logging.LogRecord("", 0, "", 0, msg, args, None).getMessage()
            record(self.name.partition(".")[0], text)
        log(self, msg, *args, **{**named, "stacklevel": named.get("stacklevel", 1) + 1})

    @functools.wraps(show)
    def shown(message: Any, category: Any, filename: str, *args: Any, **named: Any) -> None:
        with contextlib.suppress(Exception):
            _, _, inside = filename.rpartition("site-packages/")
            record(inside.partition("/")[0], str(message))
        show(message, category, filename, *args, **named)

    logging.Logger.warning, warnings.showwarning = logged, shown  # type: ignore[method-assign]
    try:
        yield
    finally:
        logging.Logger.warning = log  # type: ignore[method-assign]
        if warnings.showwarning is shown:
            warnings.showwarning = show


@contextlib.contextmanager
def reported_fallbacks() -> Iterator[list[Fallback]]:
    """A context that collects the fallbacks that libraries' loggers report, each once."""
    fallbacks: list[Fallback] = []

    def record(library: str, text: str) -> None:
        fallback = fallback_of(library, text)
        if fallback is not None and fallback not in fallbacks:
            fallbacks.append(fallback)

    with library_warnings(record):
        yield fallbacks


def cure_of(fallbacks: Sequence[Fallback], *, on_gpu: bool) -> str:
    """The command that installs what is missing for one or more fallbacks, or what else to do."""
    packages = list(dict.fromkeys(package for each in fallbacks for package in each.packages))
    if not packages:
        return next(each.change for each in fallbacks)
    command = f"pip install {' '.join(packages)}"
    if on_gpu or not set(packages) <= _FOR_GPUS:
        return command
    kernels = "their kernels need" if len(packages) > 1 else "its kernels need"
    return f"run it on a GPU after `{command}`: {kernels} one"


def fallback_sentences(fallbacks: Sequence[Fallback], *, on_gpu: bool) -> list[str]:
    """A sentence per cure: the libraries' own warnings, and what to do."""
    by_cure: dict[str, list[Fallback]] = {}
    for each in fallbacks:
        by_cure.setdefault(cure_of([each], on_gpu=on_gpu), []).append(each)
    return [f"{quotes_of(same)}: {cure}." for cure, same in by_cure.items()]


def quotes_of(fallbacks: Sequence[Fallback]) -> str:
    """What the libraries warn, once per set of packages."""
    by_packages = {each.packages or each.change: each for each in reversed(fallbacks)}
    return "; ".join(f'{each.library} warns "{each.text}"' for each in reversed(by_packages.values()))


def fallback_of(library: str, text: str) -> Fallback | None:
    """The fallback that a warning reports, or None; call it while the module with the slower code is running."""
    if _HIDDEN in text:
        return None
    packages = [(found, package or found[1]) for words, package in _PACKAGES if (found := re.search(words, text))]
    changes = [(found, change) for words, change in _CHANGES if (found := re.search(words, text))]
    if not packages and not changes:
        return None
    first = (packages or changes)[0][0]
    module = _running_module() or next((name for words, name in _MODULES if re.search(words, text)), "")
    names = tuple(dict.fromkeys(package.replace("_", "-") for _, package in packages))
    line = text[text.rfind("\n", 0, first.start()) + 1 :].partition("\n")[0]  # the warning may contain a traceback
    quote = re.split(r"(?<=\.)\s", line, maxsplit=1)[0]
    if len(quote) > _LONGEST_QUOTE:
        quote = f"{quote[:_LONGEST_QUOTE].rpartition(' ')[0]} ..."
    return Fallback(library, quote, module, names, "" if packages else changes[0][1])


def _running_module() -> str:
    torch_modules = sys.modules.get("torch.nn.modules.module")
    frame: Any = sys._getframe(1) if torch_modules else None
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, torch_modules.Module):  # type: ignore[union-attr]
            return type(getattr(owner, "_orig_mod", owner)).__name__
        frame = frame.f_back
    return ""
