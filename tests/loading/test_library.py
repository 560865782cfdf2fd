"""The fast import of transformers gives the same modules as transformers' own, and reads each file once."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module, util
from typing import Any

import pytest

SCRIPT = """
import json, sys
from pathlib import Path
from importlib import import_module
from profiler.counting.count import counted_on_meta
from profiler.loading.source import resolve

counted_on_meta(resolve("smollm2-135m"), "auto", "none")
reads = import_module("transformers.utils.import_utils").create_import_structure_from_path.cache_info().misses
ours = sys.modules.pop("transformers.models")
theirs = import_module("transformers.models")
same = [vars(ours)[name] == vars(theirs)[name] for name in ("_class_to_module", "_object_missing_backend", "_modules")]
folders = len(list(Path(theirs.__file__).parent.glob("*/__init__.py")))
print(json.dumps([reads, folders, same, len(ours._class_to_module)]))
"""


@pytest.fixture(scope="module")
def counting() -> list[Any]:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=120)
    output: list[Any] = json.loads(done.stdout)
    return output


def test_the_models_files_are_read_once(counting: list[Any]) -> None:
    """Each folder is read once, and again the few that are imported; transformers' own import reads all twice."""
    reads, folders, *_ = counting
    assert folders > 300
    assert folders <= reads < 1.5 * folders


def test_the_import_structure_is_that_of_transformers(counting: list[Any]) -> None:
    *_, same, names = counting
    assert names > 1000
    assert all(same)


@pytest.mark.skipif(util.find_spec("torchao") is None, reason="torchao is not installed")
def test_the_replacement_calls_torchaos_function() -> None:
    import torch

    from profiler.loading.library import _flatten_tensor_state_dict

    original = import_module("torchao.prototype.safetensors.safetensors_support").flatten_tensor_state_dict
    state = {"weight": torch.arange(3.0)}
    assert str(_flatten_tensor_state_dict(state)) == str(original(state))
