"""What is recorded of a call: its batch, the positions of logits that the script reads, its arguments.

What cannot be recorded, and calls that fail, are reported; the script runs as usual.
"""

import json
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hurry import with_effort
from planted_faults import changes_to, recorded, tiny_llama
from transformers import ViTConfig, ViTModel

import profiler
from profiler.data.ceiling_set import CeilingSet
from profiler.why_slow import kept_arguments, watched_calls
from profiler.why_slow.findings import judge_calls
from profiler.why_slow.kept_arguments import KeptArguments
from profiler.why_slow.read_logits import watched_logits
from profiler.why_slow.render import call_rows


@pytest.mark.parametrize(
    ("rows", "options", "computed", "words"),
    [
        (2, {"do_sample": True, "num_return_sequences": 3}, 6, "3 answers"),
        (1, {"num_beams": 4, "num_return_sequences": 3}, 4, "4 beams, 3 answers"),
        (2, {"do_sample": False}, 2, "sdpa"),
    ],
)
def test_a_call_has_the_batch_that_is_computed(rows: int, options: dict[str, Any], computed: int, words: str) -> None:
    model, shapes = tiny_llama(), list[tuple[int, ...]]()
    model.model.layers[0].register_forward_pre_hook(lambda _layer, args: shapes.append(tuple(args[0].shape[:2])))
    prompts = torch.ones(rows, 8, dtype=torch.long)
    seen = recorded(lambda: model.generate(prompts, max_new_tokens=3, **options)).seen("s.py")
    [call] = seen.calls
    assert set(shapes) == {(computed, 8), (computed, 1)}, "the prompt is computed for every beam and answer"
    assert (call.batch_size, call.words) == (computed, f"generate {computed} x 8 + 3")
    assert call_rows(judge_calls(seen, []))[0][-1].endswith(words)


ROWS, TOKENS, VOCABULARY = 3, 5, 7
LENGTHS = torch.tensor([2, 3, 5])
ONE_PER_ROW: dict[str, tuple[Callable[[Any], Any], int]] = {
    # read: (how, last positions that include it)
    "the last": (lambda x: x[:, -1], 1),
    "the last, as a slice": (lambda x: x[:, -1:], 1),
    "the last of each row in turn": (lambda x: torch.stack([row[-1] for row in x]), 1),
    "the last of each length": (lambda x: x[torch.arange(ROWS), LENGTHS - 1], 4),
    "the last, by a mask": (lambda x: x[torch.arange(TOKENS).expand(ROWS, -1) == TOKENS - 1], 1),
    "after argmax, of the last": (lambda x: x[:, -1].argmax(dim=-1), 1),
}
MORE: dict[str, tuple[Callable[[Any], Any], int]] = {
    "the last two": (lambda x: x[1:2, -2:].log_softmax(-1).sum(), 2),
    "all but the last": (lambda x: x[:, :-1].float().log_softmax(-1), TOKENS),
    "a loss": (lambda x: F.cross_entropy(x.view(-1, VOCABULARY), torch.zeros(ROWS * TOKENS).long()), TOKENS),
    "the last, after a softmax of positions": (lambda x: x.softmax(1)[:, -1], TOKENS),
    "its data": (lambda x: x.data[:, -2:], TOKENS),
    "all in numpy": (lambda x: torch.tensor(x.numpy().sum()), TOKENS),
    "pickled": (lambda x: pickle.loads(pickle.dumps(x)), TOKENS),
    "written to": (lambda x: x.index_fill_(1, torch.tensor([0]), 0.0), TOKENS),
}


@pytest.mark.parametrize("read", ONE_PER_ROW | MORE)
def test_a_read_has_the_values_of_a_plain_tensor_and_its_positions_are_known(read: str) -> None:
    how, last = (ONE_PER_ROW | MORE)[read]
    plain = torch.randn(ROWS, TOKENS, VOCABULARY)
    logits = watched_logits(plain.clone())
    found, expected = how(logits), how(plain)
    assert torch.equal(torch.as_tensor(found.tolist()), torch.as_tensor(expected.tolist()))
    assert (logits.read.at_most_one_per_row, logits.read.last) == (read in ONE_PER_ROW, last)


