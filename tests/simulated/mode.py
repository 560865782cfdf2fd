"""The dispatch mode for calls that are not known yet: it prices them and sends them to a card, and computes nothing.

The C++ card answers later calls with the same layout.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from . import attention, four_bit
from .card import Card
from .host import Host
from .native import native
from .pricing import Price, aten, in_place, matmul_dtype, nbytes, on_card, place, price_of, shaped

_VALUED: dict[Any, Callable[..., Any]] = {
    aten.full.default: lambda size, value: value,
    aten.bitwise_or.Tensor: operator.or_,
    aten.bitwise_and.Tensor: operator.and_,
    aten.bitwise_not.default: lambda value: not value if isinstance(value, bool) else ~value,
    aten.max.default: lambda value: value,
    aten.eq.Scalar: operator.eq,
    aten.ones_like.default: lambda like: 1,
    aten.all.default: bool,
    aten.cat.default: lambda values, dim=0: values[0] if len(set(values)) == 1 else None,
}
"""The operators whose results a card knows, for tensors with one value everywhere: `generate` needs them to end."""

_COUNTING: dict[Any, Callable[..., Any]] = {
    aten.zero_.default: lambda value: 0,
    aten.fill_.Scalar: lambda value, number: number,
    aten.add_.Tensor: operator.add,
}
"""Operators known for a single integer: transformers' static cache counts its tokens this way (cache_utils.py)."""

_BY_DEFAULT = ("aten::_safe_softmax", "bitsandbytes::int8_mixed_scaled_mm", "bitsandbytes::int8_scaled_mm")

_HELD_FOR_REAL = 32 << 20
"""Larger host tensors are fake, too: they only wait for a copy over the link."""

_NO_OVERHEAD = torch.Tensor.__torch_dispatch__


