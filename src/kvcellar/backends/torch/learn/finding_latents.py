"""Layers of a network that expand K and V from latents: found by numbers, with no weight read.

An attention module is run on its own terms, but whatever has weights within it gives random
numbers, so a network on the meta device will do, and what the weights are changes nothing. Twice:
the second time one linear layer gives each output's own number, in bits over the tokens. Those that
come back as V and as a part of K say which is which. What is not seen exactly so is left as it is,
and is right expanded.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import AttentionInterface

from kvcellar.backends.torch.bind.latent import expanded_rows
from kvcellar.models.latents import Latents

NAME = "kvcellar_latents"
"""The ``attn_implementation`` under which attention is looked at."""

_N_TOKENS = 24
"""Tokens that are looked at: as many bits have the numbers of a linear layer's outputs."""

_watching = threading.local()
"""Has ``watch`` while a thread watches a network."""


class _AttentionCall(NamedTuple):
    """One call of a layer's attention.

    ``outputs`` are those of the linear layers within it.
    """

    attention: nn.Module
    q: Tensor
    k: Tensor
    v: Tensor
    outputs: dict[nn.Module, Tensor]

    @property
    def layer(self) -> int:
        """Id of the layer."""
        return int(cast(int, self.attention.layer_idx))


def find_latents(network: Any) -> dict[int, Latents]:
    """Find the layers whose K and V a linear layer expands from latents that take fewer bytes.

    Args:
        network: of transformers, in evaluation mode, in memory or on the meta device.

    Returns:
        By layer, how it expands latents.
    """
    try:
        seen = _watch(network)
        fitting = [call.attention for call in seen.values() if any(_fitting(call))]
        if not fitting:
            return {}
        plain = _watch(network, fitting)
        linears = {layer: _linear_of(call) for layer, call in plain.items()}
        marked = _watch(network, fitting, {one[1] for one in linears.values() if one is not None})
    except Exception:  # attention that does not run so; left expanded, it is right
        return {}
    read = {
        layer: _read(*linear, plain[layer], marked[layer])
        for layer, linear in linears.items()
        if linear is not None
    }
    return {layer: latents for layer, latents in read.items() if latents is not None}


# Watching ----------------------------------------------------------------------------------------


class _Watch:
    """A forward that is watched, whose attention gives zeros.

    So nothing of K and V reaches what comes behind, and a second forward has the same inputs.
    """

    def __init__(self, network: Any, marked: Collection[nn.Module]) -> None:
        """Create the watch of one forward; ``marked`` layers give the numbers of their outputs."""
        self.calls: list[_AttentionCall] = []
        self._outputs: dict[nn.Module, Tensor] = {}
        self._marked = marked
        self._device, self._dtype = network.device, network.dtype
        self._generator = torch.Generator().manual_seed(0)

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Note a call; return zeros ``[1, T, n_heads, v_head_dim]``."""
        self.calls.append(_AttentionCall(module, q.clone(), k.clone(), v.clone(), self._outputs))
        self._outputs = {}
        return q.new_zeros(1, q.shape[2], q.shape[1], v.shape[3])

    def hooks(self, attention: nn.Module) -> Iterator[Any]:
        """Have whatever has weights within an attention module give numbers; yield the hooks."""
        yield attention.register_forward_pre_hook(self._give_numbers, with_kwargs=True)
        yield attention.register_forward_hook(lambda module, given, out: self._home(out))
        for part in _with_tensors(attention):
            yield part.register_forward_pre_hook(lambda module, given: self._home(given))
            yield part.register_forward_hook(self._give_output)

    def _give_numbers(
        self, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[Any, Any]:
        return self._numbers(given), self._numbers(named)

    def _give_output(self, module: nn.Module, given: Any, out: Any) -> Any:
        numbers = self._numbers(out)
        if module in self._marked:
            bits = torch.arange(_N_TOKENS)[:, None]
            columns = torch.arange(out.shape[-1])
            numbers = (1.0 + (columns >> bits & 1)).expand(out.shape)
        if type(module) is nn.Linear:
            self._outputs[module] = numbers
        return numbers

    def _numbers(self, tree: Any) -> Any:
        """Return random numbers in the place of all tensors, the same in every forward."""

        def numbers(like: Tensor) -> Tensor:
            if not like.is_floating_point() and not like.is_complex():
                return torch.arange(like.numel()).view(like.shape).to(like.dtype)
            dtype = torch.complex64 if like.is_complex() else torch.float32
            return torch.randn(like.shape, dtype=dtype, generator=self._generator)

        return tree_map_only(Tensor, numbers, tree)

    def _home(self, tree: Any) -> Any:
        """Return all tensors on the network's device, and in its type."""

        def home(x: Tensor) -> Tensor:
            return x.to(self._device, self._dtype if x.is_floating_point() else x.dtype)

        return tree_map_only(Tensor, home, tree)


