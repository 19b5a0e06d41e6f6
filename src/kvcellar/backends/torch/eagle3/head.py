"""An EAGLE-3 head that is loaded, and the head bound to a session: one forward per level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kvcellar.backends.torch.eagle3.network import Eagle3Network
from kvcellar.cache import Cache
from kvcellar.models.eagle3.config import MOST_HELD_TWICE, Eagle3Config
from kvcellar.models.runner import FloatArray
from kvcellar.op import eager_update_and_attend
from kvcellar.registry import CacheSession, load_backend, use_cache
from kvcellar.types import IntArray, ModelCacheParams


@dataclass(frozen=True, slots=True, eq=False)
class Guesses:
    """What a head says behind some tokens.

    Attributes:
        tokens: ``[R, k]``, the likeliest first, as the target calls them.
        beliefs: ``[R, k]``, how likely each is, among all that the head can say.
        hidden: ``[R, hidden]``, for the next level; the runner's own.
    """

    tokens: IntArray
    beliefs: FloatArray
    hidden: Tensor


class Eagle3Head:
    """The weights of a head. Shared by sessions and threads; never changes.

    Norms are folded into the matrices behind them, matrices with one input are one, and all lie
    ``[in, out]``: levels of four to eight guesses take a twelfth less than with torch's own order.

    Attributes:
        config: its shape.
        feature_layers: whose inputs it reads of its target.
        params: what a cache for it must know.
        kv_dtype: how its cache stores K and V: as the weights.
        kernel: runs levels of a few tokens of a small head, see ``backends.torch.eagle3``; None
            where torch runs them all.
    """

    def __init__(self, network: Eagle3Network, feature_layers: tuple[int, ...]) -> None:
        """Take the weights over from a network; it is not needed any more."""
        config, layer = network.config, network.midlayer
        self.config: Eagle3Config = config
        self.feature_layers = feature_layers
        self.params = ModelCacheParams(1, config.n_kv_heads, config.head_dim)
        self.kv_dtype = str(network.fc.weight.dtype).removeprefix("torch.")
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
        self.kernel: Any = None
        if sum(matrix.numel() for matrix in self.matrices) <= MOST_HELD_TWICE:
            self.kernel = load_backend("torch").make_eagle3_kernel(self)

    def bind(self, session: CacheSession[Any]) -> Eagle3Runner:
        """Join it with an open session, whose cache was made with its ``params``.

        Raises:
            SessionClosedError: the session is not open.
            ConfigError: its cache was made for another model.
        """
        return Eagle3Runner(self, session)

    @property
    def matrices(self) -> tuple[Tensor, ...]:
        """All of them, ``[in, out]``."""
        return (self.fc, self.qkv, self.o, self.gate_up, self.down, self.lm_head)

    def normed(self, x: Tensor) -> Tensor:
        """An RMS norm of rows, in few operators: torch's own takes as long as a small product."""
        if x.dtype != torch.float32:
            return functional.rms_norm(x, x.shape[-1:], eps=self.config.rms_norm_eps)
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x * torch.addcmul(self._eps, length, length, value=1 / x.shape[-1]).rsqrt_()

    def rope(self, positions: Tensor, n: int) -> Tensor:
        """Cosine and signed sine ``[2, T, 1, head_dim]``.

        Args:
            positions: ``[T]``.
            n: more than the highest of them.
        """
        return self.rope_table(n)[:, positions, None]

    def rope_table(self, n: int) -> Tensor:
        """Cosine and signed sine of at least ``n`` positions ``[2, n, head_dim]``; it grows."""
        table = self._rope
        if n > table.shape[1]:
            at = torch.arange(max(n, 2 * table.shape[1], 1024), device=self.embedding.device)
            with torch.inference_mode():
                cos, sin = self._rotary(self.embedding, at[None])
                half = sin.shape[2] // 2
                sin = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
                table = self._rope = torch.cat((cos, sin))
        return table


