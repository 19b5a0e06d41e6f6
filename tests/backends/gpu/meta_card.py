"""A card without numbers, which refuses while a graph is recorded what CUDA refuses then.

Tensors on the meta device are on the card, those on the CPU in main memory that is not pinned.
Kernels of Triton's are not run. Numbers that were sent to the card can be read back, others are 0.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction

from kvcellar.backends.torch.gpu import choice
from kvcellar.backends.torch.gpu.attend import launch
from kvcellar.backends.torch.gpu.sampler import sampling
from kvcellar.backends.torch.gpu.weights import layers, linears, multiply
from kvcellar.backends.torch.run import place_weights as holding

CARD = torch.device("meta")

aten = torch.ops.aten

COPIES = (aten._to_copy, aten.copy_)
INDEXED = (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_)
READ = (aten._local_scalar_dense, aten.equal)
COUNTED = (
    aten.nonzero, aten.masked_select, aten._unique2, aten.unique_dim, aten.unique_consecutive,
    aten.bincount,
)  # fmt: skip
"""Operations whose result has a size that only the card knows."""


class CaptureError(RuntimeError):
    """Something that CUDA refuses while a stream is captured."""


class HostNumbers(TorchFunctionMode):
    """Sees tensors that are made of Python's numbers, which the meta device makes of nothing."""

    def __init__(self, card: MetaCard) -> None:
        super().__init__()
        self._card = card

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor):
            data = args[-1] if args else kwargs["data"]
            home = args[0].device if func is Tensor.new_tensor else "cpu"
            is_there = torch.device(kwargs.get("device") or home) == CARD
            if is_there and not isinstance(data, Tensor):
                self._card.refuse("a tensor of numbers that are in main memory", func)
        elif func in (Tensor.__getitem__, Tensor.__setitem__) and args[0].device == CARD:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(one, (list, np.ndarray)) for one in index):
                self._card.refuse("an index of numbers that are in main memory", func)
        return func(*args, **kwargs)


class MetaGraph:
    """A graph that plays nothing."""

    driver_bytes = 0

    def __init__(self, card: MetaCard) -> None:
        self.card = card

    def replay(self) -> None:
        self.card.n_played += 1


class MetaCard(TorchDispatchMode):
    """The card while a ``with`` lasts, and the device that records its graphs."""

    size_bytes = 0

    def __init__(self) -> None:
        super().__init__()
        self.n_captured = self.n_played = 0
        self.is_capturing = False
        self._made: list[weakref.ref[Tensor]] = []
        self._sent: dict[int, tuple[Any, Tensor]] = {}

    def send(self, numbers: Any, to: Tensor) -> None:
        """By way of pinned memory."""

    def warm_up(self, call: Callable[[], Any]) -> None:
        call()

    def capture(self, call: Callable[[], Any]) -> tuple[MetaGraph, Any]:
        self.is_capturing = True
        try:
            with HostNumbers(self):
                out = call()
        finally:
            self.is_capturing = False
            made, self._made = self._made, []
        gc.collect()
        results = {id(one) for one in out}
        left = [
            one for one in (ref() for ref in made) if one is not None and id(one) not in results
        ]
        if left:
            shapes = [tuple(one.shape) for one in left]
            raise CaptureError(f"tensors of {shapes} outlive the graph whose memory they are in")
        self.n_captured += 1
        return MetaGraph(self), out

    def forget(self) -> None:
        """All graphs."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:  # in inference mode these come whole
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        out = self._run(func, func.overloadpacket, args, kwargs)
        if self.is_capturing:
            before = {one.untyped_storage()._cdata for one in _tensors((args, kwargs))}
            self._made += [
                weakref.ref(one)
                for one in _tensors(out)
                if one.device == CARD and one.untyped_storage()._cdata not in before
            ]
        return out

    def _run(self, func: Any, op: Any, args: Any, kwargs: Any) -> Any:
        """Refuse what is refused; run the rest, or stand in for it."""
        given = _tensors((args, kwargs))
        on_card = [one for one in given if one.device == CARD]
        if op in COPIES:
            return self._copied(func, op, args, kwargs)
        if not on_card:
            return func(*args, **kwargs)
        if op in READ:
            self.refuse("a number that the processor waits for", func)
            return False if op is aten.equal else self._values(given[0]).item()
        elif op in COUNTED:
            self.refuse("a result whose size the processor waits for", func)
            return torch.empty((0, given[0].dim()), dtype=torch.int64, device=CARD)
        elif op in INDEXED:
            indices = [one for one in args[1] if one is not None]
            if any(one.device != CARD for one in indices):
                self.refuse("an index in main memory", func)
            if any(one.dtype in (torch.bool, torch.uint8) for one in indices):
                self.refuse("a mask that is counted", func)
            where = [one if one is None else one.to(CARD) for one in args[1]]
            return func(args[0], where, *args[2:], **kwargs)
        elif op is aten._grouped_mm and args[0].dtype != torch.bfloat16:
            self.refuse("sizes of groups, which torch copies to main memory", func)
            return args[0].new_empty(args[0].shape[0], args[1].shape[-1])
        elif len(on_card) < len(given) and torch.Tag.pointwise not in func.tags:
            there = [tuple(one.shape) for one in given if one.device != CARD]
            raise CaptureError(f"{func} was given tensors of {there} that are not on the card")
        return func(*args, **kwargs)

    def _copied(self, func: Any, op: Any, args: Any, kwargs: Any) -> Any:
        """Copy within a place, or between the card and main memory."""
        source = args[0] if op is aten._to_copy else args[1]
        to = kwargs.get("device") or source.device if op is aten._to_copy else args[0].device
        if (to == CARD) == (source.device == CARD):
            return func(*args, **kwargs)
        self.refuse("a copy between the card and main memory that is not pinned", func)
        if to == CARD:
            out = func(*args, **kwargs)
            self._sent[out.untyped_storage()._cdata] = out.untyped_storage(), source.clone()
            return out
        values = self._values(source)
        return values.to(kwargs.get("dtype")) if op is aten._to_copy else args[0].copy_(values)

    def _values(self, tensor: Tensor) -> Tensor:
        """Return what was sent to a tensor, or zeros."""
        _, sent = self._sent.get(tensor.untyped_storage()._cdata, (None, None))
        if sent is None or sent.numel() != tensor.numel():
            return torch.zeros(tensor.shape, dtype=tensor.dtype)
        return sent.view(tensor.shape)

    def refuse(self, what: str, func: Any) -> None:
        """Raise while a stream is captured."""
        if self.is_capturing:
            raise CaptureError(f"{what}, while a stream is captured: {func}")


def _tensors(value: Any) -> list[Tensor]:
    return [one for one in tree_leaves(value) if isinstance(one, Tensor)]


@contextmanager
def meta_card() -> Iterator[None]:
    """Have the meta device be a card, with kernels that do nothing."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (choice, holding):
            patch.setattr(module, "is_gpu", lambda device: device.type == CARD.type)
        for module in (launch, multiply, linears, sampling):
            patch.setattr(module, "is_interpreted", lambda: False)
        for module in (launch, multiply, linears, layers, sampling):
            patch.setattr(module, "on_device", lambda device: contextlib.nullcontext())
        patch.setattr(InterpretedFunction, "run", lambda *args, **named: None)
        yield
