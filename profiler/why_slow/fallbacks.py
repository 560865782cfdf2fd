"""Slower code that a library falls back to, read from its own warnings, with the package that is missing."""

from __future__ import annotations

import re
import sys
from typing import Any

from profiler.why_slow.observations import Fallback

# Words of a warning, and the package that is missing: transformers 5, transformers 4 (three), auto-gptq (two),
# bitsandbytes on a CPU, transformers 5. Sources: integrations/hub_kernels.py of transformers 5.23,
# models/mamba/modeling_mamba.py and models/qwen3_next/modeling_qwen3_next.py of transformers 4.57,
# nn_modules/qlinear/qlinear_cuda.py and modeling/_base.py of AutoGPTQ, backends/cpu/ops.py of bitsandbytes 0.50,
# quantizers/quantizer_mxfp4.py of transformers 5.23.
_PACKAGES = (
    (r"falling back to its reference PyTorch implementation because `([\w-]+)` is not installed", ""),
    (r"fast path is not available .*github\.com/state-spaces/mamba", "mamba-ssm"),
    (r"fast path is not available .*github\.com/fla-org/flash-linear-attention", "flash-linear-attention"),
    (r"fast path is not available .*github\.com/Dao-AILab/causal-conv1d", "causal-conv1d"),
    (r"^CUDA extension not installed", "gptqmodel"),
    (r"^Exllama kernel is not installed", "gptqmodel"),
    (r"Failed to load CPU gemm_4bit_forward", "kernels"),
    (r"^MXFP4 quantization requires the `kernels` package", "kernels"),
)

# Other warnings of slower code, and what to do about it: bitsandbytes 0.50 (nn/modules.py, backends/cuda/ops.py) and
# torch 2.13 (_inductor/exc.py).
_CHANGES = (
    (r"bnb_4bit_compute_dtype=torch\.float32 \(default\)", "pass bnb_4bit_compute_dtype=torch.float16"),
    (r"int8_linear_matmul has no usable|not aligned for fast kernel", "use another format: no kernel takes this shape"),
    (r"No working C\+\+ compiler found", "install a C++ compiler: torch.compile needs one"),
    (r"Cannot find a working triton installation", "pip install triton: torch.compile needs it"),
)

# Modules that run slower code after a warning at import or load, when none of them exists yet.
_MODULES = ((r"CUDA extension|Exllama", "QuantLinear"), (r"MXFP4", "Experts"), (r"gemm_4bit_forward", "Linear4bit"))
_LONGEST_QUOTE = 240


def fallback_of(library: str, text: str) -> Fallback | None:
    """The fallback that a warning reports; None for any other warning.

    It must be called while the library warns: the module that runs is the one with the slower code.
    """
    packages = [(found, package or found[1]) for words, package in _PACKAGES if (found := re.search(words, text))]
    changes = [(found, change) for words, change in _CHANGES if (found := re.search(words, text))]
    if not packages and not changes:
        return None
    first = (packages or changes)[0][0]
    module = _running_module() or next((name for words, name in _MODULES if re.search(words, text)), "")
    names = tuple(dict.fromkeys(package.replace("_", "-") for _, package in packages))
    return Fallback(library, _quotable(text, first.start()), module, names, "" if packages else changes[0][1])


def _quotable(text: str, at: int) -> str:
    """The first sentence of the line at this position of a warning, which may contain a traceback."""
    line = text[text.rfind("\n", 0, at) + 1 :].partition("\n")[0]
    sentence = re.split(r"(?<=\.)\s", line, maxsplit=1)[0]
    return sentence if len(sentence) <= _LONGEST_QUOTE else f"{sentence[:_LONGEST_QUOTE].rpartition(' ')[0]} ..."


def _running_module() -> str:
    """The class of the innermost nn.Module whose method is running; empty if there is none."""
    torch_modules = sys.modules.get("torch.nn.modules.module")
    frame: Any = sys._getframe(1) if torch_modules else None
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, torch_modules.Module):  # type: ignore[union-attr]
            return type(getattr(owner, "_orig_mod", owner)).__name__
        frame = frame.f_back
    return ""
