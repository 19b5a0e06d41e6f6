"""``kvcache::update_and_attend``: the one contract between models and caches.

Functional to the tracer: no mask, no causal flag and no cache in the graph. Run eagerly, the op
meets the cache that is active in its thread (``registry.use_cache``).

Torch's modules have no other way to a cache. Two ways of running all layers in one call pass by
it: small steps of the CPU kernel (``backends/torch/cpu/decoder.py``) attend in C++, and a graph
that is played on a GPU (``backends/torch/gpu/record/graphs.py``) has met the op when it was
recorded. Both ask the bookkeeping for all plans (``Steps.plan_all``) and tell it when all layers
have written (``Steps.wrote_all``).

ExecuTorch registers an op of this name and schema too. Both packages import in either order:
the definition is made by whoever comes first, and our kernel, which serves both, is registered in
any case. Without an active cache of ours it hands over to ExecuTorch's own registry.
"""

from __future__ import annotations

import sys
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from kvcellar.cache_config import CacheConfig
from kvcellar.errors import StepError
from kvcellar.registry import active_cache

NAMESPACE = "kvcache"
_ARGS = (
    "Tensor q, Tensor k, Tensor v, Tensor position, SymInt layer_id, float scale, "
    "ScalarType out_dtype"
)
_SCHEMAS = {
    "update_and_attend": f"({_ARGS}) -> Tensor",
    "update_and_attend_sinks": f"({_ARGS}, Tensor sinks) -> Tensor",
}
_ET_MODULE = "executorch.extension.llm.cache.update_and_attend"


@runtime_checkable
class OpCache(Protocol):
    """Protocol of a cache that the op can call: one that attends torch's tensors.

    Attributes:
        config: the cache's.
        takes_tensors: true; caches of other arrays have a verb of the same name and not this.
    """

    config: CacheConfig
    takes_tensors: bool

    def update_and_attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        position: Tensor,
        layer_id: int,
        scale: float,
        out_dtype: torch.dtype,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Store k and v, attend q; see ``eager_update_and_attend``."""
        ...


def eager_update_and_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position: Tensor,
    layer_id: int,
    scale: float,
    out_dtype: torch.dtype,
    sinks: Tensor | None = None,
) -> Tensor:
    """Store this forward's K and V in the active cache, then attend over the history.

    Args:
        q: ``[1, n_heads, T, head_dim]``, rotated; of a layer with latent rows (MLA)
            ``[1, n_heads, T, v_head_dim + head_dim]``, the latent part first.
        k: ``[1, n_kv_heads, T, head_dim]``, rotated; ``n_heads`` is a multiple of ``n_kv_heads``.
            Neither it nor v are looked at in a layer that shares an earlier one's rows.
        v: ``[1, n_kv_heads, T, v_head_dim]``: the latent row where rows are latent.
        position: ``[T]`` or ``[T, 1]`` ints, one per token of the flat batch.
        layer_id: which layer's history.
        scale: factor on the attention logits.
        out_dtype: type of the result, whatever the cache stores.
        sinks: ``[n_heads]``: one more logit per head in the softmax's denominator (gpt-oss).

    Returns:
        ``[1, n_heads, T, v_head_dim]`` in ``out_dtype``.

    Raises:
        StepError: no cache is active in this thread, or it is not ready for this forward.
        ShapeError, PositionError, CacheFullError: from the cache; nothing was written.
    """
    args = (q, k, v, position, layer_id, scale, out_dtype, sinks)
    cache = active_cache()
    if cache is None:
        return _hand_over(*args)
    if not torch.is_grad_enabled():
        return cast(OpCache, cache).update_and_attend(*args)
    with torch.no_grad():
        return cast(OpCache, cache).update_and_attend(*args)


def _hand_over(
    q: Tensor, k: Tensor, v: Tensor, position: Tensor, layer_id: int, *rest: Any
) -> Tensor:
    """Use ExecuTorch's cache, since none of ours is active, where it is imported and has one."""
    scale, out_dtype, sinks = rest
    theirs: Any = sys.modules.get(_ET_MODULE)
    if theirs is None or theirs.REGISTRY._active is None or sinks is not None:
        raise StepError(
            f"layer {layer_id} attends and no cache is active in this thread; run the model "
            f"through its runner, or inside 'with use_cache(session.cache)'"
        )
    keys, values, spec = theirs.REGISTRY.current().update_and_fetch(layer_id, k, v, position)
    return cast(Tensor, theirs.attend(q, keys, values, spec, scale, out_dtype))


def _fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position: Tensor,
    layer_id: int,
    scale: float,
    out_dtype: torch.dtype,
    sinks: Tensor | None = None,
) -> Tensor:
    return q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=out_dtype)


def _keep_the_object(name: str) -> None:
    """Let ``torch.ops`` give the same object for an op after ExecuTorch has defined it again.

    A second definition makes torch forget the first one's object. Our kernel keeps the operator
    alive, and with it the object that exported graphs name: a new one would be equal to none of
    their nodes.
    """
    torch._library.custom_ops.OPDEF_TO_LIB[name]._op_defs.clear()


def _register() -> list[torch.library.Library]:
    """Define what is missing and register our kernels; the libraries must stay alive."""
    if not torch._C._jit_get_schemas_for_operator(f"{NAMESPACE}::update_and_attend"):
        torch.library.custom_op(
            f"{NAMESPACE}::update_and_attend",
            eager_update_and_attend,
            mutates_args=(),
            schema=_SCHEMAS["update_and_attend"],
        ).register_fake(_fake)
        _keep_the_object(f"{NAMESPACE}::update_and_attend")
    torch.library.custom_op(
        f"{NAMESPACE}::update_and_attend_sinks",
        eager_update_and_attend,
        mutates_args=(),
        schema=_SCHEMAS["update_and_attend_sinks"],
    ).register_fake(_fake)
    kernels = torch.library.Library(NAMESPACE, "IMPL")
    for key in ("CPU", "CUDA"):
        kernels.impl("update_and_attend", eager_update_and_attend, key)
    fragment = torch.library.Library(NAMESPACE, "FRAGMENT")
    for name, schema in _SCHEMAS.items():
        args = schema[1 : schema.index(")")]
        overload = f"{name}.out"
        if not any(
            s.overload_name == "out"
            for s in torch._C._jit_get_schemas_for_operator(f"{NAMESPACE}::{name}")
        ):
            fragment.define(f"{overload}({args}, *, Tensor(a!) out) -> Tensor(a!)")
            fragment.impl(overload, _out_variant, "CompositeExplicitAutograd")
    return [kernels, fragment]


def _out_variant(*args: Any, out: Tensor) -> Tensor:
    """Either op, written into ``out``, which is resized to the result's shape."""
    result = eager_update_and_attend(*args)
    out.resize_(result.shape).copy_(result)
    return out


_libraries = _register()