def test_a_read_of_all_columns_keeps_one_number_per_position() -> None:
    """Of 3 rows: 3 numbers of 4 bytes, not one for each of the columns."""
    logits = watched_logits(torch.randn(ROWS, TOKENS, VOCABULARY))
    logits[torch.arange(ROWS), LENGTHS - 1].sum()
    assert sum(each.untyped_storage().nbytes() for each in logits.read.places) == 4 * ROWS


USES: dict[str, Callable[[Any], Any]] = {
    "a gradient": lambda x: torch.autograd.grad((x**2).sum(), x)[0],
    "a gradient that it keeps": lambda x: (x.retain_grad(), (x.float() ** 2).sum().backward(), x.grad)[-1],
    "a transposition in place": lambda x: (x := x.detach(), x.transpose_(1, 2), x[:, -1])[-1],
    "an index of a table": lambda x: torch.arange(VOCABULARY)[x[:, -1].argmax(-1)],
    "its text": lambda x: torch.tensor(list(map(ord, f"{x.detach()} {x[0, 0, 0].detach():.2f}"))),
}


@pytest.mark.parametrize("use", USES)
def test_logits_are_used_as_a_plain_tensor(use: str) -> None:
    """Gradients are those of the tensor that the script has, not of an alias."""
    base = torch.randn(ROWS, TOKENS, VOCABULARY, requires_grad=True)
    assert torch.equal(USES[use](watched_logits(base * 1)), USES[use](base * 1))


def test_a_shape_is_no_read() -> None:
    logits = watched_logits(torch.randn(ROWS, TOKENS, VOCABULARY))
    assert (logits.shape, len(logits), logits.dtype) == ((ROWS, TOKENS, VOCABULARY), ROWS, torch.float32)
    assert (logits.read.places, logits.read.last) == ([], 0)


IDS = torch.ones(2, 8, dtype=torch.long)
SCORERS: dict[str, tuple[Callable[[Any], Any], str | None]] = {
    "a reranker": (lambda model: model(IDS).logits[:, -1, [3, 5]].sum(), "pass logits_to_keep=1"),
    "rows of several lengths": (
        lambda model: model(IDS).logits[torch.arange(2), torch.tensor([4, 7])].sum(),
        "pad on the left, and pass logits_to_keep=1",
    ),
    "a continuation": (lambda model: model(IDS).logits[0, 5:-1].log_softmax(-1).sum(), "pass logits_to_keep=3"),
    "all positions": (lambda model: model(IDS).logits[:, :-1].log_softmax(-1).sum(), None),
    "a loss": (lambda model: model(IDS, labels=IDS).loss, None),
    "only the last computed": (lambda model: model(IDS, logits_to_keep=1).logits[:, -1].sum(), None),
    "one call of two reads all": (lambda model: [model(IDS).logits[:, -1].sum(), model(IDS).logits.sum()], None),
}


@pytest.mark.parametrize("scorer", SCORERS)
def test_logits_that_nobody_reads_are_left_out(scorer: str) -> None:
    script, change = SCORERS[scorer]
    model = tiny_llama()
    found = changes_to(lambda: script(model)).get("all-logits")
    assert (found.change if found else None) == change
    if found:
        assert found.changed().logits.shape[1] == int(found.change[-1])  # type: ignore[attr-defined]


def test_compiled_code_gets_plain_logits() -> None:
    """Its code is specialised to the class of a tensor."""
    model = tiny_llama()
    classes = []

    def run() -> None:
        torch.compile(lambda x: x, backend="eager")
        classes.append(type(model(IDS).logits))

    changes_to(run)
    assert classes == [torch.Tensor]


HURRIED = Path(__file__).parents[1] / "hurry.py"
CPU = torch.device("cpu")
ONE_PROMPT = torch.ones(1, 8, dtype=torch.long)

