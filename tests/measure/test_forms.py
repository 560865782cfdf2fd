"""Variants tried on a short model; answers with and without drafts, which have the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from machines import HOST
from small_models import small_model
from subjects import MEMORY, PLANTED, subject_of
from transformers import GPT2Config, GPT2LMHeadModel

from profiler.cli.options import EXIT_INCOMPLETE
from profiler.errors import RequestError
from profiler.facts.measurements import (
    COMPILED,
    GRAPHED,
    REPEATED_HEADS,
    WITHOUT_CUDNN,
    DraftFloor,
    Drafting,
)
from profiler.facts.roofs import READ, Ceilings
from profiler.grid.cells import PHASES, Cell, CellKey
from profiler.measure.drafting import NGRAM, Draft, draft_of, measure_drafts
from profiler.measure.subject import Subject
from profiler.measure.trials import pattern_of, shortened, stack_of, try_variants
from profiler.measure.variants import variants_of
from profiler.store.folder import read_run


@pytest.mark.parametrize(("kind", "layers"), [("Llama", 5), ("Gemma3", 18), ("DeepseekV2", 4)])
def test_a_short_model_holds_every_kind_of_layer_and_a_longer_one_has_more_of_them(kind: str, layers: int) -> None:
    """Gemma 3 attends fully in every sixth layer, and the first of DeepSeek's has no experts."""
    model = small_model(kind, num_hidden_layers=layers)
    pattern = pattern_of(model, model.config)
    assert pattern.layers == layers
    assert pattern.short < pattern.long(0) <= pattern.long(1000) == layers

    def kinds(of: Any) -> set[tuple[object, ...]]:
        attention = getattr(model.config, "layer_types", None) or ["full_attention"] * layers
        stack = stack_of(of, of.config) or ()
        return {(attention[number], type(layer.mlp)) for number, layer in enumerate(stack)}

    for length in (pattern.short, pattern.long(0)):
        cut = type(model)(shortened(model.config, length))
        assert len(stack_of(cut, cut.config) or ()) == length
        assert kinds(cut) == kinds(model)
        with torch.inference_mode():
            assert cut(torch.zeros(1, 3, dtype=torch.long)).logits.shape == (1, 3, 128)
    assert len(stack_of(model, model.config) or ()) == layers, "the model itself is not cut"


def test_an_8_bit_cache_is_tried_where_transformers_has_one(tiny_folder: Path, tmp_path: Path) -> None:
    """It is not tried for a window; a run on a quantised cache tries the default one."""
    small_model("Mistral", sliding_window=4).save_pretrained(tmp_path / "windowed")
    subjects = [
        subject_of(str(tiny_folder))[0], subject_of(str(tmp_path / "windowed"))[0],
        subject_of(str(tiny_folder), cache="fp8")[0],
    ]  # fmt: skip
    caches = ("a dynamic cache", "a static cache", "an 8-bit KV cache")
    tried = [[form.name for form in variants_of(subject) if form.name in caches] for subject in subjects]
    assert tried == [["a static cache", "an 8-bit KV cache"], ["a static cache"], ["a dynamic cache"]]


def test_only_a_mixture_of_experts_is_tried_with_other_experts(tiny_folder: Path, tmp_path: Path) -> None:
    """transformers' config of a dense model also names an experts implementation."""
    small_model("Qwen3Moe").save_pretrained(tmp_path / "mixture")
    dense, mixture = subject_of(str(tiny_folder))[0], subject_of(str(tmp_path / "mixture"))[0]
    assert dense.loaded.config._experts_implementation
    assert [form.name for form in variants_of(dense) if form.experts] == []
    current = mixture.experts
    others = [form.experts for form in variants_of(mixture) if form.experts]
    assert sorted([current, *others]) == ["batched_mm", "eager", "grouped_mm"]


@pytest.mark.parametrize(
    ("capability", "dtype", "ran", "heads", "tried"),
    [
        # A T4 has only the math kernel for grouped heads, and a fused one for repeated heads.
        ("7.5", torch.float16, "math", 2, {REPEATED_HEADS}),
        ("8.0", torch.float32, "math", 4, {"memory-efficient attention"}),
        ("8.0", torch.bfloat16, "flash", 2, {"cudnn attention"}),
        ("8.0", torch.bfloat16, "flash", 4, {"cudnn attention", "memory-efficient attention"}),
        # Without cuDNN torch chooses flash.
        ("9.0", torch.bfloat16, "cudnn", 2, {WITHOUT_CUDNN}),
    ],
)
def test_a_gpu_tries_the_attention_kernels_that_it_has(
    capability: str, dtype: torch.dtype, ran: str, heads: int, tried: set[str], tmp_path: Path
) -> None:
    """torch's `check_sm_version`, `check_tensor_dtype` and `check_batch_size_and_num_heads_dense`.

    aten/src/ATen/native/transformers/cuda/sdp_utils.cpp and sdp_utils_cpp.h. On an H100, torch 2.11 raised "No
    available kernel" for grouped heads on the memory-efficient kernel.
    """
    small_model("Llama", num_key_value_heads=heads).save_pretrained(tmp_path / "model")
    subject, _ = subject_of(str(tmp_path / "model"))
    info = replace(HOST.info, kind="cuda", compute_capability=capability)
    gpu: Any = SimpleNamespace(is_cuda=True, captures=True, info=info)
    request = replace(subject.request, dtype=dtype)
    paths = {name: replace(path, kernel=ran) for name, path in subject.paths.items()}
    on_gpu = replace(subject, machine=gpu, loaded=replace(subject.loaded, request=request), paths=paths)
    names = {form.name for form in variants_of(on_gpu) if "attention" in form.name and " and " not in form.name}
    assert names == tried
    assert GRAPHED in {form.name for form in variants_of(on_gpu)}


