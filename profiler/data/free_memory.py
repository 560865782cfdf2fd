"""The rule for free memory: how many bytes of a device a model, its KV cache and its workspace may take.

What they need is counted in `counting.memory_need`; docs/explanation/does-it-fit.md has the whole formula.
"""

CONTEXT_BYTES = 450_000_000
"""Memory of a GPU that a CUDA context with its libraries takes, before any tensor.

An RTX 6000 Ada with torch 2.10 takes 426 MiB (unslothai/unsloth-zoo, pull 1053); PyTorch's developers name 300 to
400 MB since CUDA 11.7 loads kernels lazily (pytorch/pytorch, issues 107667 and 109888)."""

_FRAGMENTATION_SHARE = 0.02
"""Share of a GPU's free memory that is lost between blocks.

torch's allocator rounds large blocks to 2 MiB, and keeps pieces that are too small for the next tensor."""
SURE_SHARE = 0.98
"""Share of its free memory on which one can count: drivers report 14.56 to 14.75 GiB of a T4, and contexts differ."""
_OTHERS_SHARE = 0.1
"""Share of the host's free memory that stays free for the system and for other processes."""


def room_bytes(kind: str, free_bytes: float) -> int:
    """Return the bytes that a model may take of a device of `kind` (`cuda` or `cpu`) with this free memory.

    On a GPU the memory of the CUDA context must already be taken. Never below 0.
    """
    lost = _OTHERS_SHARE if kind == "cpu" else _FRAGMENTATION_SHARE
    return max(0, int(free_bytes * (1 - lost)))


def idle_room_bytes(kind: str, total_bytes: float) -> int:
    """Return the bytes that a model may take of an idle device whose driver or system reports `total_bytes`."""
    return room_bytes(kind, total_bytes if kind == "cpu" else total_bytes - CONTEXT_BYTES)