class CardMode(TorchDispatchMode):
    """Routes operators to cards. Reading a value is a wait. An unknown number reads as 1, an unknown bool as False."""

    # Dynamo never traces simulated code; its guard around each call would take a fifth of the time.
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init__(self, cards: Sequence[Card], host: Host) -> None:
        super().__init__()
        self._cards = cards
        self._host = host
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._pinned: set[int] = set()
        self._pinning = {
            aten._pin_memory.default: self._pin,
            aten.is_pinned.default: lambda tensor: tensor.untyped_storage()._cdata in self._pinned,
        }
        self._fused = {
            aten.scaled_dot_product_attention.default: self._attention,
            aten.linear.default: self._linear,
            aten.copy_.default: self._copied,
        }
        self._special = {
            aten.scaled_dot_product_attention.default: self._attend,
            aten._fused_sdp_choice.default: self._choose,
            aten._local_scalar_dense.default: self._read_value,
            aten._to_copy.default: self._to_copy,
            aten.copy_.default: self._copy,
            aten.set_.source_Storage: self._set,
            aten.set_.source_Storage_storage_offset: self._set,
            aten.record_stream.default: lambda args, kwargs: None,
            torch.ops.prim.device.default: lambda args, kwargs: args[0].device,
        }
        self._named = {
            "bitsandbytes::int8_vectorwise_quant": self._quantise_rows,
            "bitsandbytes::gemm_4bit": self._multiply_4bit,
        }
        fused, pinning = ({func.name() for func in funcs} for funcs in (self._fused, self._pinning))
        self.known = native().Known(self, host.core, [card.core for card in cards], fused, pinning)
        self._plans: set[Hashable] = set()
        self._looked: list[bool] = []

    def __enter__(self) -> CardMode:
        self._looked.append(native().look(True))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        native().look(self._looked.pop())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(each.__torch_dispatch__ is not _NO_OVERHEAD and not issubclass(each, FakeTensor) for each in types):
            return NotImplemented  # a weight of another library decomposes the call itself
        kwargs = kwargs or {}
        if func in self._pinning:
            return self._pinning[func](args[0])
        tensors = [*tensors_among((*args, *kwargs.values()))]
        named = named_device(args, kwargs)
        if not (any(map(on_card, tensors)) or (named is not None and named.type == "cuda")):
            if not any(isinstance(tensor, FakeTensor) for tensor in tensors):
                return self._on_host(func, args, kwargs)
            answer = self._read_value if func is aten._local_scalar_dense.default else partial(self._faked, func)
            return answer(args, kwargs)
        if special := self._special.get(func) or self._named.get(func.name()):
            return special(args, kwargs)
        if func not in self._fused and (decomposed := _decomposition(func)):
            with self:
                result = decomposed(*args, **kwargs)
            if result is not NotImplemented:
                return result
        valued = _valued(func, args, kwargs)
        value = None if valued is None else valued(*map(self._value, args))
        result = self._run(func, args, kwargs, again=valued is None)
        if value is not None:
            self._set_value(result, value)
        return result

    def _run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, again: bool = True) -> Any:
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
            self.known.learn(call)
        following = iter(made)
        return tree_unflatten(
            [next(following) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], structure
        )

    def _card_of(self, args: Sequence[Any], kwargs: Mapping[str, Any], given: Iterable[torch.Tensor]) -> Card:
        """Return the named card, or else the tensors' card."""
        device = named_device(args, kwargs) or next(tensor.device for tensor in given if on_card(tensor))
        if device.type != "cuda":
            raise NotImplementedError(f"the simulated card makes nothing on {device} but copies")
        return self._cards[self.known.current if device.index is None else device.index]

    def _value(self, argument: Any) -> Any:
        if isinstance(argument, (list, tuple)):
            return [self._value(each) for each in argument]
        if not isinstance(argument, torch.Tensor):
            return argument
        value = None
        if on_card(argument):
            value = self._cards[argument.device.index].core.value(_region(argument))
        if argument.dtype is torch.bool:
            return bool(value)
        return (float if argument.is_floating_point() else int)(1 if value is None else value)

    def _set_value(self, tensor: torch.Tensor, value: float | None) -> None:
        self._cards[tensor.device.index].core.set_value(_region(tensor), value)

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor:
        copied = self._faked(aten.empty_like.default, (self._fake.from_tensor(tensor),), {})
        self._pinned.add(copied.untyped_storage()._cdata)
        return copied

    def _on_host(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self._host.core.operators += 1
        self._host.advance(self._cards[0].truth.host_operator_s)
        tensors = [*tensors_among(args), *tensors_among(kwargs.values())]
        size = args[0] if args and isinstance(args[0], (list, tuple)) else ()
        numel = math.prod(size) if all(isinstance(side, int) for side in size) else 1
        # Four bytes per element, since the dtype is not known yet. `empty_like` on the host makes weights of a plan.
        like = max((nbytes(t) for t in tensors if t.device.type == "meta"), default=0) if "device" in kwargs else 0
        large = (not tensors and numel * 4 > _HELD_FOR_REAL) or like > _HELD_FOR_REAL
        to_meta = kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "meta"
        return self._faked(func, args, kwargs) if large and not to_meta else func(*args, **kwargs)

    def _faked(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        with self._fake:
            return func(*args, **kwargs)

    def _linear(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Price]:
        """Run one matmul as cuBLAS does: the views around it would only take time here."""
        x, weight, *bias = args
        result = torch.empty((*x.shape[:-1], weight.shape[0]), dtype=x.dtype, device="meta")
        dtype = matmul_dtype(x)
        operands = [place(0, x), place(1, weight)]
        if bias and bias[0] is not None:
            operands = [place(2, bias[0]), *operands]
        name = f"{aten.addmm.default if len(operands) > 2 else aten.mm.default} {dtype}"
        written = place(len(operands), result)
        flops = 2.0 * x.numel() * weight.shape[0]
        return result, Price(name, tuple(operands), (written,), flops, dtype, workspace=True)

    def _attend(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Attend by the chosen kernel. cuDNN plans new shapes on the host; later calls of their layout bypass this."""
        query, key, value, mask, causal, grouped = _attended(args, kwargs)
        chosen = self._choose(args, kwargs)
        plan = attention.plan(query, key, value, mask, causal)
        if chosen == attention.CUDNN and plan not in self._plans:
            self._plans.add(plan)
            self._host.advance(self._cards[query.device.index].truth.plan_s)
        if chosen != attention.MATH:
            return self._run(aten.scaled_dot_product_attention.default, args, kwargs)
        with self:
            attend = aten._scaled_dot_product_attention_math.default
            options = {"scale": kwargs.get("scale"), "enable_gqa": grouped}
            return attend.decompose(query, key, value, mask, 0.0, causal, **options)[0]

    def _attention(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Price]:
        query, key, value, mask, causal, _ = _attended(args, kwargs)
        result = attention.output(query, value)
        dtype = matmul_dtype(query)
        name = attention.NAMES[self._choose(args, kwargs)]
        operands = [query, key, value, *([] if mask is None else [mask])]
        reads = tuple(place(at, tensor) for at, tensor in enumerate(operands))
        written = place(len(operands), result)
        return result, Price(f"{name} {dtype}", reads, (written,), attention.flops(query, key, value, causal), dtype)

    def _choose(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
        query, key, value, mask, _, grouped = _attended(args, kwargs)
        return attention.choice(self._cards[query.device.index].truth.capability, query, key, value, mask, grouped)

    def _read_value(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool | int | float:
        [tensor] = args
        if on_card(tensor):
            card = self._cards[tensor.device.index]
            self._host.note_wait()
            card.stream.refuse_capture()
            card.core.launch("a value to the host")
            card.stream.wait()
        return self._value(tensor)

    def _quantise_rows(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Quantise rows as bitsandbytes does (backends/cuda/ops.py, 0.50): it waits to check columns for outliers."""
        values, threshold = args[0], args[1] if len(args) > 1 else kwargs.get("threshold", 0.0)
        func = torch.ops.bitsandbytes.int8_vectorwise_quant.default
        outliers = None
        with self:
            if threshold > 0:
                bool((values.abs() >= threshold).any())
                outliers = torch.empty(0, dtype=torch.int64, device=values.device)
        rows, scales, _ = self._run(func, (values, 0.0), {}, again=False)
        return rows, scales, outliers

    def _multiply_4bit(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Multiply as bitsandbytes' table says (backends/cuda/ops.py, 0.50): unpack in the matmul, or write a dense
        copy first."""
        values, packed, shape, absmax, blocksize, quant_type, *_ = args
        func = torch.ops.bitsandbytes.gemm_4bit.default
        if four_bit.fuses(values, shape, blocksize):
            return self._run(func, args, kwargs, again=False)  # the table may be replaced
        bitsandbytes = torch.ops.bitsandbytes
        with self:
            dense = bitsandbytes.dequantize_4bit.default(packed, absmax, blocksize, quant_type, shape, values.dtype)
            return torch.nn.functional.linear(values, dense, kwargs.get("bias"))

    def _set(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        tensor, storage, *laid = args
        offset, shape, *strides = laid or (0, (storage.nbytes() // tensor.element_size(),))
        strides = strides[0] if strides and strides[0] else torch.empty(shape, device="meta").stride()
        native().lay(tensor, storage, offset, shape, strides)
        return tensor

    def _to_copy(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        source = args[0]
        target = torch.device(kwargs.get("device") or source.device)
        if target.type == "cuda" and target.index is None:
            current = torch.cuda.current_device()
            target = torch.device("cuda", current)
            kwargs = {**kwargs, "device": target}
        if source.device == target:
            result = self._run(aten._to_copy.default, args, kwargs)
            self._set_value(result, self._cards[target.index].core.value(_region(source)))
            return result
        like, _ = shaped(aten._to_copy.default, args, kwargs)
        if target.type == "meta":
            return like
        if on_card(source) and target.type == "cpu":
            with self._fake if nbytes(like) > _HELD_FOR_REAL else contextlib.nullcontext():
                result = torch.zeros_like(like, device=target)
        else:
            call = native().Call(self._cards[target.index].core, [_output(like, [])], False, None)
            [result] = native().performed(call, [])
        self._cross(source, result, asynchronous=bool(kwargs.get("non_blocking")))
        if on_card(result):
            self._set_value(result, _everywhere(source, result.dtype))
        return result

    def _copy(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        target, source = args[:2]
        asynchronous = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking"))
        if source.device != target.device:
            self._cross(source, target, asynchronous=asynchronous)
            if on_card(target):
                self._set_value(target, _everywhere(source, target.dtype))
        elif on_card(target):
            return self._run(aten.copy_.default, args, kwargs)
        return target

    def _copied(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Price]:
        target, source = args[:2]
        return target, Price(str(aten.copy_.default), (place(1, source),), (place(0, target),))

    def _cross(self, source: torch.Tensor, target: torch.Tensor, *, asynchronous: bool) -> None:
        """Move bytes over a link: asynchronously from pinned memory; else the host waits."""
        size = min(nbytes(source), nbytes(target))
        if not size or not (on_card(source) or on_card(target)):
            return
        card = self._cards[(target if on_card(target) else source).device.index]
        truth = card.truth
        if on_card(source) and on_card(target):
            raise NotImplementedError("nothing is copied between simulated cards")
        pinned = (target if on_card(source) else source).untyped_storage()._cdata in self._pinned
        speed = truth.link_bytes_per_s * (1.0 if pinned else truth.pageable_share)
        waits = not (pinned and asynchronous)
        if not asynchronous:
            self._host.note_wait()
        if waits:
            card.stream.refuse_capture()
        card.core.launch("copy over the link", size / speed)
        if waits:
            card.stream.wait()


def copied(whole: Any) -> Any:
    """Replace FakeTensor.__new__ for a tensor argument: accelerate gives a moved weight the old class."""

    def new(kind: type, first: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(first, torch.Tensor):
            return whole(kind, first, *args, **kwargs)
        return torch.nn.Parameter(first, requires_grad=False)

    return new


def _valued(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[..., Any] | None:
    """Return the function that computes a result's uniform value from the arguments."""
    if func is aten.sum.default and args[0].dtype is torch.bool:  # how transformers tests whether all are true
        return lambda value: value * args[0].numel()
    if func in _COUNTING and not kwargs and args[0].numel() == 1 and not args[0].is_floating_point():
        return _COUNTING[func]
    return _VALUED.get(func)


@functools.cache
def _decomposition(func: Any) -> Callable[..., Any] | None:
    if func.name() in _BY_DEFAULT:
        return partial(func._op_dk, torch._C.DispatchKey.CompositeExplicitAutograd)
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    if func.namespace == "prim" or not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key.name):
        return None
    return func.py_kernels.get(key) or partial(func._op_dk, key)


def _attended(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return query, key, value, mask, whether later tokens are hidden, and whether query heads share keys."""
    mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
    causal = args[5] if len(args) > 5 else kwargs.get("is_causal", False)
    return *args[:3], mask, causal, kwargs.get("enable_gqa", False)


def _region(tensor: torch.Tensor) -> tuple[int, int]:
    _, offset, size = place(0, tensor)
    return tensor.untyped_storage().data_ptr() + offset, size


def _everywhere(source: torch.Tensor, dtype: torch.dtype) -> float | None:
    """Return the uniform value of a copied host tensor in this dtype: one number, or True for all."""
    if on_card(source) or isinstance(source, FakeTensor):
        return None
    if source.numel() == 1:
        return float(source.item())
    return 1.0 if dtype is torch.bool and bool(source.all()) else None


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
