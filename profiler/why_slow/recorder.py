"""Record the calls of a script's models, without synchronising and without keeping models alive."""

from __future__ import annotations

import contextlib
import functools
import inspect
import statistics
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from profiler.device.clock import OwnTime, clock_for, now_s
from profiler.device.contention import waited_for_core_s
from profiler.errors import describe_error
from profiler.fallbacks import Fallback, fallback_of
from profiler.json_document import view
from profiler.loading.cache_argument import without_cache
from profiler.patching import replace_attribute
from profiler.why_slow.call_record import NOT_REPEATED, CallRecord, Thread, users_file, users_line
from profiler.why_slow.call_settings import batch_inputs, by_name, context_len, new_tokens, settings_of, tokens_of
from profiler.why_slow.host_counters import Compiling, Reads, compilations_so_far
from profiler.why_slow.kept_arguments import KeptArguments
from profiler.why_slow.observations import (
    Call,
    CallKind,
    CallSettings,
    Load,
    Observations,
    OwnLine,
    UnrecordedCall,
    by_line,
)
from profiler.why_slow.plain_models import (
    attention_of,
    is_language_model,
    is_plain,
    is_repeatable,
    token_ids,
    without_values,
)

# About the cost of a wrapper of a call that is part of another call (1.4 us on a busy EPYC).
_WRAPPER_S = 1.5e-6
_NEEDS_LOGITS = {"labels", "logits_to_keep"}
"""Arguments of a forward whose logits are all used, or are chosen already."""
_REPEATED = ("MaxLengthCriteria", "EosTokenCriteria")
"""Stopping criteria that trials have, too."""


@dataclass
class Callback:
    """What `generate` calls at every token. Its seconds, without those of forwards in it, are added to the call."""

    item: Any
    """A logits processor, a stopping criterion or a streamer."""
    run: Any
    """What is called: the item itself, or its method."""
    noted: CallRecord
    is_left_out: bool = False

    def __post_init__(self) -> None:
        vars(self)["__call__"] = self.run.__call__  # transformers looks at its signature

    @property
    def name(self) -> str:
        inner = _unwrapped(self.item)
        return str(getattr(inner, "__name__", type(inner).__name__))

    def __call__(self, *args: Any, **named: Any) -> Any:
        start_s, forward_s = now_s(), self.noted.forward_s  # as calls are timed: waits for a core stretch both alike
        try:
            return self.run(*args, **named)
        finally:
            spent_s = max(0.0, now_s() - start_s - (self.noted.forward_s - forward_s))
            is_own = not str(_unwrapped(self.item).__module__).startswith("transformers.")
            times, name = self.noted.callbacks if is_own else self.noted.processors, self.name
            times[name] = times.get(name, 0.0) + spent_s
            if self.is_left_out and name not in _REPEATED:
                self.noted.left_out_s += spent_s


def _unwrapped(item: Any) -> Any:
    return _unwrapped(item.func) if isinstance(item, functools.partial) else item


@dataclass
class _Streamer:
    """A streamer that is timed."""

    streamer: Any
    put: Callback

    def __getattr__(self, name: str) -> Any:
        return getattr(self.streamer, name)


