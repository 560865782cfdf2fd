"""Real prompts: their tokens are the tokenizer's, and a file that gives none is refused with its line."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tokenized import TEMPLATE, save_tokenizer
from transformers import GemmaConfig, GPT2Config, LlamaConfig, Qwen3Config

from profiler.errors import RequestError
from profiler.grid.cells import Cell
from profiler.grid.ragged import PADDED_ENGINE, Ragged, Request
from profiler.loading import prompts as module
from profiler.loading.prompts import Prompts, load_tokenizer, read_prompts
from profiler.loading.source import ModelSource

WORDS = 32


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return _tokenizer(tmp_path_factory.mktemp("plain"), None)


def _tokenizer(folder: Path, template: str | None) -> Any:
    save_tokenizer(folder, WORDS, template)
    LlamaConfig().save_pretrained(folder)
    return load_tokenizer(ModelSource("folder", folder.name, folder), "--prompts", trust_remote_code=False)


def _read(
    tmp_path: Path, content: str | bytes, tokenizer: Any, name: str = "prompts.txt", most: float = math.inf
) -> Any:
    file = tmp_path / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_prompts(file, tokenizer, WORDS, most)


def test_a_text_has_a_prompt_on_each_line(tmp_path: Path, tokenizer: Any) -> None:
    found = _read(tmp_path, "w3 w4\n\n  \nw5\n", tokenizer)
    assert found.real == ((3, 4), (5,))
    assert found.name == "prompts.txt"
    assert found.shape(8) == Ragged("prompts.txt", (Request(2, 8), Request(1, 8)))
    assert _read(tmp_path, "w3 w4\nw5 w6", tokenizer).shape(8) == [2]
    for content in (b"\xef\xbb\xbfw3\nw4", b"w3\r\nw4\r\n"):  # a byte order mark, and Windows' line ends
        assert _read(tmp_path, content, tokenizer).real == ((3,), (4,))


def test_json_lines(tmp_path: Path, tokenizer: Any) -> None:
    lines = '{"prompt": "w3\u2028w4"}\n\n{"id": 7, "prompt": "w5\\nw6"}\n'
    assert _read(tmp_path, lines, tokenizer).real == ((3, 4), (5, 6))
    assert _read(tmp_path, lines, tokenizer, "prompts.jsonl").real == ((3, 4), (5, 6))


def test_a_chat_template_wraps_texts_and_messages(tmp_path: Path) -> None:
    chatting = _tokenizer(tmp_path, TEMPLATE)
    assert _read(tmp_path, "w3 w4", chatting).real == ((1, 3, 4, 2),)
    messages = [{"role": "system", "content": "w5"}, {"role": "user", "content": "w6"}]
    lines = json.dumps({"messages": messages}) + "\n" + json.dumps({"prompt": "w7"})
    assert _read(tmp_path, lines, chatting).real == ((1, 5, 1, 6, 2), (1, 7, 2))
    refusing = _tokenizer(tmp_path, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match=r"line 1 of prompts.txt cannot be encoded: roles must alternate\.$"):
        _read(tmp_path, lines, refusing)


@pytest.mark.parametrize(
    ("content", "name", "words"),
    [
        ("", "a.txt", "a.txt has no prompt"),
        (b"w3\n\xff\xfe", "a.txt", r"a.txt is not UTF-8 \(byte 3\)"),
        ('{"prompt": "w3"}\n{"text": "w4"}', "a.txt", "line 2 of a.txt has neither a `prompt`"),
        ('{"prompt": "w3"}\nw4', "a.txt", "line 2 of a.txt is not a JSON object"),
        ('{"messages": [{"role": "user", "content": "w3"}]}', "a.txt", "line 1 of a.txt has messages, but"),
        ('w3\n\nw4 w5 w6', "a.txt", "line 3 of a.txt has 3 tokens, and this model takes 2 before --new-tokens"),
        ('{"prompt": " "}', "a.txt", "line 1 of a.txt gives no token"),
        ('{"prompt": "\\ud800"}', "a.txt", "line 1 of a.txt cannot be encoded"),
    ],
)  # fmt: skip
def test_what_gives_no_prompt_is_refused(
    content: str | bytes, name: str, words: str, tmp_path: Path, tokenizer: Any
) -> None:
    with pytest.raises(RequestError, match=words) as raised:
        _read(tmp_path, content, tokenizer, name, most=2)
    assert "\n" not in str(raised.value)
    assert str(raised.value).endswith(".")


def test_files_of_another_kind_are_refused(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no such file; it has too many prompts; its tokens are not those of the model."""
    for path in (tmp_path / "none.txt", tmp_path):
        with pytest.raises(RequestError, match="cannot be read"):
            read_prompts(path, tokenizer, WORDS, math.inf)
    monkeypatch.setattr(module, "MOST_PROMPTS", 2)
    with pytest.raises(RequestError, match="has 3 prompts, and a run takes at most 2; draw some: shuf"):
        _read(tmp_path, "w3\n" * 3, tokenizer)
    (tmp_path / "prompts.txt").write_text("w3\nw20")
    with pytest.raises(RequestError, match=r"line 2 of prompts.txt gives token 20, but the model has 16"):
        read_prompts(tmp_path / "prompts.txt", tokenizer, 16, math.inf)


@pytest.mark.parametrize("config", [LlamaConfig, GPT2Config, Qwen3Config, GemmaConfig])
def test_a_folder_without_a_tokenizer(config: Any, tmp_path: Path) -> None:
    """transformers 5 makes one without words for some of these, to which all texts are alike."""
    config(vocab_size=64).save_pretrained(tmp_path)
    with pytest.raises(RequestError, match=r"--prompts needs .*tokenizer.*give a folder with tokenizer.json"):
        load_tokenizer(ModelSource("folder", "bare", tmp_path), "--prompts", trust_remote_code=False)


def test_rows_have_the_prompts_of_their_lengths() -> None:
    real = Prompts(WORDS, ((1, 2, 3), (4,), (5, 6, 7), (8, 9)), "prompts.txt", pad_id=31)
    assert real.of(Cell(3, 3, 8)).tolist() == [[1, 2, 3], [5, 6, 7], [4, 4, 4]]
    # No prompt has five or seven tokens: they are repeated, or cut.
    assert real.of(Cell(2, 5, 8)).tolist() == [[1, 2, 3, 1, 2], [4, 4, 4, 4, 4]]
    ragged = Prompts(WORDS, real.real, "prompts.txt", 31, ragged=real.shape(8))  # type: ignore[arg-type]
    assert ragged.of(Cell(4, 3, 8, engine=PADDED_ENGINE)).tolist() == [[1, 2, 3], [31, 31, 4], [5, 6, 7], [31, 8, 9]]
    assert ragged.of(Cell(4, 3, 8)).tolist() == [[1, 2, 3], [4, 4, 4], [5, 6, 7], [8, 9, 8]]


def test_random_tokens_are_the_same_for_the_same_cell() -> None:
    ids = Prompts(1000).of(Cell(2, 50, 8))
    assert ids.shape == (2, 50)
    assert set(ids.flatten().tolist()) <= set(range(1000))
    assert ids.equal(Prompts(1000).of(Cell(2, 50, 8, engine="static")))
    assert not ids[0].equal(ids[1])
