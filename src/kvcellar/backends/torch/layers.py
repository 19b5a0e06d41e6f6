"""What lies around a decoder's linear layers, as few calls of the CPU kernel.

Between two reads of weights a model of transformers runs some forty small operations a layer, each
with its own pass over memory and, from Python, some microseconds: of a step of a 1B model that was
9 ms, and a sixth of a prompt's time. Here q, k and v are one product, gate and up another, and
norms, rotations and gates one pass each. What is computed, and where it is rounded, stays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from kvcellar.backends import kernels

NORMS = frozenset({"LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm"})
"""Classes of transformers that compute ``x / sqrt(mean(x^2) + eps) * weight``."""

MLPS = frozenset({"LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP"})
"""That compute ``down(silu(gate(x)) * up(x))``, with the right activation in their config."""

ATTENTIONS = frozenset({"LlamaAttention", "MistralAttention", "Qwen2Attention", "Qwen3Attention"})
"""That rotate q and k by position, halves of a head against each other; Qwen3 norms them before."""

MakeLinear = Callable[[nn.Linear], nn.Module]


class KernelNorm(nn.Module):
    """RMSNorm over the last dimension."""

    def __init__(self, norm: Any) -> None:
        """Of a module's weight, which stays shared."""
        super().__init__()
        self.weight = norm.weight
        self.variance_epsilon = float(norm.variance_epsilon)
        self._number = _number(norm.weight)

    def forward(self, x: Tensor) -> Tensor:
        """``[1, T, dim]`` or ``[1, T, rows, dim]``, in the weight's type; tokens may lie apart."""
        _, n_tokens, *rows, dim = x.shape
        n_rows = rows[0] if rows else 1
        out = torch.empty(x.shape, dtype=self.weight.dtype)
        if x.dtype != out.dtype or x.stride(-1) != 1 or (n_rows > 1 and x.stride(2) != dim):
            x = x.to(out.dtype).contiguous()
        kernels.norm(
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


class KernelMlp(nn.Module):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, mlp: Any, make: MakeLinear) -> None:
        """Of a module's layers."""
        super().__init__()
        self.gate_up_proj = make(join([mlp.gate_proj, mlp.up_proj]))
        self.down_proj = make(mlp.down_proj)

    def forward(self, x: Tensor) -> Tensor:
        """``[1, T, hidden] -> [1, T, hidden]``."""
        both = self.gate_up_proj(x)
        n = both.shape[-1] // 2
        gated = both.new_empty((*both.shape[:-1], n))
        kernels.gate(both.data_ptr(), gated.numel() // n, n, _number(both), gated.data_ptr())
        out: Tensor = self.down_proj(gated)
        return out


class KernelAttention(nn.Module):
    """Projections, rotation by position, and one call of the op."""

    def __init__(self, attention: Any, make: MakeLinear) -> None:
        """Of a module's layers."""
        super().__init__()
        self.layer_idx = attention.layer_idx
        self.head_dim, self.scaling = attention.head_dim, attention.scaling
        parts = [attention.q_proj, attention.k_proj, attention.v_proj]
        self._ends = [0, *accumulate(part.out_features for part in parts)]
        self.qkv_proj = make(join(parts))
        self.o_proj = make(attention.o_proj)
        self.q_norm: nn.Module | None = getattr(attention, "q_norm", None)
        self.k_norm: nn.Module | None = getattr(attention, "k_norm", None)

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
        """``[1, T, hidden] -> [1, T, hidden]``, and no weights."""
        from kvcellar.models.torch_attention import attention

        assert past_key_values is None, "the cache is behind the op"
        joined = self.qkv_proj(hidden_states)
        n_tokens, dim = joined.shape[1], self.head_dim
        heads = joined.view(1, n_tokens, -1, dim)
        first_k, first_v = self._ends[1] // dim, self._ends[2] // dim
        q, k, v = heads[:, :, :first_k], heads[:, :, first_k:first_v], heads[:, :, first_v:]
        if self.q_norm is None or self.k_norm is None:
            rotate(heads[:, :, :first_v], *position_embeddings)
        else:
            q, k = self.q_norm(q), self.k_norm(k)
            rotate(q, *position_embeddings)
            rotate(k, *position_embeddings)
        out, _ = attention(
            self,
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attention_mask,
            scaling=self.scaling,
            position_ids=position_ids,
        )
        return self.o_proj(out.reshape(1, n_tokens, -1)), None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate each head by its token's position, in place.

    Args:
        x: ``[1, T, heads, head_dim]``, whose heads lie one behind the other.
        cos: ``[1, T, head_dim]``, in the type of x.
        sin: the same.
    """
    _, n_tokens, n_heads, dim = x.shape
    cos, sin = (side.to(x.dtype).expand(1, n_tokens, dim).contiguous() for side in (cos, sin))
    kernels.rotate(
        x.data_ptr(),
        n_tokens,
        n_heads,
        dim,
        x.stride(1),
        _number(x),
        cos.data_ptr(),
        sin.data_ptr(),
    )


def join(layers: Sequence[nn.Linear]) -> nn.Linear:
    """One layer whose outputs are theirs, one behind the other."""
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
    """What computes the same with the kernel; None: nothing here does.

    Args:
        module: of a model of transformers.
        make: what to hold the weights of linear layers in.
    """
    name = type(module).__name__
    if name in NORMS:
        return KernelNorm(module)
    if name in MLPS and module.config.hidden_act == "silu":
        return KernelMlp(module, make)
    if name in ATTENTIONS:
        return KernelAttention(module, make)
    return None


def _number(x: Tensor) -> int:
    return _NUMBERS[x.dtype]


_NUMBERS = {torch.float32: kernels.DTYPES["float32"], torch.bfloat16: kernels.DTYPES["bfloat16"]}
