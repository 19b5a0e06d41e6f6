"""Norms, rotations and gates around a decoder's linear layers, in few calls of the CPU kernel.

Between two reads of weights a model of transformers runs some forty small operations a layer, each
with its own pass over memory and, from Python, some microseconds: of a step of a 1B model that was
9 ms, and a sixth of a prompt's time. Here q, k and v are one product, gate and up another, and
norms, rotations and gates one pass each. What is computed, and where it is rounded, stays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kvcellar.backends.torch.fast.linears import KernelLinear
from kvcellar.backends.torch.kernel import dtype_of
from kvcellar.kernel import layers as native

NORMS = frozenset({"LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm"})
"""Classes of transformers that compute ``x / sqrt(mean(x^2) + eps) * weight``."""

MLPS = frozenset({"LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP"})
"""That compute ``down(silu(gate(x)) * up(x))``, with the right activation in their config."""

ATTENTIONS = frozenset({"LlamaAttention", "MistralAttention", "Qwen2Attention", "Qwen3Attention"})
"""That rotate q and k by position, halves of a head against each other; Qwen3 norms them before."""

LAYERS = frozenset({"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer"}) | {
    "Qwen3DecoderLayer"
}
"""That add to x what attention makes of its norm, and to that what the MLP makes of its."""

MakeLinear = Callable[[nn.Linear], KernelLinear]


class KernelNorm(nn.Module):
    """RMSNorm over the last dimension."""

    def __init__(self, norm: Any) -> None:
        """Take a module's weight, which stays shared."""
        super().__init__()
        self.weight = norm.weight
        self.variance_epsilon = float(norm.variance_epsilon)
        self._number = dtype_of(norm.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``[1, T, dim]`` or ``[1, T, rows, dim]``; tokens may lie apart."""
        _, n_tokens, *rows, dim = x.shape
        n_rows = rows[0] if rows else 1
        out = torch.empty(x.shape, dtype=self.weight.dtype)
        if x.dtype != out.dtype or x.stride(-1) != 1 or (n_rows > 1 and x.stride(2) != dim):
            x = x.to(out.dtype).contiguous()
        native.norm(
            x.data_ptr(),
            n_tokens,
            n_rows,
            dim,
            x.stride(1),
            self._number,
            self.weight.data_ptr(),
            self.variance_epsilon,
            out.data_ptr(),
        )
        return out


class KernelEmbedding(nn.Module):
    """The embedding of a model whose last layer has the same weights, which are held once."""

    embed_scale: Tensor | None

    def __init__(self, embedding: Any, head: KernelLinear) -> None:
        """Read the rows of ``head``, which has them in 12 bits, 8 or 4.

        Args:
            embedding: what gives the type; one that scales its rows keeps doing so.
            head: the last layer.
        """
        super().__init__()
        self.num_embeddings, self.embedding_dim = head.out_features, head.in_features
        self.dtype: torch.dtype = embedding.weight.dtype
        self.head = head
        scale = getattr(embedding, "embed_scale", None)
        self.register_buffer("embed_scale", scale, persistent=False)

    @property
    def weight(self) -> Tensor:
        """All rows ``[num_embeddings, embedding_dim]``, not scaled: made anew each time."""
        return self.head.rows(torch.arange(self.num_embeddings), self.dtype)

    def forward(self, ids: Tensor) -> Tensor:
        """Look rows up, ``[...] -> [..., embedding_dim]``.

        Raises:
            IndexError: an id is none of the vocabulary's.
        """
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.num_embeddings:
            raise IndexError(
                f"ids are between {int(ids.min())} and {int(ids.max())}, and the embedding has "
                f"{self.num_embeddings} rows; check the tokens"
            )
        rows = self.head.rows(ids, self.dtype)
        return rows if self.embed_scale is None else rows * self.embed_scale.to(self.dtype)


class KernelMlp(nn.Module):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, mlp: Any, make: MakeLinear) -> None:
        """Make the kernel's layers of a module's."""
        super().__init__()
        self.gate_up_proj = make(join([mlp.gate_proj, mlp.up_proj]))
        self.down_proj = make(mlp.down_proj)

    def forward(self, x: Tensor) -> Tensor:
        """Run ``[1, T, hidden] -> [1, T, hidden]``."""
        both = self.gate_up_proj(x)
        n = both.shape[-1] // 2
        gated = both.new_empty((*both.shape[:-1], n))
        native.gate(both.data_ptr(), gated.numel() // n, n, dtype_of(both.dtype), gated.data_ptr())
        out: Tensor = self.down_proj(gated)
        return out


class KernelAttention(nn.Module):
    """Projections, rotation by position, and one call of the op."""

    def __init__(self, attention: Any, make: MakeLinear) -> None:
        """Make the kernel's layers of a module's."""
        super().__init__()
        self.layer_idx = attention.layer_idx
        self.head_dim, self.scaling = attention.head_dim, attention.scaling
        parts = [attention.q_proj, attention.k_proj, attention.v_proj]
        self.n_heads, self.n_kv_heads = (part.out_features // self.head_dim for part in parts[:2])
        self.qkv_proj = make(join(parts))
        self.n_joined = self.qkv_proj.out_features
        self.o_proj = make(attention.o_proj)
        self.q_norm, self.k_norm = (
            KernelNorm(norm) if (norm := getattr(attention, name, None)) is not None else None
            for name in ("q_norm", "k_norm")
        )

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: None = None,
        *,
        position_ids: Tensor,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Run ``[1, T, hidden] -> [1, T, hidden]``; no weights are returned."""
        assert past_key_values is None, "the cache is behind the op"
        cos, sin = position_embeddings
        heads, n_q, n_k = self._heads(self.qkv_proj(hidden_states))
        if self.q_norm is None or self.k_norm is None:
            rotate(heads[:, :, : n_q + n_k], cos, sin)
            q, k = heads[:, :, :n_q], heads[:, :, n_q : n_q + n_k]
        else:
            q, k = self.q_norm(heads[:, :, :n_q]), self.k_norm(heads[:, :, n_q : n_q + n_k])
            rotate(q, cos, sin)
            rotate(k, cos, sin)
        attended = self._attend(q, k, heads[:, :, n_q + n_k :], attention_mask, position_ids)
        return self.o_proj(attended), None

    def attend(self, joined: Tensor, position_ids: Tensor) -> Tensor:
        """Attend ``[1, T, q, k and v]``, rotated ``-> [1, T, n_heads * head_dim]``."""
        heads, n_q, n_k = self._heads(joined)
        q, k, v = heads[:, :, :n_q], heads[:, :, n_q : n_q + n_k], heads[:, :, n_q + n_k :]
        return self._attend(q, k, v, None, position_ids)

    def _heads(self, joined: Tensor) -> tuple[Tensor, int, int]:
        """Return ``[1, T, heads of q, k and v, head_dim]``; how many are q's, how many k's."""
        heads = joined.view(1, joined.shape[1], -1, self.head_dim)
        return heads, self.n_heads, self.n_kv_heads

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, position_ids: Tensor
    ) -> Tensor:
        out, _ = _attention()(
            self,
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            mask,
            scaling=self.scaling,
            position_ids=position_ids,
        )
        return out.reshape(1, q.shape[1], -1)


