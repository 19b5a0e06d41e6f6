"""Requests to the engine, the events that answer them, and the sequence between the two."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

from kvcellar.checks import number, seen, whole, wholes
from kvcellar.engine.loop.generating import Finish, GeneratedToken, Usage
from kvcellar.engine.loop.text import StopMatcher, StopsFn, TextStream
from kvcellar.engine.requests.draft import NO_DRAFT, Draft
from kvcellar.engine.sampler.sampling import Choice, SamplingParams, SamplingState
from kvcellar.errors import ConfigError
from kvcellar.history import History
from kvcellar.models.seeing import EncodedPicture, SeenPicture
from kvcellar.pictures.tokens import PlacedPicture, pictures_in
from kvcellar.space import SHARED, Space
from kvcellar.types import IntArray

if TYPE_CHECKING:
    from kvcellar.prefix import PrefixHandle

_GREEDY = SamplingParams()
_NONE: IntArray = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One prompt to continue.

    Attributes:
        prompt_ids: the tokens; any iterable of whole numbers is made a history.
        params: how to sample and when to end.
        priority: higher goes first; equals go in the order they came.
        deadline_s: longest time to wait before the first compute; None for any.
        prompt_logprobs: None for none, 0 for the log probability of each token of the prompt
            behind those before it, n for the n most likely tokens' too; they come as a
            :class:`PromptEvent`. All of the prompt is computed for it, whatever the cache has.
        snapshots_at: lengths of the prompt from which later requests are likely to go on
            otherwise. A model that cannot be cut back everywhere is made ready to resume there.
        space: with which adapter it is computed, and with whom its K and V are shared.
        marks: what stands in the text for a token of which the text would not say that it came:
            such as one character that no text has. None: of no token.
        finder: makes what finds stop texts, where not all of the answer is text.
    """

    prompt_ids: History
    params: SamplingParams = _GREEDY
    priority: int = 0
    deadline_s: float | None = None
    prompt_logprobs: int | None = None
    snapshots_at: tuple[int, ...] = ()
    space: Space = SHARED
    marks: Mapping[int, str] | None = None
    finder: StopsFn = StopMatcher

    def __post_init__(self) -> None:
        if self.prompt_logprobs is not None and self.prompt_logprobs < 0:
            raise ConfigError(
                f"prompt_logprobs must be 0 or more, or None, got {self.prompt_logprobs}"
            )
        object.__setattr__(self, "prompt_ids", History(self.prompt_ids))
        object.__setattr__(self, "snapshots_at", self._checked_lengths())
        if not isinstance(self.params, SamplingParams):
            raise ConfigError(f"params must be SamplingParams, got {seen(self.params)}")
        whole(self.priority, "priority")
        if self.deadline_s is not None and number(self.deadline_s, "deadline_s") < 0:
            raise ConfigError(f"deadline_s must be 0 or more seconds, got {self.deadline_s}")

    def _checked_lengths(self) -> tuple[int, ...]:
        """Return ``snapshots_at`` as plain numbers.

        Raises:
            ConfigError: one of them is no length of the prompt.
        """
        lengths = tuple(wholes(self.snapshots_at, "snapshots_at"))
        n_prompt = len(self.prompt_ids)
        if any(not 0 < n <= n_prompt for n in lengths):
            raise ConfigError(
                f"snapshots_at are lengths of the prompt, 1 to {n_prompt}, got {seen(lengths)}"
            )
        return lengths


@dataclass(frozen=True, slots=True)
class PromptEvent:
    """A prompt has been read whose log probabilities were asked for; before its first token.

    Attributes:
        request_id: whose.
        scores: of each token of the prompt but the first, which nothing comes before.
    """

    request_id: int
    scores: tuple[Choice, ...]


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """Progress of a request's prompt, in tokens.

    Attributes:
        n_read: those whose K and V the cache holds for it.
        n_prompt: all of them.
        n_cached: of those that are read, the ones that did not have to be computed.
    """

    n_read: int
    n_prompt: int
    n_cached: int


EndReason = Literal["stop", "length", "cancelled", "deadline", "error"]


