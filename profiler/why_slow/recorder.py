"""Record the calls of a script's models, without synchronising and without keeping models alive."""

import contextlib
import functools
import re
import sys
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from profiler.device.clock import clock_for, core_timer, now_s
from profiler.device.contention import ForeignLoad, OwnClock, own_s, waited_for_core_s
from profiler.errors import describe_error
from profiler.fallbacks import Fallback, fallback_of
from profiler.json_document import view
from profiler.loading.cache_argument import keeps_last_logits
from profiler.patching import replace_attribute
from profiler.why_slow.call_record import Callback, CallRecord, Thread, users_line
from profiler.why_slow.kept_arguments import KeptArguments
from profiler.why_slow.observations import (
    Call,
    GraphBreak,
    LineTime,
    Load,
    Observations,
    OwnLine,
    Recompilation,
    by_line,
)
from profiler.why_slow.plain_models import attention_of, is_language_model, token_ids
from profiler.why_slow.watched_calls import Watched, new_tokens

# About the cost of a wrapper of a call that is part of another call (1.4 µs on a busy EPYC).
_WRAPPER_S = 1.5e-6
_LONGEST_REASON = 80
_LONGEST_BREAK = 120
_READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "__repr__")
"""Methods of a tensor that return its values to the host."""
_NEEDS_LOGITS = {"labels", "logits_to_keep"}
"""Arguments of a forward whose logits are all used, or are chosen already."""


def breaks_so_far() -> Counter[str]:
    """How often torch.compile in this process has broken code into pieces, by reason."""
    utils = sys.modules.get("torch._dynamo.utils")
    return Counter(utils.counters["graph_break"]) if utils is not None else Counter()


def compilations_so_far() -> list[Any]:
    utils = sys.modules.get("torch._dynamo.utils")
    return list(utils.get_compilation_metrics()) if utils is not None else []