class KernelLayer(nn.Module):
    """A decoder layer; for a few tokens two calls of the kernel and one of the op."""

    def __init__(self, layer: Any, make: MakeLinear) -> None:
        """Make the kernel's parts of a module's."""
        super().__init__()
        self.input_layernorm = KernelNorm(layer.input_layernorm)
        self.self_attn = KernelAttention(layer.self_attn, make)
        self.post_attention_layernorm = KernelNorm(layer.post_attention_layernorm)
        self.mlp = KernelMlp(layer.mlp, make)
        self._dtype = self.input_layernorm.weight.dtype
        self.few = min(
            linear.few
            for linear in (
                self.self_attn.qkv_proj,
                self.self_attn.o_proj,
                self.mlp.gate_up_proj,
                self.mlp.down_proj,
            )
        )
        """Tokens up to which it is the kernel's."""
        self._native: native.DecoderLayer | None = None

    def take_addresses(self) -> None:
        """Tell the kernel the addresses of all weights, which stay where they are from now on."""
        attention, mlp = self.self_attn, self.mlp
        self._native = native.DecoderLayer(
            attention.qkv_proj.for_kernel(),
            attention.o_proj.for_kernel(),
            mlp.gate_up_proj.for_kernel(),
            mlp.down_proj.for_kernel(),
            _for_kernel(self.input_layernorm),
            _for_kernel(self.post_attention_layernorm),
            _for_kernel(attention.q_norm),
            _for_kernel(attention.k_norm),
            attention.n_heads,
            attention.n_kv_heads,
            attention.head_dim,
            dtype_of(self._dtype),
            attention.scaling,
        )

    def native(self) -> native.DecoderLayer:
        """Return the compiled layer, for a decoder of the whole model; addresses were taken."""
        assert self._native is not None, "weights lie where they stay"
        return self._native

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        position_ids: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        **kwargs: Any,
    ) -> Tensor:
        """Run ``[1, T, hidden] -> [1, T, hidden]``."""
        x, native, n_tokens = hidden_states, self._native, hidden_states.shape[1]
        cos, sin = position_embeddings
        if native is None or not self._fits(x, cos):
            attended, _ = self.self_attn(
                self.input_layernorm(x),
                position_embeddings,
                attention_mask,
                position_ids=position_ids,
                **kwargs,
            )
            x = x + attended
            whole: Tensor = x + self.mlp(self.post_attention_layernorm(x))
            return whole
        joined = x.new_empty((1, n_tokens, self.self_attn.n_joined))
        native.before(x.data_ptr(), n_tokens, cos.data_ptr(), sin.data_ptr(), joined.data_ptr())
        attended = self.self_attn.attend(joined, position_ids)
        out = torch.empty_like(x)
        native.after(x.data_ptr(), attended.data_ptr(), n_tokens, out.data_ptr())
        return out

    def _fits(self, x: Tensor, cos: Tensor) -> bool:
        """Return true if this is for the kernel: few tokens, in its type, as it reads them."""
        n_tokens = x.shape[1]
        is_few = n_tokens <= self.few and cos.shape[1] == n_tokens
        return is_few and x.dtype == self._dtype and x.is_contiguous()


