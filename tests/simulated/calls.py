"""What calls of a card's operators do to it, each worked out once: the card in C++ answers whatever lies alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from .card import Card
from .native import native
from .pricing import Operator, Price
from .shapes import in_place, on_card, shaped


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """What is to be known of an operator. One alone is like it: hashing an operator takes torch a call into Python."""

    func: Any
    priced: Operator
    decomposed: Callable[..., Any] | None
    """Itself in other operators."""
    fused: Callable[..., tuple[Any, Price]] | None
    """One kernel, whatever torch's own way to it: a tensor laid out as what that gives, and its price."""
    valued: Callable[..., Any] | None
    """What its result holds everywhere, of what each argument does."""
    counting: Callable[..., Any] | None
    """The same, where its first argument is a single integer."""
    special: Callable[..., Any] | None
    pinning: Callable[..., Any] | None


class Calls:
    """Gives memory to what operators make, and launches their kernels."""

    def __init__(self, cards: Sequence[Card], known: Any) -> None:
        self._cards = cards
        self._known = known

    def run(self, kind: Kind, args: Sequence[Any], kwargs: Mapping[str, Any], *, again: bool = True) -> Any:
        """Take memory for what is new, and run what is more than a view or an allocation.

        `again`: the next that is like it will find this known, and never come here.
        """
        given = [*tensors_among(args), *tensors_among(kwargs.values())]
        price = None
        if kind.fused is not None:
            result, price = kind.fused(args, kwargs)
            stood_in = given
        elif in_place(kind.func, args):
            result, stood_in = args[0], given
        else:
            result, stood_in = shaped(kind.func, args, kwargs)
        leaves, structure = tree_flatten(result)
        outputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        card = self._card_of(args, kwargs, given)
        laid = [_output(output, stood_in) for output in outputs]
        if price is None:
            fresh = [at for at, output in enumerate(laid) if output.is_fresh]
            price = kind.priced.price(args, given, outputs, fresh)
        call = native().Call(card.core, laid, isinstance(result, list), price)
        made = native().performed(call, given)
        if again and len(outputs) == len(leaves):
            self._known.learn(call)
        following = iter(made)
        return tree_unflatten(
            [next(following) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], structure
        )

    def made(self, like: torch.Tensor, card: Card) -> torch.Tensor:
        """A new tensor of a card, laid out like another."""
        [found] = native().performed(native().Call(card.core, [_output(like, [])], False, None), [])
        return found

    def _card_of(self, args: Sequence[Any], kwargs: Mapping[str, Any], given: Iterable[torch.Tensor]) -> Card:
        """The card that is named, or else that of the tensors."""
        device = named_device(args, kwargs) or next(tensor.device for tensor in given if on_card(tensor))
        if device.type != "cuda":
            raise NotImplementedError(f"the simulated card makes nothing on {device} but copies")
        return self._cards[self._known.current if device.index is None else device.index]


def named_device(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.device | None:
    found = kwargs.get("device") or next((each for each in args if isinstance(each, torch.device)), None)
    return None if found is None else torch.device(found)


def _output(tensor: torch.Tensor, given: Sequence[torch.Tensor]) -> Any:
    """How an output lies, and whether it is, or looks at, one of those that were given."""
    same = next((at for at, each in enumerate(given) if each is tensor), -1)
    storage = tensor.untyped_storage()
    of = next((at for at, each in enumerate(given) if each.untyped_storage()._cdata == storage._cdata), -1)
    shape, stride, offset = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
    return native().Output(same, of, shape, stride, offset, tensor.dtype, storage.nbytes())


def tensors_among(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_among(value)
