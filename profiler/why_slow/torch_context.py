"""What a script sets in torch around a call, besides gradients: autocast, and the kernels that SDPA may run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

_IS_ENABLED = {  # on a CPU as well
    SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled,
    SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled,
    SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.cudnn_sdp_enabled,
    SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled,
}
ALL_KERNELS = tuple(_IS_ENABLED)


@dataclass(frozen=True)
class TorchContext:
    """The autocast of a device type, with its dtype if it is enabled, and the kernels of SDPA."""

    device_type: str
    autocast: torch.dtype | None
    kernels: tuple[SDPBackend, ...] = ALL_KERNELS
    keeps_casts: bool = True
    """Whether autocast keeps casts of weights that require gradients: it does not in inference mode."""

    @classmethod
    def current(cls, device_type: str) -> TorchContext:
        casts = torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)
        kernels = tuple(kernel for kernel, is_enabled in _IS_ENABLED.items() if is_enabled())
        keeps = torch.is_autocast_cache_enabled() and not torch.is_inference_mode_enabled()
        return cls(device_type, torch.get_autocast_dtype(device_type) if casts else None, kernels, keeps)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The context again, where another one is current."""
        now = TorchContext.current(self.device_type)
        with ExitStack() as around:
            if self.autocast != now.autocast:
                around.enter_context(torch.autocast(
                    self.device_type, self.autocast, enabled=self.autocast is not None, cache_enabled=self.keeps_casts
                ))  # fmt: skip
            if self.kernels != now.kernels:
                around.enter_context(sdpa_kernel(list(self.kernels)))
            yield
