"""Pieces of questions.sh, each in a fresh process: python tests/gpu/questions.py NAME [--model M] [--device cpu]

Each prints one line of JSON. Models have random weights.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from profiler.counting.walk import walk
from profiler.device.clock import time_in_turn, waited_s
from profiler.device.machine import Machine, machine_for, recorded
from profiler.device.telemetry import Watch
from profiler.loading.load import load
from profiler.measure.linears import time_formats
from profiler.measure.subject import Subject
from profiler.run.options import Options
from profiler.run.validate import prepare

Answer = dict[str, Any]
_ROUNDS = 15


def _loaded(options: argparse.Namespace, **more: Any) -> tuple[Any, Any, Machine]:
    """Return the prepared run of the model, the loaded model, and its machine."""
    asked = {"dtype": "auto", "quant": options.quant, "weights": "random", "device": options.device, "new_tokens": 8}
    prepared = prepare(Options(model=options.model, prompt_lens=[8], batch_sizes=[1], **asked | more))
    return prepared, load(prepared.request, prepared.config), machine_for(prepared.request.device)


def lines(options: argparse.Namespace) -> Answer:
    """`generate` as it is, without cuDNN's attention, and with a static cache: what each line does in a new process."""
    _, loaded, machine = _loaded(options)
    model, tokens = loaded.module, options.tokens

    def timed(length: int, **more: Any) -> tuple[float, list[int]]:
        ids = torch.arange(3, 3 + length, device=machine.device)[None]
        given = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "pad_token_id": 0, **more}
        found: list[Any] = []
        seconds = waited_s(lambda: found.append(model.generate(ids, **given)), machine.clock.synchronize)
        return seconds, found[0][0, length:].tolist()

    answer: Answer = {}
    for name, more in (("as it is", {}), ("cuDNN off", {}), ("static", {"cache_implementation": "static"})):
        torch.backends.cuda.enable_cudnn_sdp(name != "cuDNN off")
        first_s, ids = timed(16, **more)
        again_s, _ = timed(16, **more)
        new_s, _ = timed(16 + tokens, **more)
        answer[name] = {
            "first_call_s": first_s,
            "ms_per_token_at_known_lengths": 1e3 * again_s / tokens,
            "ms_per_token_at_new_lengths": 1e3 * new_s / tokens,
            "same_tokens": ids == answer.setdefault("ids", ids),
        }
    answer.pop("ids")
    return answer


def prefill(options: argparse.Namespace) -> Answer:
    """Products, attention and small kernels of a prefill by its trace, and its clock: eager, and with compiled code."""
    _, loaded, machine = _loaded(options)
    model, answer = loaded.module, {}
    ids = torch.zeros(options.batch, options.length, dtype=torch.long, device=machine.device)
    numels = [each.weight.numel() for each in model.modules() if isinstance(each, torch.nn.Linear)]
    flops = 2.0 * ids.numel() * (sum(numels) - model.get_output_embeddings().weight.numel())
    for name in ("eager", "compiled"):
        call = model if name == "eager" else torch.compile(model, backend="inductor" if machine.is_cuda else "eager")

        def step(call: Any = call) -> object:
            with torch.inference_mode():
                return call(input_ids=ids, use_cache=True, logits_to_keep=1)

        first_s = waited_s(step, machine.clock.synchronize)
        with Watch(machine.source, interval_s=0.1) as watch:
            [seconds] = time_in_turn([step], machine.clock, _ROUNDS, drop_first=True)
        with recorded(cuda=machine.is_cuda) as profile:
            step()
            machine.clock.synchronize()
        times_s = _device_times(profile, machine.is_cuda)
        products_s = sum(second for key, second in times_s.items() if "mm" in key or key.endswith("linear"))
        attention_s = sum(second for key, second in times_s.items() if "attention" in key)
        answer[name] = {
            "first_call_s": first_s,
            "prefill_s": statistics.median(seconds),
            "products_s": products_s,
            "products_flops_per_s": flops / products_s if products_s else None,
            "attention_s": attention_s,
            "small_kernels_s": sum(times_s.values()) - products_s - attention_s,
            "clock_mhz": _range([reading.clock_hz / 1e6 for reading in watch.readings if reading.clock_hz]),
            "power_w": _range([reading.power_w for reading in watch.readings if reading.power_w]),
        }
    return answer


def _range(values: list[float]) -> list[float]:
    """Return the minimum, the median and the maximum; nothing without values."""
    return [min(values), statistics.median(values), max(values)] if values else []


def _device_times(profile: Any, cuda: bool) -> dict[str, float]:
    """Seconds of kernels by the operator that launched them; on a CPU, of the operators themselves."""
    name = "self_device_time_total" if cuda else "self_cpu_time_total"
    host = [each for each in profile.key_averages() if each.device_type == torch.autograd.DeviceType.CPU]
    return {each.key: 1e-6 * getattr(each, name) for each in host if getattr(each, name)}


def linears(options: argparse.Namespace) -> Answer:
    """All linears of a decode step in each format, replayed as graphs."""
    prepared, loaded, machine = _loaded(options)
    subject = Subject(machine, loaded, walk(loaded.module), {}, {}, prepared.grid, prepared.prompts)
    room_bytes = 0.5 * machine.available_bytes()
    found = time_formats(subject, prepared.config, room_bytes, options.budget)
    return {"times": [asdict(item) for item in found.times]}


PIECES: dict[str, Callable[[argparse.Namespace], Answer]] = {"lines": lines, "prefill": prefill, "linears": linears}


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("piece", choices=PIECES)
    parser.add_argument("--model", default="mistral-7b-v0.1")
    parser.add_argument("--quant", default="none")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of each call of generate")
    parser.add_argument("--batch", type=int, default=8, help="prompts of the prefill")
    parser.add_argument("--length", type=int, default=512, help="tokens of each")
    parser.add_argument("--budget", type=float, default=25.0, help="seconds for the linears")
    options = parser.parse_args(given)
    print(json.dumps({"piece": options.piece, "quant": options.quant, **PIECES[options.piece](options)}))


if __name__ == "__main__":
    main()
