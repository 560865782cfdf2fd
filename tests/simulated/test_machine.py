"""CUDA's machine on a simulated GPU: memory, streams, captures, and the state after a failed capture."""

from __future__ import annotations

import gc

import pytest
import torch

from profiler.device.machine import machine_for
from profiler.errors import CaptureError, RequestError

from .truth import H100
from .world import simulated

CARD = torch.device("cuda", 0)
MIB, GIB = 1 << 20, 1 << 30
OLDEST, NEWEST = (2, 11), (2, 14)
"""torch releases: the generator, the allocator and the pool are left in capture by the one, by the other none."""


@pytest.mark.parametrize("version", [(2, 7), OLDEST, (2, 12), NEWEST])
def test_a_machine_recovers_after_a_failed_capture(version: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.7.1 has `_cuda_endAllocateCurrentStreamToPool`; from 2.8 on it is `_cuda_endAllocateToPool`.

    `a_plain_capture` in test_acceptance.py shows that a plain capture does not recover.
    """

    def waits() -> None:
        torch.empty(GIB, dtype=torch.uint8, device="cuda")
        x.sum().item()

    with simulated(H100.but(torch_version=version)), monkeypatch.context() as patch:
        if version == (2, 7):
            ended = torch._C._cuda_endAllocateToPool
            patch.setattr(torch._C, "_cuda_endAllocateCurrentStreamToPool", ended, raising=False)
            patch.delattr(torch._C, "_cuda_endAllocateToPool")
        machine = machine_for(CARD)
        x = torch.zeros(16, device="cuda")
        before = torch.cuda.current_stream()
        with pytest.raises(RequestError, match="cannot be captured"):
            machine.capture(waits)
        gc.collect()
        assert torch.cuda.current_stream() is before
        torch.rand(4, device="cuda")
        torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() < 256 * MIB
        machine.capture(lambda: x.add_(1))()


def test_cudas_own_allocator_captures_without_a_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `backend:cudaMallocAsync`, torch has no MemPool (c10/cuda/CUDACachingAllocator.h, `createOrIncrefPool`)."""

    def no_pool() -> None:
        raise RuntimeError("cudaMallocAsync does not yet support createOrIncrefPool.")

    with simulated(H100):
        monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
        monkeypatch.setattr(torch.cuda, "MemPool", no_pool)
        machine, x = machine_for(CARD), torch.zeros(16, device="cuda")
        machine.capture(lambda: x.add_(1))()
        with pytest.raises(CaptureError, match="cannot be captured"):
            machine.capture(lambda: x.sum().item())
        torch.rand(4, device="cuda")
        machine.capture(lambda: x.add_(1))()
