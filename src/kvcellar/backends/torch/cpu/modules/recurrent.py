"""Recurrent modules in a few calls of the CPU kernel, from slot to slot of a cache's states.

What transformers' modules do with states (read a slot, put it in a batch of sequences of one
length, write to it, store it) copies each state several times, and a module is called once for
each length. Here all sequences of a flat batch are one call, and a state is read and written once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from kvcellar.backends.torch.bind.mixers import Mixer, begin_states
from kvcellar.backends.torch.cache.caches import TorchCache
from kvcellar.backends.torch.cache.kernel import address_of, dtype_of
from kvcellar.backends.torch.cpu.modules.layers import take_attributes
from kvcellar.errors import BackendError
from kvcellar.kernel import recurrent as native
from kvcellar.registry import active_cache


@dataclass(frozen=True)
class MixerPart:
    """A recurrent module: linear layers, a convolution, a recurrence, and a norm with a gate.

    Attributes:
        kind: ``delta``, ``scan`` (Mamba 2), or ``convolution`` where there is nothing else.
        inputs: linear layers of the module's input; their outputs lie one behind the other.
        scale: factor on that input.
        scales: buffer of factors on those outputs; empty: none.
        at: where in those are what goes through the convolution, the gate, and of ``delta`` what
            decays and beta are made of, of ``scan`` the steps; of ``convolution`` factors on its
            inputs and on its results. -1: behind another linear layer.
        gate: a linear layer of the inputs, and one behind it that says the gate; or none.
        decay: the same for decays.
        is_by_head: outputs lie by key heads, and ``at`` is where they are in the kernel's order.
        heads: sizes, as the kernel's class is given them.
        conv: the convolution.
        has_silu: it has an activation.
        rates: parameter of decays: a logarithm for each head.
        shifts: parameter that is added to what decays or steps are made of.
        skips: parameter by which inputs are added to results; empty: none.
        beta_scale: factor on beta.
        norm: the norm; empty: there is a gate alone.
        gating: whether the gate comes first, is a sigmoid, and whether the norm rounds between.
        eps: of the norm.
        group: numbers that are normalised together.
        out: the last linear layer.
    """

    kind: str
    inputs: tuple[str, ...]
    scale: float
    scales: str
    at: tuple[int, ...]
    gate: tuple[str, ...]
    decay: tuple[str, ...]
    is_by_head: bool
    heads: tuple[int, ...]
    conv: str
    has_silu: bool
    rates: str
    shifts: str
    skips: str
    beta_scale: float
    norm: str
    gating: tuple[bool, ...]
    eps: float
    group: int
    out: str

    @property
    def inner(self) -> int:
        """Numbers of a token behind the recurrence."""
        return self.heads[0] * self.heads[3 if self.kind == "delta" else 2]


class KernelMixer(nn.Module):
    """A recurrent module on a cache's slots, or from zeros where no cache is ours."""

    def __init__(
        self,
        own: nn.Module,
        part: MixerPart,
        inputs: nn.Module,
        behind: Mapping[str, nn.Module],
        out: nn.Module,
    ) -> None:
        """Take the parts of a module.

        Args:
            own: the module, bound to a layer's states; its plain attributes are this one's too.
            part: what it is.
            inputs: its linear layers of ``part.inputs``, joined.
            behind: linear layers behind these, as ``gate`` and ``decay``.
            out: the last linear layer.
        """
        super().__init__()
        take_attributes(self, own)
        bound = vars(own)["forward"]
        assert isinstance(bound, Mixer), "its states have a place"
        self.part, self.number, self.shapes = part, bound.number, bound.shapes
        self.places = bound.places
        self.in_proj, self.out_proj = inputs, out
        self.behind = nn.ModuleDict(behind)
        self._hold(own)

    def _hold(self, own: nn.Module) -> None:
        """Keep a module's small parameters as the kernel reads them, in float32."""
        part, conv = self.part, own.get_submodule(self.part.conv)
        weight: Any = conv.weight
        bias: Any = conv.bias
        self._held = [weight.detach()[:, 0].T.float().contiguous()]
        self._held += [] if bias is None else [bias.detach().float()]
        n_channels, width = weight.shape[0], weight.shape[-1]
        at = [address_of(one) for one in self._held]
        self._convolution = native.Convolution(n_channels, width, *at, has_silu=part.has_silu)
        self._n_channels = n_channels
        self._order = _order_by_head(part.heads) if part.is_by_head else None
        self._factors: Tensor | float = part.scale
        if part.scales:
            self._factors = (own.get_buffer(part.scales).float() * part.scale).flatten()
            self._factors = self._factors.to(weight.dtype)
        self._slices = {
            name: _slice_of(own, part.inputs, getattr(part, name)[0]) for name in self.behind
        }
        if part.kind == "convolution":
            return
        numbers = [own.get_parameter(part.rates).detach().float().exp().flatten()]
        names = (part.shifts, *([part.skips] if part.skips else []))
        numbers += [own.get_parameter(name).detach().float().flatten() for name in names]
        self._held += numbers
        at = [address_of(one) for one in numbers]
        if part.kind == "delta":
            n_decays = numbers[1].numel() // part.heads[0]
            self._delta = native.DeltaRule(
                *part.heads, *at, n_decays=n_decays, beta_scale=part.beta_scale
            )
        else:
            self._scan = native.Scan(*part.heads, *at)
        self._hold_norm(own)

    def _hold_norm(self, own: nn.Module) -> None:
        part, weight = self.part, None
        if part.norm:
            weight = next(own.get_submodule(part.norm).parameters()).detach().float()
            self._held.append(weight)
        gates_first, is_sigmoid, rounds = part.gating
        self._norm = native.GatedNorm(
            part.inner,
            part.group,
            0 if weight is None else address_of(weight),
            0 if weight is None else weight.numel(),
            eps=part.eps,
            gates_first=gates_first,
            is_sigmoid=is_sigmoid,
            rounds=rounds,
        )

    def forward(self, *given: Any, **named: Any) -> Tensor:
        """Run a flat batch ``[1, T, hidden]``; without a cache of ours ``[n, T, hidden]``."""
        everything = (*given, *named.values())
        hidden: Tensor = next(one for one in everything if isinstance(one, Tensor))
        cache = active_cache()
        if not isinstance(cache, TorchCache) or cache.pools.states is None:
            if any(isinstance(one, Cache) and one.layers for one in everything):
                raise BackendError(
                    "a recurrent layer that the CPU kernel runs was given states of transformers' "
                    "cache, which it does not read; run the model on a cache of kvcellar, or "
                    "without one"
                )
            n, n_tokens, _ = hidden.shape
            states = [torch.empty(n, *shape) for shape in self.shapes]
            advances = [(i * n_tokens, n_tokens, -1, i) for i in range(n)]
            batch = native.StateBatch(n * n_tokens, dtype_of(hidden.dtype), advances)
            return self.advance(hidden, states, batch)
        states = begin_states(cache, self.number, hidden)
        out = self.advance(hidden, states, cache.state_batch(hidden.dtype))
        cache.steps.wrote_states(self.number)
        return out

    def advance(self, x: Tensor, states: Sequence[Tensor], batch: native.StateBatch) -> Tensor:
        """Take states from slot to slot.

        Args:
            x: ``[..., hidden]``, the batch's tokens in their order.
            states: of the layer, each float32 ``[n_slots, *shape]``.
            batch: which slots are read and written.

        Raises:
            ConfigError: there are fewer slots.
        """
        rows: Tensor = self.in_proj(x)
        rows = rows.reshape(-1, rows.shape[-1])
        if isinstance(self._factors, Tensor) or self._factors != 1.0:
            rows = rows * self._factors
        behind = {name: layer(rows[:, self._slices[name]]) for name, layer in self.behind.items()}
        if self._order is not None:
            rows = rows[:, self._order]
        n, stride = rows.shape
        at = [address_of(rows) + rows.element_size() * place for place in self.part.at]
        of_conv = states[self.places["convolution", 0]]
        mixed = rows.new_empty((n, self._n_channels))
        if self.part.kind == "convolution":
            where = address_of(of_conv), len(of_conv), at[0], stride, address_of(mixed)
            self._convolution.run(batch, *where, at[1], at[2])
            return self._finish(x, mixed)
        where = address_of(of_conv), len(of_conv), at[0], stride, address_of(mixed)
        self._convolution.run(batch, *where)
        decays = _address(behind.get("decay"), at[2], stride)
        core = rows.new_empty((n, self.part.inner))
        self._recur(batch, states[self.places["recurrent", 0]], mixed, decays, (at, stride), core)
        gates = _address(behind.get("gate"), at[1], stride)
        core_at = address_of(core)
        self._norm.run(n, dtype_of(core.dtype), core_at, *gates, core_at)
        return self._finish(x, core)

    def _recur(
        self,
        batch: native.StateBatch,
        state: Tensor,
        mixed: Tensor,
        decays: tuple[int, int],
        rows: tuple[Sequence[int], int],
        core: Tensor,
    ) -> None:
        """Run the recurrence on what went through the convolution."""
        heads, size = self.part.heads, mixed.element_size()
        at, slots = address_of(mixed), (address_of(state), len(state))
        if self.part.kind == "delta":
            width = heads[1] * heads[2]
            q, k, v = at, at + size * width, at + 2 * size * width
            beta = rows[0][3], rows[1]
            self._delta.run(
                batch, *slots, q, k, v, self._n_channels, *decays, *beta, address_of(core)
            )
        else:
            b = at + size * self.part.inner
            c = b + size * heads[1] * heads[3]
            self._scan.run(batch, *slots, at, b, c, self._n_channels, *decays, address_of(core))

    def _finish(self, x: Tensor, core: Tensor) -> Tensor:
        out: Tensor = self.out_proj(core.view(*x.shape[:-1], -1))
        return out


