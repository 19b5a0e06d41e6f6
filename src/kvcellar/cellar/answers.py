"""Answers, and the settings that they are sampled with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvcellar.agents import AgentUsage, Miss, TurnEnd
from kvcellar.dialects import AnswerParser, is_whole
from kvcellar.engine import DEFAULTABLE, FinishEvent, GeneratedToken, SamplingParams
from kvcellar.errors import AgentError, EngineClosedError
from kvcellar.pictures.given import Given
from kvcellar.sampler_settings import SamplerFields
from kvcellar.valid import read_json

MAX_TOKENS = 1024
"""Tokens of an answer for which nobody sets a limit."""

_USUAL: Mapping[str, float] = {"temperature": 0.7, "top_p": 0.95}


class Sampling(SamplerFields, total=False):
    """Settings of one answer, each as :class:`kvcellar.engine.SamplingParams` has it.

    What is left out is as the model's own files want it; where they say nothing, a temperature of
    0.7, a ``top_p`` of 0.95, and no more than 1,024 tokens. ``max_tokens=None`` has no limit but
    the context.
    """

    max_tokens: int | None
    logit_bias: Mapping[int, float]
    seed: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    min_tokens: int
    logprobs: int | None


class Asking(Sampling, total=False):
    """Settings of what is said: by whom, with which tools, and what its answer has to be.

    ``role`` says who says a text: ``user`` or ``tool``. ``tools`` are definitions of what may be
    called, as OpenAI has them (their inside is enough), from then on; they are remembered, and an
    empty list takes them away. ``tool_choice`` is ``auto``, ``none``, ``required`` or a tool's
    name. ``response_format`` is a JSON schema, plainly or in OpenAI's words: the answer is JSON of
    it, and ``Answer.value`` is what that says. With both, an answer without calls is. ``images``
    are pictures before the text, or before that of the last message: paths of files, their bytes,
    or ``kvcellar.pictures.picture.Picture``.
    """

    role: str
    images: Sequence[Given] | Given
    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str
    response_format: Mapping[str, Any] | None


def params_of(sampling: Mapping[str, Any]) -> SamplingParams:
    """Return settings that leave what was not given to the model.

    Raises:
        TypeError: there is no setting of a name that was given.
        ConfigError: a value that cannot work; the message names it.
    """
    given: dict[str, Any] = dict(sampling)
    unknown = given.keys() - Sampling.__annotations__.keys()
    if unknown:
        raise TypeError(
            f"{', '.join(sorted(unknown))} is no setting of an answer; there are: "
            f"{', '.join(Sampling.__annotations__)}"
        )
    settings = {"max_tokens": MAX_TOKENS, **_USUAL, **given}
    return SamplingParams(**settings, unset=DEFAULTABLE - given.keys())


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool that an answer asks for. ``result`` makes the message to say next.

    Attributes:
        name: of the tool.
        arguments: as values.
        id: what its result refers to.
    """

    name: str
    arguments: dict[str, Any]
    id: str

    def result(self, value: Any) -> dict[str, Any]:
        """Return what came of the call as a message: a text as it is, any other value as JSON."""
        said = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return {"role": "tool", "tool_call_id": self.id, "name": self.name, "content": said}


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer that has ended. ``str(answer)`` is its text.

    Attributes:
        text: what was said, without thoughts and calls; no part of a stop text is in it.
        finish_reason: ``stop`` (the model, or a stop text, ended it), ``tool_calls`` (it waits for
            the results of its calls) or ``length`` (the limit of tokens, or the end of the
            context).
        agent: name of the agent whose turn it was; None of a completion.
        usage: tokens that were read, reused, restored and sampled, and what was lost.
        token_ids: tokens that were sampled.
        tokens: the same with their texts, and log probabilities where ``logprobs`` asked for them.
        reasoning: what the model thought before it answered, without the marks around it.
        calls: calls of tools that are whole, in their order.
    """

    text: str
    finish_reason: str
    agent: str | None
    usage: AgentUsage
    token_ids: tuple[int, ...] = field(default=(), repr=False)
    tokens: tuple[GeneratedToken, ...] = field(default=(), repr=False)
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()

    def __str__(self) -> str:
        return self.text

    @property
    def value(self) -> Any:
        """The value that its text is as JSON, which ``response_format`` asks for.

        Raises:
            AgentError: it is none, or was cut before its end.
        """
        try:
            return read_json(self.text)
        except ValueError as error:
            was = "was cut" if self.finish_reason == "length" else "ended"
            raise AgentError(
                f"the answer {was} after {len(self.token_ids)} tokens and is no whole JSON "
                f"({error}); give it more max_tokens, or ask with response_format"
            ) from error

    @property
    def mean_logprob(self) -> float | None:
        """Mean log probability of its tokens, where ``logprobs`` asked for them; else None."""
        known = [token.logprob for token in self.tokens if token.logprob is not None]
        return sum(known) / len(known) if known else None


@dataclass(frozen=True, slots=True)
class Why:
    """Reuse that the last turn of an agent lost, and why. ``str(why)`` says it in a sentence.

    Attributes:
        said: the sentence, with what helps.
        miss: cause, tokens, place and both texts; None where nothing was lost.
    """

    said: str
    miss: Miss | None = None

    def __str__(self) -> str:
        return self.said


def answer_of_turn(
    end: TurnEnd,
    tokens: Sequence[GeneratedToken],
    parser: AnswerParser | None = None,
    notes: Sequence[str] = (),
) -> Answer:
    """Return the answer of a turn that has ended.

    Args:
        end: of the turn.
        tokens: of the answer.
        parser: which has read all of it; None: it is text as it is.
        notes: what else there is to know of it.

    Raises:
        KVCellarError: it ended with an error; what it had said is in the agent's history.
    """
    usage = replace(end.usage, notes=(*end.usage.notes, *notes))
    return _answer(end.finish, end.agent_id, usage, tokens, parser)


def answer_of_request(
    event: FinishEvent,
    tokens: Sequence[GeneratedToken],
    parser: AnswerParser | None = None,
    notes: Sequence[str] = (),
) -> Answer:
    """Return the answer of a request that is nobody's turn.

    Args:
        event: the end of it.
        tokens: of the answer.
        parser: which has read all of it; None: it is text as it is.
        notes: what else there is to know of it.

    Raises:
        KVCellarError: it ended with an error.
    """
    used = event.usage
    usage = AgentUsage(
        prompt_tokens=used.prompt_tokens if used else 0,
        cached_tokens=used.cached_tokens if used else 0,
        restored_tokens=0,
        restored_from={},
        completion_tokens=len(event.token_ids),
        restore_s=0.0,
        time_to_first_token_s=used.time_to_first_token_s if used else None,
        drafted_tokens=used.drafted_tokens if used else 0,
        accepted_tokens=used.accepted_tokens if used else 0,
        miss=None,
        notes=tuple(notes),
    )
    return _answer(event, None, usage, tokens, parser)


def _answer(
    event: FinishEvent,
    agent: str | None,
    usage: AgentUsage,
    tokens: Sequence[GeneratedToken],
    parser: AnswerParser | None,
) -> Answer:
    if event.error is not None:
        raise event.error
    if event.reason not in ("stop", "length"):
        raise EngineClosedError("the cellar was closed before the answer had ended")
    if parser is None:
        return Answer(event.text, event.reason, agent, usage, event.token_ids, tuple(tokens))
    if parser.trouble:
        raise AgentError(f"{parser.trouble[:300]}; ask again")
    whole = [call for call in parser.calls if is_whole(call)]
    is_called = bool(whole) and len(whole) == len(parser.calls)
    return Answer(
        parser.text,
        "tool_calls" if is_called and event.reason == "stop" else event.reason,
        agent,
        usage,
        event.token_ids,
        tuple(tokens),
        parser.reasoning,
        tuple(ToolCall(one.name, json.loads(one.arguments), one.call_id) for one in whole),
    )
