"""What a script's models do, noted as it happens: nothing is synchronised, and no model but the last is kept alive."""

from __future__ import annotations

import functools
import itertools
import re
import sys
import sysconfig
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from profiler.diagnosis.why import Between, Call, GraphBreak, Kind, Load, Read, Recompilation, Seen, TextAgain
from profiler.machine.clock import Clock, OwnTime, clock_for, now_s

# Inputs are kept for trials up to so many calls and bytes.
_MOST_KEPT = 256
_MOST_KEPT_BYTES = 64 << 20
_LONGEST_REASON = 80
_LONGEST_BREAK = 120
# What calls of the wrappers cost is measured by so many.
_OVERHEAD_CALLS = 2000
_EXTRAS = ("output_hidden_states", "output_attentions", "output_scores", "output_logits")
_OF_A_CONFIG = (
    "_attn_implementation_internal",
    "_experts_implementation_internal",
    "_output_attentions",
    "use_cache",
    *_EXTRAS,
)
"""Where a config keeps what settings are read from."""
_READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "__repr__")
"""Methods of a tensor that hand its values to the host, which waits until the device has them."""
_CALLBACKS = {"stopping_criteria": "__call__", "logits_processor": "__call__", "streamer": "put"}
"""Arguments of `generate` that it calls at every token, and how."""
_PLACES_OF_LIBRARIES = ("stdlib", "platstdlib", "purelib", "platlib")
_NOT_THE_USERS = (
    *(str(Path(sysconfig.get_path(name)).resolve()) for name in _PLACES_OF_LIBRARIES),
    str(Path(__file__).parents[1]),
    "<frozen",
)


@dataclass
class Noted:
    """One call as it was noted: marks of the device's clock, and what a trial needs to call it again."""

    kind: Kind
    model: weakref.ref[Any]
    where: str
    settings: dict[str, str]
    shape: tuple[int, int, int]
    """(batch, tokens handed over, tokens in the cache)."""
    clock: Clock
    start: Any
    end: Any = None
    forwards: int = 0
    new_tokens: int = 0
    arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    """What it was called with; None where that was not kept."""
    mask: Any = None
    name: str = ""
    callbacks: dict[str, float] = field(default_factory=dict)
    """Seconds in the user's own objects that it calls at every token, by their class."""
    began_s: float = 0.0
    ended_s: float = 0.0
    """By the host's clock, without waiting for the device."""
    thread: int = 0


@dataclass
class Again:
    """How often something was done again, and what that took."""

    count: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.seconds += seconds


@dataclass
class _Thread(threading.local):
    depth: int = 0
    noted: Noted | None = None
    text_depth: int = 0
    load_depth: int = 0
    reading: bool = False
    last: str = ""
    """The line of the last call of a model."""


