"""Read optimum-benchmark's benchmark.json and benchmark_report.json (optimum_benchmark/benchmark/report.py).

Its decode latency is that of the whole loop after the first token. Its decode throughput is batch x (new tokens - 1)
divided by that latency (optimum_benchmark/scenarios/inference/scenario.py, atomic_decode_volume). A report without its
configuration therefore gives the tokens of the loop, but not the number of sequences.
"""

from __future__ import annotations

from statistics import median

from profiler.grid.cells import PHASES
from profiler.readers.figures import Figure, ForeignFile
from profiler.readers.sources import Source
from profiler.readers.values import Measured, first_of, inner, measured, number_at, texts, whole_of


def read_optimum_benchmark(source: Source) -> ForeignFile | None:
    """The figures of a file of optimum-benchmark; None for another tool's file. Raises RequestError if it is broken."""
    first = source.records[0]
    report = first.get("report", first)
    if not any(inner(report, f"{phase}.latency") for phase in PHASES):
        return None
    config = source.only.get("config") or {}
    sizes = {
        "batch_size": inner(config, "scenario.input_shapes.batch_size"),
        "prompt_len": inner(config, "scenario.input_shapes.sequence_length"),
        "new_tokens": inner(config, "scenario.generate_kwargs.max_new_tokens"),
    }
    shape = {name: None if value is None else whole_of(value, name, 1) for name, value in sizes.items()}
    # Before the prefill, `generate` repeats each prompt as often as the larger of the two (transformers 5.23,
    # generation/utils.py, _expand_inputs_for_generation).
    options = inner(config, "scenario.generate_kwargs") or {}
    copies = max(whole_of(options.get(name) or 1, name, 1) for name in ("num_beams", "num_return_sequences"))
    if shape["batch_size"]:
        shape["batch_size"] *= copies
    # Its launcher `process` polls its child without a pause on a core that the model may need.
    polls = inner(config, "launcher.name") == "process"
    notes = (
        *(["its launcher kept one core busy during the measurement"] if polls else []),
        *([f"each prompt runs as {copies} sequences: beams, or answers"] if copies > 1 else []),
    )
    figures = []
    for phase in PHASES:
        if (latency := inner(report, f"{phase}.latency")) is None:
            continue
        mean_s = measured(latency.get("mean"), f"{phase}.latency.mean", values=latency.get("values"))
        loop_tokens = None if phase == "prefill" else 0
        # The configuration takes precedence, since the throughput counts beams as tokens.
        if phase == "decode" and not shape["new_tokens"]:
            loop_tokens = round(mean_s.value * (number_at(report, "decode.throughput.value") or 0.0))
        time_s = Measured(median(mean_s.values), values=mean_s.values) if mean_s.values else mean_s
        figure = Figure(phase, loop_tokens=loop_tokens, notes=notes)
        figures.append(figure.timed(time_s).with_shapes(**shape))
    on_cpu = inner(config, "backend.device") == "cpu"
    # Of the GPUs of the machine, any number may have run.
    device = first_of(config, *(() if on_cpu else ("environment.gpu",)), "environment.cpu")
    settings = {
        "model's name": inner(config, "backend.model"),
        "precision": inner(config, "backend.torch_dtype"),
        "attention": inner(config, "backend.attn_implementation"),
        "device": ", ".join(dict.fromkeys(map(str, device))) if isinstance(device, list) else device,
        "transformers": inner(config, "environment.transformers_version"),
        "optimum-benchmark": inner(config, "environment.optimum_benchmark_version"),
    }
    return ForeignFile("optimum-benchmark", figures, settings=texts(settings))
