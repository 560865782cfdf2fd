"""Calls of torch.compile: a backend that records instead of compiling counts them and their inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from small_models import small_model

from profiler.device.machine import Machine
from profiler.engines.transformers import CompileEngine

WINDOW = 16


class Capturing(Machine):
    """This CPU, as if it captured graphs."""

    captures = True


@dataclass
class Recorded:
    """The mode of each compilation, and all inputs that are numbers instead of tensors."""

    skips: int = 0
    """Skipped CUDA graphs per compilation."""

    compilations: list[str] = field(default_factory=list)
    numbers: list[object] = field(default_factory=list)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """Replace inductor, and CUDA graphs in the mode that records them."""
    record = Recorded()
    compile_for_real = torch.compile

    def compile_(function: Callable[..., Any], mode: str | None = None, dynamic: bool | None = None) -> Any:
        def backend(module: Any, inputs: Any) -> Any:
            record.compilations.append(mode or "default")
            # As inductor counts a piece that it runs without a CUDA graph (torch/_inductor/compile_fx.py).
            torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] += record.skips
            record.numbers += [each for each in inputs if not isinstance(each, torch.Tensor)]
            return module.forward

        return compile_for_real(function, backend=backend, dynamic=dynamic)

    monkeypatch.setattr(torch, "compile", compile_)
    return record


def _visits(engine: CompileEngine, prompt: int, slots: int, visits: int = 2, steps: int = 6) -> None:
    with torch.inference_mode():
        for _ in range(visits):
            engine.prepare(2, slots)
            state = engine.prefill(torch.ones(2, prompt, dtype=torch.long), slots)
            for _ in range(steps):
                state = engine.decode(state)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "pieces"), [("Llama", 1), ("Mistral", 1), ("Mixtral", None)])
def test_a_shape_is_compiled_once_and_no_position_is_an_input(
    kind: str, pieces: int | None, recorded: Recorded
) -> None:
    """A number that changes from step to step would be recorded as one more CUDA graph each time."""
    engine = CompileEngine(small_model(kind), Capturing(torch.device("cpu")))
    _visits(engine, prompt=6, slots=WINDOW, visits=1)
    first = len(recorded.compilations)
    assert pieces is None or first == pieces
    assert set(recorded.compilations) == {"reduce-overhead"}
    assert recorded.numbers == []
    _visits(engine, prompt=6, slots=WINDOW)
    assert len(recorded.compilations) == first, "later visits reuse the compiled code"
    _visits(engine, prompt=4, slots=WINDOW)
    assert len(recorded.compilations) == first, "so does another depth of the same cache"


@pytest.mark.slow
def test_a_moving_window_is_not_captured(recorded: Recorded) -> None:
    """The host counts its position: compiled code may take it as an input, but each would need another CUDA graph."""
    engine = CompileEngine(small_model("Mistral"), Capturing(torch.device("cpu")))
    _visits(engine, prompt=12, slots=24, visits=1, steps=8)
    assert set(recorded.compilations) == {"default"}
    first = len(recorded.compilations)
    _visits(engine, prompt=12, slots=24, steps=8)
    assert len(recorded.compilations) == first


@pytest.mark.slow
@pytest.mark.parametrize("skips", [0, 1])
def test_every_shape_is_compiled_by_itself_and_pieces_without_a_cuda_graph_count(
    skips: int, recorded: Recorded
) -> None:
    """By default, torch makes sizes symbolic inputs of the compiled code from the second shape on."""
    recorded.skips = skips
    engine = CompileEngine(small_model("Llama"), Capturing(torch.device("cpu")))
    for slots in (16, 24, 32):
        _visits(engine, prompt=6, slots=slots, visits=1)
    assert engine.graph_skips == skips * len(recorded.compilations) == 3 * skips
    assert len(recorded.compilations) == 3
    assert recorded.numbers == []
