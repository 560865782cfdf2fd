"""The figures that every reader returns, and their checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from profiler.errors import RequestError
from profiler.grid.cells import Phase
from profiler.readers.values import Measured, Record, Settings, apart, escaped

Covers = Literal["prefill", "decode", "generate"]
"""What a time covers: the prefill of a whole prompt, one decode step, or a whole `generate`."""

# A nanosecond to thirty years, a billion sequences or tokens, 64 bytes per weight: beyond them a file is damaged.
_SHORTEST_S, _LONGEST_S = 1e-9, 1e9
_LARGEST = 10**9
_WIDEST_BYTES = 64.0


LLAMA_CPP_PACKED_DTYPE = "int8"
"""llama.cpp rounds activations to 8 bits, and multiplies packed weights on units for int8 (ggml-cuda/mmq.cu)."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured time from another tool's file. Shapes that the file does not name are None."""

    covers: Covers
    seconds: float = 0.0
    """Seconds of what `covers` names."""
    batch_size: int | None = None
    prompt_len: int | None = None
    context_len: int | None = None
    """Tokens in the cache before the prompt, or before the first decode step if there was no prompt."""
    new_tokens: int | None = None
    samples_s: tuple[float, ...] = ()
    """Seconds of each repetition, if the file has them."""
    spread_s: float = 0.0
    """Standard deviation of the repetitions, if the file has it instead of them; tools divide by n or by n - 1."""
    half_width_s: float = 0.0
    """Half width of the 95 % interval of `seconds`, if a clock is coarser than the repetitions tell."""
    rounding_s: float = 0.0
    """Half a unit of the last digit that the file prints: the resolution of `seconds`."""
    requests: int | None = None
    """Requests that shared `seconds`, if they were not one batch."""
    repeats: int = 0
    """Number of repetitions; 0 if the file does not say."""
    chunk_tokens: int | None = None
    """Prompt tokens processed at a time; the weights are read once per chunk."""
    weight_bytes: float | None = None
    """Bytes per parameter as stored, if the file gives the size of the weights."""
    params: int | None = None
    """The model's parameters, if the file gives them."""
    kv_itemsize: float | None = None
    """Bytes per element of the cache, averaged over keys and values."""
    shared: int = 0
    """The first of the cached tokens, which all sequences share: they are kept once."""
    cap: int | None = None
    """The most sequences allowed at a time, if `batch_size` is how many there were on average."""
    prefill_makes_token: bool = True
    """Whether the prefill of a generation makes the first of its new tokens."""
    step_tokens: float = 1.0
    """Tokens per sequence that a decode step gives; more than one with speculative decoding."""
    verified_tokens: float | None = None
    """Tokens per sequence that a decode step processes, the drafted ones included; None: at least `step_tokens`."""
    may_speculate: bool = False
    """Whether a step may have given several tokens without a word of it in the file."""
    loop_tokens: int | None = None
    """Tokens of all sequences, if `seconds` is a whole decode loop; 0 if the file does not say how many."""
    gpu_layers: int | None = None
    """Layers on the GPU, if the file says how many; 0 is none, more than the model has are all."""
    weights_on_host: bool = False
    """Whether some weights, such as experts, are in the host's memory."""
    cache_on_host: bool = False
    """Whether the cache is in the host's memory."""
    settings: Settings = ()
    """The settings in which this figure differs from others of its file."""
    notes: tuple[str, ...] = ()
    """Caveats for the reader of the figure."""

    @property
    def has_step(self) -> bool:
        """Whether this is a prefill or one decode step of a known shape."""
        is_step = self.covers != "generate" and self.loop_tokens is None
        return is_step and self.batch_size is not None and self.depth is not None

    @property
    def depth(self) -> int | None:
        """Tokens of the context and the prompt, those that the file names; None if it names neither."""
        lengths = [length for length in (self.prompt_len, self.context_len) if length is not None]
        return sum(lengths) if lengths else None

    @property
    def decode_steps(self) -> float:
        """Decode steps of what `covers` names."""
        if self.covers != "generate":
            return 1.0 if self.covers == "decode" else 0.0
        return ((self.new_tokens or 0) - self.prefill_makes_token) / self.step_tokens

    @property
    def step_phase(self) -> Phase:
        return "prefill" if self.covers == "prefill" else "decode"

    def timed(self, time_s: Measured) -> Figure:
        """The figure with a time in seconds, and its repetitions or their spread."""
        return replace(
            self,
            seconds=time_s.value,
            samples_s=time_s.values,
            spread_s=0.0 if time_s.values else time_s.spread,
            rounding_s=time_s.rounding,
            repeats=len(time_s.values) or self.repeats,
        )

    def of_one_batch(self) -> Figure:
        """The figure scaled from all requests to one batch of at most `batch_size` of them."""
        if self.requests is None or self.batch_size is None:
            return self
        batch_size = min(self.batch_size, self.requests)
        return replace(self, seconds=self.seconds * batch_size / self.requests, batch_size=batch_size, requests=None)

    def with_shapes(self, prompt_len: int | None, batch_size: int | None, new_tokens: int | None) -> Figure:
        """The figure with the given shapes in place of those that the file does not name."""
        if prompt_len is batch_size is new_tokens is None:
            return self
        return replace(
            self,
            prompt_len=prompt_len if self.depth is None else self.prompt_len,
            batch_size=self.batch_size or batch_size,
            new_tokens=self.new_tokens or new_tokens,
        ).by_step()

    def by_step(self) -> Figure:
        """The figure of one step if this is a whole decode loop of a known number of steps, else the figure itself.

        A loop makes all tokens after the first. Raises RequestError for shapes that contradict `loop_tokens`.
        """
        if self.loop_tokens is None or self.batch_size is None or not (self.new_tokens or self.loop_tokens):
            return self
        steps = self.new_tokens - 1 if self.new_tokens else self.loop_tokens // self.batch_size
        if steps < 1 or (self.loop_tokens and steps * self.batch_size != self.loop_tokens):
            raise RequestError(
                f"its decode loop made {self.loop_tokens} tokens after the first of each sequence, which does not match"
                f" a batch of {self.batch_size}" + (f" and {self.new_tokens} new tokens." if self.new_tokens else ".")
            )
        time_s = Measured(self.seconds, values=self.samples_s).times(1 / steps)
        return replace(self.timed(time_s), new_tokens=steps + 1, loop_tokens=None)


