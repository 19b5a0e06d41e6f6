"""Norms, rotations and gates around a decoder's linear layers, in few calls of the CPU kernel.

Between two reads of weights a model of transformers runs some forty small operations a layer, each
with its own pass over memory and, from Python, some microseconds: of a step of a 1B model that was
9 ms, and a sixth of a prompt's time. Here q, k and v are one product, gate and up another, and
norms, rotations and gates one pass each. What is computed, and where it is rounded, stays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kvcellar.backends.torch.bind.active_adapters import is_active
from kvcellar.backends.torch.cache.kernel import address_of, dtype_of
from kvcellar.backends.torch.cpu.modules.rotations import Rotation
from kvcellar.backends.torch.cpu.modules.routed import KernelMixture
from kvcellar.kernel import layers as native


class KernelNorm(nn.Module):
    """RMSNorm over the last dimension."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        """Take a weight, which stays shared, and what is added to the mean of squares."""
        super().__init__()
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)
        self.eps = eps
        self._number = dtype_of(weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``[B, T, dim]`` or ``[B, T, rows, dim]``; tokens may lie apart.

        B is 1 but for sequences that a recurrent module runs side by side.
        """
        batch, n_tokens, *rows, dim = x.shape
        if batch > 1:
            return self.forward(x.reshape(1, batch * n_tokens, *rows, dim)).view(x.shape)
        n_rows = rows[0] if rows else 1
        out = torch.empty(x.shape, dtype=self.weight.dtype)
        if x.dtype != out.dtype or x.stride(-1) != 1 or (n_rows > 1 and x.stride(2) != dim):
            x = x.to(out.dtype).contiguous()
        native.norm(
            address_of(x),
            n_tokens,
            n_rows,
            dim,
            x.stride(1),
            self._number,
            address_of(self.weight),
            self.eps,
            address_of(out),
        )
        return out


class HeldRows(Protocol):
    """Protocol of a linear layer whose weights can be read row by row."""

    in_features: int
    out_features: int

    def rows(self, outputs: Tensor, dtype: torch.dtype) -> Tensor:
        """Weights of outputs, ``[...] -> [..., in_features]``."""
        ...


class HeldEmbedding(nn.Module):
    """An embedding whose rows are read out of a held linear layer, its head's or its own."""

    embed_scale: Tensor | None

    def __init__(self, rows: HeldRows, dtype: torch.dtype, scale: Tensor | None) -> None:
        """Read rows of weights as they are held: packed, coded, or in a file's blocks.

        Args:
            rows: one output for each row: the last layer where they are its, too.
            dtype: of the rows that are returned.
            scale: factor on them, or None.
        """
        super().__init__()
        self.num_embeddings, self.embedding_dim = rows.out_features, rows.in_features
        self.dtype = dtype
        self.held = rows
        self.register_buffer("embed_scale", scale, persistent=False)

    @property
    def device(self) -> torch.device:
        """Device of the rows."""
        return torch.device("cpu")

    @property
    def weight(self) -> Tensor:
        """All rows ``[num_embeddings, embedding_dim]``, not scaled: made anew each time."""
        ids = torch.arange(self.num_embeddings, device=self.device)
        return self.held.rows(ids, self.dtype)

    def forward(self, ids: Tensor) -> Tensor:
        """Look rows up, ``[...] -> [..., embedding_dim]``."""
        rows = self.held.rows(ids, self.dtype)
        return rows if self.embed_scale is None else rows * self.embed_scale.to(self.dtype)


class KernelEmbedding(HeldEmbedding):
    """An embedding of the CPU kernel's, which looks at the ids before it reads."""

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
        return super().forward(ids)


class KernelMlp(nn.Module):
    """``down(act(gate(x)) * up(x))``."""

    def __init__(self, gate_up: nn.Module, down: nn.Module, act: nn.Module | None) -> None:
        """Take linear layers and the activation; None: silu, which is the kernel's."""
        super().__init__()
        self.gate_up_proj, self.down_proj, self.act = gate_up, down, act

    def forward(self, x: Tensor) -> Tensor:
        """Run ``[..., hidden] -> [..., hidden]``."""
        both = self.gate_up_proj(x)
        n = both.shape[-1] // 2
        if self.act is not None:
            out: Tensor = self.down_proj(self.act(both[..., :n]) * both[..., n:])
            return out
        gated = both.new_empty((*both.shape[:-1], n))
        native.gate(
            address_of(both), gated.numel() // n, n, dtype_of(both.dtype), address_of(gated)
        )
        out = self.down_proj(gated)
        return out