@dataclass(frozen=True, slots=True)
class FinishEvent:
    """A request has ended; nothing follows.

    Attributes:
        request_id: which.
        reason: ``stop`` or ``length`` as in ``Finish``; ``cancelled``, ``deadline`` or ``error``.
        text: the texts of all tokens, joined.
        token_ids: what was sampled.
        usage: what it took; None where it never ran.
        finish: for ``stop`` and ``length``: the cause.
        error: for ``error`` and ``deadline``: what happened.
    """

    request_id: int
    reason: EndReason
    text: str = ""
    token_ids: tuple[int, ...] = ()
    usage: Usage | None = None
    finish: Finish | None = None
    error: Exception | None = None


Event = PromptEvent | GeneratedToken | FinishEvent


@dataclass(slots=True, eq=False)
class Sequence:
    """One request on its way: its tokens, and how many of them the cache holds.

    ``n_computed`` tokens have their KV in the cache under ``seq_id``. A sequence that has caught up
    has exactly one token left to compute, the one that was sampled last; where a guess was wrong
    and states cannot be cut back, ``n_again`` that were verified with it come before.
    """

    request_id: int
    request: Request
    tokens: History
    n_prompt: int
    state: SamplingState
    stream: TextStream | None
    arrived_s: float
    seq_id: int = -1
    n_computed: int = 0
    n_cached: int = 0
    draft: Draft = NO_DRAFT
    """Guesses that the next step verifies, or the last one did."""
    handle: PrefixHandle | None = None
    admitted_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float = 0.0
    last_step: int = -1
    n_preemptions: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    scores: list[Choice] = field(default_factory=list)
    """Of the prompt's tokens from the second on, where they are asked for, as far as it is read."""
    publish_at: set[int] = field(default_factory=set)
    """Lengths at which others wait to share what this sequence has computed by then, or may."""
    resumable_at: int = 0
    """The length at which it was published last, or began, whole blocks."""
    point: int = 0
    """A length whose states it keeps, so that its end can be resumed in whole blocks; 0: none."""
    n_again: int = 0
    """Tokens at its end that were verified before, and that states have to go through again."""
    pictures: tuple[PlacedPicture, ...] = field(init=False)
    """Pictures in its prompt."""
    rows: dict[str, EncodedPicture] = field(default_factory=dict)
    """Rows of those of its pictures that the next step computes tokens of."""
    awaits_rows: bool = False
    """True while it waits for the rows of a picture: steps leave it out, and it does not count as
    one of the sequences that run."""
    space: Space = field(init=False)
    """Space of what it has computed: the request's, and how long its text was when it came in."""

    def __post_init__(self) -> None:
        self.space = self.request.space
        self.pictures = pictures_in(self.tokens.tokens[: self.n_prompt])

    def seen(self, stop: int) -> tuple[SeenPicture, ...]:
        """Return its pictures that begin before a place, with the rows that are at hand."""
        return tuple(
            SeenPicture(placed, self.rows.get(placed.name))
            for placed in self.pictures
            if placed.start < stop
        )

    @property
    def reusable(self) -> IntArray:
        """Leading tokens whose KV may come from elsewhere; the last one's logits are needed.

        Where the prompt's log probabilities are asked for, only what has them already.
        """
        n = len(self.tokens) - 1
        if self.request.prompt_logprobs is not None and len(self.scores) < self.n_prompt - 1:
            n = len(self.scores)
        return self.tokens[:n]

    @property
    def is_sampled(self) -> bool:
        """True if any token is wanted behind the prompt."""
        return self.request.params.max_tokens != 0

    def unscored(self, n_tokens: int) -> IntArray:
        """Return the prompt's tokens that follow the next ``n_tokens``, if they are scored."""
        if self.request.prompt_logprobs is None:
            return _NONE
        first = self.n_computed + 1
        return self.tokens[first : min(first + n_tokens, self.n_prompt)]

    @property
    def n_left(self) -> int:
        """Tokens that are known and not computed."""
        return len(self.tokens) - self.n_computed

    @property
    def is_decoding(self) -> bool:
        """True if only the last sampled token is left to compute, and what comes again."""
        return self.n_left == 1 + self.n_again and len(self.tokens) > self.n_prompt

    @property
    def sampled(self) -> IntArray:
        """Tokens that were sampled."""
        return self.tokens[self.n_prompt :]

    @property
    def order(self) -> tuple[int, float, int]:
        """Sort key: higher priority first, then who came first."""
        return (-self.request.priority, self.arrived_s, self.request_id)