class Eagle3Runner:
    """One head bound to one session. What it needs comes in and goes out as arrays."""

    def __init__(self, head: Eagle3Head, session: CacheSession[Any]) -> None:
        """Bind; use :meth:`Eagle3Head.bind`."""
        self.head = head
        self.params = head.params
        self.feature_layers = head.feature_layers
        self._session = session

    def join(self, features: Sequence[FloatArray], before: Tensor | None = None) -> Tensor:
        """What ``read`` takes in place of features, a third of their size.

        Args:
            features: ``[n, n_features]`` each.
            before: what was joined before and comes first.
        """
        head = self.head
        with torch.inference_mode():
            rows = torch.from_numpy(np.concatenate(features) if len(features) > 1 else features[0])
            if head.kernel is not None and head.kernel.takes(self._session.cache, len(rows)):
                joined = head.kernel.join(rows)
            else:
                joined = _product(rows.to(head.fc), head.fc, head.fc_bias)
            return joined if before is None else torch.cat((before, joined))

    def read(
        self,
        token_ids: Sequence[int],
        joined: Sequence[Tensor],
        positions: Sequence[int],
        rows: Sequence[int],
        k: int,
    ) -> Guesses:
        """Take pairs of features and the token behind them, which the target has seen.

        Args:
            token_ids: ``[T]``.
            joined: ``[T, hidden]`` in all, of the features of the tokens before these.
            positions: ``[T]``.
            rows: ``[R]``, behind which of them to guess.
            k: guesses for each.

        Raises:
            StepError, PositionError: the tokens are not those that the cache expects; no cell
                stays claimed for this step.
        """
        hidden = torch.cat(tuple(joined)) if len(joined) > 1 else joined[0]
        return self._forward(token_ids, hidden, range(len(token_ids)), positions, rows, k)

    def go_on(
        self,
        token_ids: Sequence[int],
        above: Guesses,
        rows: Sequence[int],
        positions: Sequence[int],
        k: int,
    ) -> Guesses:
        """Guess behind guesses.

        Args:
            token_ids: ``[T]``, the guesses.
            above: what an earlier call returned.
            rows: ``[T]``, behind which of its rows each was guessed.
            positions: ``[T]``.
            k: guesses for each.

        Raises:
            As ``read``.
        """
        return self._forward(token_ids, above.hidden, rows, positions, range(len(token_ids)), k)

    def _forward(
        self,
        token_ids: Sequence[int],
        hidden: Tensor,
        above: Sequence[int],
        positions: Sequence[int],
        rows: Sequence[int],
        k: int,
    ) -> Guesses:
        """Of tokens that go on from some rows of ``hidden``, what is said behind some of them."""
        head = self.head
        cache: Cache = self._session.cache
        if not cache.is_step_open:
            cache.end_step()  # from here on cancel_step can only mean this forward's step
        try:
            with torch.inference_mode():
                if head.kernel is not None and head.kernel.takes(cache, len(token_ids)):
                    level = head.kernel.level
                    out, ids, said = level(cache, token_ids, hidden, above, positions, rows, k)
                else:
                    with use_cache(cache):
                        out, ids, said = self._level(token_ids, hidden, above, positions, rows, k)
                return Guesses(head.target_ids[ids.cpu().numpy()], said.cpu().numpy(), out)
        except BaseException:
            cache.cancel_step()
            raise

    def _level(
        self,
        token_ids: Sequence[int],
        hidden: Tensor,
        above: Sequence[int],
        positions: Sequence[int],
        rows: Sequence[int],
        k: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """By torch, on any device, and what the kernel is held to."""
        at = torch.tensor(positions, device=hidden.device)
        tokens = torch.tensor(token_ids, device=hidden.device)
        if list(above) != list(range(len(hidden))):
            hidden = hidden[torch.tensor(above)]
        chosen = None
        if list(rows) != list(range(len(tokens))):
            chosen = torch.tensor(rows, dtype=torch.int64)
        out = self._layer(tokens, hidden, at, max(positions) + 1, chosen)
        logits = torch.mm(self.head.normed(out), self.head.lm_head)
        said, ids = torch.softmax(logits.float(), dim=-1).topk(k)
        return out, ids, said

    def _layer(
        self, tokens: Tensor, hidden: Tensor, at: Tensor, n_positions: int, rows: Tensor | None
    ) -> Tensor:
        """``[T, hidden]``, or of some rows."""
        head, config = self.head, self.head.config
        embeds = head.embedding[tokens]
        both = head.normed(torch.stack((embeds, hidden), dim=1))
        if head.residual_scale is not None:
            hidden = both[:, 1] * head.residual_scale
        qkv = _product(both.flatten(1), head.qkv, head.qkv_bias)
        n_q, n_kv = config.n_heads, config.n_kv_heads
        qkv = qkv.view(len(tokens), n_q + 2 * n_kv, config.head_dim)
        qk, v = qkv[:, : n_q + n_kv], qkv[:, n_q + n_kv :]
        cos, sin = head.rope(at, n_positions)
        qk = torch.addcmul(qk * cos, qk.roll(config.head_dim // 2, -1), sin)
        attended = eager_update_and_attend(
            qk[:, :n_q].transpose(0, 1)[None],
            qk[:, n_q:].transpose(0, 1)[None],
            v.transpose(0, 1)[None],
            at,
            0,
            config.head_dim**-0.5,
            hidden.dtype,
        )
        attended = attended[0].transpose(0, 1).flatten(1)
        if rows is not None:
            attended, hidden = attended[rows], hidden[rows]
        hidden = torch.addmm(hidden, attended, head.o)
        gate, up = torch.mm(head.normed(hidden), head.gate_up).chunk(2, dim=-1)
        return torch.addmm(hidden, functional.silu(gate) * up, head.down)


def _turned(weight: Tensor) -> Tensor:
    """``[out, in]`` as ``[in, out]``, in memory too."""
    return weight.detach().t().contiguous()


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)
