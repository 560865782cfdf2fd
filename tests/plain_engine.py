"""An engine without a model: its steps take a given time, and it may run out of memory."""

import time
from collections.abc import Callable

import torch

from profiler.engines.base import DecodeState, Engine


class PlainEngine(Engine):
    """Prompts and steps take `step_s`. A batch of tokens that does not fit raises `error`."""

    name = "eager"
    keeps_last_logits = True

    def __init__(
        self,
        step_s: float = 0.0,
        fits: Callable[[int, int], bool] = lambda _batch, _tokens: True,
        error: type[Exception] = torch.OutOfMemoryError,
    ) -> None:
        self.step_s = step_s
        self.fits = fits
        self.error = error
        self.prompts: list[tuple[int, int]] = []

    def fill(self, batch: int, context: int, slots: int) -> DecodeState:
        return DecodeState(None, torch.zeros(batch, 1, dtype=torch.long))

    def prefill(self, ids: torch.Tensor, slots: int) -> DecodeState:
        batch, tokens = ids.shape
        self.prompts.append((batch, tokens))
        self._work()
        if not self.fits(batch, tokens):
            raise self.error("CUDA out of memory")
        return DecodeState(None, ids[:, :1])

    def decode(self, state: DecodeState) -> DecodeState:
        self._work()
        return state

    def _work(self) -> None:
        if self.step_s:  # even a sleep of 0 s lets another process run
            time.sleep(self.step_s)
