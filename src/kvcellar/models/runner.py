"""What an engine calls: one model bound to one session, whatever the backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from kvcellar.types import IntArray, ModelCacheParams

__all__ = ["FloatArray", "Runner"]

FloatArray = NDArray[np.float32]


@runtime_checkable
class Runner(Protocol):
    """One model, one session. The weights may be shared with other runners.

    The batch is flat: B = 1, all tokens on one axis. Whose tokens they are was said to the cache
    with ``begin_step`` (or ``propose``) before; a cache of one sequence needs neither.
    """

    params: ModelCacheParams
    vocab_size: int

    def forward(
        self,
        token_ids: Sequence[int] | IntArray,
        positions: Sequence[int] | IntArray,
        rows: Sequence[int] | IntArray | None = None,
    ) -> FloatArray:
        """Run the tokens through the model, which writes their K and V to the session's cache.

        Args:
            token_ids: ``[T]``.
            positions: ``[T]``, each token's position in its sequence.
            rows: ``[R]``, the tokens whose logits are wanted, as indices into the batch; the LM
                head runs on these alone. None: the last one.

        Returns:
            Logits ``[R, vocab_size]``, of their own: no later forward writes to them.

        Raises:
            SessionClosedError: the session is not open; nothing was changed.
            PromptError: no tokens, or an id that the model does not have.
            StepError, PositionError: the tokens are not those that the cache expects.

        Whatever it raises, no cell stays claimed for this step.
        """
        ...