def test_attention_kernels_are_tried_with_and_without_a_mask(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The padding mask hides one key of the shorter of two sequences.

    In a decode step after 8 tokens this sequence sees 8 of 9 keys. In a prefill of 6 it lacks the last key, which only
    the last query would have seen.
    """
    subject, config = subject_of(str(tiny_folder))
    masks: list[torch.Tensor | None] = []
    plain = torch.nn.functional.scaled_dot_product_attention

    def seen(*args: Any, attn_mask: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
        masks.append(attn_mask)
        return plain(*args, attn_mask=attn_mask, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", seen)
    monkeypatch.setattr(
        "profiler.measure.trials.variants_of",
        lambda subject, _: [form for form in variants_of(subject) if form.holds_alike],
    )
    [cell] = subject.grid.cells
    hidden: dict[tuple[str, str], list[int]] = {}
    for trial in try_variants(subject, config, MEMORY, dict.fromkeys(cell.keys, 1e-4), 60.0):
        found = [mask for mask in masks if mask is not None]
        hidden[trial.form, trial.key.phase] = [int((~mask).sum()) for mask in found[-1]] if found else []
        masks.clear()
    expected = {"prefill": [15 + 1, 15], "decode": [1, 0]}
    for phase, count in expected.items():
        assert hidden["math attention", phase] == []
        assert hidden["a padding mask", phase] == count
        assert hidden["a padding mask and math attention", phase] == count


def test_trials_stay_within_a_table_of_positions(tmp_path: Path) -> None:
    """GPT-2's table has 64 rows, and the cell's 56 + 8 tokens take all of them; a trial steps more often than it."""
    config = GPT2Config(n_positions=64, n_embd=32, n_layer=2, n_head=2, vocab_size=100)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    subject, config = subject_of(str(tmp_path), prompt_lens=[56], batch_sizes=[1], new_tokens=8)
    [cell] = subject.grid.cells
    failed: list[str] = []
    seconds = {key: 1e-4 for key in cell.keys if key.phase == "decode"}
    found = try_variants(subject, config, MEMORY, seconds, 20.0, on_failure=lambda form, _: failed.append(form))
    assert "math attention" in {trial.form for trial in found}
    assert "math attention" not in failed


def test_steps_that_no_share_of_the_budget_holds_are_not_tried(tiny_folder: Path) -> None:
    """Of steps of an hour, not even two layers can be tried in a second."""
    subject, config = subject_of(str(tiny_folder))
    assert list(try_variants(subject, config, MEMORY, dict.fromkeys(subject.grid.cells[0].keys, 3600.0), 1.0)) == []


def test_compiled_code_is_a_form_of_one_decode_step(tiny_folder: Path) -> None:
    """Its prefills are eager, and each shape would be compiled separately."""
    subject, _ = subject_of(str(tiny_folder))
    [compiled] = [form for form in variants_of(subject, compiling=True) if form.name == COMPILED]
    keys = [CellKey(phase, Cell(batch, 6, 4)) for batch in (1, 2) for phase in PHASES]
    assert [(key.phase, key.cell.batch_size) for key in compiled.corners(keys)] == [("decode", 1)]


CEILINGS = Ceilings({"float32": PLANTED}, {READ: PLANTED}, 1 << 23, beyond_cache=True)
NEW_TOKENS, PROMPT_LEN = 16, 48


@pytest.fixture(scope="module")
def subject(short_folder: Path) -> Subject:
    """Six layers of a real model, which repeat themselves, on a grid of two batches."""
    return subject_of(str(short_folder), batch_sizes=[1, 8], new_tokens=NEW_TOKENS)[0]


def draft_for(subject: Subject, name: str) -> Draft:
    """The drafts on the beginning of the built-in text."""
    draft = draft_of(name, subject.request, subject.loaded.config, NEW_TOKENS)
    return replace(draft, prompt=draft.prompt[:PROMPT_LEN])


def drafting(subject: Subject, name: str) -> Drafting:
    return measure_drafts(subject, draft_for(subject, name), NEW_TOKENS, CEILINGS, turns=1)


def check(found: Drafting) -> None:
    """The steps' tokens are the answer's: each gives what it accepted and one more."""
    assert found.same_tokens == found.new_tokens == NEW_TOKENS
    assert sum(found.accepted) + len(found.accepted) == NEW_TOKENS
    assert all(0 <= kept <= drafted for kept, drafted in zip(found.accepted, found.drafted, strict=True))
    for drafting_s, assisted_s in zip(found.drafting_s, found.assisted_s, strict=True):
        assert 0 < drafting_s < assisted_s or not found.steps


@pytest.mark.ci
def test_ngrams(subject: Subject) -> None:
    """The same lookup by hand: after the last two tokens, or else one, the ten that followed them at first."""
    found = drafting(subject, NGRAM)
    check(found)
    model: Any = subject.loaded.module
    ids = torch.tensor([draft_for(subject, NGRAM).prompt])
    with torch.inference_mode():
        tokens = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False)
    text, place, accepted = tokens[0].tolist(), PROMPT_LEN, []
    while place < len(text):
        proposed = looked_up(text[:place])
        right = 0
        while right < len(proposed) and place + right < len(text) - 1 and proposed[right] == text[place + right]:
            right += 1
        accepted.append(right)
        place += right + 1
    assert list(found.accepted) == accepted


def looked_up(text: list[int]) -> list[int]:
    for size in (2, 1):
        for start in range(len(text) - size):
            if text[start : start + size] == text[-size:]:
                return text[start + size : start + size + 10]
    return []


@pytest.mark.slow
def test_a_draft_that_is_the_model_itself_is_always_right(subject: Subject, short_folder: Path) -> None:
    """All drafts are accepted, so there are far fewer steps than tokens. A draft costs a step of the model."""
    found = drafting(subject, str(short_folder))
    check(found)
    assert found.accepted == found.drafted
    assert found.steps < NEW_TOKENS / 4
    # Roofs of 1e10: a float32 weight takes 4 bytes and 2 FLOPs per row, so from 2 rows on arithmetic binds the linears.
    one, eight = found.floors
    rows = 1 + one.drafted
    assert one.verifying_s == pytest.approx(max(1, rows / 2) * one.one_token_s, rel=0.05)
    assert eight.verifying_s == pytest.approx(rows * eight.one_token_s, rel=0.05)
    assert one.drafting_s == pytest.approx(one.drafted * one.one_token_s, rel=0.05)


def test_speedup_and_verdict() -> None:
    """Ten of eleven tokens come after the first step, in half of the time: 2 x 10 / 11."""
    floor = DraftFloor(1, 4, one_token_s=1.0, verifying_s=1.2, drafting_s=0.3)
    assert floor.speedup(3.0) == pytest.approx(2.0)
    found = Drafting("d", 9, 12, 12, (4, 4, 4, 4), (1, 3, 2, 2), (5.0, 5.0), (1.0, 1.0), (10.0, 10.0), (floor,))
    assert found.tokens_per_step == 1 + 7 / 3
    assert found.speedups == pytest.approx((20 / 11, 20 / 11))
    assert found.pays is True
    assert replace(found, assisted_s=(5.0, 15.0)).pays is None
    # The plain answer ended with 15 tokens in 0.75 s after the first; the other went on, with 6 x 5 in a second.
    longer = Drafting("d", 9, 16, 15, (4,) * 7, (1, 4, 4, 4, 4, 4, 4), (1.0,), (0.1,), (0.75,), ())
    assert longer.speedups == (30 / 15 * 0.75,)
    assert replace(longer, new_tokens=1).pays is None


def test_refused_in_one_line(subject: Subject, tiny_folder: Path, roofscope: Callable[..., Any]) -> None:
    with pytest.raises(RequestError, match=r"its vocabulary has 128 tokens, and that of \S+ 49152; use a draft model"):
        drafting(subject, str(tiny_folder))
    with pytest.raises(RequestError, match="random ones are never right"):
        drafting(subject, "smollm2-135m")
    found = roofscope("run", "smollm2-135m", "--draft", "ngram")
    assert found.code == 2
    assert "has random weights here, which accept no draft" in found.err


@pytest.mark.ci
def test_a_run_says_whether_drafts_pay(
    gguf_file: Path, short_folder: Path, roofscope: Callable[..., Any], tmp_path: Path
) -> None:
    """The whole model with its first six layers: measured at batch 1, and computed at batch 4."""
    arguments = ("run", str(gguf_file), "--prompt-lens", "16", "--batch-sizes", "1,4", "--new-tokens", "16")
    folder = tmp_path / "run"
    found = roofscope(
        *arguments, "--budget", "5", "--no-levers", "--full", "--draft", str(short_folder), "--out", str(folder)
    )
    assert found.code in (0, EXIT_INCOMPLETE), found.err  # so short a budget may not measure a busy host's overhead
    screen = " ".join(found.out.split())
    assert f"drafts of {short_folder.name} at batch 1:" in screen
    assert "16, the same as without drafts" in screen
    drafting = read_run(folder).document.drafting
    assert drafting is not None
    assert [floor.batch for floor in drafting.floors] == [1, 4]
    assert "at batch 1: " in (folder / "report.html").read_text(encoding="utf-8")
