"""Protocol of a runner: one model bound to one session, whatever the backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from kvcellar.errors import PromptError, StepError
from kvcellar.registry import CacheSession
from kvcellar.space import LONG, Space
from kvcellar.types import IntArray, ModelCacheParams

FloatArray = NDArray[np.float32]

Turned = bool | Sequence[tuple[bool, int]]
"""True where texts are long: of all tokens of a forward, or with how many they are."""

L = TypeVar("L")
"""Logits, wherever they are."""


@runtime_checkable
class Runner(Protocol):
    """One model, one session. The weights may be shared with other runners.

    The batch is flat: B = 1, all tokens on one axis. Whose tokens they are was said to the cache
    with ``begin_step`` (or ``propose``) before; a cache of one sequence needs neither.

    Attributes:
        params: what its cache was made with.
        vocab_size: ids from 0 to ``vocab_size - 1`` exist.
        max_tokens_per_step: the most tokens that one forward takes; None: any number.
    """

    params: ModelCacheParams
    vocab_size: int
    max_tokens_per_step: int | None

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


@runtime_checkable
class FeatureRunner(Runner, Protocol):
    """A runner that also tells what some of its layers say of every token.

    Attributes:
        n_features: numbers per token.
    """

    n_features: int

    def forward_with_features(
        self,
        token_ids: Sequence[int] | IntArray,
        positions: Sequence[int] | IntArray,
        rows: Sequence[int] | IntArray | None = None,
    ) -> tuple[FloatArray, FloatArray]:
        """Run the tokens as ``forward``; return features ``[T, n_features]`` of all of them too."""
        ...


@runtime_checkable
class HiddenRunner(Runner, Protocol):
    """A runner that also tells what the model makes logits of."""

    def forward_hidden(
        self, token_ids: Sequence[int] | IntArray, positions: Sequence[int] | IntArray
    ) -> FloatArray:
        """Run the tokens as ``forward`` and make no logits.

        Returns:
            The hidden states ``[T, hidden_size]`` of all tokens, behind the model's last norm.
        """
        ...


@runtime_checkable
class AdaptingRunner(Runner, Protocol):
    """A runner whose tokens may each be computed with an adapter beside the model's weights.

    Attributes:
        adapters: names of the adapters that are loaded.
        own_adapter: what computes tokens of which nothing is said; empty: the model alone.
    """

    adapters: Collection[str]
    own_adapter: str

    def adapting(self, runs: Sequence[tuple[str, int]]) -> AbstractContextManager[None]:
        """Have the forwards of a block compute their tokens with adapters.

        Args:
            runs: names, empty for the model's own weights, and how many tokens each computes, in
                the order of the token axis.
        """
        ...


@runtime_checkable
class TurningRunner(Runner, Protocol):
    """A runner whose model turns positions by other factors in long texts than in short ones.

    Attributes:
        rope_border: tokens of the longest short text; 0: no text that the session holds is long.
        read_as: by sequence, true where what a plain loop has read of it is of a long text.
    """

    rope_border: int
    read_as: dict[int, bool]

    def turning(self, runs: Turned) -> AbstractContextManager[None]:
        """Have the forwards of a block turn positions as those of long texts or of short ones.

        Without it they are turned as those of the longest text that the session can hold.

        Args:
            runs: true for a long text, of all tokens; or such, with how many tokens are of it, in
                the order of the token axis.
        """
        ...


@runtime_checkable
class LosableRunner(Runner, Protocol):
    """A runner whose model may be lost while it rests, as one that several processes compute."""

    @property
    def lost(self) -> Exception | None:
        """Reason why no forward will succeed any more; None: they may."""
        ...


def rope_border_of(runner: Runner) -> int:
    """Return the length of the longest text that a runner's model reads as short; 0: all are."""
    return runner.rope_border if isinstance(runner, TurningRunner) else 0


def turning(runner: Runner, runs: Turned) -> AbstractContextManager[None]:
    """Have a runner's forwards turn positions by each text's length; see ``TurningRunner``."""
    if not rope_border_of(runner):
        return nullcontext()
    assert isinstance(runner, TurningRunner), "it has a border"
    return runner.turning(runs)


@contextmanager
def in_spaces(runner: Runner, runs: Sequence[tuple[Space, int]]) -> Iterator[None]:
    """Have a runner's forwards compute tokens as their spaces say, in the order of the token axis.

    Args:
        runner: of any kind, which knows the adapters.
        runs: spaces, and how many tokens are of each.
    """
    adapters = adapting(runner, [(space.adapter, n) for space, n in runs])
    with adapters, turning(runner, [(space.rope == LONG, n) for space, n in runs]):
        yield


def adapting(runner: Runner, runs: Sequence[tuple[str, int]]) -> AbstractContextManager[None]:
    """Have a runner's forwards compute their tokens with adapters; see ``AdaptingRunner``.

    Where all tokens are for the model's own weights any runner will do.
    """
    if not any(name for name, _ in runs):
        return nullcontext()
    assert isinstance(runner, AdaptingRunner), "looked at when a request comes"
    return runner.adapting(runs)