@functools.cache
def _attention() -> Callable[..., tuple[Tensor, None]]:
    from kvcellar.backends.torch.model_attention import attention  # it imports all of transformers

    return attention


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate each head by its token's position, in place.

    Args:
        x: ``[1, T, heads, head_dim]``, whose heads lie one behind the other.
        cos: ``[1, T, head_dim]``, in the type of x.
        sin: the same.
    """
    _, n_tokens, n_heads, dim = x.shape
    cos, sin = (side.to(x.dtype).expand(1, n_tokens, dim).contiguous() for side in (cos, sin))
    native.rotate(
        x.data_ptr(),
        n_tokens,
        n_heads,
        dim,
        x.stride(1),
        dtype_of(x.dtype),
        cos.data_ptr(),
        sin.data_ptr(),
    )


def join(layers: Sequence[nn.Linear]) -> nn.Linear:
    """Make one layer whose outputs are those of several, one behind the other."""
    first = layers[0]
    has_bias = any(layer.bias is not None for layer in layers)
    joined = nn.Linear(first.in_features, 1, bias=has_bias, device="meta")
    joined.out_features = sum(layer.out_features for layer in layers)
    weights = torch.cat([layer.weight.detach() for layer in layers])
    joined.weight = nn.Parameter(weights, requires_grad=False)
    if has_bias:
        biases = [
            weights.new_zeros(layer.out_features) if layer.bias is None else layer.bias.detach()
            for layer in layers
        ]
        joined.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    return joined


def kernel_layer(module: Any, make: MakeLinear) -> nn.Module | None:
    """Make what computes the same with the kernel; None: nothing here does.

    Args:
        module: of a model of transformers.
        make: what to hold the weights of linear layers in.
    """
    name = type(module).__name__
    if name in LAYERS and _is_silu(module.mlp) and _is_known(module):
        return KernelLayer(module, make)
    if name in NORMS:
        return KernelNorm(module)
    if name in MLPS and _is_silu(module):
        return KernelMlp(module, make)
    if name in ATTENTIONS:
        return KernelAttention(module, make)
    return None


def _for_kernel(norm: KernelNorm | None) -> native.Norm:
    """Return what the kernel reads of a norm, or of none."""
    if norm is None:
        return native.Norm(0, 0.0)
    return native.Norm(norm.weight.data_ptr(), norm.variance_epsilon)


def _is_known(layer: Any) -> bool:
    parts = (layer.input_layernorm, layer.post_attention_layernorm, layer.self_attn, layer.mlp)
    kinds = (NORMS, NORMS, ATTENTIONS, MLPS)
    return all(type(part).__name__ in kind for part, kind in zip(parts, kinds, strict=True))


def _is_silu(mlp: Any) -> bool:
    return bool(mlp.config.hidden_act == "silu")