def _with_tensors(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost modules within one that have parameters or buffers of their own."""
    for child in module.children():
        if any(True for _ in child.parameters(False)) or any(True for _ in child.buffers(False)):
            yield child
        else:
            yield from _with_tensors(child)


def _watch(
    network: Any, numbered: Collection[nn.Module] = (), marked: Collection[nn.Module] = ()
) -> dict[int, _AttentionCall]:
    """Run a short text; return the call of each layer's attention, of those that have one.

    Args:
        network: as ``find_latents`` takes it.
        numbered: attention modules that get random numbers.
        marked: linear layers in them that give the numbers of their outputs, in bits.
    """
    device, vocab_size = network.device, network.get_input_embeddings().num_embeddings
    ids = (torch.arange(_N_TOKENS) * 7 % vocab_size)[None].to(device)
    positions = torch.arange(_N_TOKENS)[None].to(device)
    watch = _watching.watch = _Watch(network, marked)
    try:
        with ExitStack() as stack:
            stack.enter_context(_attention_of(network.config))
            stack.enter_context(torch.inference_mode())
            for attention in numbered:
                for hook in watch.hooks(attention):
                    stack.callback(hook.remove)
            network(input_ids=ids, position_ids=positions, use_cache=False)
    finally:
        del _watching.watch
    layers = [call.layer for call in watch.calls]
    return {call.layer: call for call in watch.calls if layers.count(call.layer) == 1}


@contextmanager
def _attention_of(config: Any) -> Iterator[None]:
    """Have a network attend as this module watches it, for as long as the block lasts."""
    before = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Note a call of a layer's attention; give zeros."""
    watch: _Watch = _watching.watch
    return watch.attend(module, query, key, value), None


AttentionInterface.register(NAME, _attention)


# What was seen -----------------------------------------------------------------------------------


def _fitting(call: _AttentionCall) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the linear layers that could expand latents, and take fewer bytes, by their sizes."""
    for name, linear in call.attention.named_modules():
        if type(linear) is nn.Linear and linear.bias is None:
            latents = _latents(name, linear, call, (True, True, False))
            expanded = call.k.shape[1] * (call.k.shape[3] + call.v.shape[3])
            if latents is not None and latents.latent_dim + latents.rotary_dim < expanded:
                yield name, linear


def _latents(
    name: str, linear: nn.Linear, call: _AttentionCall, order: tuple[bool, bool, bool]
) -> Latents | None:
    """Return a layer's latents as they would have to be in this order; None: they cannot be."""
    n_kv_heads, head_dim, v_dim = *call.k.shape[1::2], call.v.shape[3]
    per_head, rest = divmod(linear.out_features, n_kv_heads)
    plain = per_head - v_dim
    if rest or not 0 < plain < head_dim:
        return None
    dims = n_kv_heads, plain, head_dim - plain, v_dim, linear.in_features
    return Latents(name, *order, *dims)


def _linear_of(call: _AttentionCall) -> tuple[str, nn.Linear] | None:
    """Return the linear layer that fits and of which V's first numbers are outputs."""
    for name, linear in _fitting(call):
        if linear in call.outputs:
            rows = call.outputs[linear].reshape(-1, linear.out_features)
            if len(rows) == _N_TOKENS and bool((rows == call.v[0, 0, :, :1]).all(0).any()):
                return name, linear
    return None


def _read(
    name: str, linear: nn.Linear, plain: _AttentionCall, marked: _AttentionCall
) -> Latents | None:
    """Return what the marks say; None where K and V are more than the linear layer's outputs."""
    k, v = _columns(marked.k), _columns(marked.v)
    either = (True, False)
    for order in product(either, either, either):
        latents = _latents(name, linear, plain, order)
        assert latents is not None, "it was found to fit"
        k_rows, v_rows = expanded_rows(latents)
        n = latents.rotary_dim if latents.is_rotary_first else latents.plain_dim
        expanded, shared = slice(n), slice(n, None)
        if latents.is_rotary_first:
            expanded, shared = shared, expanded
        if torch.equal(k[:, expanded], k_rows) and torch.equal(v, v_rows):
            rotary = plain.k[..., shared]
            is_shared = torch.equal(rotary, rotary[:, :1].expand_as(rotary))
            is_apart = torch.equal(rotary, marked.k[..., shared])
            return latents if is_shared and is_apart and torch.equal(plain.q, marked.q) else None
    return None


def _columns(rows: Tensor) -> Tensor:
    """Return which output each number of ``rows [1, n_heads, T, dim]`` is; -1: none."""
    bits = rows[0] - 1
    is_mark = ((bits == 0) | (bits == 1)).all(1)
    places = torch.arange(_N_TOKENS)[:, None]
    return torch.where(is_mark, (bits.nan_to_num().long() << places).sum(1), -1)
