"""Logits that stay where a model computed them, and how their rows are sampled there.

Everything here is plain numbers, so that a backend need not know whose rows they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from kvcellar.errors import LogitsError
from kvcellar.models.runner import FloatArray, Runner
from kvcellar.sampler_settings import SamplerSettings
from kvcellar.types import IntArray

BoolArray = NDArray[np.bool_]

_NO_IDS: IntArray = np.empty(0, np.int64)
_NO_NUMBERS: FloatArray = np.empty(0, np.float32)
_PLAIN = SamplerSettings(temperature=1.0)


@dataclass(frozen=True, slots=True, eq=False)
class RowSampling:
    """Settings of one row of logits; they apply in the order of ``SamplingParams``.

    Attributes:
        row: which one.
        settings: which cuts and penalties; the temperature means nothing where the likeliest token
            is taken, the repetition penalty is for tokens of ``held``, the others for ``sampled``.
        draw: a random number in [0, 1); None: the likeliest token is taken.
        held: tokens of the prompt and the output, each once, where the first penalty needs them.
        sampled: tokens of the output, each once, where a penalty needs them.
        times: float32, how often each of them is there.
        bias_ids: tokens with a bias.
        bias: float32, the bias of each.
        allowed: ``[vocab]``: tokens that may come; None: all.
        end_id: the token that stands for all others, where a guide has one.
        barred: tokens that may not come, unless nothing else may.
        logprobs: None for none; else how many of the likeliest tokens come with the chosen one's.
    """

    row: int
    settings: SamplerSettings = _PLAIN
    draw: float | None = None
    held: IntArray = field(default_factory=lambda: _NO_IDS)
    sampled: IntArray = field(default_factory=lambda: _NO_IDS)
    times: FloatArray = field(default_factory=lambda: _NO_NUMBERS)
    bias_ids: IntArray = field(default_factory=lambda: _NO_IDS)
    bias: FloatArray = field(default_factory=lambda: _NO_NUMBERS)
    allowed: BoolArray | None = None
    end_id: int | None = None
    barred: IntArray = field(default_factory=lambda: _NO_IDS)
    logprobs: int | None = None


class RowChoice(NamedTuple):
    """Token that was chosen for a row.

    Attributes:
        token_id: the token; -1 where none may come.
        best: the highest of the row's logits: no finite number where the model computed nonsense.
        logprob: natural-log probability of the token under the model; None: not asked for.
        top: the likeliest tokens with theirs, likeliest first, the lowest id first of equals.
    """

    token_id: int
    best: float
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class KeptLogits(Protocol):
    """Logits ``[R, vocab_size]`` of a forward, there until the next one of the same runner."""

    def score(self, first: int, token_ids: IntArray, n_top: int) -> list[RowChoice]:
        """Return the log probabilities of tokens ``[n]`` in as many rows, the first one on.

        Args:
            first: row of the first token.
            token_ids: what really followed.
            n_top: the most likely tokens that come with each.
        """
        ...

    def sample(self, asked: Sequence[RowSampling]) -> list[RowChoice]:
        """Choose a token for each of some rows, all at once; the logits stay as they are."""
        ...


@runtime_checkable
class SamplingRunner(Runner, Protocol):
    """A runner that samples where its logits are, so that they need not come to main memory."""

    def forward_kept(
        self,
        token_ids: Sequence[int] | IntArray,
        positions: Sequence[int] | IntArray,
        rows: Sequence[int] | IntArray | None = None,
        *,
        has_features: bool = False,
    ) -> tuple[KeptLogits, FloatArray]:
        """Run the tokens as ``forward_with_features``; the features are empty if not wanted."""
        ...


@runtime_checkable
class PreparingRunner(SamplingRunner, Protocol):
    """A runner whose device works on a forward after ``forward_kept`` has returned."""

    def prepare(
        self, positions: Sequence[int] | IntArray, rows: Sequence[int] | IntArray | None = None
    ) -> None:
        """Make the step ready that the session's cache has begun, meanwhile: no token is known yet.

        It need not come; whatever cannot be made ready is left to its forward.

        Args:
            positions: one per token.
            rows: tokens whose logits are wanted; None: the last one.
        """
        ...


class FirstStep(NamedTuple):
    """A step that is run before there are requests, so that what it needs is there afterwards.

    Attributes:
        n_tokens: of a prompt.
        has_logits: true if the logits of its last token are wanted.
        n_sequences: that have a token each behind the prompt; 0: there is nothing behind it.
        n_times: how often these come, each time with the next token.
    """

    n_tokens: int
    has_logits: bool
    n_sequences: int = 0
    n_times: int = 0


@runtime_checkable
class CompilingRunner(SamplingRunner, Protocol):
    """A runner whose device compiles kernels, or records work, when it first needs them."""

    def first_steps(self, most_tokens: int, most_rows: int) -> Sequence[FirstStep]:
        """Return the steps behind which nothing is left to be compiled for ordinary ones.

        Args:
            most_tokens: of one forward.
            most_rows: sequences that run at a time.
        """
        ...

    def choosing(self) -> AbstractContextManager[None]:
        """Return a block of first steps, in which kernels are chosen that later steps keep."""
        ...


def no_probabilities(row: int, best: float) -> LogitsError:
    """Return the error of a row of logits whose maximum is no number."""
    return LogitsError(
        f"row {row} of the logits has the maximum {best}: the model computed no "
        f"probabilities; load it in another dtype, or check the weights"
    )


def nothing_may_come(row: int) -> LogitsError:
    """Return the error of a row in which the settings leave no token."""
    return LogitsError(
        f"row {row} of the logits has no token that may come: its guide allows none to which the "
        f"model gives a probability; end the sequence where the guide is complete"
    )
