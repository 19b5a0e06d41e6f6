"""OpenAI's completions: prompts that belong to no conversation, or tokens for an agent."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvcellar.agents import ModelHost
from kvcellar.engine.loop.generating import GeneratedToken
from kvcellar.server.answer.answer_facts import ignored_of, note, predictions
from kvcellar.server.answer.completions import (
    Continuation,
    Continuations,
    Pieces,
    continued,
    to_the_end,
)
from kvcellar.server.answer.logprobs import LegacyLogprobs, prompt_logprobs
from kvcellar.server.answer.parsing import READS_AGENT, refuse_streamed_scores, whose_of
from kvcellar.server.front.bodies import BodyRoute
from kvcellar.server.schemas.openai import CompletionRequest
from kvcellar.server.state.service import new_id, service_of
from kvcellar.server.stream.replies import Frames, frame, sse
from kvcellar.server.stream.streams import MergedStream

router = APIRouter(tags=["OpenAI"], route_class=BodyRoute)


@router.post("/v1/completions", response_model=None, dependencies=[READS_AGENT])
async def completions(request: Request, body: CompletionRequest) -> Response:
    """Continue a prompt, or several, ``n`` times each; prompts that begin alike share their KV."""
    service = service_of(request)
    path = service.models.resolve(body.model)
    head = {
        "id": new_id("cmpl-"),
        "object": "text_completion",
        "created": int(time.time()),
        "model": service.models.public(path),
        "system_fingerprint": "kvcellar",
    }
    batch = Continuations(body, path, whose_of(request, body.agent_id, salt=body.cache_salt), head)
    refuse_streamed_scores(body)
    stream = MergedStream(continued(service, batch))
    if body.stream:
        return await sse(request, stream, CompletionFrames(request, batch), ignored_of(body))
    await to_the_end(request, stream)
    host = service.models.registry.host(path)
    usage = _usage(batch)
    note(request, **{k: v for k, v in usage.items() if isinstance(v, int)})
    found = [_finished(host, body, i, choice) for i, choice in enumerate(batch.choices)]
    return JSONResponse(
        {**head, "choices": found, "usage": usage, "kvcellar": batch.extra},
        headers={**batch.headers, **ignored_of(body)},
    )


def _finished(
    host: ModelHost | None, body: CompletionRequest, index: int, choice: Continuation
) -> dict[str, Any]:
    """Write a continuation that has ended."""
    pieces = [*choice.pieces, *choice.tokens]
    logprobs = LegacyLogprobs(host).of(pieces) if body.logprobs is not None else None
    n, scored = body.prompt_logprobs, {}
    if n is not None:
        scored = {"prompt_logprobs": prompt_logprobs(host, choice.prompt, choice.scores, n)}
    return {
        "index": index,
        "text": choice.echo + _text_of(pieces) + choice.rest,
        "logprobs": logprobs,
        **scored,
        "finish_reason": _reason(choice),
    }


def _text_of(tokens: Sequence[GeneratedToken]) -> str:
    return "".join(token.text for token in tokens)


def _reason(choice: Continuation) -> str | None:
    return choice.end.reason if choice.end is not None else None


def _usage(batch: Continuations) -> dict[str, Any]:
    """Count a request's tokens: each prompt once, what was sampled for each continuation."""
    choices, n = batch.choices, batch.n
    ends = [choice.end.usage for choice in choices if choice.end is not None]
    prompt = sum(choice.n_prompt for choice in choices[::n])
    completion = sum(len(choice.tokens) for choice in choices)
    cached = sum(usage.cached_tokens for usage in ends[::n] if usage is not None)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": min(cached, prompt), "audio_tokens": 0},
        "completion_tokens_details": predictions(usage for usage in ends if usage is not None),
    }


class CompletionFrames(Frames[Pieces]):
    """Chunks of completions; several continuations may come by turns."""

    def __init__(self, request: Request, batch: Continuations) -> None:
        """Write chunks of a request's continuations."""
        super().__init__(request)
        self._batch = batch
        options = batch.body.stream_options
        self._has_usage = bool(options and options.include_usage)
        self._more = {"usage": None} if self._has_usage else {}
        self._logprobs: dict[int, LegacyLogprobs] = {}
        self._begun: set[int] = set()

    def headers(self, first: Pieces | None) -> Mapping[str, str]:
        """Say whose turn it is, where it is an agent's."""
        return self._batch.headers

    async def of(self, number: int, item: Pieces) -> bytes:
        """Write the next tokens of a continuation."""
        logprobs = None
        if self._batch.body.logprobs is not None:
            if number not in self._logprobs:
                host = service_of(self._request).models.registry.host(self._batch.path)
                self._logprobs[number] = LegacyLogprobs(host)
            logprobs = self._logprobs[number].of(item)
        text = _text_of(item)
        return self._chunk(number, text, logprobs=logprobs) if text or logprobs else b""

    def end(self) -> bytes:
        """Write the ends of all continuations, the usage where it is wanted, and the end."""
        batch = self._batch
        said = {"kvcellar": batch.extra} if "notice" in batch.extra else {}
        ends = [
            self._chunk(i, choice.rest, said, finish_reason=_reason(choice))
            for i, choice in enumerate(batch.choices)
        ]
        usage = _usage(batch)
        note(self._request, **{k: v for k, v in usage.items() if isinstance(v, int)})
        if self._has_usage:
            value = {**batch.head, "choices": [], "usage": usage, "kvcellar": batch.extra}
            ends.append(frame(value))
        return b"".join([*ends, frame("[DONE]")])

    def _chunk(
        self, number: int, text: str, said: Mapping[str, Any] | None = None, **fields: Any
    ) -> bytes:
        if number not in self._begun:
            self._begun.add(number)
            text = self._batch.choices[number].echo + text
        choice = {"index": number, "text": text, "logprobs": None, "finish_reason": None, **fields}
        return frame({**self._batch.head, "choices": [choice], **self._more, **(said or {})})
