"""Effects of operators on a card, each worked out once: the C++ card answers later calls with the same layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from .card import Card
from .native import native
from .pricing import Price, in_place, on_card, price_of, shaped


class Calls:
    """Allocates memory for the outputs of operators, and launches their kernels.

    `fused` operators return their output, in torch's layout, and the price of one kernel, however torch runs them.
    """

    def __init__(
        self, cards: Sequence[Card], known: Any, fused: Mapping[Any, Callable[..., tuple[Any, Price]]]
    ) -> None:
        self._cards = cards
        self._known = known
        self._fused = fused

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, again: bool = True) -> Any:
        """Allocate memory for new outputs, and run every call that is more than a view or an allocation.

        `again`: the next call of the same layout is answered from memory, without this function.
        """
        given = [*tensors_among(args), *tensors_among(kwargs.values())]
        price = None
        if func in self._fused:
            result, price = self._fused[func](args, kwargs)
            stood_in = given
        elif in_place(func, args):
            result, stood_in = args[0], given
        else:
            result, stood_in = shaped(func, args, kwargs)
        leaves, structure = tree_flatten(result)
        outputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        card = self._card_of(args, kwargs, given)
        laid = [_output(output, stood_in) for output in outputs]
        if price is None:
            fresh = [at for at, output in enumerate(laid) if output.is_fresh]
            price = price_of(func, args, given, outputs, fresh)
        call = native().Call(card.core, laid, isinstance(result, list), price)
        made = native().performed(call, given)
        if again and len(outputs) == len(leaves):
            self._known.learn(call)
        following = iter(made)
        return tree_unflatten(
            [next(following) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], structure
        )

    def made(self, like: torch.Tensor, card: Card) -> torch.Tensor:
        """Return a new tensor of a card with the layout of another."""
        [found] = native().performed(native().Call(card.core, [_output(like, [])], False, None), [])
        return found

    def _card_of(self, args: Sequence[Any], kwargs: Mapping[str, Any], given: Iterable[torch.Tensor]) -> Card:
        """Return the named card, or else the tensors' card."""
        device = named_device(args, kwargs) or next(tensor.device for tensor in given if on_card(tensor))
        if device.type != "cuda":
            raise NotImplementedError(f"the simulated card makes nothing on {device} but copies")
        return self._cards[self._known.current if device.index is None else device.index]


def named_device(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.device | None:
    found = kwargs.get("device") or next((each for each in args if isinstance(each, torch.device)), None)
    return None if found is None else torch.device(found)


def _output(tensor: torch.Tensor, given: Sequence[torch.Tensor]) -> Any:
    """Return the layout of an output, and whether it is an input or a view of one."""
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
