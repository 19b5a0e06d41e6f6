"""Decoder layers on a card, of parts that were found by running them (decision 61).

A layer is a norm, q, k and v as one product, one launch that turns them, the cache's, and the
output's product, which adds what came in; then a norm, a product that is gated and one that adds.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor, nn

from kvcellar.backends.torch.bind.active_adapters import is_active
from kvcellar.backends.torch.cpu.modules.layers import KernelAttention, take_attributes
from kvcellar.backends.torch.cpu.modules.rotations import Rotation, Sides
from kvcellar.backends.torch.cpu.modules.routed import KernelMixture
from kvcellar.backends.torch.gpu.attend.launch import on_device
from kvcellar.backends.torch.gpu.weights import between
from kvcellar.backends.torch.gpu.weights.linears import CardLinear, CardNorm, gate
from kvcellar.backends.torch.gpu.weights.multiply import HeadTurn


class CardMlp(nn.Module):
    """``down(act(gate(x)) * up(x))``."""

    def __init__(self, gate_up: CardLinear, down: CardLinear, act: nn.Module | None) -> None:
        """Take linear layers and the activation; None: silu, which the product has."""
        super().__init__()
        self.gate_up_proj, self.down_proj, self.act = gate_up, down, act

    def forward(self, x: Tensor, add: Tensor | None = None, norm: CardNorm | None = None) -> Tensor:
        """Run ``[..., hidden] -> [..., hidden]``, of normed inputs, adding to the result."""
        if self.act is None and is_active():  # adapters add to what gates
            both = self.gate_up_proj(x, norm=norm)
            inner = gate(both.view(-1, both.shape[-1])).view(*both.shape[:-1], -1)
        elif self.act is None:
            inner = self.gate_up_proj.gated(x, norm)
        else:
            first, up = self.gate_up_proj(x, norm=norm).chunk(2, -1)
            inner = self.act(first) * up
        out: Tensor = self.down_proj(inner, add)
        return out


class CardAttention(KernelAttention):
    """Projections, one launch that turns heads, and one call of the op."""

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Sides | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Run ``[1, T, hidden] -> [1, T, hidden]``; no weights are returned."""
        assert past_key_values is None, "the cache is behind the op"
        return self.o_proj(self.attended(hidden_states, position_embeddings, kwargs)), None

    def attended(
        self,
        x: Tensor,
        sides: Sides | None,
        kwargs: dict[str, Any],
        norm: CardNorm | None = None,
    ) -> Tensor:
        """Attend ``[1, T, hidden] -> [1, T, n_heads * head_dim]``, of normed inputs."""
        whole = self._turned(x, sides, norm)
        if whole is not None:
            return self.attend(whole, kwargs)
        joined = self.qkv_proj(x, norm=norm)
        norms = self.q_norm, self.k_norm
        own = None
        if isinstance(norms[0], CardNorm) and isinstance(norms[1], CardNorm):
            own = norms[0], norms[1]
        elif norms[0] is not None and norms[1] is not None:
            heads, n_q, n_k = self._heads(joined)
            q, k, v = heads.split([n_q, n_k, n_k], 2)
            joined = torch.cat([norms[0](q), norms[1](k), v], 2).view(joined.shape)
        turn(joined, self.rotation, sides, own, (self.n_heads, self.n_kv_heads, self.head_dim))
        return self.attend(joined, kwargs)

    def _turned(self, x: Tensor, sides: Sides | None, norm: CardNorm | None) -> Tensor | None:
        """Return q, k and v of few tokens, turned where they are made; None: that cannot be."""
        rotation, linear = self.rotation, self.qkv_proj
        is_plain = self.q_norm is None and self.k_norm is None and not is_active()
        if not (is_plain and isinstance(linear, CardLinear) and rotation.n_turned == self.head_dim):
            return None
        cos, sin = _sides(rotation, sides, x)
        spread = 2 if rotation.layout == "repeated" else 1
        heads = self.n_heads + self.n_kv_heads, self.head_dim
        turned = HeadTurn(cos[0], sin[0], *heads, rotation.is_paired, spread)
        own = self.n_heads, self.n_kv_heads, self.head_dim
        return linear.turned(
            x, norm, turned, lambda joined: turn(joined, rotation, sides, None, own)
        )


def turn(
    joined: Tensor,
    rotation: Rotation,
    sides: Sides | None,
    norms: tuple[CardNorm, CardNorm] | None,
    heads: tuple[int, int, int],
) -> None:
    """Normalise and rotate q and k in place, in one launch; in none where there is nothing to do.

    Args:
        joined: ``[1, T, q, k and v]``.
        rotation: of q and k.
        sides: cosines and sines as the model makes them.
        norms: of q's and k's heads, or None.
        heads: how many are q's, how many k's, and their size.
    """
    if norms is None and not rotation.n_turned:
        return
    n_q, n_k, dim = heads
    cos, sin = _sides(rotation, sides, joined)
    q, k = norms or (None, None)
    half = triton.next_power_of_2(max(1, rotation.n_turned // 2))
    rest = triton.next_power_of_2(max(1, dim - rotation.n_turned))
    with on_device(joined.device):
        between.turn_heads[(joined.shape[1], n_q + n_k)](
            joined, cos, sin, cos if q is None else q.weight, cos if k is None else k.weight,
            0.0 if q is None else q.eps, 0.0 if k is None else k.eps, n_q,
            joined.stride(1), dim, cos.stride(1), rotation.n_turned, rotation.is_paired,
            2 if rotation.layout == "repeated" else 1, norms is not None, half, rest, num_warps=1,
        )  # fmt: skip


def _sides(rotation: Rotation, sides: Sides | None, joined: Tensor) -> Sides:
    """Return cosines and sines ``[1, T, n]`` with a token's behind each other."""
    if not rotation.n_turned:
        return joined, joined
    assert sides is not None, "a rotation has cosines and sines"
    cos, sin = (side.expand(1, joined.shape[1], side.shape[2]) for side in sides)
    is_plain = cos.stride(2) == sin.stride(2) == 1 and cos.stride(1) == sin.stride(1)
    return (cos, sin) if is_plain else (cos.contiguous(), sin.contiguous())


class CardLayer(nn.Module):
    """A decoder layer in some ten launches; of few tokens in seven: norms and turns in products."""

    def __init__(
        self,
        own: nn.Module,
        before: CardNorm,
        attention: CardAttention,
        between: CardNorm,
        mlp: nn.Module,
    ) -> None:
        """Take the parts of a module, whose plain attributes are this one's as well.

        ``mlp`` is a :class:`CardMlp`, or the block of a mixture.
        """
        super().__init__()
        take_attributes(self, own)
        self.input_layernorm, self.self_attn = before, attention
        self.post_attention_layernorm = between
        self.mlp = mlp if isinstance(mlp, CardMlp) else KernelMixture(mlp)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        position_embeddings: Sides | None = None,
        past_key_values: None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Run ``[1, T, hidden] -> [1, T, hidden]``."""
        assert past_key_values is None, "the cache is behind the op"
        x = hidden_states
        before = self.input_layernorm
        attended = self.self_attn.attended(x, position_embeddings, kwargs, before)
        x = self.self_attn.o_proj(attended, x)
        if isinstance(self.mlp, CardMlp):
            return self.mlp(x, x, self.post_attention_layernorm)  # type: ignore[no-any-return]
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out
