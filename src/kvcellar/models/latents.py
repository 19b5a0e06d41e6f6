"""Latent attention (MLA) as a model has it: which linear layer expands latents to K and V."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Latents:
    """Layout of the outputs by which an attention module expands latents to K and V.

    Attributes:
        linear: name of the linear layer within the attention module.
        is_by_head: its outputs are a head's K and V, head after head; else first one of the two for
            all heads, then the other.
        is_k_first: of K and V, K comes first.
        is_rotary_first: a K row begins with the part that all heads share.
        n_kv_heads: heads of the expanded K and V.
        plain_dim: numbers of a head's K row that are expanded.
        rotary_dim: the other numbers of a K row, which all heads share.
        v_dim: numbers of a head's V row.
        latent_dim: numbers of a latent.
    """

    linear: str
    is_by_head: bool
    is_k_first: bool
    is_rotary_first: bool
    n_kv_heads: int
    plain_dim: int
    rotary_dim: int
    v_dim: int
    latent_dim: int
