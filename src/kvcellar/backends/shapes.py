"""Checks of the shapes of q, k and v, for all backends."""

from __future__ import annotations

from collections.abc import Sequence

from kvcellar.errors import ShapeError
from kvcellar.types import LayerGroup


def check_shapes(
    layer: int, group: LayerGroup, k: Sequence[int], v: Sequence[int], q: Sequence[int] | None
) -> None:
    """Refuse shapes of k, v and, where it is there, q, that do not fit a layer's group.

    Raises:
        ShapeError: saying what would fit.
    """
    n_tok, n_kv = k[2] if len(k) == 4 else 0, group.n_kv_heads
    if (*k,) != (1, n_kv, n_tok, group.head_dim) or (*v,) != (1, n_kv, n_tok, group.v_head_dim):
        raise ShapeError(
            f"layer {layer} brings k {list(k)} and v {list(v)}; this cache holds "
            f"[1, {n_kv}, T, {group.head_dim}] and [1, {n_kv}, T, {group.v_head_dim}]"
        )
    if q is not None:
        n_heads = q[1] if len(q) == 4 else 0
        if not n_heads or n_heads % n_kv or (*q,) != (1, n_heads, n_tok, group.q_dim):
            kind = "latent rows" if group.is_latent else f"{n_kv} KV heads"
            raise ShapeError(
                f"layer {layer} attends with q {list(q)}; this cache has {kind} of head_dim "
                f"{group.head_dim} and v_head_dim {group.v_head_dim}, so q is "
                f"[1, a multiple of {n_kv}, {n_tok}, {group.q_dim}]"
            )
