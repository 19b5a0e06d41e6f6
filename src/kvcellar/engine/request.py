"""What a caller asks of the engine, what it is told, and what the engine remembers meanwhile."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

from kvcellar.engine.draft import NO_DRAFT, Draft
from kvcellar.engine.generate import Finish, GeneratedToken, Usage
from kvcellar.engine.sampling import SamplingParams, SamplingState
from kvcellar.engine.text import TextStream
from kvcellar.errors import ConfigError
from kvcellar.types import IntArray

if TYPE_CHECKING:
    from kvcellar.bookkeeping.prefix import PrefixHandle

__all__ = [
    "Event",
    "FinishEvent",
    "Request",
    "Sequence",
    "Status",
    "TokenEvent",
]

_GREEDY = SamplingParams()


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to continue.

    Attributes:
        prompt_ids: the tokens; behind those of ``parent``, where one is named.
        params: how to sample and when to end.
        priority: higher goes first; equals go in the order they came.
        deadline_s: longest time to wait before the first compute; None for any.
        parent: id of a request, running or kept, whose tokens come before the prompt; what the
            cache holds of them no more is computed again.
        is_fork: with a parent: share its cells and leave it as it is (true), or take over the
            sequence of a kept one (false).
        keep: hold the sequence after the end, so that others can name it as their parent; the
            engine gives its cells up when nothing else is left to give.
    """

    prompt_ids: tuple[int, ...]
    params: SamplingParams = _GREEDY
    priority: int = 0
    deadline_s: float | None = None
    parent: int | None = None
    is_fork: bool = True
    keep: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_ids", tuple(int(t) for t in self.prompt_ids))
        if self.deadline_s is not None and self.deadline_s < 0:
            raise ConfigError(f"deadline_s must be 0 or more seconds, got {self.deadline_s}")


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """A request has one more token."""

    request_id: int
    token: GeneratedToken


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
    reason: Literal["stop", "length", "cancelled", "deadline", "error"]
    text: str = ""
    token_ids: tuple[int, ...] = ()
    usage: Usage | None = None
    finish: Finish | None = None
    error: Exception | None = None


Event = TokenEvent | FinishEvent


class Status(enum.Enum):
    """Where a sequence is."""

    WAITING = "waiting"
    RUNNING = "running"
    MOVED_OUT = "moved out"
    KEPT = "kept"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Sequence:
    """One request on its way: its tokens, and how many of them the cache holds.

    ``n_computed`` tokens have their KV in the cache under ``seq_id``. A sequence that has caught up
    has exactly one token left to compute, the one that was sampled last.
    """

    request_id: int
    request: Request
    tokens: list[int]
    n_prompt: int
    state: SamplingState
    stream: TextStream | None
    arrived_s: float
    n_inherited: int = 0
    """Tokens at the beginning that are its parent's."""
    seq_id: int = -1
    status: Status = Status.WAITING
    n_computed: int = 0
    n_cached: int = 0
    draft: Draft = NO_DRAFT
    """Guesses that the next step verifies, or the last one did."""
    handle: PrefixHandle | None = None
    parent: Sequence | None = None
    admitted_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float = 0.0
    last_step: int = -1
    n_preemptions: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    publish_at: set[int] = field(default_factory=set)
    """Lengths at which others wait to share what this sequence has computed by then."""
    _array: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    def token_array(self) -> IntArray:
        """All tokens as an array; those that were seen before are not converted again."""
        if len(self._array) < len(self.tokens):
            fresh = np.asarray(self.tokens[len(self._array) :], dtype=np.int64)
            self._array = np.concatenate([self._array, fresh])
        return self._array

    @property
    def n_left(self) -> int:
        """Tokens that are known and not computed."""
        return len(self.tokens) - self.n_computed

    @property
    def is_decoding(self) -> bool:
        """Whether only the last sampled token is left to compute."""
        return self.n_left == 1 and len(self.tokens) > self.n_prompt

    @property
    def sampled(self) -> list[int]:
        """The tokens that were sampled."""
        return self.tokens[self.n_prompt :]

    @property
    def order(self) -> tuple[int, float, int]:
        """Sort key: higher priority first, then who came first."""
        return (-self.request.priority, self.arrived_s, self.request_id)