@dataclass
class Recorder:
    """Records calls, loads and work on texts; the wrappers of `patches` call it."""

    notes: list[CallRecord] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    text_s: float = 0.0
    text_where: str = ""
    undo: list[Callable[[], None]] = field(default_factory=list)
    """Functions that restore what was replaced."""
    again_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Seconds of texts that were tokenized before, by the line that tokenized them once more."""
    trained: bool = False
    """Whether anything was differentiated, so that the script needs gradients."""
    compiles: bool = field(default_factory=lambda: bool(compilations_so_far()))
    """Whether the script uses torch.compile, whose code is specialised to classes of tensors."""
    touched: int = 0
    """Calls of the wrappers, to estimate their cost."""
    noting_s: float = 0.0
    kept: KeptArguments = field(default_factory=KeptArguments)
    calling: set[int] = field(default_factory=set)
    """The threads that are in a model's call or load."""
    own_lines: tuple[OwnLine, ...] = ()
    functions: dict[str, tuple[str, str]] = field(default_factory=dict)
    """As `Observations.callbacks`."""
    unnoted: UnrecordedCall | None = None
    fallbacks: list[Fallback] = field(default_factory=list)
    reads: Reads = field(init=False)
    _here: Thread = field(default_factory=Thread)
    _loaded: list[Callable[[], Any]] = field(default_factory=list)
    _sources: dict[str, str] = field(default_factory=dict)
    _last: Any = None
    """The model of the latest call, which a trial needs; it lives at least until the next one is made."""
    _texts: set[int] = field(default_factory=set)
    _warnings: set[str] = field(default_factory=set)
    _named: list[tuple[weakref.ref[Any], tuple[str, int]]] = field(default_factory=list)
    """Models and their architectures, in the order of their numbers."""
    _settings: dict[CallSettings, CallSettings] = field(default_factory=dict)
    """Those of all calls: equal ones are one object, as a loop has many calls."""
    _plain: weakref.WeakKeyDictionary[Any, bool] = field(default_factory=weakref.WeakKeyDictionary)
    """Whether modules are language models in plain PyTorch."""
    _batches: dict[int, CallRecord] = field(default_factory=dict)
    """By the id of a model: the call of `generate_batch` that it is in."""
    _watches_attention: bool = False
    _start_s: float = field(default_factory=lambda: now_s())  # a test may have another clock
    _waited_s: float = field(default_factory=waited_for_core_s)
    _compiling: Compiling = field(default_factory=Compiling)

    def __post_init__(self) -> None:
        self.reads = Reads(self._here, self.replace)

    def replace(self, owner: object, name: str, value: object) -> None:
        """Set an attribute of another object, until the recording ends."""
        self.undo.append(replace_attribute(owner, name, value))

    def call(
        self,
        kind: CallKind, model: Any, run: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any],
        *, compiled: bool = False,
    ) -> Any:  # fmt: skip
        """Run a call of a model and record it, unless it is part of another call of this thread."""
        here = self._here
        self.touched += 1
        if kind == "forward" and not here.depth and (batch := self._batches.get(id(model))):
            batch.forwards += 1
            try:
                return self._forward(batch, run, args, named)
            finally:
                here.depth = 0
        if here.depth:
            noted = here.noted
            if noted is None or here.depth > 1 or kind != "forward":
                return run(*args, **named)
            noted.forwards += noted.model() is model
            return self._forward(noted, run, args, named)
        timer, noted = OwnTime(), None
        with self._errors_counted():
            here.noted = noted = self._note(kind, model, args, named, compiled)
            if (streamer := named.get("streamer")) is not None:
                named = {**named, "streamer": _Streamer(streamer, self._callback(streamer, streamer.put, noted, True))}
        self.noting_s += timer.core_seconds()
        here.depth = 1
        began_s = now_s()
        try:
            with self._without_samples():
                result = run(*args, **named)
        except BaseException as error:
            self._record_end(noted, began_s, model, None, error)
            raise
        finally:
            here.depth, here.noted = 0, None
        self._record_end(noted, began_s, model, result)
        return result

    def batch(self, model: Any, run: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Run `generate_batch`, whose forwards run in a thread of transformers: they belong to this call."""

        def watched(*args: Any, **named: Any) -> Any:
            if (noted := self._here.noted) is not None:
                self._batches[id(model)] = noted
            try:
                return run(*args, **named)
            finally:
                self._batches.pop(id(model), None)

        return self.call("generate", model, watched, args, named)

    def is_plain_call(self, module: Any, args: tuple[Any, ...], named: dict[str, Any]) -> bool:
        """Whether a call is that of a language model in plain PyTorch, on token ids, and part of no other call."""
        if self._here.depth:
            return False
        if (known := self._plain.get(module)) is None:
            known = self._plain[module] = is_language_model(module)
        return known and token_ids(args, named) is not None

    def _forward(self, noted: CallRecord, run: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Run a forward pass within a call, and add its seconds to it."""
        self._here.depth, start_s = 2, now_s()
        try:
            return run(*args, **named)
        finally:
            self._here.depth, spent_s = 1, now_s() - start_s
            noted.forward_s += spent_s
            noted.prompt_s = noted.prompt_s or spent_s

    def callbacks(
        self, items: Any, run: functools.partial[Any], args: tuple[Any, ...], named: dict[str, Any],
        *, are_criteria: bool = False,
    ) -> Any:  # fmt: skip
        """Run a list of logits processors or of stopping criteria within `generate`, each of them timed."""
        self.touched += 1
        noted = self._here.noted
        if noted is None:
            return run(*args, **named)
        return run.func([self._callback(item, item, noted, are_criteria) for item in items], *args, **named)

    def _callback(self, item: Any, run: Any, noted: CallRecord, is_left_out: bool) -> Callback:
        """A callback, whose own function is noted: that of its class, or one that it was made from."""
        found = Callback(item, run, noted, is_left_out)
        if found.name not in self.functions:
            parts = (item, getattr(run, "__func__", type(run).__call__), *getattr(item, "__dict__", {}).values())
            codes = (getattr(_unwrapped(part), "__code__", None) for part in parts)
            own = [(code, file) for code in codes if code and (file := users_file(code.co_filename))]
            name, where = (own[0][0].co_qualname, f"{own[0][1]}:{own[0][0].co_firstlineno}") if own else ("", "")
            self.functions[found.name] = (name, where)
        return found

    def _record_end(
        self, noted: CallRecord | None, began_s: float, model: Any, result: Any, error: BaseException | None = None
    ) -> None:
        """Record the end of a call. One that raised gives up its arguments, as it is not repeated."""
        ended_s = now_s()
        if noted is None:
            return
        with self._errors_counted():
            noted.end = noted.clock.mark()
            noted.began_s, noted.ended_s = began_s, ended_s
            if error is not None:
                noted.failed, noted.arguments = describe_error(error), None
            elif noted.kind == "generate":
                noted.new_tokens = new_tokens(result, noted.shape[1], model)
            elif noted.arguments and not (noted.plain or noted.shape[2] or self.trained or self.compiles):
                from profiler.why_slow.read_logits import watch_logits

                # A forward without a cache could leave out logits, and no compiled code gets them.
                takes_choice = "logits_to_keep" in inspect.signature(type(model).forward).parameters
                if takes_choice and not _NEEDS_LOGITS & noted.arguments[1].keys():
                    noted.read = watch_logits(result, noted.shape[1])
            self.notes.append(noted)
            self._here.last, self._last = noted.where, model

    @contextlib.contextmanager
    def _errors_counted(self) -> Iterator[None]:
        """A context that counts exceptions as an UnrecordedCall: recording must not stop the script."""
        try:
            yield
        except Exception as error:
            first = self.unnoted or UnrecordedCall(0, describe_error(error))
            self.unnoted = replace(first, count=first.count + 1)

    def enter_autocast(self) -> None:
        """Note that the script enters an autocast, which keeps casts of weights until the script leaves it."""
        if not self._here.depth:
            self._here.autocast = (self._here.autocast[0] + 1, users_line())

    @contextlib.contextmanager
    def _without_samples(self) -> Iterator[None]:
        """A context in which the script's own code does not run in this thread, or is that of callbacks."""
        thread = threading.get_ident()
        self.calling.add(thread)
        try:
            yield
        finally:
            self.calling.discard(thread)

    def let_go(self) -> None:
        """Let go of the latest model, so that its memory can be freed: another one is made."""
        self._last = None

    def load(self, source: str, run: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Run and record a load of a model."""
        self.touched += 1
        if self._here.load_depth:
            return run(*args, **named)
        self.let_go()
        self._here.load_depth = 1
        start_s, model = now_s(), None
        try:
            with self._without_samples():
                model = run(*args, **named)
            return model
        finally:
            self._here.load_depth = 0
            with self._errors_counted():
                seconds, name = now_s() - start_s, self.name_of_source(source)
                conversion, instead = _conversion(model, named)
                self.loads.append(Load(name, seconds, users_line(), start_s - self._start_s, conversion, instead))
                self._loaded.append(weakref.ref(model) if hasattr(model, "parameters") else lambda: None)

    def name_of_source(self, source: str) -> str:
        """The name of a model's source in files: a hub id, or the last part of a path, as paths may name a user.

        Further paths with the same last part get a number.
        """
        is_path = source.startswith(("/", ".", "~")) or Path(source).exists()
        name = Path(source).resolve().name if is_path else source
        same_name = sum(short.partition(" (")[0] == name for short in self._sources.values())
        return self._sources.setdefault(source, f"{name} ({same_name + 1})" if same_name else name)

    def text(
        self, run: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any], *, encodes: bool = True
    ) -> Any:
        """Run a tokenizer and add its seconds; with `encodes`, also record texts that were encoded before.

        Repeated decoding is not recorded, as a loop that streams decodes the same tokens at every step.
        """
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
                self.text_where = self.text_where or users_line()
                with self._errors_counted():
                    if encodes:
                        self.note_text(args, spent_s)

    def note_text(self, args: tuple[Any, ...], spent_s: float) -> None:
        """Add the seconds of a text to its line, if the text was tokenized before."""
        texts = tuple(args[0]) if args and isinstance(args[0], list) else args[0] if args else None
        if isinstance(texts, str | tuple):
            with contextlib.suppress(TypeError):  # of lists of lists
                if (key := hash(texts)) in self._texts:
                    self.again_s[users_line()].append(spent_s)
                self._texts.add(key)

    def warning(self, library: str, text: str) -> None:
        """Record a warning of a library, if it reports that slower code runs."""
        with self._errors_counted():
            if text not in self._warnings and (fallback := fallback_of(library, text)) is not None:
                self.fallbacks.append(fallback)
            self._warnings.add(text)

    def seen(self, script: str, *, interrupted: bool = False) -> Observations:
        """All that was recorded so far; waits for the devices to read their clocks."""
        for clock in {id(noted.clock): noted.clock for noted in self.notes}.values():
            clock.synchronize()
        wall_s = now_s() - self._start_s
        firsts: dict[str, CallRecord] = {}
        for noted in sorted(self.notes, key=lambda noted: noted.began_s):
            firsts.setdefault(noted.settings.device, noted)
        calls = tuple(self._call(n, noted, firsts[noted.settings.device]) for n, noted in enumerate(self.notes))
        overhead_s = self.noting_s + (self.touched + self.reads.touched) * _WRAPPER_S
        return Observations(
            script, wall_s, calls, tuple(self.loads), self.text_s, self.text_where, overhead_s, interrupted,
            self._compiling.recompilations(), by_line(self.again_s), self.reads.by_line(),
            self._compiling.graph_breaks(), self.unnoted, tuple(self.fallbacks), own_lines=self.own_lines,
            callbacks=self.functions,
            waited_s=max(0.0, waited_for_core_s() - self._waited_s),
        )  # fmt: skip

    @property
    def loaded_models(self) -> list[Any]:
        """Per load, its model if that still exists, else None."""
        return [model() for model in self._loaded]

    def _call(self, number: int, noted: CallRecord, first: CallRecord) -> Call:
        """A record as values. Its start is read from the clock of its device, relative to the `first` call there."""
        batch, tokens, context = noted.shape
        return view(
            Call,
            noted,
            number=number,
            model=noted.name,
            batch_size=batch,
            prompt_len=tokens,
            context_len=noted.attention.context_len if noted.attention else context,
            forwards=noted.forwards or 1,
            seconds=noted.clock.seconds([noted.start, noted.end])[0],
            padding=0.0 if noted.visible is None else 1 - float(noted.visible),
            callbacks_s=dict(noted.callbacks),
            processors_s=dict(noted.processors),
            began_s=first.began_s - self._start_s + noted.clock.seconds([first.start, noted.start])[0],
            warm_s=None,
            forward_s=None if noted.kind == "forward" or noted.clock.ahead else noted.forward_s,
        )

    def _note(
        self, kind: CallKind, model: Any, args: tuple[Any, ...], named: Mapping[str, Any], compiled: bool
    ) -> CallRecord:
        import torch

        from profiler.why_slow.torch_context import TorchContext

        self.kept.look_at_memory()
        if not (plain := is_plain(model)):
            args, named = by_name(kind, model, args, named)
        ids = token_ids(args, named) if plain else tokens_of(args, named)
        mask = named.get("attention_mask")
        number, architecture = self._number(model)
        settings = settings_of(kind, model, named)
        # Of the three ways to compile a model, only the module around it is seen from outside.
        own_forward = vars(model).get("forward")
        compiled = (
            compiled or model._compiled_call_impl is not None or hasattr(own_forward, "_torchdynamo_orig_callable")
        )
        settings = replace(settings, compiled=compiled)
        settings = self._settings.setdefault(settings, settings)
        device = torch.device(settings.device)
        rows, tokens = (int(ids.shape[0]), int(ids.shape[1])) if ids is not None else (1, 1)
        shape = (rows * settings.times_computed, tokens, 0 if plain or ids is None else context_len(named))
        noted = CallRecord(
            kind=kind,
            model=weakref.ref(model),
            where=users_line(),
            settings=settings,
            shape=shape,
            clock=clock_for(device),
            context=TorchContext.current(device.type),
            start=None,
            # Not the mask itself, which would be kept for each call of a long loop.
            visible=mask.bool().float().mean() if isinstance(mask, torch.Tensor) and mask.dim() == 2 else None,
            name=architecture[0] + (f" ({number})" if number > 1 else ""),
            architecture=architecture,
            plain=plain,
            autocast=self._here.autocast,
        )
        inputs = batch_inputs(args, named) if kind == "generate" and ids is None and (args or "inputs" in named) else ()
        if isinstance(inputs, list):
            noted.batched = True
            noted.shape = (len(inputs), round(statistics.mean(map(len, inputs))), 0)
            noted.settings = replace(settings, cache=True, cache_class="PagedAttentionCache")
        # Compiled code is specialised to its arguments, so no change to it is tried.
        if not compiled and (not plain or is_repeatable(args, named)):
            if plain:
                args, named = tuple(map(without_values, args)), {n: without_values(value) for n, value in named.items()}
            stored = {name: value for name, value in (named if plain else without_cache(named)).items()
                      if name not in NOT_REPEATED}  # fmt: skip
            noted.arguments = self.kept.keep(args, stored, device)
        if plain and not self._watches_attention:
            self._watch_attention()
        if noted.clock.ahead and not self.reads.watched:
            self.reads.watch()
        noted.start = noted.clock.mark()
        return noted

    def _number(self, model: Any) -> tuple[int, tuple[str, int]]:
        """The number of a model, that of one of its architecture if that no longer exists, and the architecture."""
        for number, (known, architecture) in enumerate(self._named, 1):
            if known() is model:
                return number, architecture
        architecture = type(model).__name__, sum(each.numel() for each in model.parameters())
        gone = [n for n, (known, of) in enumerate(self._named) if known() is None and of == architecture]
        at = gone[0] if gone else len(self._named)
        self._named[at : at + 1] = [(weakref.ref(model), architecture)]
        return at + 1, architecture

    def _watch_attention(self) -> None:
        """From now on, record the shapes of attention within calls of plain models."""
        from torch.nn import functional

        self._watches_attention = True
        original, here = functional.scaled_dot_product_attention, self._here

        @functools.wraps(original)
        def attention(query: Any, key: Any, value: Any, *args: Any, **named: Any) -> Any:
            noted = here.noted
            if noted is not None and noted.plain:
                seen = noted.attention
                noted.attention = replace(seen, layers=seen.layers + 1) if seen else attention_of(query, key, value)
            return original(query, key, value, *args, **named)

        self.replace(functional, "scaled_dot_product_attention", attention)


def _conversion(model: Any, named: Mapping[str, Any]) -> tuple[str, str]:
    """(what a load did to the weights besides reading them, what to do instead), in words; empty if nothing."""
    quantizer = getattr(model, "hf_quantizer", None)
    if named.get("gguf_file") and not getattr(quantizer, "packed_modules", None):
        # transformers refuses to save such a model: the quantizer of GGUF is not serialisable.
        return "GGUF weights are unpacked", "load the safetensors checkpoint that the file was made from"
    if quantizer is not None and not quantizer.pre_quantized:
        method = quantizer.quantization_config.quant_method
        words = f"weights are quantised ({getattr(method, 'value', method)})"
        return words, "call save_pretrained once, and load that folder"
    return "", ""
