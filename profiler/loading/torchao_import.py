"""Import transformers without torchao, which only its packed formats need."""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import Any

_QUANTIZER = "transformers.quantizers.quantizer_torchao"
_SAFETENSORS = "torchao.prototype.safetensors.safetensors_support"


def without_torchao() -> None:
    """Import transformers' torchao quantizer, which every model imports, without torchao.

    The quantizer takes one function from torchao, for saving. Its replacement imports torchao when it is called.
    Modules that are already imported stay. If this import fails, the plain one follows at first use.
    """
    if _QUANTIZER in sys.modules or _SAFETENSORS in sys.modules:
        return
    stub = ModuleType(_SAFETENSORS)
    vars(stub)["flatten_tensor_state_dict"] = _flatten_tensor_state_dict
    sys.modules[_SAFETENSORS] = stub
    try:
        with suppress(Exception):
            import_module(_QUANTIZER)
    finally:
        del sys.modules[_SAFETENSORS]


def _flatten_tensor_state_dict(*args: Any, **kwargs: Any) -> Any:
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    return flatten_tensor_state_dict(*args, **kwargs)
