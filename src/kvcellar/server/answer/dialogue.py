"""Questions and answers in no protocol's words: each protocol has a parser and a writer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvcellar.agents import AgentUsage
from kvcellar.dialects import Call, Part, is_whole
from kvcellar.engine import SamplingParams
from kvcellar.engine.loop.generating import GeneratedToken
from kvcellar.grammar.form import ResponseFormat
from kvcellar.server.answer.media import LeftOut
from kvcellar.server.answer.thinking import Thinking
from kvcellar.server.answer.tools import Toolbox, ToolChoice
from kvcellar.server.state.conversations import Whose


@dataclass(frozen=True, slots=True)
class PinWish:
    """A wish to keep a beginning of the conversation in the cache.

    Attributes:
        n_messages: how many messages it is.
        ttl_s: for how many seconds.
    """

    n_messages: int
    ttl_s: float


@dataclass(frozen=True, slots=True)
class Question:
    """A request for answers, in no protocol's words.

    Attributes:
        messages: the whole conversation, as chat templates take it.
        model: a name that is offered; None: the default.
        params: how to sample; without a guide.
        tools: what it may call.
        choice: whether it does, and which.
        is_parallel: whether an answer may have several calls.
        form: what an answer without calls has to be.
        thinking: how much the model thinks.
        whose: whom it is for, as the client says it.
        pins: what to keep in the cache.
        left_out: counts what was no text in its messages.
    """

    messages: Sequence[Mapping[str, Any]]
    params: SamplingParams
    model: str | None = None
    tools: Toolbox = field(default_factory=Toolbox)
    choice: ToolChoice = field(default_factory=ToolChoice)
    is_parallel: bool = True
    form: ResponseFormat | None = None
    thinking: Thinking = field(default_factory=Thinking)
    whose: Whose = field(default_factory=Whose)
    pins: Sequence[PinWish] = ()
    left_out: LeftOut = field(default_factory=LeftOut)


@dataclass(frozen=True, slots=True)
class Started:
    """The prompt is in.

    Attributes:
        agent_id: whose turn it is.
        model: who answers.
        prompt_tokens: all of them.
        cached_tokens: of these, those that the cache had when it was queued.
        pinned_tokens: leading tokens that somebody asked to keep.
        notice: what the client should know of whose turn it is.
    """

    agent_id: str
    model: str
    prompt_tokens: int
    cached_tokens: int
    pinned_tokens: int
    notice: str | None = None


@dataclass(frozen=True, slots=True)
class PartEvent:
    """A part of the answer that became certain, and the token by which it did.

    Where the answer may have calls or reasoning, a token may have an empty part and a part no
    token: what is held back for a mark that may begin is another's text.
    """

    part: Part
    token: GeneratedToken | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """The end.

    Attributes:
        reason: ``stop``, ``length`` or ``tool_calls``; the last where all calls are whole.
        cause: why, as ``engine.loop.generating.Finish`` has it.
        stop_text: the stop text that ended it, if one did.
        text: all text that is in no call and no reasoning.
        calls: all calls.
        usage: what it took.
        agent_id: whose turn it was.
        model: who answered.
        params: how it was sampled.
        pinned_tokens: as in :class:`Started`.
        notice: as in :class:`Started`.
        added: messages of the agent's history that were read behind the system messages of the
            request, which did not have them.
        reasoning: all that the model thought, without the marks around it.
        reasoning_tokens: tokens of it, marks included.
    """

    reason: str
    cause: str
    stop_text: str | None
    text: str
    calls: Sequence[Call]
    usage: AgentUsage
    agent_id: str
    model: str
    params: SamplingParams
    pinned_tokens: int = 0
    notice: str | None = None
    added: Sequence[Mapping[str, Any]] = ()
    reasoning: str = ""
    reasoning_tokens: int = 0

    @property
    def is_inside_call(self) -> bool:
        """True where the answer ended in the middle of its last call."""
        return bool(self.calls) and not is_whole(self.calls[-1])


ChatEvent = Started | PartEvent | Ended
