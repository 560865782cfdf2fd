"""The pairs of a query and a key in attention, and the cached tokens that it reads again."""

from typing import Any

import numpy as np

from profiler.facts.step import Count, Step


def read_again(step: Step, shared: Any, unchosen: Any = 0) -> Any:
    """Return the cached tokens that a kernel reads again for each further sequence, though `shared` are the same ones.

    Others read a prefix once (Hydragen, arXiv:2402.05099). `unchosen` ones are not read; the rest differ if they can.
    """
    return np.maximum((step.batch - 1) * shared - step.batch * unchosen, 0)


def causal_pairs(query: Count, context: Count, window: int | None = None, *, rate: int = 1) -> Any:
    """Return the (query, key) pairs per sequence of causal attention: a query sees the cache, its past and itself.

    The sum over i = 1..query of min((context + i) // rate, window); a key stands for `rate` tokens.
    """

    def up_to(tokens: Any) -> Any:
        limit = tokens if window is None else np.minimum(tokens, window * rate)
        blocks = limit // rate
        whole = rate * (blocks * (blocks - 1) // 2) + blocks * (limit - blocks * rate + 1)
        return whole if window is None else whole + (tokens - limit) * window

    return up_to(context + query) - up_to(context)


def chunked_pairs(query: Count, context: Count, chunk: int) -> Any:
    """Return the (query, key) pairs per sequence within chunks: the sum over queries of i mod chunk + 1 (Llama 4)."""

    def up_to(tokens: Any) -> Any:
        whole, rest = divmod(tokens, chunk)
        return whole * (chunk * (chunk + 1) // 2) + rest * (rest + 1) // 2

    return up_to(context + query) - up_to(context)