class KernelAttention(nn.Module):
    """Projections, rotation by position, and one call of the op."""

    def __init__(
        self,
        own: nn.Module,
        heads: tuple[int, int, int],
        scaling: float,
        rotation: Rotation,
        qkv: nn.Module,
        o: nn.Module,
        norms: tuple[nn.Module, nn.Module] | None,
    ) -> None:
        """Take the parts of a module.

        Args:
            own: the module, whose plain attributes are this one's as well.
            heads: how many are q's, how many k's and as many v's, and their size.
            scaling: factor on the logits.
            rotation: of q and k.
            qkv: q, k and v joined.
            o: behind attention.
            norms: of q's and k's heads, before they are rotated; None: there are none.
        """
        super().__init__()
        take_attributes(self, own)
        self.n_heads, self.n_kv_heads, self.head_dim = heads
        self.n_joined = (self.n_heads + 2 * self.n_kv_heads) * self.head_dim
        self.scaling, self.rotation = scaling, rotation
        self.qkv_proj, self.o_proj = qkv, o
        self.q_norm: nn.Module | None = None if norms is None else norms[0]
        self.k_norm: nn.Module | None = None if norms is None else norms[1]

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Run ``[1, T, hidden] -> [1, T, hidden]``; no weights are returned."""
        assert past_key_values is None, "the cache is behind the op"
        heads, n_q, n_k = self._heads(self.qkv_proj(hidden_states))
        q, k, v = heads.split([n_q, n_k, n_k], 2)
        if self.q_norm is None or self.k_norm is None:
            self.rotation.apply(heads[:, :, : n_q + n_k], position_embeddings)
        else:
            q, k = self.q_norm(q), self.k_norm(k)
            self.rotation.apply(q, position_embeddings)
            self.rotation.apply(k, position_embeddings)
        return self.o_proj(self._attend(q, k, v, attention_mask, kwargs)), None

    def attend(self, joined: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """Attend ``[1, T, q, k and v]``, rotated ``-> [1, T, n_heads * head_dim]``."""
        heads, n_q, n_k = self._heads(joined)
        q, k, v = heads.split([n_q, n_k, n_k], 2)
        return self._attend(q, k, v, None, kwargs)

    def rotate(self, joined: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> None:
        """Rotate q and k of ``[1, T, q, k and v]`` in place."""
        heads, n_q, n_k = self._heads(joined)
        self.rotation.apply(heads[:, :, : n_q + n_k], position_embeddings)

    def _heads(self, joined: Tensor) -> tuple[Tensor, int, int]:
        """Return ``[1, T, heads of q, k and v, head_dim]``; how many are q's, how many k's."""
        heads = joined.view(1, joined.shape[1], -1, self.head_dim)
        return heads, self.n_heads, self.n_kv_heads

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
    ) -> Tensor:
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        out, _ = _attention()(self, q, k, v, mask, **{**kwargs, "scaling": self.scaling})
        return out.reshape(1, q.shape[2], -1)


class KernelLayer(nn.Module):
    """A decoder layer; for a few tokens two calls of the kernel and one of the op."""

    def __init__(
        self,
        own: nn.Module,
        before: KernelNorm,
        attention: KernelAttention,
        between: KernelNorm,
        mlp: KernelMlp | KernelMixture,
    ) -> None:
        """Take the kernel's parts of a module, whose plain attributes are this one's as well."""
        super().__init__()
        take_attributes(self, own)
        self.input_layernorm, self.self_attn = before, attention
        self.post_attention_layernorm, self.mlp = between, mlp
        self._dtype = before.weight.dtype
        self.few = 0
        """Tokens up to which it is the kernel's; none before ``take_addresses``."""
        self._native: native.DecoderLayer | None = None
        self._unturned: tuple[Tensor, Tensor] | None = None

    def take_addresses(self) -> None:
        """Tell the kernel the addresses of all weights, which stay where they are from now on."""
        attention, mlp, mixture = self.self_attn, self.mlp, None
        linears: list[Any] = [attention.qkv_proj, attention.o_proj]
        if isinstance(mlp, KernelMixture):
            mlp.take_addresses()
            mixture = mlp.native
            if mixture is None or self._dtype != torch.bfloat16:
                return
        else:
            linears += [mlp.gate_up_proj, mlp.down_proj]
        self.few = min(linear.few for linear in linears)
        held = [linear.for_kernel() for linear in linears]
        qkv, o, gate_up, down = held if mixture is None else (*held, None, None)
        self._native = native.DecoderLayer(
            qkv,
            o,
            gate_up,
            down,
            _for_kernel(self.input_layernorm),
            _for_kernel(self.post_attention_layernorm),
            _for_kernel(attention.q_norm),
            _for_kernel(attention.k_norm),
            attention.n_heads,
            attention.n_kv_heads,
            attention.head_dim,
            dtype_of(self._dtype),
            attention.scaling,
            mixture,
        )
        if not attention.rotation.is_whole:
            shape = (self.few, attention.head_dim)
            self._unturned = (
                torch.ones(shape, dtype=self._dtype),
                torch.zeros(shape, dtype=self._dtype),
            )

    @property
    def is_native(self) -> bool:
        """True if it is compiled: addresses were taken, and a mixture's block is the kernel's."""
        return self._native is not None

    def native(self) -> native.DecoderLayer:
        """Return the compiled layer, for a decoder of the whole model."""
        assert self._native is not None, "weights lie where they stay"
        return self._native

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        past_key_values: None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Run ``[1, T, hidden] -> [1, T, hidden]``."""
        assert past_key_values is None, "the cache is behind the op"
        x, native, n_tokens = hidden_states, self._native, hidden_states.shape[1]
        sides = self._unturned or position_embeddings
        if native is None or sides is None or not self._fits(x, sides):
            attended, _ = self.self_attn(
                self.input_layernorm(x), position_embeddings, attention_mask, **kwargs
            )
            x = x + attended
            whole: Tensor = x + self.mlp(self.post_attention_layernorm(x))
            return whole
        cos, sin = sides
        joined = x.new_empty((1, n_tokens, self.self_attn.n_joined))
        native.before(address_of(x), n_tokens, address_of(cos), address_of(sin), address_of(joined))
        if self._unturned and position_embeddings is not None:
            self.self_attn.rotate(joined, position_embeddings)
        attended = self.self_attn.attend(joined, kwargs)
        out = torch.empty_like(x)
        native.after(address_of(x), address_of(attended), n_tokens, address_of(out))
        return out

    def _fits(self, x: Tensor, sides: tuple[Tensor, Tensor]) -> bool:
        """Return true if this is for the kernel: few tokens, in its type, as it reads them.

        Not tokens of adapters, which are computed beside each linear layer.
        """
        if is_active():
            return False
        n_tokens, given = x.shape[1], sides[0].shape[1]
        is_few = n_tokens <= self.few and (self._unturned is not None or given == n_tokens)
        return is_few and all(
            one.dtype == self._dtype and one.is_contiguous() for one in (x, *sides)
        )


@functools.cache
def _attention() -> Callable[..., tuple[Tensor, None]]:
    from kvcellar.backends.torch.bind.model_attention import (
        attention,  # it imports all of transformers
    )

    return attention


def take_attributes(module: nn.Module, own: nn.Module) -> None:
    """Give a module the numbers and names of the one that it stands in for: others read them."""
    for name, value in vars(own).items():
        if name not in vars(module) and isinstance(value, (int, float, str)):
            setattr(module, name, value)


class Beside(nn.Module):
    """Linear layers of one input whose outputs stand one behind the other."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        """Take the layers; some may be torch's and others the kernel's."""
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        """Return what each makes of ``x``, ``[..., n_in]``, in one tensor."""
        return torch.cat([layer(x) for layer in self.layers], dim=-1)


def join(layers: Sequence[nn.Linear]) -> nn.Linear:
    """Make one layer whose outputs are those of several, one behind the other; of one, itself."""
    first = layers[0]
    if len(layers) == 1:
        return first
    bias = join_biases(layers)
    joined = nn.Linear(first.in_features, 1, bias=bias is not None, device="meta")
    joined.out_features = sum(layer.out_features for layer in layers)
    weights = torch.cat([layer.weight.detach() for layer in layers])
    joined.weight = nn.Parameter(weights, requires_grad=False)
    if bias is not None:
        joined.bias = nn.Parameter(bias, requires_grad=False)
    return joined


def join_biases(layers: Sequence[nn.Linear]) -> Tensor | None:
    """Return the biases of layers behind one another, zeros for none; None: all lack one."""
    if all(layer.bias is None for layer in layers):
        return None
    biases = [
        layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias.detach()
        for layer in layers
    ]
    return torch.cat(biases)


def _for_kernel(norm: nn.Module | None) -> native.Norm:
    """Return what the kernel reads of a norm, or of none."""
    if norm is None:
        return native.Norm(0, 0.0)
    assert isinstance(norm, KernelNorm), "a layer is made where its norms are the kernel's"
    return native.Norm(address_of(norm.weight), norm.eps)
