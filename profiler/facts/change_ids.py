"""The kinds of changes that a user can make, and the names that runs recorded for them."""

from enum import StrEnum


class ChangeId(StrEnum):
    """A kind of change."""

    DTYPE = "dtype"
    FORMAT = "format"
    STATIC_CACHE = "static-cache"
    EIGHT_BIT_CACHE = "8-bit-cache"
    GRAPH = "cuda-graph"
    COMPILED_STEP = "compiled-step"
    COMPILED_FORWARD = "compiled-forward"
    SDPA = "sdpa-attention"
    EAGER_ATTENTION = "eager-attention"
    REPEATED_HEADS = "repeated-heads"
    WITHOUT_CUDNN = "without-cudnn"
    UNWINDOWED = "unwindowed"
    EXPERTS = "experts"
    THREADS = "threads"
    KEPT_PAGES = "kept-pages"


WEIGHTS = frozenset({ChangeId.DTYPE, ChangeId.FORMAT})
CACHES = frozenset({ChangeId.STATIC_CACHE, ChangeId.EIGHT_BIT_CACHE})
STEPS = frozenset({ChangeId.GRAPH, ChangeId.COMPILED_STEP, ChangeId.COMPILED_FORWARD})
ATTENTION = frozenset(
    {ChangeId.SDPA, ChangeId.EAGER_ATTENTION, ChangeId.REPEATED_HEADS, ChangeId.WITHOUT_CUDNN, ChangeId.UNWINDOWED}
)
PARTS = (WEIGHTS, CACHES | STEPS, ATTENTION)
"""Changes of one part exclude each other, as do two of one kind."""


def exclude(one: ChangeId, other: ChangeId) -> bool:
    """Return whether two changes are of one kind or of one part."""
    return one is other or any({one, other} <= part for part in PARTS)


_OLD_FORMS = {
    "torch.compile": ChangeId.COMPILED_STEP,
    "a static cache and one CUDA graph per step": ChangeId.GRAPH,
    "a static cache": ChangeId.STATIC_CACHE,
    "an 8-bit KV cache": ChangeId.EIGHT_BIT_CACHE,
    "attention without cuDNN": ChangeId.WITHOUT_CUDNN,
    "attention on repeated heads": ChangeId.REPEATED_HEADS,
    "math attention": ChangeId.EAGER_ATTENTION,
}
"""What runs before 0.5.0 tried without a line, by the name that they recorded."""


def change_recorded_as(form: str) -> tuple[ChangeId, str] | None:
    """Return the change of a trial that recorded only a name, and its value; None for one that left."""
    for of_kind in (ChangeId.THREADS, ChangeId.EXPERTS):
        if form.endswith(f" {of_kind}"):
            return of_kind, form.partition(" ")[0]
    name = form.removeprefix("unquantised ")
    if name in ("float32", "bfloat16", "float16"):
        return ChangeId.DTYPE, name
    if " " not in name and name not in _OLD_FORMS:
        return ChangeId.FORMAT, name
    return (_OLD_FORMS[form], "") if form in _OLD_FORMS else None
