"""The grammar of ranges (128; 64,256; 64..2048*2), the grid that a run's options describe, and default grids."""

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from profiler.errors import GridError, RequestError
from profiler.grid.cells import DEFAULT_ENGINE, Grid
from profiler.grid.ragged import PADDED_ENGINE, RAGGED, Ragged, parse_ragged, too_few
from profiler.options import listed

MAX_VALUES = 1000
MOST = 10**7
"""Most sequences, or tokens of one: no model has more, and counts of more would not fit the integers of a machine."""
# No sensible number has more digits, and Python itself reads no more than a few thousand.
_NUMBER = re.compile(r"\d{1,18}")
_RANGE = re.compile(r"(\d{1,18})\.\.(\d{1,18})(?:([*+])(\d{1,18}))?")
_GRAMMAR = "use a number (128), a list (64,256), or a range (64..2048*2, 1..9+2)"
_LEAST_NEW_TOKENS = 4
_RUNGS: tuple[tuple[tuple[int, ...], tuple[int, ...], int], ...] = (
    ((128, 512, 2048), (1, 4, 16), 16),
    ((128, 512, 2048), (1, 4), 16),
    ((128, 512), (1, 2, 4), 16),
    ((64, 256), (1, 2, 4), 16),
    ((64, 256), (1, 4), 10),
    ((64, 256), (1, 2), 10),
    ((64, 128), (1, 2), 10),
    ((32, 64), (1, 2), 10),
    ((32,), (1, 2), 10),
    ((32,), (1,), 10),
)
"""Prompt lengths, batch sizes and new tokens: what chats and retrieval look like, and less where steps are slow."""

TEST_PROMPTS = (128, 64, 32, 16)
"""Prompt lengths of a batch test; a shorter one leaves time for more doublings."""
TEST_TOKENS = 10
MOST_SEQUENCES = 4096


def parse_values(text: str, option: str) -> tuple[int, ...]:
    """Return the distinct numbers of `"128"`, `"64,256"`, `"64..2048*2"` (doubling) or `"1..9+2"`, ascending.

    Raises GridError, naming `option`, for other texts, values below 1 or above MOST, and more than MAX_VALUES values.
    """
    values: set[int] = set()
    for part in (piece.strip() for piece in text.split(",")):
        if _NUMBER.fullmatch(part):
            values.add(int(part))
        elif match := _RANGE.fullmatch(part):
            values.update(_expand(match, part, option))
        else:
            raise GridError(f"{option}: {part!r} is neither a number nor a range; {_GRAMMAR}.")
        if len(values) > MAX_VALUES:
            raise GridError(f"{option}: {text!r} gives more than {MAX_VALUES} values; use a wider step.")
    return _checked(values, option)


def parse_in_order(text: str, option: str) -> tuple[int, ...]:
    """Return the numbers of `"128"` or `"256,128"` in their order. Raises GridError as `parse_values` does."""
    return tuple(number for part in listed(text) for number in parse_values(part, option))


def make_grid(
    prompt_lens: str | Sequence[int] | Ragged,
    batch_sizes: str | Sequence[int],
    new_tokens: int,
    context_lens: str | Sequence[int] = (),
    engines: Sequence[str] = (DEFAULT_ENGINE,),
    prefix: int = 0,
) -> Grid:
    """Return the Grid of texts in the range grammar, of numbers, or of ragged prompts. Raises GridError."""
    check_new_tokens(new_tokens)
    if isinstance(prompt_lens, Ragged) or (isinstance(prompt_lens, str) and prompt_lens.startswith(RAGGED)):
        return _ragged_grid(prompt_lens, values_of(batch_sizes, "--batch-sizes"), new_tokens, context_lens, engines)
    contexts = values_of(context_lens, "--context-lens") if context_lens else ()
    prompts = values_of(prompt_lens, "--prompt-lens") if prompt_lens or not contexts else ()
    check_prefix(prefix, min((*prompts, *contexts)))
    return Grid(
        prompt_lens=prompts,
        batch_sizes=values_of(batch_sizes, "--batch-sizes"),
        new_tokens=new_tokens,
        context_lens=contexts,
        engines=tuple(dict.fromkeys(engines)),
        prefix=prefix,
    )


