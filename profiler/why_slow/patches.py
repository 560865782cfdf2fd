"""Watch a script: patch torch and transformers, imported or not yet, and sample which of its own lines run.

Samples are of the main thread, about 50 times a second, while no model's call runs.
"""

import concurrent.futures.thread
import contextlib
import functools
import importlib.machinery
import logging
import random
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from profiler.device.clock import core_timer, now_s
from profiler.fallbacks import library_warnings
from profiler.why_slow.call_record import runs_here, starts_here, users_file
from profiler.why_slow.observations import OwnLine
from profiler.why_slow.recorder import Recorder
from profiler.why_slow.watched_calls import FORWARD, GENERATE, GENERATE_BATCH, PLAIN


@contextlib.contextmanager
def watched(recorder: Recorder) -> Iterator[None]:
    """While in this context, `recorder` gets calls, loads and tokenizer work of transformers.

    It does not import transformers: the script may first set environment variables that change the import.
    """
    finder = _Finder(recorder)
    sys.meta_path.insert(0, finder)
    for name, patch in _PATCHES.items():
        if name in sys.modules:
            patch(sys.modules[name], recorder)
    # The starts of threads and of tasks in pools, to know their line where a thread runs library code only.
    recorder.before(threading.Thread, "start", starts_here)
    recorder.before(concurrent.futures.thread._WorkItem, "__init__", starts_here)
    recorder.before(concurrent.futures.thread._WorkItem, "run", runs_here)
    try:
        with recorder.undo, library_warnings(recorder.warning), sampled(recorder):
            yield
    finally:
        sys.meta_path.remove(finder)


@dataclass(eq=False)
class _Finder:
    """Finds a module with the other finders, and patches it after it was loaded."""

    recorder: Recorder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _PATCHES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def patched(module: ModuleType) -> None:
            execute(module)
            _PATCHES[fullname](module, self.recorder)

        spec.loader.exec_module = patched  # type: ignore[method-assign]
        return spec


def _models(module: ModuleType, recorder: Recorder) -> None:
    import torch

    base = module.PreTrainedModel

    def call(run: partial[Any]) -> Any:
        # Compiled code must not contain the recorder.
        return run() if torch.compiler.is_compiling() else recorder.call(FORWARD, run)

    from_pretrained = base.__dict__["from_pretrained"]

    @functools.wraps(from_pretrained.__func__)
    def load(cls: Any, *args: Any, **named: Any) -> Any:
        source = str(args[0] if args else named.get("pretrained_model_name_or_path"))
        return recorder.load(source, partial(from_pretrained.__func__, cls, *args, **named))

    recorder.around(base, "__call__", call)
    recorder.before(base, "__init__", lambda *_: setattr(recorder, "latest", None))
    recorder.replace(base, "from_pretrained", classmethod(load))


# Packages whose modules are no language models in plain PyTorch, so that calls of theirs are not slowed down.
_LIBRARIES = ("torch", "torchvision", "torchaudio", "torchao", "transformers", "accelerate", "bitsandbytes", "peft")


def _plain_modules(module: ModuleType, recorder: Recorder) -> None:
    """Patch calls of the script's own modules, of which the recorder records language models in plain PyTorch."""
    base = module.Module
    original = base.__call__

    @functools.wraps(original)
    def call(self: Any, *args: Any, **named: Any) -> Any:
        # Compiled code must not contain the wrapper.
        if sys.modules["torch"].compiler.is_compiling() or not recorder.is_plain_call(self, args, named):
            return original(self, *args, **named)
        return recorder.call(PLAIN, partial(original, self, *args, **named))

    def watch(owner: Any) -> None:
        if owner.__module__.partition(".")[0] not in _LIBRARIES and owner.__call__ is original:
            recorder.replace(owner, "__call__", call)
        for each in owner.__subclasses__():
            watch(each)

    def watch_new(cls: Any, /, **named: Any) -> None:
        super(base, cls).__init_subclass__(**named)
        watch(cls)

    watch(base)
    recorder.replace(base, "__init_subclass__", classmethod(watch_new))


def _compiled(module: ModuleType, recorder: Recorder) -> None:
    """Patch the module that `torch.compile(model)` wraps around the model."""

    def call(run: partial[Any]) -> Any:
        models, model = sys.modules.get("transformers.modeling_utils"), run.args[0]._orig_mod
        of_transformers = models is not None and isinstance(model, models.PreTrainedModel)
        if not of_transformers and not recorder.is_plain_call(model, run.args[1:], run.keywords):
            return run()
        return recorder.call(FORWARD if of_transformers else PLAIN, run, compiled=model)

    recorder.around(module.OptimizedModule, "__call__", call)


def _tokenizers(module: ModuleType, recorder: Recorder) -> None:
    base = module.PreTrainedTokenizerBase
    for name in ("__call__", "decode", "batch_decode"):
        recorder.around(base, name, partial(recorder.text, encodes=name == "__call__"))


