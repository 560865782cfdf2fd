"""The figures that every reader returns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Self

from profiler.readers.values import Measured, Settings

Covers = Literal["prefill", "decode", "generate"]
"""What a time covers: the prefill of a whole prompt, one decode step, or a whole `generate`."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What ran together. What the file does not name is None."""

    batch_size: int | None = None
    prompt_len: int | None = None
    context_len: int | None = None
    """Tokens in the cache before the prompt, or before the first decode step if there was no prompt."""
    new_tokens: int | None = None
    cap: int | None = None
    """The most sequences allowed at a time, if `batch_size` is how many there were on average."""
    requests: int | None = None
    """Sequences that shared the time, if it is not one batch's."""

    @property
    def depth(self) -> int | None:
        """Tokens of the context and the prompt, those that the file names; None if it names neither."""
        lengths = [length for length in (self.prompt_len, self.context_len) if length is not None]
        return sum(lengths) if lengths else None


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured time from another tool's file, with what it says of the step and of how the machine held the model.

    Tokens are those of a sequence.
    """

    covers: Covers
    shape: Shape
    time: Measured
    """Seconds of what `covers` names."""
    tokens_given: float | None = 1.0
    """Those that a decode step gives: with speculative decoding several; None: the file does not say."""
    tokens_processed: float = 1.0
    """Those that a decode step processes, the drafted ones included."""
    tokens_of_prefill: int = 1
    """Those that the prefill of a generation gives."""
    weight_bytes: float | None = None
    """Bytes per parameter as stored."""
    params: int | None = None
    kv_itemsize: float | None = None
    """Bytes per element of the cache, averaged over keys and values."""
    cached_once: int = 0
    """The first of the cached tokens, which all sequences share: they are kept once."""
    gpu_layers: int | None = None
    """Layers on the GPU; 0 is none, more than the model has are all."""
    weights_on_host: bool = False
    """Whether some weights, such as experts, are in the host's memory."""
    cache_on_host: bool = False
    settings: Settings = ()
    """The settings in which this figure differs from others of its file."""
    notes: tuple[str, ...] = ()
    """Caveats for the reader of the figure."""

    @property
    def decode_steps(self) -> float:
        """Decode steps of what `covers` names."""
        whole = ((self.shape.new_tokens or 0) - self.tokens_of_prefill) / (self.tokens_given or 1.0)
        return {"prefill": 0.0, "decode": 1.0, "generate": whole}[self.covers]

    def with_shape(
        self, batch_size: int | None = None, prompt_len: int | None = None, new_tokens: int | None = None
    ) -> Self:
        """The figure with the given shape where the file names none, of one batch as soon as its size is known."""
        own, time = self.shape, self.time
        batch = own.batch_size or batch_size
        if batch and own.requests:
            batch = min(batch, own.requests)
            time = time.times(batch / own.requests)
        shape = replace(
            own,
            batch_size=batch,
            prompt_len=prompt_len if own.depth is None else own.prompt_len,
            new_tokens=own.new_tokens or new_tokens,
            requests=None if batch else own.requests,
        )
        return replace(self, shape=shape, time=time)


@dataclass(frozen=True)
class ForeignFile:
    """The content of one result file of another tool."""

    tool: str
    figures: Sequence[Figure]
    settings: Mapping[str, str] = field(default_factory=dict)
    """Model, device, software and other settings, by the names that a comparison uses."""
    gpus: int | None = None
    """GPUs that shared each step; None if the file does not say."""
    stages: int | None = None
    """Groups of so many GPUs that hold some layers each and work in turn: pipeline stages, llama.cpp's layer split.

    None if the file does not say."""
    packed_dtype: str = ""
    """The dtype in which the tool multiplies packed weights where a device has units for it; empty: the model's."""
    remarks: tuple[str, ...] = ()
    """Sentences about the whole file: what was left out, and what its reader should know first."""
    name: str = ""

    @property
    def in_turn(self) -> bool:
        """Whether more GPUs than one hold layers in turn, as llama.cpp's do unless the file names a split of rows."""
        return self.packed_dtype == "int8" and self.settings.get("split_mode", "layer") in ("layer", "none")