@dataclass
class Recorder:
    """Records calls, loads and work on texts; the wrappers of `patches` call it.

    What they wrap is passed as a `partial`, whose first argument is the object of the method.
    """

    notes: list[CallRecord] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    text_s: float = 0.0
    text_where: str = ""
    undo: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
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
    own_lines: tuple[OwnLine, ...] = ()
    making_s: float = 0.0
    sampled_s: float = 0.0
    functions: dict[str, tuple[str, str]] = field(default_factory=dict)
    """As `Observations.callbacks`."""
    unnoted: Counter[str] = field(default_factory=Counter)
    fallbacks: list[Fallback] = field(default_factory=list)
    foreign: ForeignLoad = field(default_factory=partial(ForeignLoad, children=True))
    here: Thread = field(default_factory=lambda: Thread(set()))
    _loaded: list[Callable[[], Any]] = field(default_factory=list)
    _sources: dict[str, str] = field(default_factory=dict)
    latest: Any = None
    """The model of the latest call, which a trial needs; it lives until another one is made, which needs its memory."""
    _texts: set[int] = field(default_factory=set)
    _warnings: set[str] = field(default_factory=set)
    _named: list[tuple[weakref.ref[Any], tuple[str, int]]] = field(default_factory=list)
    """Models and their architectures, in the order of their numbers."""
    _plain: weakref.WeakKeyDictionary[Any, bool] = field(default_factory=weakref.WeakKeyDictionary)
    """Whether modules are language models in plain PyTorch."""
    _in_threads: dict[int, CallRecord] = field(default_factory=dict)
    """By the id of a model: the call whose forwards run in another thread."""
    _waits_s: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    """Waits for values of a device, by (line that read them, line of the model's call before it)."""
    _watches_reads: bool = False
    _watches_attention: bool = False
    _start_s: float = field(default_factory=lambda: own_s())  # a test may have another clock
    _waited_s: float = field(default_factory=waited_for_core_s)
    _breaks: Counter[str] = field(default_factory=breaks_so_far)
    _compilations: list[Any] = field(default_factory=compilations_so_far)

    def replace(self, owner: object, name: str, value: object) -> None:
        """Set an attribute of another object, until the recording ends."""
        self.undo.callback(replace_attribute(owner, name, value))

    def around(self, owner: object, name: str, call: Callable[[partial[Any]], Any]) -> None:
        """Replace a function or method by `call(run)`, where `run` is the original with its arguments."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def around(*args: Any, **named: Any) -> Any:
            return call(partial(original, *args, **named))

        self.replace(owner, name, around)

    def before(self, owner: object, name: str, note: Callable[..., object]) -> None:
        """Replace a function or method by one that first calls `note` with the same positional arguments."""

        def call(run: partial[Any]) -> Any:
            note(*run.args)
            return run()

        self.around(owner, name, call)

    def call(self, watched: Watched, run: partial[Any], *, compiled: Any = None) -> Any:
        """Run a call of a model, or of the module around a `compiled` one, and record it unless a call makes it."""
        self.touched += 1
        model = run.args[0] if compiled is None else compiled
        outer = self.here.noted or self._in_threads.get(id(model))
        if outer is not None and watched.kind == "forward" and "forward" not in self.here.within:
            outer.forwards += outer.model() is model
            return self._forward(outer, run)
        if self.here.in_call:
            return run()
        timer, noted, streamed = core_timer(), None, contextlib.ExitStack()
        with self._errors_counted():
            noted = self._note(watched, model, run, compiled is not None)
            if (streamer := run.keywords.get("streamer")) is not None:
                put = self._callback(streamer, streamer.put, noted, is_left_out=True)
                streamed.callback(replace_attribute(streamer, "put", put))
        self.noting_s += timer()
        self.here.noted = noted
        if noted is not None and watched.in_threads:
            self._in_threads[id(model)] = noted
        result, failed = None, ""
        try:
            with streamed, self.here.inside("call"):
                result = run()
            return result
        except BaseException as error:
            failed = describe_error(error)
            raise
        finally:
            self.here.noted = None
            self._in_threads.pop(id(model), None)
            if noted is not None:
                with self._errors_counted():
                    self._record_end(noted, model, result, failed)

    def is_plain_call(self, module: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> bool:
        """Whether a call is that of a language model in plain PyTorch, on token ids, and part of no other call."""
        if self.here.in_call:
            return False
        if (known := self._plain.get(module)) is None:
            known = self._plain[module] = is_language_model(module)
        return known and token_ids(args, named) is not None

    def _forward(self, noted: CallRecord, run: partial[Any]) -> Any:
        start_s = own_s()
        try:
            with self.here.inside("forward"):
                return run()
        finally:
            spent_s = own_s() - start_s
            noted.forward_s += spent_s
            noted.prompt_s = noted.prompt_s or spent_s

    def callbacks(self, run: partial[Any], *, are_criteria: bool = False) -> Any:
        """Run a list of logits processors or of stopping criteria within `generate`, each of them timed."""
        self.touched += 1
        noted = self.here.noted
        if noted is None:
            return run()
        timed = [self._callback(item, item, noted, are_criteria) for item in run.args[0]]
        return run.func(timed, *run.args[1:], **run.keywords)

    def _callback(self, item: Any, run: Any, noted: CallRecord, is_left_out: bool) -> Callback:
        found = Callback(item, run, noted, is_left_out)
        if found.name not in self.functions:
            self.functions[found.name] = found.own_function
        return found

    def _record_end(self, noted: CallRecord, model: Any, result: Any, failed: str) -> None:
        noted.end = noted.clock.mark()
        if failed:  # it is not repeated
            noted.failed, noted.arguments = failed, None
        elif noted.kind == "generate":
            noted.new_tokens = new_tokens(result, noted.shape[1], model)
        elif noted.watched.takes_cache and noted.arguments and not (noted.shape[2] or self.trained or self.compiles):
            from profiler.why_slow.read_logits import watch_logits

            # A forward without a cache could leave out logits. Code that is compiled or differentiates gets plain ones.
            if keeps_last_logits(type(model)) and not _NEEDS_LOGITS & noted.named.keys():
                noted.read = watch_logits(result, noted.shape[1])
        self.notes.append(noted)
        self.here.last, self.latest = noted.where, model

    @contextlib.contextmanager
    def _errors_counted(self) -> Iterator[None]:
        """A context that counts exceptions: recording must not stop the script."""
        try:
            yield
        except Exception as error:
            self.unnoted[describe_error(error)] += 1

    def enter_autocast(self) -> None:
        """Note that the script enters an autocast, which keeps casts of weights until the script leaves it."""
        if not self.here.in_call:
            self.here.autocast = (self.here.autocast[0] + 1, users_line())

    def load(self, source: str, run: partial[Any]) -> Any:
        self.touched += 1
        if "load" in self.here.within:
            return run()
        self.latest = None
        start_s, model = own_s(), None
        try:
            with self.here.inside("load"):
                model = run()
            return model
        finally:
            with self._errors_counted():
                seconds, name = own_s() - start_s, self.name_of_source(source)
                conversion, instead = _conversion(model, run.keywords)
                self.loads.append(Load(name, seconds, users_line(), start_s - self._start_s, conversion, instead))
                self._loaded.append(weakref.ref(model) if hasattr(model, "parameters") else lambda: None)

    def name_of_source(self, source: str) -> str:
        """The name of a model's source in files: a hub id, or of a path, which may name a user, its last part."""
        is_path = source.startswith(("/", ".", "~")) or Path(source).exists()
        name = Path(source).resolve().name if is_path else source
        same_name = sum(short.partition(" (")[0] == name for short in self._sources.values())
        return self._sources.setdefault(source, f"{name} ({same_name + 1})" if same_name else name)

    def text(self, run: partial[Any], *, encodes: bool = True) -> Any:
        """Run a tokenizer and add its seconds; with `encodes`, also record texts that were encoded before."""
        self.touched += 1
        if "tokenizer" in self.here.within:
            return run()
        start_s = own_s()
        try:
            with self.here.inside("tokenizer"):
                return run()
        finally:
            if not self.here.in_call:
                spent_s, where = own_s() - start_s, users_line()
                self.text_s += spent_s
                self.text_where = self.text_where or where
                first = run.args[1] if run.args[1:] else None
                texts = tuple(first) if isinstance(first, list) else first
                if encodes and isinstance(texts, str | tuple):
                    with contextlib.suppress(TypeError):  # of lists of lists
                        if (key := hash(texts)) in self._texts:
                            self.again_s[where].append(spent_s)
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
        waited_s = max(0.0, waited_for_core_s() - self._waited_s)
        wall_s = own_s() - self._start_s + waited_s
        firsts = {noted.settings.device: noted for noted in sorted(self.notes, key=lambda noted: -noted.began_s)}
        calls = tuple(self._call(n, noted, firsts[noted.settings.device]) for n, noted in enumerate(self.notes))
        return Observations(
            script, wall_s, calls, tuple(self.loads), self.text_s, self.text_where,
            self.noting_s + self.touched * _WRAPPER_S, interrupted, recompilations(self._compilations),
            by_line(self.again_s), graph_breaks(self._breaks), self.unnoted.copy(), tuple(self.fallbacks),
            own_lines=self.own_lines, making_s=self.making_s, sampled_s=self.sampled_s, callbacks=self.functions,
            waited_s=waited_s,
        )  # fmt: skip

    @property
    def loaded_models(self) -> list[Any]:
        """Per load, its model if that still exists, else None."""
        return [model() for model in self._loaded]

    def _call(self, number: int, noted: CallRecord, first: CallRecord) -> Call:
        """A record as values. Its start is read from the clock of its device, relative to the `first` call there."""
        batch, tokens, context = noted.shape
        return view(
            Call, noted, number=number, model=noted.name, batch_size=batch, prompt_len=tokens,
            context_len=noted.attention.context_len if noted.attention else context, forwards=noted.forwards or 1,
            seconds=noted.clock.seconds([noted.start, noted.end])[0],
            padding=0.0 if noted.visible is None else 1 - float(noted.visible),
            warm_s=None,
            began_s=first.began_s - self._start_s + noted.clock.seconds([first.start, noted.start])[0],
            forward_s=None if noted.kind == "forward" or noted.clock.ahead else noted.forward_s,
        )  # fmt: skip

    def _note(self, watched: Watched, model: Any, run: partial[Any], compiled: bool) -> CallRecord:
        import torch

        from profiler.why_slow.torch_context import TorchContext

        self.kept.look_at_memory()
        settings, shape, mask, repeated = watched.read(model, run.args[1:], run.keywords)
        number, architecture = self._number(model)
        # Of the three ways to compile a model, only the module around it is seen from outside.
        compiled = (
            compiled
            or model._compiled_call_impl is not None
            or hasattr(vars(model).get("forward"), "_torchdynamo_orig_callable")
        )
        settings = replace(settings, compiled=compiled)
        device = torch.device(settings.device)
        clock = OwnClock() if settings.on_cpu else clock_for(device)
        noted = CallRecord(
            watched, weakref.ref(model), users_line(), settings, shape, clock,
            TorchContext.current(device.type),
            # Not the mask itself, which would be kept for each call of a long loop.
            visible=mask.bool().float().mean() if isinstance(mask, torch.Tensor) and mask.dim() == 2 else None,
            name=architecture[0] + (f" ({number})" if number > 1 else ""),
            architecture=architecture, autocast=self.here.autocast,
        )  # fmt: skip
        if not compiled and repeated is not None:  # compiled code is specialised to its arguments
            noted.arguments = self.kept.keep(*repeated, device)
        if watched.sees_attention and not self._watches_attention:
            self._watch_attention()
        if noted.clock.ahead and not self._watches_reads:
            self._watch_reads()
        noted.start, noted.began_s = noted.clock.mark(), own_s()
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

    def _watch_reads(self) -> None:
        """From now on, record which lines read tensors of a device on the host."""
        import torch

        def read(run: partial[Any]) -> Any:
            if torch.compiler.is_compiling():  # compiled code must not contain the wrapper
                return run()
            self.touched += 1
            if self.here.within or run.args[0].device.type == "cpu":
                return run()
            start_s = now_s()
            try:
                with self.here.inside("read"):
                    return run()
            finally:
                self._waits_s[users_line(), self.here.last].append(now_s() - start_s)

        self._watches_reads = True
        for name in _READS:
            self.around(torch.Tensor, name, read)

    def reads_after(self, call: str) -> tuple[LineTime, ...]:
        """Reads that follow calls of this line, by their own line, the longest waits first."""
        return by_line({where: seconds for (where, last), seconds in self._waits_s.items() if last == call})

    def _watch_attention(self) -> None:
        """From now on, record the shapes of attention within calls of plain models."""
        from torch.nn import functional

        def attention(run: partial[Any]) -> Any:
            noted = self.here.noted
            if noted is not None and noted.watched.sees_attention:
                seen = noted.attention
                more = replace(seen, layers=seen.layers + 1) if seen else attention_of(*run.args, **run.keywords)
                noted.attention = more
            return run()

        self._watches_attention = True
        self.around(functional, "scaled_dot_product_attention", attention)