class BoundRunner(ABC):
    """A :class:`FeatureRunner` of any backend: how a forward is checked, and undone if it fails.

    Many runners may share one model, also from several threads, as long as each session is used by
    one thread at a time. Use :meth:`kvcellar.models.LoadedModel.bind`, which checks that model and
    session fit.
    """

    def __init__(
        self,
        session: CacheSession[Any],
        params: ModelCacheParams,
        vocab_size: int,
        n_features: int,
        max_tokens_per_step: int | None = None,
    ) -> None:
        """Bind to a session; the others are attributes of a runner."""
        self.params = params
        self.vocab_size = vocab_size
        self.n_features = n_features
        self.max_tokens_per_step = max_tokens_per_step
        self._session = session

    def forward(
        self,
        token_ids: Sequence[int] | IntArray,
        positions: Sequence[int] | IntArray,
        rows: Sequence[int] | IntArray | None = None,
    ) -> FloatArray:
        """See :meth:`Runner.forward`."""
        return self._forward(self._run, token_ids, positions, rows, has_features=False)[0]

    def forward_with_features(
        self,
        token_ids: Sequence[int] | IntArray,
        positions: Sequence[int] | IntArray,
        rows: Sequence[int] | IntArray | None = None,
    ) -> tuple[FloatArray, FloatArray]:
        """See :meth:`FeatureRunner.forward_with_features`."""
        return self._forward(self._run, token_ids, positions, rows, has_features=True)

    def _forward(
        self,
        run: Callable[..., tuple[L, FloatArray]],
        token_ids: Sequence[int] | IntArray,
        positions: Sequence[int] | IntArray,
        rows: Sequence[int] | IntArray | None,
        *,
        has_features: bool,
    ) -> tuple[L, FloatArray]:
        """Check a batch and run it with ``_run``, or with what takes the same arguments."""
        cache: Any = self._session.cache
        if not cache.is_step_open:
            cache.end_step()  # from here on cancel_step can only mean this forward's step
        try:
            batch = _checked_batch(token_ids, positions, rows, self.vocab_size)
            return run(cache, *batch, has_features=has_features)
        except BaseException:
            cache.cancel_step()
            self._after_failure(cache)
            raise

    @abstractmethod
    def _run(
        self, cache: Any, ids: IntArray, at: IntArray, rows: IntArray | None, *, has_features: bool
    ) -> tuple[FloatArray, FloatArray]:
        """Run a checked batch; return its logits, and the features, which are not read if unwanted.

        Args:
            cache: the session's.
            ids: ``[T]``.
            at: ``[T]`` positions.
            rows: ``[R]`` tokens whose logits are wanted; None: the last one.
            has_features: features ``[T, n_features]`` are wanted.
        """

    def _after_failure(self, cache: Any) -> None:  # noqa: B027
        """Let go of what a forward that raised has left, once its step is taken back."""


def step_limit(runner: Runner, wanted: int) -> int:
    """Return the tokens of one forward: as many as wanted, or what the runner takes at most."""
    most = runner.max_tokens_per_step
    return wanted if most is None else min(wanted, most)


def _checked_batch(
    token_ids: Sequence[int] | IntArray,
    positions: Sequence[int] | IntArray,
    rows: Sequence[int] | IntArray | None,
    vocab_size: int,
) -> tuple[IntArray, IntArray, IntArray | None]:
    """Return the arguments of a forward as arrays of their own: ids, positions, and rows.

    Raises:
        PromptError: no tokens, or an id that the model does not have.
        StepError: not one position per token, or rows that are none of the batch's.
    """
    ids = np.asarray(token_ids)
    n_tokens = ids.size
    if ids.ndim != 1 or not n_tokens:
        raise PromptError(
            f"a forward takes one flat batch of at least one token, got token_ids of shape "
            f"{list(ids.shape)}"
        )
    low, high = (ids[0], ids[0]) if n_tokens == 1 else (ids.min(), ids.max())
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise PromptError(
            f"token id {bad} is not in the model's vocabulary, 0 to {vocab_size - 1}; "
            f"encode the text with the model's own tokenizer"
        )
    if ids.dtype.kind not in "iu":
        raise PromptError(f"token ids are whole numbers, got an array of {ids.dtype}")
    at = np.asarray(positions)
    if at.shape != ids.shape:
        raise StepError(
            f"a forward takes one position per token; got {n_tokens} tokens and positions of "
            f"shape {list(at.shape)}"
        )
    wanted: IntArray | None = None
    if rows is not None and not (len(rows) == 1 and rows[0] == n_tokens - 1):
        wanted = np.asarray(rows, dtype=np.int64)
        if wanted.ndim != 1 or (wanted.size and (wanted.min() < 0 or wanted.max() >= n_tokens)):
            raise StepError(
                f"rows are indices of the batch's tokens, 0 to {n_tokens - 1}; got "
                f"{wanted.tolist()}"
            )
        wanted = wanted.copy()
    # Copies, which may be written to: ten times faster than torch.tensor.
    return np.array(ids, dtype=np.int64), np.array(at, dtype=np.int64), wanted