LLAMA = """
import hashlib, torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
sizes = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4, vocab_size=4000)
model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=4, eos_token_id=None, pad_token_id=0)).eval()
found = []
"""
SCRIPTS = {
    "generates": """
for _ in range(8):
    ids = torch.randint(0, 4000, (4, 512))
    found.append(model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False))
""",
    "makes one model after the other": """
for _ in range(3):
    model = None
    wide = LlamaConfig(**{**sizes, "vocab_size": 400000}, tie_word_embeddings=True)
    model = LlamaForCausalLM(wide).eval()
    found.append(model.generate(torch.ones(1, 8, dtype=torch.long), max_new_tokens=2, do_sample=False))
""",
}
END = """
import resource
tokens = torch.cat([each.flatten() for each in found]).numpy().tobytes()
print("result", hashlib.sha256(tokens).hexdigest())
print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def result_and_peak(command: list[str]) -> tuple[str, int]:
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    lines = dict(line.split(" ", 1) for line in done.stdout.splitlines() if line.startswith(("result ", "peak ")))
    return lines["result"], int(lines["peak"])


TRIED = {
    # A paged cache of 4,096 tokens for each of the calls, and for each of the trial's.
    "with paged caches": """
from transformers import ContinuousBatchingConfig, GenerationConfig
generation = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1, pad_token_id=0)
batching = ContinuousBatchingConfig(page_size=32, num_blocks=128, max_batch_tokens=256)
for prompt in torch.randint(3, 4000, (4, 16)).tolist():
    answers = model.generate_batch([prompt], generation_config=generation, continuous_batching_config=batching)
    found += [torch.tensor(answer.generated_tokens) for answer in answers.values()]
""",
    "under autocast": """
with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
    for _ in range(6):
        found.append(model(torch.ones(1, 8, dtype=torch.long)).logits.argmax(-1))
""",
}
_MORE_KIB = 300_000_000 // 1024


@pytest.mark.slow
@pytest.mark.parametrize("kind", SCRIPTS | TRIED)
def test_a_script_has_its_result_and_at_most_a_fifth_more_memory(kind: str, tmp_path: Path) -> None:
    """Trials, of a wider model, need at most 300 MB more."""
    begin = LLAMA.replace("hidden_size=128", "hidden_size=512") if kind in TRIED else LLAMA
    script = tmp_path / "own.py"
    script.write_text(begin + (SCRIPTS | TRIED)[kind] + END)
    expected, own = result_and_peak([sys.executable, str(script)])
    profiler = ["-m", "profiler"] if kind in TRIED else [str(HURRIED)]
    budget = ["--budget", "20" if kind in TRIED else "0"]
    command = [sys.executable, *profiler, "why", *budget, "--out", str(tmp_path / "why"), str(script)]
    result, peak = result_and_peak(command)
    assert result == expected
    assert bool(json.loads((tmp_path / "why" / "why.json").read_text())["tried"]) == (kind in TRIED)
    assert peak <= max(1.2 * own, own + _MORE_KIB * (kind in TRIED)), (peak, own)


def test_a_block_leaves_the_random_numbers_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The floor builds a narrow copy of the model, whose weights are random."""
    monkeypatch.setattr(
        "profiler.why_slow.floor.here_ceilings", lambda *_, **__: CeilingSet("here", 1e9, {"float32": 1e9})
    )
    with_effort(monkeypatch, script_least_s=1.0, script_most_s=1.0)
    model = tiny_llama()
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    with profiler.why() as watching:
        model(ONE_PROMPT)
    assert watching.found.floor is not None
    assert torch.equal(torch.rand(3), expected)


def test_a_storage_counts_once_and_a_view_keeps_only_itself_and_no_graph() -> None:
    """Two calls with the same 400 bytes of numbers keep 400; 8 bytes of 8 MB keep 8."""
    kept = KeptArguments()
    embedded = torch.arange(100.0, requires_grad=True) * 2
    found = kept.keep((), {"inputs_embeds": embedded, "again": embedded}, CPU)
    assert found[1]["again"].grad_fn is None
    assert kept.keep((), {"inputs_embeds": embedded.view(10, 10)}, CPU) is not None
    assert sum(kept.storages.values()) == 400
    large = torch.arange(1 << 20)
    found = kept.keep((large[5:6],), {}, CPU)
    assert (found[0][0].tolist(), sum(kept.storages.values())) == ([5], 408)
    assert found[0][0].untyped_storage().nbytes() == 8


