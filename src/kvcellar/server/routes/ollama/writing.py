"""Answers as Ollama's clients read them: one object, or a line of JSON for every piece."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic_core import from_json
from starlette.requests import Request

from kvcellar.agents import AgentUsage, ModelHost
from kvcellar.dialects import Call, CallPart, ReasoningPart, TextPart
from kvcellar.engine.loop.generating import GeneratedToken, Usage
from kvcellar.server.answer.answer_facts import AnswerFrames, extra_of, note, notes_of
from kvcellar.server.answer.completions import Continuations, Pieces
from kvcellar.server.answer.dialogue import (
    ChatEvent,
    Ended,
    PartEvent,
    Started,
)
from kvcellar.server.answer.logprobs import ChatLogprobs
from kvcellar.server.errors import as_api_error, error_body
from kvcellar.server.routes.ollama.models import now
from kvcellar.server.schemas.ollama import OllamaBody, OllamaChatRequest
from kvcellar.server.state.service import service_of
from kvcellar.server.stream.replies import Frames, json_line

_NS = 10**9


class OllamaAnswer:
    """Writer of the objects of one answer: in a chat as a message, else as a response.

    Attributes:
        body: what was asked.
        model: who answers, as the client calls it.
    """

    def __init__(self, body: OllamaBody) -> None:
        """Begin an answer now."""
        self.body = body
        self.model = body.model
        self._is_chat = isinstance(body, OllamaChatRequest)
        self._started_s = time.perf_counter()

    def piece(
        self,
        text: str = "",
        thinking: str = "",
        calls: Sequence[Call] = (),
        n_before: int = 0,
        **more: Any,
    ) -> dict[str, Any]:
        """Write a piece of the answer, ``n_before`` calls behind its start, or all of it."""
        head = {"model": self.model, "created_at": now(), "done": False}
        thought = {"thinking": thinking} if thinking else {}
        if not self._is_chat:
            return {**head, "response": text, **thought, **more}
        message: dict[str, Any] = {"role": "assistant", "content": text, **thought}
        if calls:
            message["tool_calls"] = [_call(call, i) for i, call in enumerate(calls, n_before)]
        return {**head, "message": message, **more}

    def facts(self, end: Ended) -> dict[str, Any]:
        """Write what comes with the end: why, how many tokens, and how long it took."""
        usage = end.usage
        extra = {**extra_of(end, self.body), "cached_tokens": usage.cached_tokens}
        return {
            **self.counts(end.reason, usage.prompt_tokens, usage.completion_tokens, usage),
            "kvcellar": extra,
        }

    def counts(
        self, reason: str | None, n_prompt: int, n_sampled: int, usage: AgentUsage | Usage | None
    ) -> dict[str, Any]:
        """Write why an answer ended, how many tokens it had, and how long it took."""
        total_s = time.perf_counter() - self._started_s
        first_s = min((usage.time_to_first_token_s if usage else None) or 0.0, total_s)
        return {
            "done": True,
            "done_reason": "length" if reason == "length" else "stop",
            "total_duration": int(total_s * _NS),
            "load_duration": 0,
            "prompt_eval_count": n_prompt,
            "prompt_eval_duration": int(first_s * _NS),
            "eval_count": n_sampled,
            "eval_duration": int((total_s - first_s) * _NS),
        }

    def continued(self, batch: Continuations) -> dict[str, Any]:
        """Write the end of a prompt's continuation, with its last text."""
        choice, end = batch.only, batch.only.end
        reason, usage = (end.reason, end.usage) if end is not None else (None, None)
        counts = self.counts(reason, choice.n_prompt, len(choice.tokens), usage)
        return self.piece(choice.rest, **counts, kvcellar=batch.extra)

    def whole(
        self, end: Ended, tokens: Sequence[GeneratedToken], host: ModelHost | None
    ) -> dict[str, Any]:
        """Write an answer that has ended as one object."""
        more = {"logprobs": ChatLogprobs(host).of(tokens)["content"]} if self.body.logprobs else {}
        return self.piece(end.text, end.reasoning, end.calls, **more, **self.facts(end))


class OllamaFrames(AnswerFrames):
    """Lines of one answer; a call is one line, once it is whole."""

    media_type: ClassVar[str] = "application/x-ndjson"

    def __init__(self, request: Request, answer: OllamaAnswer, path: str) -> None:
        """Write the lines of a model's answer; an empty piece says that it is alive."""
        super().__init__(request)
        self._answer = answer
        self._path = path
        self._logprobs: ChatLogprobs | None = None
        self._call: Call | None = None
        self._n_calls = 0
        self.ping = _line(answer.piece())

    async def of(self, number: int, item: ChatEvent) -> bytes:
        """Write the next event."""
        if isinstance(item, Started):
            return b""
        if isinstance(item, PartEvent):
            part = item.part
            if isinstance(part, CallPart):
                return self._take(part.call) if not part.text else b""
            return self._text(part, item.token)
        usage = item.usage
        note(
            self._request,
            agent=item.agent_id,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            **notes_of(usage),
        )
        end = self._answer.piece(**self._answer.facts(item))
        return self._take(None) + _line(end)

    def failed(self, error: Exception) -> bytes:
        """Write an error that comes too late to be a status."""
        return _line(error_body(as_api_error(error), self._request))

    def _text(self, part: TextPart | ReasoningPart, token: GeneratedToken | None) -> bytes:
        more = {}
        if token is not None and token.logprob is not None:
            if self._logprobs is None:
                host = service_of(self._request).models.registry.host(self._path)
                self._logprobs = ChatLogprobs(host)
            more = {"logprobs": self._logprobs.of([token])["content"]}
        if not part.text and not more:
            return b""
        text, thinking = part.text, ""
        if isinstance(part, ReasoningPart):
            text, thinking = thinking, text
        return _line(self._answer.piece(text, thinking, **more))

    def _take(self, call: Call | None) -> bytes:
        """Write the call before, now that the next has begun or the answer has ended."""
        before, self._call = self._call, call
        if before is None:
            return b""
        self._n_calls += 1
        return _line(self._answer.piece(calls=[before], n_before=self._n_calls - 1))


class RawFrames(Frames[Pieces]):
    """Lines of a prompt's continuation that went through no chat template."""

    media_type: ClassVar[str] = "application/x-ndjson"

    def __init__(self, request: Request, answer: OllamaAnswer, batch: Continuations) -> None:
        """Write the lines of a request's only continuation."""
        super().__init__(request)
        self._answer = answer
        self._batch = batch
        self.ping = _line(answer.piece())

    async def of(self, number: int, item: Pieces) -> bytes:
        """Write the next tokens."""
        text = "".join(token.text for token in item)
        return _line(self._answer.piece(text)) if text else b""

    def end(self) -> bytes:
        """Write the last text, and how it ended."""
        return _line(self._answer.continued(self._batch))

    def failed(self, error: Exception) -> bytes:
        """Write an error that comes too late to be a status."""
        return _line(error_body(as_api_error(error), self._request))


def _line(value: Mapping[str, Any]) -> bytes:
    return json_line(value) + b"\n"


def _call(call: Call, index: int) -> dict[str, Any]:
    """Write a call; of one in whose middle the answer ended as much of its object as there is."""
    try:
        arguments = from_json(call.arguments or "{}", allow_partial="trailing-strings")
    except ValueError:
        arguments = {}
    arguments = arguments if isinstance(arguments, dict) else {}
    function = {"index": index, "name": call.name, "arguments": arguments}
    return {"id": call.call_id, "function": function}
