"""Import transformers 0.4 s faster, by reading its 1,600 files once instead of twice."""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

_TORCHAO_QUANTIZER = "transformers.quantizers.quantizer_torchao"
_TORCHAO_SAFETENSORS = "torchao.prototype.safetensors.safetensors_support"


def import_transformers() -> None:
    """Import the parts of transformers that every model needs, 0.4 s faster than its own imports (5.23).

    The imported modules have the same names as after a plain import. Modules that are already imported stay. If the
    fast import fails, with another version or a broken installation, the plain import follows at first use.
    """
    if "transformers.models" not in sys.modules:
        with suppress(Exception):
            _import_models()
    if _TORCHAO_QUANTIZER not in sys.modules and _TORCHAO_SAFETENSORS not in sys.modules:
        with suppress(Exception):
            _import_torchao_quantizer()


def _import_models() -> None:
    """Import `transformers.models` with the import structure that transformers has already read.

    transformers reads each of the 1,600 files for the names that it defines, and again for `transformers.models`,
    because the cache between the two has room for 128 of their 549 folders. Only the prefix of the names differs.
    """
    import transformers
    from transformers.utils import import_utils

    define = import_utils.define_import_structure
    prefix = "models."
    structure = {
        backends: {name.removeprefix(prefix): names for name, names in modules.items() if name.startswith(prefix)}
        for backends, modules in define(Path(transformers.__file__).parent / "models", prefix="models").items()
    }
    import_utils.define_import_structure = lambda _file: structure
    try:
        import_module("transformers.models")
    finally:
        import_utils.define_import_structure = define


def _import_torchao_quantizer() -> None:
    """Import transformers' torchao quantizer without torchao.

    Every model imports it, and it takes one function from torchao, for saving. The replacement imports torchao when it
    is called.
    """
    stub = ModuleType(_TORCHAO_SAFETENSORS)
    vars(stub)["flatten_tensor_state_dict"] = _flatten_tensor_state_dict
    sys.modules[_TORCHAO_SAFETENSORS] = stub
    try:
        import_module(_TORCHAO_QUANTIZER)
    finally:
        del sys.modules[_TORCHAO_SAFETENSORS]


def _flatten_tensor_state_dict(*args: Any, **kwargs: Any) -> Any:
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    return flatten_tensor_state_dict(*args, **kwargs)