@dataclass
class Recorder:
    """Takes notes of calls, loads and text work; `patches` calls it."""

    notes: list[Noted] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    text_s: float = 0.0
    text_where: str = ""
    undo: list[Callable[[], None]] = field(default_factory=list)
    """Gives back the classes whose methods are timed."""
    again: dict[str, Again] = field(default_factory=dict)
    """Texts that were tokenized before, by the line that did so."""
    trained: bool = False
    """Whether anything was differentiated: gradients are wanted then."""
    touched: int = 0
    """How often a wrapper was entered."""
    noting_s: float = 0.0
    kept_bytes: int = 0
    _here: _Thread = field(default_factory=_Thread)
    _sources: dict[str, str] = field(default_factory=dict)
    _last: Any = None
    _reads_watched: bool = False
    _reads: dict[tuple[str, str], Again] = field(default_factory=dict)
    """By the line that read and the line of the call before it."""
    _texts: set[int] = field(default_factory=set)
    _timed: set[type] = field(default_factory=set)
    _numbers: weakref.WeakKeyDictionary[Any, int] = field(default_factory=weakref.WeakKeyDictionary)
    _kept_settings: weakref.WeakKeyDictionary[Any, Any] = field(default_factory=weakref.WeakKeyDictionary)
    """By model: its first parameter, and by what may change them its settings and device."""
    _start_s: float = field(default_factory=now_s)
    _breaks_before: Counter[str] = field(default_factory=lambda: _dynamo_breaks())
    _compiled_before: list[Any] = field(default_factory=lambda: _dynamo_compilations())

    def call(
        self,
        kind: Kind,
        model: Any,
        run: Callable[..., Any],
        args: tuple[Any, ...],
        named: dict[str, Any],
        *,
        compiled: bool = False,
    ) -> Any:
        """Run a call of a model and note it, unless it lies within another one."""
        here = self._here
        self.touched += 1
        if here.depth:
            noted = here.noted
            if noted is not None and noted.model() is model:
                noted.forwards += 1
            return run(*args, **named)
        noting = OwnTime()
        here.noted = noted = self._note(kind, model, args, named, compiled)
        self.noting_s += noting.seconds()
        if kind == "generate":
            self._time_callbacks(named)
        here.depth = 1
        noted.began_s = now_s()
        try:
            result = run(*args, **named)
        finally:
            here.depth, here.noted = 0, None
            noted.end = noted.clock.mark()
            noted.ended_s = now_s()
        if kind == "generate":
            noted.new_tokens = _new_tokens(result, noted.shape[1], model)
        self.notes.append(noted)
        here.last = noted.where
        self._last = model
        return result

    def load(self, source: str, run: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Run a load of a model and note it; what was kept of earlier models is let go."""
        self.touched += 1
        if self._here.load_depth:
            return run(*args, **named)
        self._last = None
        self._here.load_depth = 1
        start_s = now_s()
        try:
            return run(*args, **named)
        finally:
            self._here.load_depth = 0
            self.loads.append(Load(self._name_of(source), now_s() - start_s, _where()))

    def _name_of(self, source: str) -> str:
        """A model as it is written down: a hub id, or the own name of a path, which may tell whose home it lies in.

        Another path of the same name gets a number.
        """
        is_path = source.startswith(("/", ".", "~")) or Path(source).exists()
        name = Path(source).resolve().name if is_path else source
        taken = [known for known, short in self._sources.items() if short.partition(" (")[0] == name]
        return self._sources.setdefault(source, f"{name} ({len(taken) + 1})" if taken else name)

    def text(self, run: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Run a tokenizer and add its seconds."""
        self.touched += 1
        if self._here.text_depth:
            return run(*args, **named)
        self._here.text_depth = 1
        start_s = now_s()
        try:
            return run(*args, **named)
        finally:
            self._here.text_depth = 0
            if not self._here.depth:
                spent_s = now_s() - start_s
                self.text_s += spent_s
                self.text_where = self.text_where or _where()
                self._note_text(args, spent_s)

    def _watch_reads(self) -> None:
        """From now on, note what reads a tensor's values on the host: from the first model on that lies elsewhere."""
        import torch

        self._reads_watched = True
        for name in _READS:
            original, own = getattr(torch.Tensor, name), name in vars(torch.Tensor)

            def read(tensor: Any, *args: Any, _original: Any = original, **named: Any) -> Any:
                # Compiled code is not to have this in it.
                if torch.compiler.is_compiling():
                    return _original(tensor, *args, **named)
                return self._read(functools.partial(_original, tensor), tensor, args, named)

            setattr(torch.Tensor, name, functools.wraps(original)(read))
            self.undo.append(
                functools.partial(setattr, torch.Tensor, name, original)
                if own
                else functools.partial(delattr, torch.Tensor, name)
            )

    def _read(self, run: Callable[..., Any], tensor: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Run what reads a tensor; outside of a model's calls, where its values lie elsewhere, add it to its line."""
        self.touched += 1
        here = self._here
        if here.depth or here.reading or tensor.device.type == "cpu":
            return run(*args, **named)
        here.reading = True
        start_s = now_s()
        try:
            return run(*args, **named)
        finally:
            here.reading = False
            self._reads.setdefault((_where(), here.last), Again()).add(now_s() - start_s)

    def reads(self, behind: str | None = None) -> tuple[Read, ...]:
        """The lines that read values of a device; of those alone that did so behind a call of the line `behind`."""
        found: dict[str, Again] = {}
        for (where, last), item in self._reads.items():
            if behind in (None, last):
                whole = found.setdefault(where, Again())
                whole.count += item.count
                whole.seconds += item.seconds
        ordered = sorted(found.items(), key=lambda pair: -pair[1].seconds)
        return tuple(Read(where, item.count, item.seconds) for where, item in ordered)

    def _note_text(self, args: tuple[Any, ...], spent_s: float) -> None:
        """Add the seconds of a text that was handed over before."""
        texts = args[0] if args else None
        texts = texts if isinstance(texts, str) else tuple(texts) if isinstance(texts, list) else None
        try:
            key = hash(texts)
        except TypeError:
            return
        if texts is None:
            return
        if key in self._texts:
            self.again.setdefault(_where(), Again()).add(spent_s)
        self._texts.add(key)

    def _time_callbacks(self, named: Mapping[str, Any]) -> None:
        """Time what `generate` is told to call at every token, from now on."""
        for name, method in _CALLBACKS.items():
            given = named.get(name)
            for item in given if isinstance(given, (list, tuple)) else [given]:
                owner = type(item)
                if item is not None and hasattr(owner, method) and owner not in self._timed:
                    self._timed.add(owner)
                    self._time_method(owner, method)

    def _time_method(self, owner: type, method: str) -> None:
        original, is_own = getattr(owner, method), method in vars(owner)
        here = self._here

        @functools.wraps(original)
        def timed(*args: Any, **named: Any) -> Any:
            noted, own = here.noted, OwnTime()
            try:
                return original(*args, **named)
            finally:
                if noted is not None:
                    noted.callbacks[owner.__name__] = noted.callbacks.get(owner.__name__, 0.0) + own.seconds()

        setattr(owner, method, timed)
        self.undo.append(
            functools.partial(setattr, owner, method, original) if is_own else functools.partial(delattr, owner, method)
        )

    def seen(self, script: str, *, interrupted: bool = False) -> Seen:
        """All that was noted so far, read from the clocks once the devices are done."""
        for clock in {id(noted.clock): noted.clock for noted in self.notes}.values():
            clock.synchronize()
        wall_s = now_s() - self._start_s
        calls = tuple(self._call(number, noted) for number, noted in enumerate(self.notes))
        overhead_s = self.noting_s + self.touched * _wrapper_s()
        return Seen(
            script, wall_s, calls, tuple(self.loads), self.text_s, self.text_where, overhead_s, interrupted,
            tuple(self._recompilations()), tuple(self._between()),
            tuple(TextAgain(where, item.count, item.seconds) for where, item in self.again.items()),
            self.reads(),
            tuple(self._graph_breaks()),
        )  # fmt: skip

    def _recompilations(self) -> Iterator[Recompilation]:
        """What torch.compile has compiled again since the watch began."""
        before = {id(metrics) for metrics in self._compiled_before}
        for metrics in _dynamo_compilations():
            if metrics.recompile_reason and id(metrics) not in before:
                reason = str(metrics.recompile_reason).strip().splitlines()[0][:_LONGEST_REASON]
                yield Recompilation((metrics.duration_us or 0) / 1e6, reason)

    def _graph_breaks(self) -> Iterator[GraphBreak]:
        """What torch.compile broke its graphs for since the watch began."""
        found = _dynamo_breaks()
        found.subtract(self._breaks_before)
        for reason, count in found.most_common():
            if count > 0:
                yield GraphBreak(count, _shortest(reason))

    def _between(self) -> Iterator[Between]:
        """What the script itself took between calls that one of its lines made in a row, as a loop of its own does."""
        found: dict[str, list[float]] = {}
        for before, after in itertools.pairwise(self.notes):
            same = (before.where, before.kind, before.thread) == (after.where, after.kind, after.thread)
            if same and after.kind == "forward":
                found.setdefault(after.where, []).append(max(0.0, after.began_s - before.ended_s))
        for where, gaps in found.items():
            yield Between(where, len(gaps), sum(gaps))

    def _call(self, number: int, noted: Noted) -> Call:
        batch, tokens, context = noted.shape
        padding = 0.0
        if noted.mask is not None and noted.mask.dim() == 2:
            padding = 1 - float(noted.mask.bool().float().mean())
        return Call(
            number=number,
            kind=noted.kind,
            model=noted.name,
            batch_size=batch,
            prompt_len=tokens,
            context_len=context,
            new_tokens=noted.new_tokens,
            forwards=noted.forwards or 1,
            seconds=noted.clock.seconds([noted.start, noted.end])[0],
            where=noted.where,
            settings=noted.settings,
            padding=padding,
            callbacks_s=dict(noted.callbacks),
        )

    def _ran_with(self, kind: Kind, model: Any, named: dict[str, Any]) -> tuple[dict[str, str], Any]:
        """(settings, device) of a call. A forward's are kept until something tells that they may have changed: reading
        them from a config takes as long as a small model's own work."""
        if kind == "generate":
            return _settings(kind, model, named), model.device
        first, kept = self._kept_settings.get(model, (lambda: None, {}))
        parameter = first()
        if parameter is None:
            parameter = next(model.parameters())
            self._kept_settings[model] = (weakref.ref(parameter), kept)
        placed = vars(model).get("hf_device_map")
        key = (
            parameter.dtype, parameter.device, model.training, placed and tuple(placed.values()),
            *_seen_cheaply(vars(model.config), named),
        )  # fmt: skip
        found: tuple[dict[str, str], Any] | None = kept.get(key)
        if found is None:
            found = kept[key] = (_settings(kind, model, named), model.device)
        return found

    def _note(self, kind: Kind, model: Any, args: tuple[Any, ...], named: dict[str, Any], compiled: bool) -> Noted:
        ids = _ids(args, named)
        mask = named.get("attention_mask")
        number = self._numbers.setdefault(model, len(self._numbers))
        shape = (int(ids.shape[0]), int(ids.shape[1]), _context(named)) if ids is not None else (1, 1, 0)
        settings, device = self._ran_with(kind, model, named)
        noted = Noted(
            kind=kind,
            model=weakref.ref(model),
            where=_where(),
            settings={**settings, "compiled": "yes" if compiled else "no"},
            shape=shape,
            clock=clock_for(device),
            start=None,
            mask=mask,
            thread=threading.get_ident(),
            name=type(model).__name__ + (f" ({number + 1})" if number else ""),
        )
        nbytes = sum(_nbytes(value) for value in (*args, *named.values()))
        # Compiled code is bound to what it was compiled with: it is not tried again.
        if not compiled and len(self.notes) < _MOST_KEPT and self.kept_bytes + nbytes <= _MOST_KEPT_BYTES:
            self.kept_bytes += nbytes
            kept = {name: value for name, value in named.items() if name not in ("past_key_values", "streamer")}
            noted.arguments = (args, kept)
        if noted.clock.ahead and not self._reads_watched:
            self._watch_reads()
        noted.start = noted.clock.mark()
        return noted


def _dynamo_breaks() -> Counter[str]:
    """How often torch.compile broke a graph, by the reason that it gives; torch itself keeps account of it."""
    utils = sys.modules.get("torch._dynamo.utils")
    return Counter(utils.counters["graph_break"]) if utils is not None else Counter()


def _shortest(reason: str) -> str:
    """What torch says in a paragraph (`Failed to trace ...`, then `Explanation: ...`) in a line."""
    told = re.search(r"^\s*Explanation: (.+)$", reason, re.MULTILINE)
    return (told[1] if told else reason.strip().splitlines()[0]).strip().rstrip(".")[:_LONGEST_BREAK]


def _dynamo_compilations() -> list[Any]:
    """What torch.compile has compiled so far; torch itself keeps account of it."""
    utils = sys.modules.get("torch._dynamo.utils")
    return list(utils.get_compilation_metrics()) if utils is not None else []


def _ids(args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    """The tokens that were handed over, whatever they were called."""
    for value in (named.get("input_ids"), named.get("inputs"), *args[:1]):
        if getattr(value, "dim", None) is not None and value.dim() == 2:
            return value
    embedded = named.get("inputs_embeds")
    return embedded[..., 0] if embedded is not None else None


def _context(named: Mapping[str, Any]) -> int:
    """Tokens in a cache that grows, told by its shapes: asking a static one may wait for the device."""
    layers = getattr(named.get("past_key_values"), "layers", None) or []
    keys = getattr(layers[0], "keys", None) if layers else None
    return int(keys.shape[-2]) if keys is not None and keys.dim() == 4 else 0


def _new_tokens(result: Any, prompt_len: int, model: Any) -> int:
    tokens = getattr(result, "sequences", result)
    length = int(tokens.shape[-1]) if hasattr(tokens, "shape") else 0
    return max(0, length - (1 if model.config.is_encoder_decoder else prompt_len))


def _nbytes(value: Any) -> int:
    return int(value.numel() * value.element_size()) if hasattr(value, "element_size") else 0


def option(model: Any, named: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """What holds for a call of `generate`: its own argument, its generation config's, the model's, the default."""
    configs = (named.get("generation_config"), getattr(model, "generation_config", None))
    for value in (named.get(name), *(getattr(config, name, None) for config in configs)):
        if value is not None:
            return value
    return default


def _seen_cheaply(config: Mapping[str, Any], named: Mapping[str, Any]) -> tuple[Any, ...]:
    """All but the model itself that a forward's settings follow from, as it lies there."""
    import torch

    return (
        torch.is_grad_enabled(),
        torch.get_num_threads(),
        _kernel(),
        type(named.get("past_key_values")),
        *(config.get(name) for name in _OF_A_CONFIG),
        *(bool(named[name]) if name in named else None for name in ("use_cache", *_EXTRAS)),
    )


def _settings(kind: Kind, model: Any, named: Mapping[str, Any]) -> dict[str, str]:
    import torch

    generates = kind == "generate"
    config = model.config
    cache = option(model, named, "use_cache", True) if generates else named.get("use_cache", config.use_cache)
    extras = [
        name
        for name in _EXTRAS
        if (option(model, named, name) if generates else named.get(name, getattr(config, name, False)))
    ]
    return {
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "placement": in_turn(model) or "-",
        "attention": str(getattr(config, "_attn_implementation", None) or "-"),
        "kernel": _kernel(),
        "experts": str(getattr(config, "_experts_implementation", None) or "-"),
        "cache": "on" if cache else "off",
        "cache_class": _cache_class(model, named, generates=generates) if cache else "-",
        "gradients": "on" if torch.is_grad_enabled() and not generates else "off",
        "mode": "train" if model.training else "eval",
        "outputs": ", ".join(extras) or "-",
        "beams": str(option(model, named, "num_beams", 1)) if generates else "-",
        "assistant": "yes" if named.get("assistant_model") is not None else "no",
        "threads": str(torch.get_num_threads()),
    }


def _kernel() -> str:
    """`math` where every fused kernel of SDPA is switched off; torch's switches hold for a CPU as well."""
    from torch.backends import cuda as switches

    fused = (switches.flash_sdp_enabled, switches.mem_efficient_sdp_enabled, switches.cudnn_sdp_enabled)
    return "-" if any(enabled() for enabled in fused) else "math"


def _cache_class(model: Any, named: Mapping[str, Any], *, generates: bool) -> str:
    """What holds keys and values: the class that was handed over, or what `generate` is to make."""
    given = named.get("past_key_values")
    if given is not None:
        return type(given).__name__
    return str((option(model, named, "cache_implementation") if generates else None) or "DynamicCache")


def in_turn(model: Any) -> str:
    """What a `device_map` over several cards comes to, in words; empty where one card does all.

    accelerate's hooks hand the hidden states from card to card, so that a step takes as long as on one of them.
    """
    places = {str(place).removeprefix("cuda:") for place in (getattr(model, "hf_device_map", None) or {}).values()}
    cards = len(places - {"cpu", "disk", "meta"})
    return f"layers run card after card: one of {cards} works at a time" if cards > 1 else ""


def _where() -> str:
    """The line of the user's own code that led here: the nearest frame that is neither a library's nor ours."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_NOT_THE_USERS) and "site-packages" not in name:
            # A notebook's cell is a file of a name that means nothing.
            return f"{'cell' if 'ipykernel_' in name else Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


class _Nothing:
    """Stands for a model where the cost of a wrapper is measured."""


def _wrapper_s() -> float:
    """Seconds that entering a wrapper within another call costs."""
    recorder, model = Recorder(), _Nothing()
    recorder._here.depth = 1

    def run() -> None:
        return None

    start_s = now_s()
    for _ in range(_OVERHEAD_CALLS):
        run()
    bare_s = now_s()
    for _ in range(_OVERHEAD_CALLS):
        recorder.call("forward", model, run, (), {})
    return max(0.0, (now_s() - bare_s) - (bare_s - start_s)) / _OVERHEAD_CALLS