def _ragged_grid(
    prompts: str | Ragged,
    batch_sizes: tuple[int, ...],
    new_tokens: int,
    context_lens: str | Sequence[int],
    engines: Sequence[str],
) -> Grid:
    if context_lens:
        raise GridError("--context-lens fills the cache equally for all sequences; leave it out with ragged prompts.")
    if set(engines) - {DEFAULT_ENGINE, PADDED_ENGINE}:
        raise GridError(
            f"prompts of unequal lengths work only with --engine {DEFAULT_ENGINE}, with and without a mask; for other"
            " engines, give --prompt-lens one length, which cuts --prompts FILE."
        )
    ragged = prompts if isinstance(prompts, Ragged) else parse_ragged(prompts, batch_sizes[-1], new_tokens)
    if len(ragged.requests) < batch_sizes[-1]:
        raise GridError(too_few(ragged.name, len(ragged.requests), batch_sizes[-1]))
    grid = Grid((), batch_sizes, new_tokens, (), (PADDED_ENGINE, DEFAULT_ENGINE), ragged)
    if min(cell.new_tokens for cell in grid.cells) < _LEAST_NEW_TOKENS:
        raise GridError(
            f"--prompt-lens: a batch of {ragged.name} writes fewer than {_LEAST_NEW_TOKENS} tokens, too few to time a"
            " decode step."
        )
    return replace(grid, prompt_lens=tuple(sorted({cell.prompt_len for cell in grid.cells})))


def values_of(values: str | Sequence[int], option: str) -> tuple[int, ...]:
    """Return the numbers of a text or of a sequence. Raises GridError as `parse_values` does."""
    return parse_values(values, option) if isinstance(values, str) else _checked(values, option)


def check_new_tokens(new_tokens: int) -> None:
    """Raise GridError for too few new tokens to time a decode step, or for too many."""
    if new_tokens < _LEAST_NEW_TOKENS:
        raise GridError(
            f"--new-tokens: {new_tokens} is too few to time a decode step; use {_LEAST_NEW_TOKENS} or more."
        )
    _checked([new_tokens], "--new-tokens")


def _checked(values: Iterable[int], option: str) -> tuple[int, ...]:
    ordered = tuple(sorted(set(values)))
    if not ordered:
        raise GridError(f"{option}: no value given; {_GRAMMAR}.")
    if ordered[0] < 1:
        raise GridError(f"{option}: {ordered[0]} is not possible; every value must be 1 or more.")
    if ordered[-1] > MOST:
        raise GridError(f"{option}: {ordered[-1]} is not possible; no value may be above {MOST}.")
    return ordered


def _expand(match: re.Match[str], part: str, option: str) -> Sequence[int]:
    first, last = int(match[1]), int(match[2])
    operator, step = match[3] or "+", int(match[4] or 1)
    if first < 1 or last < first:
        raise GridError(f"{option}: {part!r} is not an ascending range from 1 or more; {_GRAMMAR}.")
    if step < (2 if operator == "*" else 1):
        raise GridError(f"{option}: {part!r} never reaches its end; use a factor of 2 or more, or a step of 1 or more.")
    if operator == "+":
        return range(first, last + 1, step)[: MAX_VALUES + 1]
    powers = (first * step**power for power in range(MAX_VALUES + 1))
    return list(itertools.takewhile(lambda value: value <= last, powers))


def check_prefix(prefix: int, shortest: int) -> None:
    """Raise RequestError for a prefix that is not shorter than the `shortest` prompt or cache of a decode step."""
    if prefix and not 0 < prefix < shortest:
        raise RequestError(
            f"--prefix {prefix} is not possible: it is a part of every prompt, and the shortest has {shortest} tokens;"
            f" use 0 to {shortest - 1}, or longer prompts."
        )


def beyond_positions(limit: int | None, longest: int) -> str:
    """Return a note on a sequence of `longest` tokens beyond the model's `limit` (None: no limit); else empty."""
    if limit is None or longest <= limit:
        return ""
    return f"{longest:,} tokens are beyond the model's own limit of {limit:,}: they are counted, and `run` refuses them"


def check_positions(limit: int | None, longest: int, shorter: str) -> None:
    """Raise RequestError for `longest` tokens beyond `limit`; `shorter` names the options that make it shorter."""
    if limit is not None and longest > limit:
        raise RequestError(
            f"the longest prompt plus its new tokens is {longest} tokens, but this model's limit is {limit};"
            f" use {shorter}."
        )


def default_grids(new_tokens: int | None) -> list[Grid]:
    """Return the default grids of a run, with `new_tokens` unless it is None."""
    return [Grid(prompts, sizes, new_tokens or few) for prompts, sizes, few in _RUNGS]


def doubling_grids(prompt_lens: Sequence[int], context_lens: Sequence[int], new_tokens: int | None) -> list[Grid]:
    """Return the grids of a batch test: most doublings first; three of a shorter prompt before fewer of a longer."""
    sizes = [tuple(1 << power for power in range(most)) for most in range(MOST_SEQUENCES.bit_length(), 1, -1)]
    # A batch test should reach at least batch 8, after three doublings.
    enough, few = ([each for each in sizes if (each[-1] >= 8) == is_enough] for is_enough in (True, False))
    grids = [Grid((prompt_len,), (), new_tokens or TEST_TOKENS) for prompt_len in prompt_lens]
    grids += [Grid((), (), new_tokens or TEST_TOKENS, (context_len,)) for context_len in context_lens]
    by_doublings = [replace(grid, batch_sizes=each) for grid in grids for each in enough]
    return by_doublings + [replace(grids[-1], batch_sizes=each) for each in few]
