"""What speculative decoding can gain: the tokens of a step that verifies drafts, and the acceptance from which it pays.

Y. Leviathan, M. Kalman, Y. Matias: Fast Inference from Transformers via Speculative Decoding, ICML 2023
(arXiv:2211.17192), sections 3.1 and 3.3, for drafts of which each token is accepted with the same probability.
"""

from __future__ import annotations

from profiler.facts.step import Count, Step

_ACCURACY = 1e-9


def verifying(batch: Count, drafted: int, context: Count) -> Step:
    """Return the step that verifies `drafted` tokens per sequence: they and one more run, and all logits are asked for.

    Without drafts it is a decode step.
    """
    return Step(batch, 1 + drafted, context, asked=1 + drafted)


def expected_tokens(acceptance: float, drafted: int) -> float:
    """Return the expected tokens of a step that verifies `drafted` ones: (1 - a^(k+1)) / (1 - a), from 1 to k + 1."""
    return sum(acceptance**place for place in range(drafted + 1))


def pays_from(cost: float, drafted: int) -> float | None:
    """Return the least acceptance, 0 to 1, at which drafting and verifying pays; None if it never does.

    `cost` is the time of drafting and verifying over that of a step of one token, which gives one token.
    """
    if cost > drafted + 1:
        return None
    low, high = 0.0, 1.0
    while high - low > _ACCURACY:
        middle = (low + high) / 2
        low, high = (low, middle) if expected_tokens(middle, drafted) >= cost else (middle, high)
    return high if low else 0.0
