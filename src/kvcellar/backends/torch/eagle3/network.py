"""The network of EAGLE-3 in torch, with the names of the published checkpoints.

Li et al., 2025, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via
Training-Time Test" (arXiv:2503.01840). What is cached, and how queries attend, is the caller's:
the drafter passes the neutral op, training its own unrolled attention.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from kvcellar.models.eagle3.config import Eagle3Config

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q ``[B, n_heads, T, head_dim]``, k and v ``[B, n_kv_heads, T, head_dim]``, rotated, to
``[B, n_heads, T, head_dim]``."""


class Attention(nn.Module):
    """Attention over what embedding and hidden state say side by side."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        width, has_bias = 2 * config.hidden_size, config.attention_bias
        n_q, n_kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
        self.q_proj = nn.Linear(width, n_q, bias=has_bias)
        self.k_proj = nn.Linear(width, n_kv, bias=has_bias)
        self.v_proj = nn.Linear(width, n_kv, bias=has_bias)
        self.o_proj = nn.Linear(n_q, config.hidden_size, bias=False)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """Attend ``[B, T, 2 * hidden]``; return ``[B, T, hidden]``."""
        heads = (*x.shape[:2], -1, self.head_dim)
        q = self.q_proj(x).view(heads).transpose(1, 2)
        k = self.k_proj(x).view(heads).transpose(1, 2)
        v = self.v_proj(x).view(heads).transpose(1, 2)
        q, k = apply_rotary_pos_emb(q, k, *rope)
        out = attend(q, k, v).transpose(1, 2).flatten(2)
        projected: Tensor = self.o_proj(out)
        return projected


class Mlp(nn.Module):
    """Gated, as Llama's."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Run ``[B, T, hidden] -> [B, T, hidden]``."""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """The one decoder layer; its attention sees the token's embedding beside the hidden state."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.is_normed_before_residual = config.norm_before_residual
        self.input_layernorm = nn.RMSNorm(hidden, eps)
        self.hidden_norm = nn.RMSNorm(hidden, eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps)
        self.self_attn = Attention(config)
        self.mlp = Mlp(config)

    def forward(
        self, embeds: Tensor, hidden: Tensor, rope: tuple[Tensor, Tensor], attend: Attend
    ) -> Tensor:
        """Both ``[B, T, hidden]``; the result too, not normalised."""
        normed = self.hidden_norm(hidden)
        if self.is_normed_before_residual:
            hidden = normed
        both = torch.cat((self.input_layernorm(embeds), normed), dim=-1)
        hidden = hidden + self.self_attn(both, rope, attend)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class Eagle3Network(nn.Module):
    """From a token and the target's features, or its own hidden state, to the token after it.

    Position i of its sequence is the pair of the target's features at token i and of token i + 1;
    it predicts token i + 2. Where a guess stands in for token i + 1, its own hidden state stands in
    for the features.
    """

    d2t: Tensor
    """``[draft_vocab]``: what to add to a draft id to get the target's."""
    t2d: Tensor
    """``[vocab]``: whether the draft can say a token."""

    rotary: LlamaRotaryEmbedding

    def __init__(self, config: Eagle3Config, *, has_rotary: bool = True) -> None:
        """Random weights; without what rotates, for weights to come, where it says so."""
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.fc = nn.Linear(config.n_features, config.hidden_size, bias=config.fc_bias)
        self.midlayer = Layer(config)
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.ones(config.vocab_size, dtype=torch.bool))
        if has_rotary:
            self.make_rotary(torch.device("cpu"))

    def make_rotary(self, device: torch.device) -> None:
        """Make what rotates; it has no weights, and is not loaded."""
        config = self.config
        self.rotary = LlamaRotaryEmbedding(
            LlamaConfig(
                hidden_size=config.hidden_size,
                head_dim=config.head_dim,
                num_attention_heads=config.n_heads,
                max_position_embeddings=config.max_positions,
                rope_parameters=dict(config.rope_parameters),
            )
        ).to(device)

    def step(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Run one pass through the layer.

        Args:
            tokens: ``[B, T]``.
            hidden: ``[B, T, hidden]``: ``fc`` of the features, or what an earlier pass returned.
            positions: ``[B or 1, T]``.
            attend: attends over what is known before.

        Returns:
            ``[B, T, hidden]``; ``logits`` reads it, and the next pass.
        """
        rope = self.rotary(hidden, positions)
        out: Tensor = self.midlayer(self.embed_tokens(tokens), hidden, rope, attend)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits ``[B, T, draft_vocab]`` of what ``step`` returned."""
        out: Tensor = self.lm_head(self.norm(hidden))
        return out
