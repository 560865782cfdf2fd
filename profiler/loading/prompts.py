"""The prompts of a run: real ones of a file in the tokens of the model's tokenizer, or random tokens."""

import hashlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from profiler.errors import RequestError, first_line
from profiler.grid.cells import Cell
from profiler.grid.ragged import PADDED_ENGINE, Ragged, Request, longest
from profiler.loading.config import pretrained_location
from profiler.loading.meta_model import quiet_libraries
from profiler.loading.source import ModelSource

MOST_PROMPTS = 10_000


@dataclass(frozen=True)
class Prompts:
    """Token ids for any cell, the same for the same cell."""

    vocab_size: int
    real: tuple[tuple[int, ...], ...] = ()
    """The token ids of real prompts, in the order of their file; empty: tokens are random."""
    name: str | None = None
    """The file's name without its folder."""
    pad_id: int = 0
    ragged: Ragged | None = None
    """The unequal lengths of the run's grid."""

    @property
    def digest(self) -> str | None:
        """A short hash of the real prompts, by which a run is not resumed with others; None for random tokens."""
        return hashlib.sha256(repr(self.real).encode()).hexdigest()[:12] if self.real else None

    def of(self, cell: Cell) -> torch.Tensor:
        """Return the token ids [batch, prompt] of a cell."""
        batch = self.ragged.batch(cell.batch_size) if self.ragged else ()
        lens = (
            [request.prompt_len for request in batch]
            if batch and longest(batch) == cell.prompt_len
            else [cell.prompt_len] * cell.batch_size
        )
        width, pads = cell.prompt_len, cell.engine == PADDED_ENGINE
        if not self.real:
            generator = torch.Generator().manual_seed(1_000_003 * len(lens) + width)
            return torch.randint(0, self.vocab_size, (len(lens), width), generator=generator)
        # First the prompts of these lengths: padded on the left, or else repeated.
        of_length = {
            length: itertools.cycle(sorted(self.real, key=lambda prompt: len(prompt) != length)) for length in set(lens)
        }
        rows = [np.resize(next(of_length[length]), length if pads else width) for length in lens]
        padded = [np.pad(row, (width - len(row), 0), constant_values=self.pad_id) for row in rows]
        return torch.from_numpy(np.stack(padded)).long()

    def shape(self, new_tokens: int) -> list[int] | Ragged:
        """Return the lengths of the real prompts as a grid takes them: the one that all have, or unequal ones."""
        lens = [len(prompt) for prompt in self.real]
        if len(set(lens)) == 1:
            return lens[:1]
        return Ragged(str(self.name), tuple(Request(length, new_tokens) for length in lens))


def read_prompts(path: Path, tokenizer: Any, vocab_size: int, most_tokens: float) -> Prompts:
    """Return the prompts of a file in the tokenizer's tokens: lines of text, or JSON lines; blank lines are skipped.

    With a chat template, a text is the only message of a user. Raises RequestError, naming the line, for a prompt that
    cannot be encoded, has no token, one outside the `vocab_size`, or more than `most_tokens`.
    """
    prompts = []
    for where, line in _lines(path):
        ids = _encoded(tokenizer, line, where)
        if not ids:
            raise RequestError(f"{where} gives no token; remove it.")
        if max(ids) >= vocab_size:
            raise RequestError(
                f"{where} gives token {max(ids)}, but the model has {vocab_size}: the tokenizer is not the model's."
            )
        if len(ids) > most_tokens:
            raise RequestError(
                f"{where} has {len(ids)} tokens, and this model takes {most_tokens:.0f} before --new-tokens;"
                " remove the line, or cut all prompts with --prompt-lens."
            )
        prompts.append(tuple(ids))
    pad_id = next((each for each in (tokenizer.pad_token_id, tokenizer.eos_token_id) if each is not None), 0)
    return Prompts(vocab_size, tuple(prompts), path.name, pad_id if pad_id < vocab_size else 0)


def _lines(path: Path) -> Iterator[tuple[str, str | list[Any]]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"--prompts: {path.name} is not UTF-8 (byte {error.start}); convert it: iconv -t UTF-8 (-f its encoding)."
        ) from None
    except OSError as error:
        raise RequestError(f"--prompts: {path.name} cannot be read: {error.strerror}.") from None
    # A JSON string may contain the other characters at which splitlines() cuts.
    lines = [(number, line.strip()) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise RequestError(f"--prompts: {path.name} has no prompt; write one on each line.")
    if len(lines) > MOST_PROMPTS:
        raise RequestError(
            f"--prompts: {path.name} has {len(lines)} prompts, and a run takes at most {MOST_PROMPTS};"
            f" draw some: shuf -n 1000 {path.name}."
        )
    as_json = path.suffix.lower() in (".jsonl", ".json", ".ndjson") or bool(_fields(lines[0][1]))
    for number, line in lines:
        where = f"--prompts: line {number} of {path.name}"
        yield where, _prompt_in(line, where) if as_json else line


def _fields(line: str) -> dict[str, Any]:
    """The fields of a JSON object; none of any other line."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def _prompt_in(line: str, where: str) -> str | list[Any]:
    fields = _fields(line)
    for name, kind in (("messages", list), ("prompt", str)):
        if isinstance(value := fields.get(name), kind) and value:
            return value
    why = "has neither a `prompt` (a text) nor `messages` (a list)" if fields else "is not a JSON object"
    raise RequestError(f'{where} {why}; write {{"prompt": "..."}} on each line.')


def _encoded(tokenizer: Any, prompt: str | list[Any], where: str) -> list[int]:
    if isinstance(prompt, list) and not tokenizer.chat_template:
        raise RequestError(f"{where} has messages, but the tokenizer has no chat template; write a `prompt`.")
    try:
        if not tokenizer.chat_template:
            return list(tokenizer(prompt).input_ids)
        messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])
    except Exception as error:
        raise RequestError(f"{where} cannot be encoded: {first_line(error)}.") from error


def load_tokenizer(source: ModelSource, flag: str, *, trust_remote_code: bool) -> Any:
    """Return the model's own tokenizer; that of a preset is its hub id's. Raises RequestError, which names `flag`."""
    from transformers import AutoTokenizer

    where, extra = pretrained_location(source)
    advice = "give a folder with tokenizer.json, a .gguf file, or a hub id that is in the local cache"
    try:
        with quiet_libraries():
            tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=trust_remote_code, **extra)
    except Exception as error:
        reason = first_line(error)
        # The lines after this one list the files that it looked for.
        why = "" if reason.startswith("Couldn't instantiate") else f" ({reason})"
        raise RequestError(f"{flag} needs a tokenizer, and none of {source.name} loads{why}; {advice}.") from error
    # For a folder without its files, transformers 5 makes a tokenizer that knows special tokens only.
    if set(tokenizer.get_vocab().values()) <= set(tokenizer.all_special_ids):
        raise RequestError(f"{flag} needs a tokenizer, and {source.name} has none; {advice}.")
    return tokenizer
