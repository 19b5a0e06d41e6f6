"""The weights of an EAGLE-3 head as they are multiplied: folded, joined and turned."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kvcellar.backends.torch.eagle3.network import Eagle3Network
from kvcellar.models.eagle3.config import Eagle3Config
from kvcellar.types import IntArray


class Eagle3Weights:
    """The weights of a head. Shared by sessions and threads; never changes.

    Norms are folded into the matrices behind them, matrices with one input are one, and all lie
    ``[in, out]``: levels of four to eight guesses take a twelfth less than with torch's own order.

    Attributes:
        config: its shape.
        embedding: ``[vocab, hidden]``.
        fc, qkv, o, gate_up, down, lm_head: matrices ``[in, out]``.
        fc_bias, qkv_bias: None where the head has none.
        residual_scale: ``[hidden]``; None where what goes around the layer is not normalised.
        target_ids: ``[draft_vocab]``: what the target calls a token.
    """

    def __init__(self, network: Eagle3Network) -> None:
        """Take the weights over from a network; it is not needed any more."""
        config, layer = network.config, network.midlayer
        self.config: Eagle3Config = config
        attention, mlp = layer.self_attn, layer.mlp
        with torch.no_grad():
            self.embedding = network.embed_tokens.weight.detach()
            self.fc, self.fc_bias = _turned(network.fc.weight), network.fc.bias
            qkv = (attention.q_proj, attention.k_proj, attention.v_proj)
            scale = torch.cat((layer.input_layernorm.weight, layer.hidden_norm.weight))
            self.qkv = _turned(torch.cat([part.weight for part in qkv]) * scale)
            self.qkv_bias = None
            if config.attention_bias:
                self.qkv_bias = torch.cat([part.bias for part in qkv])
            self.o = _turned(attention.o_proj.weight)
            gate_up = torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight))
            self.gate_up = _turned(gate_up * layer.post_attention_layernorm.weight)
            self.down = _turned(mlp.down_proj.weight)
            self.residual_scale = None
            if config.norm_before_residual:
                self.residual_scale = layer.hidden_norm.weight.detach()
            self.lm_head = _turned(network.lm_head.weight * network.norm.weight)
            ids = torch.arange(config.draft_vocab_size, device=network.d2t.device)
            self.target_ids: IntArray = (ids + network.d2t).cpu().numpy()
        self._rotary = network.rotary
        self._eps = torch.tensor(config.rms_norm_eps, device=self.fc.device)
        self._rope = torch.empty(2, 0, config.head_dim)

    @property
    def matrices(self) -> tuple[Tensor, ...]:
        """All matrices, ``[in, out]``."""
        return (self.fc, self.qkv, self.o, self.gate_up, self.down, self.lm_head)

    def normed(self, x: Tensor) -> Tensor:
        """Normalise rows (RMS) in few operators: torch's own take as long as a small product."""
        if x.dtype != torch.float32:
            return functional.rms_norm(x, x.shape[-1:], eps=self.config.rms_norm_eps)
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x * torch.addcmul(self._eps, length, length, value=1 / x.shape[-1]).rsqrt_()

    def rope(self, positions: Tensor, n: int) -> Tensor:
        """Return cosine and signed sine ``[2, T, 1, head_dim]``.

        Args:
            positions: ``[T]``.
            n: more than the highest of them.
        """
        return self.rope_table(n)[:, positions, None]

    def rope_table(self, n: int) -> Tensor:
        """Return cosine and signed sine ``[2, m, head_dim]`` of at least ``n`` positions."""
        table = self._rope
        if n > table.shape[1]:
            at = torch.arange(max(n, 2 * table.shape[1], 1024), device=self.embedding.device)
            with torch.inference_mode():
                cos, sin = self._rotary(self.embedding, at[None])
                half = sin.shape[2] // 2
                sin = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
                table = self._rope = torch.cat((cos, sin))
        return table


def _turned(weight: Tensor) -> Tensor:
    """Transpose ``[out, in]`` to ``[in, out]``, in memory too."""
    return weight.detach().t().contiguous()
