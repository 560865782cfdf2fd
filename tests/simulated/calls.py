"""What the calls of a card's operators do to it, each worked out once: whatever lies alike is treated alike."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .allocator import Block
from .card import Card, Region, Work
from .graph import Graph
from .pricing import Operator, Place, Price, nbytes, on_card
from .shapes import Layout, Shapes, described, in_place, layout_of


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """What is to be known of an operator. One alone is like it: hashing an operator takes torch a call into Python."""

    func: Any
    priced: Operator
    decomposed: Callable[..., Any] | None
    """Itself in other operators."""
    fused: Callable[..., tuple[Any, Price]] | None
    """One kernel, whatever torch's own way to it: what that gives, and its price."""
    rounds: bool
    """Whether float32 may be rounded on the way, as torch is set."""
    valued: Callable[..., Any] | None
    """What its result holds everywhere, of what each argument does."""
    special: Callable[..., Any] | None
    pinning: Callable[..., Any] | None


@dataclass(frozen=True, slots=True)
class _Known:
    """What a call does that was met before, with tensors laid out alike."""

    layout: Layout | None
    """None: it gives back its first argument."""
    takes: int | None
    """Bytes of memory for its output."""
    card: Any
    """Whose memory that is, and which runs its kernel."""
    price: Price | None


class Calls:
    """Gives memory to what operators make, and launches their kernels."""

    def __init__(self, cards: Sequence[Card], shapes: Shapes) -> None:
        self._cards = cards
        self._shapes = shapes
        self._known: dict[tuple[Any, ...], _Known] = {}
        self._blocks: dict[int, tuple[Block, Card, Any]] = {}
        self._workspaces: dict[object, Block] = {}

    def run(self, kind: Kind, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Take memory for what is new, and run what is more than a view or an allocation."""
        tensors: list[torch.Tensor] = []
        parts: list[Any] = [kind, *kwargs]
        described(args, tensors, parts)
        if kwargs:
            described(kwargs.values(), tensors, parts)
        if kind.rounds and tensors[0].dtype is torch.float32:
            parts.append(torch.backends.cuda.matmul.allow_tf32)
        if not tensors:  # a device without a number is the current one
            parts.append(torch.cuda.current_device())
        key = tuple(parts)
        try:
            known = self._known.get(key)
        except TypeError:  # what cannot be told apart
            return self._asked(kind, args, kwargs, tensors)[0]
        if known is None:
            return self._met(key, kind, args, kwargs, tensors)
        if known.layout is None:
            result = args[0]
        else:
            result = self._shapes.made(known.layout, args)
            if known.takes is not None:
                self._hold(result.untyped_storage(), known.takes, known.card)
        if known.price is not None:
            self._launch(known.card, known.price, (*tensors, result))
        return result

    def _met(
        self, key: Any, kind: Kind, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: list[torch.Tensor]
    ) -> Any:
        """Call what was not met before, and remember it where it gives a single tensor."""
        result, card, price = self._asked(kind, args, kwargs, tensors)
        if in_place(kind.func, args):
            self._known[key] = _Known(None, None, card, price)
        elif not kind.priced.mutates and (layout := layout_of(result, args)) is not None:
            takes = None if layout.view or not on_card(result) else result.untyped_storage().nbytes()
            self._known[key] = _Known(layout, takes, card, price)
        return result

    def _asked(
        self, kind: Kind, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: list[torch.Tensor]
    ) -> tuple[Any, Card | None, Price | None]:
        if kind.fused is None:
            result = self._shapes.result(kind.func, args, kwargs)
            return result, *self.account(kind, args, tensors, list(tensors_among([result])))
        result, price = kind.fused(args, kwargs)
        card = self._cards[result.device.index]
        self._launch(card, price, (*tensors, result))
        return result, card, price

    def account(
        self, kind: Kind, args: Sequence[Any], inputs: list[torch.Tensor], outputs: list[torch.Tensor]
    ) -> tuple[Card | None, Price | None]:
        card = self._card_of(outputs, inputs)
        if card is None:
            return None, None
        fresh = [at for at, tensor in enumerate(outputs) if self.take(tensor)]
        price = kind.priced.price(args, inputs, outputs, fresh)
        if price is not None:
            self._launch(card, price, (*inputs, *outputs))
        return card, price

    def _launch(self, card: Card, price: Price, tensors: Sequence[torch.Tensor]) -> None:
        """Run a kernel with these tensors, which its price counts."""
        if price.workspace:
            self._workspace(card)
        blocks = self._blocks

        def laid(places: Sequence[Place]) -> tuple[Region, ...]:
            return tuple(
                [(blocks[tensors[at].untyped_storage()._cdata][0].address + by, size) for at, by, size in places]
            )

        card.launch(Work(price.name, laid(price.reads), laid(price.writes), price.flops, price.dtype))

    def region(self, tensor: torch.Tensor) -> Region:
        """Where a tensor lies on its card."""
        block = self._blocks[tensor.untyped_storage()._cdata][0]
        return block.address + tensor.storage_offset() * tensor.element_size(), nbytes(tensor)

    def _card_of(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Card | None:
        for tensor in (*outputs, *inputs):
            if tensor.device.type == "cuda":
                return self._cards[tensor.device.index]
        return None

    def take(self, tensor: torch.Tensor) -> bool:
        """Give a new storage its memory; whether it was new."""
        storage = tensor.untyped_storage()
        if not on_card(tensor) or storage._cdata in self._blocks:
            return False
        self._hold(storage, storage.nbytes(), self._cards[tensor.device.index])
        return True

    def _hold(self, storage: torch.UntypedStorage, nbytes: int, card: Card) -> None:
        """Give a storage its memory until it ends."""
        key = storage._cdata
        stream = card.stream
        owner = stream.capture.pool if isinstance(stream.capture, Graph) else stream
        block = card.memory.allocate(nbytes, owner)
        self._blocks[key] = (block, card, weakref.ref(storage, lambda _, key=key: self._drop(key)))

    def _drop(self, key: int) -> None:
        block, card, _ = self._blocks.pop(key)
        card.memory.free(block)

    def _workspace(self, card: Card) -> None:
        """cuBLAS keeps a workspace a stream (CUDAContextLight.h: 32 MiB on Hopper, 8 MiB before)."""
        if card.stream not in self._workspaces:
            size = (32 << 20) if card.truth.capability >= (9, 0) else (8 << 20)
            self._workspaces[card.stream] = card.memory.allocate(size, card.stream)


def tensors_among(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_among(value)