def _address(own: Tensor | None, at: int, stride: int) -> tuple[int, int]:
    """Return the address of rows and how far they lie apart: of a tensor's, or those given."""
    return (at, stride) if own is None else (address_of(own), own.shape[-1])


def _slice_of(own: nn.Module, inputs: Sequence[str], name: str) -> slice:
    """Return where the outputs of one of some joined linear layers are."""
    sizes: list[Any] = [own.get_submodule(one).out_features for one in inputs]
    first = sum(sizes[: inputs.index(name)])
    return slice(first, first + sizes[inputs.index(name)])


def _order_by_head(heads: Sequence[int]) -> Tensor:
    """Return where q, k, v, gate, beta and decay are in outputs that lie by key heads.

    Those of two linear layers: of each key head q, k, v and gate; then of each beta and decay.
    """
    n_heads, n_keys, k_dim, v_dim = heads
    each = n_heads // n_keys
    sizes = (k_dim, k_dim, each * v_dim, each * v_dim)
    wide = torch.arange(n_keys * sum(sizes)).view(n_keys, -1)
    small = torch.arange(2 * n_heads).view(n_keys, -1) + wide.numel()
    parts = [*wide.split(sizes, 1), *small.split(each, 1)]
    return torch.cat([part.flatten() for part in parts])