@pytest.mark.parametrize(
    ("named", "free_bytes"),
    [
        ({"cache": SimpleNamespace(keys=[torch.zeros(4)])}, 1 << 40),  # that other calls change
        ({"input_ids": torch.zeros(21, dtype=torch.uint8)}, 1000),  # more than 2 %
        ({"logits_processor": [SimpleNamespace(allowed={"ids": torch.zeros(6)})]}, 1000),
    ],
)
def test_what_is_shared_or_large_is_not_kept(
    named: dict[str, Any], free_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_arguments, "available_bytes", lambda _: free_bytes)
    kept = KeptArguments()
    assert kept.keep((), named, CPU) is None
    assert sum(kept.storages.values()) == 0


def test_recording_stops_with_a_line_if_memory_runs_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script goes on, none of its later calls is recorded, and the answer says when recording stopped."""
    monkeypatch.setattr(kept_arguments, "available_bytes", lambda _: 1e8)
    monkeypatch.setattr(kept_arguments, "total_bytes", lambda _: 1e10)
    model, logits = tiny_llama(), list[Any]()
    seen = recorded(lambda: logits.extend(model(ONE_PROMPT).logits for _ in range(3))).seen("s.py")
    assert [each.shape for each in logits] == [(1, 8, 64)] * 3
    assert (seen.calls, seen.unnoted.total()) == ((), 3)
    assert all("100 MB of 10.0 GB" in error for error in seen.unnoted)


def test_an_encoder_whose_config_has_no_cache_is_recorded() -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    model = ViTModel(ViTConfig(**sizes, image_size=32, patch_size=16)).eval()
    seen = recorded(lambda: model(torch.ones(1, 3, 32, 32))).seen("s.py")
    assert ([call.settings.cache for call in seen.calls], seen.unnoted) == ([False], {})


def test_a_call_that_cannot_be_recorded_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """If recording fails at the second of three calls, the others are recorded. All three return the usual logits."""
    model, of = tiny_llama(), watched_calls.forward_settings
    reads = iter([of, mock.Mock(side_effect=KeyError("unforeseen")), of])
    monkeypatch.setattr(watched_calls, "forward_settings", lambda *args: next(reads)(*args))
    expected, logits = model(ONE_PROMPT).logits, list[Any]()
    seen = recorded(lambda: logits.extend(model(ONE_PROMPT).logits for _ in range(3))).seen("s.py")
    assert [torch.equal(each, expected) for each in logits] == [True] * 3
    assert (len(seen.calls), seen.unnoted) == (2, {"KeyError: 'unforeseen'": 1})


SLEEP_S = 0.3


def runs_out(ids: Any, scores: Any) -> Any:
    """A logits processor that raises at the second token."""
    if ids.shape[1] > ONE_PROMPT.shape[1]:
        time.sleep(SLEEP_S)
        raise RuntimeError("out of memory (pretended)")
    return scores


def test_a_failed_call_counts_with_its_time_and_has_no_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second script has no other calls."""
    with_effort(monkeypatch, script_least_s=1.0, script_most_s=1.0)
    floors: list[list[int]] = []
    monkeypatch.setattr(
        "profiler.why_slow.trials.floor_of_calls", lambda calls, *_: floors.append([call.number for call in calls])
    )
    model = tiny_llama()

    def fail() -> None:
        with pytest.raises(RuntimeError, match="out of memory"):
            model.generate(ONE_PROMPT, max_new_tokens=4, do_sample=False, logits_processor=[runs_out])

    with profiler.why() as watching:
        fail()
        model.generate(ONE_PROMPT, max_new_tokens=3, do_sample=False)
    failed, done = watching.found.seen.calls
    assert (failed.failed, done.failed) == ("RuntimeError: out of memory (pretended)", "")
    assert failed.seconds >= SLEEP_S
    assert failed.forwards == 2
    assert watching.found.seen.calls_s >= failed.seconds + done.seconds - 1e-6
    assert not any(failed.number in trial.calls for trial in watching.found.tried)
    assert any("they failed (RuntimeError" in text for text in watching.found.not_tried)
    with profiler.why() as alone:
        fail()
    assert [call.failed for call in alone.found.seen.calls] == [failed.failed]
    assert floors == [[done.number]]