_PATCHES: dict[str, Callable[[ModuleType, Recorder], None]] = {
    # It prints only the first time in a process.
    "transformers.utils.logging": lambda _, recorder: recorder.before(
        logging.Logger,
        "warning_once",
        lambda logger, text, *_: recorder.warning(logger.name.split(".")[0], str(text)),
    ),
    "torch": lambda module, recorder: recorder.before(
        module, "compile", lambda *_: setattr(recorder, "compiles", True)
    ),
    # Tensor.backward, autograd.backward and autograd.grad all call it.
    "torch.autograd": lambda module, recorder: recorder.before(
        module, "_engine_run_backward", lambda *_: setattr(recorder, "trained", True)
    ),
    "torch.amp.autocast_mode": lambda module, recorder: recorder.before(
        module.autocast, "__enter__", lambda _: recorder.enter_autocast()
    ),
    "transformers.modeling_utils": _models,
    "torch.nn.modules.module": _plain_modules,
    "transformers.generation.utils": lambda module, recorder: recorder.around(
        module.GenerationMixin, "generate", partial(recorder.call, GENERATE)
    ),
    "transformers.generation.continuous_batching.continuous_api": lambda module, recorder: recorder.around(
        module.ContinuousMixin, "generate_batch", partial(recorder.call, GENERATE_BATCH)
    ),
    "transformers.generation.logits_process": lambda module, recorder: recorder.around(
        module.LogitsProcessorList, "__call__", recorder.callbacks
    ),
    "transformers.generation.stopping_criteria": lambda module, recorder: recorder.around(
        module.StoppingCriteriaList, "__call__", partial(recorder.callbacks, are_criteria=True)
    ),
    "torch._dynamo.eval_frame": _compiled,
    "transformers.tokenization_utils_base": _tokenizers,
}


# The mean of the times between samples, which differ: a loop whose steps take as long would always be seen at one line.
_EVERY_S = 0.02
# A line is known from about three samples on.
_LEAST_S = 3 * _EVERY_S
# Python lets the sampler in after so long. Otherwise that would be in a kernel, where Python's lock is free.
_SWITCH_S = 2e-4
_MAKING = "", "making models"
_PACKAGE = str(Path(__file__).parents[1])


@contextlib.contextmanager
def sampled(recorder: Recorder) -> Iterator[None]:
    seconds: dict[tuple[str, str], dict[tuple[str, str], float]] = defaultdict(lambda: defaultdict(float))
    going = [True]  # no event: a child may be forked while the sampler holds its lock
    thread = threading.Thread(target=_sample, args=(recorder, seconds, going), name="roofscope", daemon=True)
    thread.start()
    try:
        yield
    finally:
        going.clear()
        thread.join()
        recorder.making_s = sum(seconds.pop(_MAKING, {}).values())
        known = [OwnLine(where, function, calls, sum(lines.values()))
                 for (_, function), lines in seconds.items() if sum(lines.values()) >= _LEAST_S
                 for where, calls in [max(lines, key=lambda line: lines[line])]]  # fmt: skip
        recorder.own_lines = tuple(sorted(known, key=lambda line: -line.seconds))


def _sample(recorder: Recorder, seconds: Any, going: Sequence[bool]) -> None:
    """While `going`, add the time since the last sample to the place of each sample outside of calls and loads.

    Samples do not wait for a call's end: code that runs for less than the time between two of them is seen as often as
    its share of the time. `seconds` has them by the place, and by (line, what it calls).
    """
    main, timer, draw = threading.main_thread().ident or 0, core_timer(), random.Random(0)
    usual_s, last_s = sys.getswitchinterval(), now_s()
    while going:
        time.sleep(draw.uniform(0.5, 1.5) * _EVERY_S)
        if recorder.here.busy:
            last_s = now_s()
            continue
        # Else threads of the script keep their usual turns. Daemons, such as the monitor of tqdm's bars, sleep.
        alone = all(thread.daemon or thread.ident == main for thread in threading.enumerate())
        sys.setswitchinterval(_SWITCH_S if alone else usual_s)
        spent_s, last_s = now_s() - last_s, now_s()
        recorder.sampled_s += spent_s
        if (place := _place(sys._current_frames().get(main))) is not None:
            seconds[place[:2]][place[2:]] += spent_s
    sys.setswitchinterval(usual_s)
    recorder.noting_s += timer()


def _place(frame: FrameType | None) -> tuple[str, str, str, str] | None:
    """(file, function) of the innermost code of the user, its line, and what that calls in a library.

    Lines of one function have one place; outside of functions, each has its own. `_MAKING` is where a model is made.
    None in an import, and in code of this package: the time of calls, loads and recording has another name.
    """
    library, found, kind = "", None, getattr(sys.modules.get("torch.nn"), "Module", ())
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__init__" and isinstance(frame.f_locals.get("self"), kind):
            return *_MAKING, "", ""
        if found is None and (file := users_file(code.co_filename)):
            function = code.co_qualname.partition(".<locals>.<")[0]
            line, function = f"{file}:{frame.f_lineno}", "" if function[:1] == "<" else function
            found = file if function else line, function, line, library
        if not found and code.co_filename.startswith(("<frozen importlib", _PACKAGE)):
            return None
        library = f"{str(frame.f_globals.get('__name__')).partition('.')[0]}.{code.co_qualname}"
        frame = frame.f_back
    return found
