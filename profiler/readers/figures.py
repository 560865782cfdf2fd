"""The figures that every reader returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from profiler.readers.values import Measured, Settings

Covers = Literal["prefill", "decode", "generate"]
"""What a time covers: the prefill of a whole prompt, one decode step, or a whole `generate`."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured time from another tool's file. What the file does not say is None."""

    covers: Covers
    time: Measured
    """Seconds of what `covers` names."""
    batch_size: int | None = None
    prompt_len: int | None = None
    context_len: int | None = None
    """Tokens in the cache before the prompt, or before the first decode step if there was no prompt."""
    new_tokens: int | None = None
    cap: int | None = None
    """The most sequences allowed at a time, if `batch_size` is how many there were on average."""
    requests: int | None = None
    """Sequences that shared the time, if it is not one batch's."""
    gives: float | None = 1.0
    """Tokens per sequence that a decode step gives: with speculative decoding several."""
    processes: float = 1.0
    """Tokens per sequence that a decode step processes, the drafted ones included."""
    prefill_gives: int = 1
    """Tokens per sequence that the prefill of a generation gives."""
    weight_bytes: float | None = None
    """Bytes per parameter as stored."""
    params: int | None = None
    """The model's parameters."""
    kv_itemsize: float | None = None
    """Bytes per element of the cache, averaged over keys and values."""
    cached_once: int = 0
    """The first of the cached tokens, which all sequences share: they are kept once."""
    gpu_layers: int | None = None
    """Layers on the GPU; 0 is none, more than the model has are all."""
    weights_on_host: bool = False
    """Whether some weights, such as experts, were in the host's memory."""
    cache_on_host: bool = False
    """Whether the cache was in the host's memory."""
    settings: Settings = ()
    """The settings in which this figure differs from others of its file."""
    notes: tuple[str, ...] = ()
    """Caveats for the reader of the figure."""

    @property
    def depth(self) -> int | None:
        """Tokens of the context and the prompt, those that the file names; None if it names neither."""
        lengths = [length for length in (self.prompt_len, self.context_len) if length is not None]
        return sum(lengths) if lengths else None

    @property
    def decode_steps(self) -> float:
        """Decode steps of what `covers` names."""
        if self.covers != "generate":
            return float(self.covers == "decode")
        return ((self.new_tokens or 0) - self.prefill_gives) / (self.gives or 1.0)

    def with_shape(
        self, batch_size: int | None = None, prompt_len: int | None = None, new_tokens: int | None = None
    ) -> Figure:
        """The figure with the given shape where the file names none, of one batch as soon as its size is known."""
        batch, time = self.batch_size or batch_size, self.time
        if batch and self.requests:
            batch = min(batch, self.requests)
            time = time.times(batch / self.requests)
        return replace(
            self,
            time=time,
            batch_size=batch,
            prompt_len=prompt_len if self.depth is None else self.prompt_len,
            new_tokens=self.new_tokens or new_tokens,
            requests=None if batch else self.requests,
        )


@dataclass(frozen=True)
class ForeignFile:
    """The content of one result file of another tool."""

    tool: str
    figures: Sequence[Figure]
    settings: Mapping[str, str] = field(default_factory=dict)
    """Model, device, software and other settings, by the names that a comparison uses."""
    gpus: int | None = None
    """GPUs that shared each step; None if the file does not say."""
    stages: int = 1
    """Groups of so many GPUs that hold some layers each and work in turn: pipeline stages, llama.cpp's layer split."""
    packed_dtype: str = ""
    """The dtype in which the tool multiplies packed weights where a device has units for it; empty: the model's."""
    remarks: tuple[str, ...] = ()
    """Sentences about the whole file: what was left out, and what its reader should know first."""
    name: str = ""
