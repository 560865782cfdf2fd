"""Every precision separately: bytes as stored, time of dequantising, the kernel that ran; then a mixture of experts."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from profiler.counting.operators import Linear
from profiler.counting.walk import linear_modules, walk
from profiler.loading.request import dtype_name
from profiler.quant.storage import conversion_calls, stored
from profiler.store.folder import Run

from .bench import (
    BRIEF,
    LARGE_CARD_BYTES,
    SMALL_BATCHES,
    Attempt,
    Bench,
    Check,
    cells_measured,
    facts_of,
    random_numbers,
    replayed_s,
    small_run,
    within,
)

SHARES = {"int8": 0.51, "nf4": 0.28, "fp4": 0.28, "int8wo": 0.51, "fp8": 0.51}
"""Share of 16 bits that a format's linears need, with scales (nf4: 4 bits and a float32 per 64 weights)."""
_PACKAGES = {"int8wo": "torchao", "fp8": "torchao"}
_MIXTRAL = {
    "num_hidden_layers": 4, "hidden_size": 1024, "intermediate_size": 3584, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 64,
}  # fmt: skip


def attempts(bench: Bench) -> Iterator[Attempt]:
    yield Attempt("16 bits", lambda bench: [_cells_end("16 bits", bench.once(small_run))], least_s=25.0, cuda=False)
    old = bench.cuda and torch.cuda.get_device_capability(bench.device) < (8, 9)
    for quant in (quant for quant in SHARES if not (quant == "fp8" and old)):
        package = _PACKAGES.get(quant, "bitsandbytes")
        for name, run in ((f"{quant}: bytes", _format_bytes), (f"{quant}: a run", _format_run)):
            yield Attempt(name, partial(run, quant=quant), least_s=25.0, cuda=False, package=package)
    other = "float16" if bench.dtype == torch.bfloat16 else "float32"
    yield Attempt("another dtype", partial(_plain_run, model=bench.small, dtype=other), least_s=25.0, cuda=False)
    yield Attempt("a mixture of experts", _experts, least_s=30.0)
    if bench.cuda and bench.machine.info.memory_bytes < LARGE_CARD_BYTES:
        mistral = {"model": "mistral-7b-v0.1", "quant": "nf4", "prompt_lens": [128], "batch_sizes": [1, 4]}
        yield Attempt("Mistral-7B in nf4", partial(_plain_run, **mistral), least_s=45.0, package="bitsandbytes")


def _half_bytes(bench: Bench) -> int:
    return _linear_bytes(bench.load(bench.small))


def _linear_bytes(model: Any) -> int:
    linears = [op for op in walk(model).operators if isinstance(op, Linear) and op.group != "lm_head"]
    return sum(op.count * op.weight.weight_bytes for op in linears)


def _short_run(bench: Bench, name: str, **options: Any) -> Run:
    given = {"prompt_lens": [32], "batch_sizes": SMALL_BATCHES[bench.cuda], **BRIEF[bench.cuda], **options}
    return bench.run(name, **given)


def _cells_end(name: str, run: Run) -> Check:
    decode = run.cells[run.cells["phase"] == "decode"].set_index("batch_size")
    value = {"step_s": decode["latency_s"].to_dict(), "warnings": list(run.document.warnings)}
    return cells_measured(f"{name}: every cell is measured", run, value)


def _format_bytes(bench: Bench, quant: str) -> Iterator[Check]:
    model = bench.load(bench.small, quant=quant)
    share, expected = _linear_bytes(model) / bench.once(_half_bytes), SHARES[quant]
    yield Check(f"{quant}: linear bytes / 16 bits", abs(share - expected) <= 0.03, share, f"{expected} +- 0.03")
    if quant == "nf4" and bench.cuda:
        yield _kernel_that_ran(model)


def _format_run(bench: Bench, quant: str) -> Iterator[Check]:
    run = _short_run(bench, f"precision-{quant}", model=bench.small, quant=quant)
    yield _cells_end(quant, run)
    if bench.cuda:
        yield random_numbers(f"{quant}: random numbers are drawn after the run", bench.device)
    if quant in ("nf4", "int8wo"):
        yield _dequantisation(bench, run, quant)


def _dequantisation(bench: Bench, run: Run, quant: str) -> Check:
    """Compare the term of a decode step's breakdown with replays of the same kernels, at every linear of the model.

    Only a step whose linears the run replayed has this term; the one with most rows is judged.
    """
    name, facts = f"{quant}: the dequantisation term / replays of its own", facts_of(run)
    linears = linear_modules(bench.load(bench.small, quant=quant))
    operators = {operator for operator, *_ in linears}
    decode = [key for key in facts.measured if key.phase == "decode" and operators <= facts.replays.get(key, {}).keys()]
    if not decode:
        return Check(name, None, why="the run's time ended before it replayed the linears of a decode step")
    rows = max(key.cell.batch_size for key in decode)
    cells = run.cells[run.cells["phase"] == "decode"].set_index("batch_size")
    term_s = float(cells["dequantise_s"].loc[rows])
    found = [conversion_calls(modules, rows, bench.dtype) for modules in linears.values()]
    if not any(found):
        return Check(name, term_s == 0.0, term_s, "0: its kernel is fused at this batch")
    if not bench.cuda:
        return Check(name, None, term_s, why="on a CPU its calls are overhead, which a loop cannot leave out")
    return within(name, term_s / sum(len(calls) * replayed_s(bench, calls) for calls in found if calls), 0.1)


def _kernel_that_ran(model: Any) -> Check:
    """Check one row through a 4-bit layer: the fused kernel, or dequantisation first, as the count predicts."""
    layer = model.model.layers[0].mlp.up_proj
    weight = stored(layer)
    x = torch.randn(1, layer.in_features, device=model.device, dtype=weight.compute_dtype)
    with torch.inference_mode(), torch.profiler.profile() as trace:
        layer(x)
    names = [event.key for event in trace.key_averages()]
    dequantised = any("dequant" in name.lower() for name in names)
    predicted = bool(weight.writes_dense_copy(1))
    value = {"dequantised": dequantised, "names": names[:12]}
    return Check("nf4 at one row: predicted path = traced", dequantised == predicted, value, str(predicted))


def _plain_run(bench: Bench, **options: Any) -> Iterator[Check]:
    name = options.get("quant") or options["dtype"]
    yield _cells_end(f"{options['model']} in {name}", _short_run(bench, f"plain-{name}", **options))


def _experts(bench: Bench) -> Iterator[Check]:
    """If torch's matmul by experts reads its offsets from the card, captures of such a step fail."""
    folder = bench.made_model("mixtral-8x7b", "small-mixtral", "MixtralForCausalLM", **_MIXTRAL)
    run = _short_run(bench, "experts", model=folder, dtype=dtype_name(bench.dtype))
    yield _cells_end("a Mixtral of four layers", run)
    yield random_numbers("experts: random numbers are drawn after the run", bench.device, run.model.experts)