def _conversion(model: Any, named: Mapping[str, Any]) -> tuple[str, str]:
    """(what a load did to the weights besides reading them, what to do instead), in words; empty if nothing."""
    quantizer = getattr(model, "hf_quantizer", None)
    if named.get("gguf_file") and not getattr(quantizer, "packed_modules", None):
        # transformers refuses to save such a model: the quantizer of GGUF is not serialisable.
        return "GGUF weights are unpacked", "load the safetensors checkpoint that the file was made from"
    if quantizer is not None and not quantizer.pre_quantized:
        method = quantizer.quantization_config.quant_method
        return (
            f"weights are quantised ({getattr(method, 'value', method)})",
            "call save_pretrained once, and load that folder",
        )
    return "", ""


def recompilations(before: Iterable[Any]) -> tuple[Recompilation, ...]:
    """Code that torch.compile has compiled again since the compilations `before`."""
    known = set(map(id, before))
    return tuple(
        Recompilation((each.duration_us or 0) / 1e6, _first_line(each.recompile_reason)[:_LONGEST_REASON])
        for each in compilations_so_far()
        if each.recompile_reason and id(each) not in known
    )


def graph_breaks(before: Counter[str]) -> tuple[GraphBreak, ...]:
    """Graph breaks since those `before`, by reason, the most frequent first."""
    found = []
    for reason, count in (breaks_so_far() - before).most_common():
        # torch writes a paragraph: `Failed to trace ...`, then `Explanation: ...`.
        explanation = re.search(r"^\s*Explanation: (.+)$", reason, re.MULTILINE)
        line = explanation[1] if explanation else _first_line(reason)
        found.append(GraphBreak(count, line.strip().rstrip(".")[:_LONGEST_BREAK]))
    return tuple(found)


def _first_line(reason: object) -> str:
    return str(reason).strip().splitlines()[0]
