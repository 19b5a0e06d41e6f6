"""An EAGLE-3 head that is loaded, and the head bound to a session: one forward per level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kvcellar.backends.torch.eagle3.kernel import make_eagle3_kernel
from kvcellar.backends.torch.eagle3.network import Eagle3Network
from kvcellar.backends.torch.eagle3.weights import Eagle3Weights
from kvcellar.cache import Cache
from kvcellar.models.eagle3.config import MOST_HELD_TWICE
from kvcellar.models.runner import FloatArray
from kvcellar.op import eager_update_and_attend
from kvcellar.registry import CacheSession, use_cache
from kvcellar.types import IntArray, ModelCacheParams


@dataclass(frozen=True, slots=True, eq=False)
class Guesses:
    """Guesses of a head behind some tokens.

    Attributes:
        tokens: ``[R, k]``, the likeliest first, as the target calls them.
        beliefs: ``[R, k]``, how likely each is, among all that the head can say.
        hidden: ``[R, hidden]``, for the next level; the runner's own.
    """

    tokens: IntArray
    beliefs: FloatArray
    hidden: Tensor


class Eagle3Head(Eagle3Weights):
    """A head that is loaded; attributes as in :class:`Eagle3Weights`.

    Attributes:
        feature_layers: whose inputs it reads of its target.
        params: what a cache for it must know.
        kernel: runs levels of a few tokens of a small head; None: torch runs them all.
    """

    def __init__(self, network: Eagle3Network, feature_layers: tuple[int, ...]) -> None:
        """Take the weights over from a network; it is not needed any more."""
        super().__init__(network)
        self.feature_layers = feature_layers
        self.params = ModelCacheParams(
            1,
            self.config.n_kv_heads,
            self.config.head_dim,
            kv_dtype=str(self.fc.dtype).removeprefix("torch."),
        )
        is_small = sum(matrix.numel() for matrix in self.matrices) <= MOST_HELD_TWICE
        self.kernel = make_eagle3_kernel(self) if is_small else None

    def bind(self, session: CacheSession[Any]) -> Eagle3Runner:
        """Join the head with an open session, whose cache was made with its ``params``.

        Raises:
            SessionClosedError: the session is not open.
            ConfigError: its cache was made for another model.
        """
        return Eagle3Runner(self, session)


class Eagle3Runner:
    """One head bound to one session. What it needs comes in and goes out as arrays."""

    def __init__(self, head: Eagle3Head, session: CacheSession[Any]) -> None:
        """Bind; use :meth:`Eagle3Head.bind`."""
        self.head = head
        self.params = head.params
        self.feature_layers = head.feature_layers
        self._session = session

    def join(self, features: Sequence[FloatArray], before: Tensor | None = None) -> Tensor:
        """Project features to what ``read`` takes in place of them, a third of their size.

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
        """Run tokens that go on from some rows of ``hidden``; guess behind some of them."""
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
        """Run a level by torch, on any device; the kernel is compared with it."""
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
        """Run the layer; return ``[T, hidden]``, or of some rows."""
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


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)