@dataclass(frozen=True)
class ForeignFile:
    """The content of one result file of another tool."""

    tool: str
    figures: Sequence[Figure]
    created: str = ""
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


def shared_gpus(each: Iterable[tuple[int | None, int]]) -> tuple[int | None, int]:
    """The (`gpus`, `stages`) that all results of a file have. Raises RequestError if they differ."""
    first, *others = dict.fromkeys(each)
    if others:
        raise RequestError("it has results of unequal numbers of GPUs; give each a file.")
    return first


def told_apart(
    records: Sequence[Record],
    settings: Callable[[Record], Mapping[str, object]],
    figures: Callable[[Record], Sequence[Figure]],
) -> tuple[list[Figure], dict[str, str]]:
    """(the figures of all records, each with the settings in which its record differs; the settings that all share)."""
    shared, differing = apart([settings(record) for record in records])
    pairs = zip(records, differing, strict=True)
    return [replace(figure, settings=own) for record, own in pairs for figure in figures(record)], shared


def refuse_impossible(figures: Sequence[Figure]) -> None:
    """Raises RequestError for the first figure that no machine could have."""
    for number, figure in enumerate(figures, 1):
        for seconds in (figure.seconds, *figure.samples_s):
            if not _SHORTEST_S <= seconds <= _LONGEST_S:
                raise _damaged(number, f"{seconds:.3g} s is not a possible time of a {figure.covers}")
        if not all(0 <= spread_s <= _LONGEST_S for spread_s in (figure.half_width_s, figure.spread_s)):
            raise _damaged(number, "its spread is not a possible one of times")
        for size in (figure.batch_size, figure.prompt_len, figure.context_len, figure.new_tokens):
            if size is not None and size > _LARGEST:
                raise _damaged(number, f"{escaped(size)} is not a possible number of sequences or tokens")
        if figure.weight_bytes is not None and figure.weight_bytes > _WIDEST_BYTES:
            raise _damaged(number, f"{figure.weight_bytes:.3g} bytes is not a possible size of a weight")


def _damaged(number: int, fault: str) -> RequestError:
    return RequestError(f"figure {number} is damaged: {fault}.")
