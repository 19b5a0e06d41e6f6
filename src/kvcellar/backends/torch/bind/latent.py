"""Latent attention (MLA), bound so that latents are what is cached.

Such a model expands a short latent per token to K and V of all heads, by one linear layer, and
beside it all heads share a few rotary numbers of K. Caching the expanded rows costs tens of times
the latent. The weights can be absorbed in its place: a query times the weights that expand K is a
query for latents, and the sum of latents times the weights that expand V is the result, so each
token has one latent row and one rotary row. The linear layer then hands its input on and computes
nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from kvcellar.errors import ModelError
from kvcellar.models.latents import Latents

_BOUND = "_kvcellar_latents"
"""Name under which an attention module has its :class:`LatentLinear`; a copy of it has a copy."""

_handed = threading.local()
"""Has ``latent``, what a :class:`LatentLinear` of this thread has handed on last, and ``by`` it."""


class LatentLinear(nn.Module):
    """The linear layer that expanded latents, in its place: hands them on and expands nothing.

    Its weights are those of the linear layer, K's and V's apart.
    """

    def __init__(self, linear: nn.Linear, latents: Latents) -> None:
        """Take the weights of a linear layer apart; they stay of its type and on its device.

        Raises:
            ModelError: a rank has some of the heads, and their rows do not lie together.
        """
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.weight.shape[0]
        n_kv_heads = self.out_features // (latents.plain_dim + latents.v_dim)
        if n_kv_heads != latents.n_kv_heads and not latents.is_by_head:
            raise ModelError(
                f"a rank has {n_kv_heads} of {latents.n_kv_heads} heads of a layer whose K and V "
                f"lie apart; leave --tp out"
            )
        self.latents = latents = replace(latents, n_kv_heads=n_kv_heads)
        for name, rows in zip(("up_k", "up_v"), expanded_rows(latents), strict=True):
            weight = linear.weight.detach()[rows.to(linear.weight.device)]
            setattr(self, name, nn.Parameter(weight, requires_grad=False))
        self.up_k: nn.Parameter
        """``[n_kv_heads, plain_dim, latent_dim]``"""
        self.up_v: nn.Parameter
        """``[n_kv_heads, v_dim, latent_dim]``"""

    def forward(self, latent: Tensor) -> Tensor:
        """Keep ``latent [..., latent_dim]`` for the attention.

        Returns:
            Zeros ``[..., out_features]``, which take no memory.
        """
        _handed.by, _handed.latent = self, latent
        return latent.new_zeros(1).expand(*latent.shape[:-1], self.out_features)

    def absorb(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v for a cache of latent rows.

        Args:
            q: ``[1, n_heads, T, plain_dim + rotary_dim]``.
            k: ``[1, n_kv_heads, T, plain_dim + rotary_dim]``, of which only the rotary part counts.

        Returns:
            q ``[1, n_heads, T, latent_dim + rotary_dim]``, k ``[1, 1, T, rotary_dim]`` and v
            ``[1, 1, T, latent_dim]``.
        """
        dims, (n_heads, n_tok) = self.latents, q.shape[1:3]
        assert _handed.by is self, "an attention module expands latents before it attends"
        latent: Tensor = _handed.latent
        _handed.__dict__.clear()
        if dims.is_rotary_first:
            rotary, plain = q.split((dims.rotary_dim, dims.plain_dim), dim=-1)
            k = k[:, :1, :, : dims.rotary_dim]
        else:
            plain, rotary = q.split((dims.plain_dim, dims.rotary_dim), dim=-1)
            k = k[:, :1, :, dims.plain_dim :]
        folded = plain.reshape(dims.n_kv_heads, -1, dims.plain_dim)
        absorbed = torch.bmm(folded, self.up_k).view(1, n_heads, n_tok, dims.latent_dim)
        v = latent.reshape(1, 1, n_tok, dims.latent_dim)
        return torch.cat((absorbed, rotary), dim=-1), k, v

    def expand(self, out: Tensor) -> Tensor:
        """Return ``[1, n_heads, T, v_dim]`` of attended latents ``[1, n_heads, T, latent_dim]``."""
        dims, (n_heads, n_tok) = self.latents, out.shape[1:3]
        folded = out.reshape(dims.n_kv_heads, -1, dims.latent_dim)
        return torch.bmm(folded, self.up_v.transpose(1, 2)).view(1, n_heads, n_tok, dims.v_dim)


def bound_to(attention: nn.Module) -> LatentLinear | None:
    """Return what an attention module has in place of its expanding layer; None: it has none."""
    return vars(attention).get(_BOUND)


def bind_latents(network: nn.Module, found: Mapping[int, Latents]) -> None:
    """Have layers of a network hand on latents in place of expanded K and V.

    Args:
        network: of transformers, with its weights.
        found: by layer, as ``find_latents`` returns them.

    Raises:
        ModelError: a layer has no such linear layer; those before it are bound.
    """
    left = dict(found)
    for attention in list(network.modules()):
        layer = vars(attention).get("layer_idx")
        if layer not in left or not _has_linear(attention, left[layer].linear):
            continue
        latents = left.pop(layer)
        name, _, last = latents.linear.rpartition(".")
        parent = attention.get_submodule(name)
        bound = LatentLinear(cast(nn.Linear, getattr(parent, last)), latents)
        setattr(parent, last, bound)
        vars(attention)[_BOUND] = bound
    if left:
        raise ModelError(
            f"layers {sorted(left)} were found to expand latents, and this network's have no such "
            f"linear layer; it is another model than the one that was looked at"
        )


def _has_linear(attention: nn.Module, name: str) -> bool:
    return type(dict(attention.named_modules()).get(name)) is nn.Linear


def expanded_rows(latents: Latents) -> tuple[Tensor, Tensor]:
    """Return which outputs are K's ``[n_kv_heads, plain_dim]`` and V's ``[n_kv_heads, v_dim]``."""
    n, k_dim, v_dim = latents.n_kv_heads, latents.plain_dim, latents.v_dim
    lengths = (k_dim, v_dim) if latents.is_k_first else (v_dim, k_dim)
    every = torch.arange(n * (k_dim + v_dim))
    if latents.is_by_head:
        first, second = every.view(n, -1).split(lengths, dim=1)
    else:
        first, second = (
            part.view(n, -1) for part in every.split([n * length for length in lengths])
        )
    return (first, second) if latents.is_k_first else (second, first)
