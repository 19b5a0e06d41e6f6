"""OpenAI's completions: prompts that belong to no conversation, or tokens for an agent."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvcellar.agents import ModelHost, Turn
from kvcellar.agents.lengths import refuse_bytes, refuse_text, size_of
from kvcellar.engine import FinishEvent, PromptEvent, SamplingParams, TokenEvent
from kvcellar.engine import Request as EngineRequest
from kvcellar.engine.generate import GeneratedToken
from kvcellar.history import History
from kvcellar.server.bodies import BodyRoute
from kvcellar.server.conversations import Whose
from kvcellar.server.errors import ApiError
from kvcellar.server.forms import form_of
from kvcellar.server.logprobs import LegacyLogprobs, pieces_of
from kvcellar.server.parsing import READS_AGENT, sampling_of, whose_of
from kvcellar.server.replies import Frames, frame, sse
from kvcellar.server.schemas.openai import CompletionRequest
from kvcellar.server.service import Service, new_id, service_of
from kvcellar.server.streams import Stream, until_gone
from kvcellar.server.telling import ignored_of, note, predictions

router = APIRouter(tags=["OpenAI"], route_class=BodyRoute)

MOST_CHOICES = 256
DEFAULT_MAX_TOKENS = 16


Pieces = Sequence[GeneratedToken]
"""Tokens that come together."""


@dataclass(slots=True)
class _Continuation:
    """One continuation as far as it is.

    Attributes:
        prompt: its tokens, as they were given.
        params: how it is sampled.
        n_prompt: how many tokens were read for it: an agent's history comes before its prompt.
        echo: the prompt's text, where it is wanted and does not come as pieces.
        pieces: the prompt's tokens with their texts and log probabilities, where both are wanted.
        tokens: what was sampled.
        end: how it ended.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    n_prompt: int
    echo: str = ""
    pieces: list[GeneratedToken] = field(default_factory=list)
    tokens: list[GeneratedToken] = field(default_factory=list)
    end: FinishEvent | None = None

    @property
    def rest(self) -> str:
        """Text that came with the end and no token: held back for a stop text that never came."""
        n_seen = sum(len(token.text) for token in self.tokens)
        return self.end.text[n_seen:] if self.end is not None else ""


@dataclass(slots=True)
class _Continuations:
    """All continuations of one request.

    Attributes:
        body: what was asked.
        path: of the model.
        whose: whom it is for.
        head: what answers and chunks begin with.
        choices: the continuations, once the prompts are read.
        notes: what the answers are not held to.
    """

    body: CompletionRequest
    path: str
    whose: Whose
    head: Mapping[str, Any]
    choices: list[_Continuation] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def n(self) -> int:
        """Continuations of each prompt."""
        return self.body.n or 1

    @property
    def headers(self) -> dict[str, str]:
        """Headers that say whose turn it is, where it is an agent's."""
        return {} if self.whose.name is None else {"x-agent-id": self.whose.name}

    @property
    def extra(self) -> dict[str, Any]:
        """Facts that the protocol has no field for."""
        return {"ignored": list(self.body.ignored), "notes": self.notes}


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
    batch = _Continuations(body, path, whose_of(request, body.agent_id), head)
    stream = Stream(_continued(service, batch))
    if body.stream:
        return await sse(request, stream, CompletionFrames(request, batch), ignored_of(body))

    async def to_the_end() -> None:
        async with stream:
            async for _ in stream:
                pass

    await until_gone(request, to_the_end())
    host = service.models.registry.host(path)
    usage = _usage(batch)
    note(request, **{k: v for k, v in usage.items() if isinstance(v, int)})
    found = [_finished(host, body, i, choice) for i, choice in enumerate(batch.choices)]
    return JSONResponse(
        {**head, "choices": found, "usage": usage, "kvcellar": batch.extra},
        headers={**batch.headers, **ignored_of(body)},
    )


def _finished(
    host: ModelHost | None, body: CompletionRequest, index: int, choice: _Continuation
) -> dict[str, Any]:
    """Write a continuation that has ended."""
    pieces = [*choice.pieces, *choice.tokens]
    logprobs = LegacyLogprobs(host).of(pieces) if body.logprobs is not None else None
    return {
        "index": index,
        "text": choice.echo + _text_of(pieces) + choice.rest,
        "logprobs": logprobs,
        "finish_reason": _reason(choice),
    }


@asynccontextmanager
async def _continued(
    service: Service, batch: _Continuations
) -> AsyncIterator[Sequence[AsyncGenerator[Pieces, None]]]:
    """Open the continuations of a request, once its prompts are read and it is admitted.

    Raises:
        ApiError: what is asked for cannot be had together, or there is no room for it.
    """
    body, whose = batch.body, batch.whose
    if body.best_of not in (None, 1, batch.n):
        raise ApiError(
            400,
            f"best_of {body.best_of} is not honoured: all of n answers are given, {batch.n} here; "
            f"choose among them by their logprobs",
            "unsupported_field",
            param="best_of",
        )
    async with service.models.registry.use(batch.path) as host:
        prompts = await _prompts(service, host, body)
        form = form_of(body)
        held = None if form is None else await service.grammars.of_form(host, form)
        batch.notes.extend(held.notes if held is not None else ())
        if whose.name is not None:
            _check_turn(body, len(prompts) * batch.n)
        with service.admitted(len(prompts) * batch.n):
            n_most = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
            for tokens, echo in prompts:
                for i in range(batch.n):
                    params = sampling_of(body, max_tokens=n_most, logprobs=body.logprobs, index=i)
                    if held is not None:
                        params = replace(params, guide=held.begin)
                    batch.choices.append(_Continuation(tokens, params, len(tokens), echo))
            if whose.name is None:
                yield [_plain(service, host, choice, body) for choice in batch.choices]
            else:
                yield [_of_agent(service, host, whose, batch.choices[0])]


def _check_turn(body: CompletionRequest, n_choices: int) -> None:
    """Refuse what an agent's turn cannot be.

    Raises:
        ApiError: 400, so it is.
    """
    if n_choices > 1:
        raise ApiError(400, "an agent continues one prompt, once; leave n out", param="n")
    if body.max_tokens == 0:
        raise ApiError(
            400, "an agent's turn has an answer; give max_tokens above 0", param="max_tokens"
        )
    if body.echo and body.logprobs is not None:
        raise ApiError(
            400,
            "log probabilities of a prompt are of a prompt alone; leave the agent out, or echo",
            param="echo",
        )


async def _plain(
    service: Service, host: ModelHost, choice: _Continuation, body: CompletionRequest
) -> AsyncGenerator[Pieces, None]:
    """Continue a prompt that is nobody's."""
    service.check_fits(host, choice.prompt)
    wanted = len(choice.prompt) + (choice.params.max_tokens or 0)
    service.pins.make_room(host, min(wanted, host.engine.cache.capacity))
    asked = EngineRequest(
        History(choice.prompt),
        choice.params.for_model(host.sampling),
        deadline_s=service.config.wait_s,
        prompt_logprobs=body.logprobs if body.echo else None,
        space=host.space,
    )
    started_s, last_s = time.perf_counter(), None
    async with await host.service.submit(asked) as stream:
        async for event in stream:
            if isinstance(event, TokenEvent):
                now = time.perf_counter()
                service.metrics.token(host.name, started_s, last_s, now)
                last_s = now
                choice.tokens.append(event.token)
                yield [event.token]
            elif isinstance(event, PromptEvent):
                cost = 8 * len(choice.prompt)  # each token is decoded with those around it
                choice.pieces = await service.agents.work.run(
                    cost,
                    pieces_of,
                    host,
                    choice.prompt,
                    event.scores,
                    has_specials=_is_tokens(body),
                )
                yield choice.pieces
            else:
                choice.end = event
                await service.check_finish(host, event)


async def _of_agent(
    service: Service, host: ModelHost, whose: Whose, choice: _Continuation
) -> AsyncGenerator[Pieces, None]:
    """Continue a prompt behind an agent's history, which grows by it."""

    def on_start(tokens: History, n_cached: int) -> None:
        service.check_fits(host, tokens)
        choice.n_prompt = len(tokens)

    turn = Turn(
        tokens=choice.prompt,
        params=choice.params,
        model=host.name,
        deadline_s=service.config.wait_s,
        on_start=on_start,
    )
    async with service.conversations.seat(turn, whose):
        async with service.agents.turns.running(turn) as running:
            async for event in running.events:
                running.take(event)
                if isinstance(event, TokenEvent):
                    choice.tokens.append(event.token)
                    yield [event.token]
        choice.end = running.end.finish
        await service.check_finish(host, choice.end)


async def _prompts(
    service: Service, host: ModelHost, body: CompletionRequest
) -> list[tuple[tuple[int, ...], str]]:
    """Return each prompt's tokens, and its text where that is to be echoed without them.

    Raises:
        ApiError: 400, there is none, there are too many, or one holds what is no token.
        ContextError: one is longer than the model's context, as its bytes say.
    """
    given, n = body.prompt, body.n or 1
    is_one = isinstance(given, str) or bool(given and isinstance(given[0], int))
    prompts: list[Any] = [given] if is_one else list(given)
    if not prompts:
        raise ApiError(400, "there is no prompt; give a text or tokens")
    if len(prompts) * n > MOST_CHOICES:
        raise ApiError(
            400,
            f"{len(prompts)} prompts, {n} times each, are above {MOST_CHOICES} continuations",
            param="n",
        )
    tokenizer, has_specials = host.tokenizer, body.add_special_tokens is not False
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if (texts or body.echo) and tokenizer is None:
        raise ApiError(
            400, f"model {host.name!r} has no tokenizer; give tokens, without echo", param="prompt"
        )
    for text in texts:
        refuse_bytes(tokenizer, size_of(text).n_bytes, host.context)
    has_echo = bool(body.echo) and body.logprobs is None

    def encode(prompt: str | list[int]) -> tuple[tuple[int, ...], str]:
        if isinstance(prompt, str):
            assert tokenizer is not None
            refuse_text(tokenizer, prompt, host.context)
            ids = tokenizer.encode(prompt, add_special_tokens=has_specials)
            return tuple(ids), prompt if has_echo else ""
        _check_ids(host, prompt)
        echo = tokenizer.decode(prompt) if has_echo and tokenizer is not None else ""
        return tuple(prompt), echo

    work = service.agents.work
    return await work.run(size_of(texts).cost, lambda: [encode(prompt) for prompt in prompts])


def _check_ids(host: ModelHost, prompt: list[int]) -> None:
    n_known = host.engine.runner.vocab_size
    for token_id in prompt:
        if not 0 <= token_id < n_known:
            raise ApiError(
                400,
                f"the prompt holds token id {str(token_id)[:20]} and the model has ids 0 to "
                f"{n_known - 1}",
                "invalid_prompt",
                param="prompt",
            )


def _is_tokens(body: CompletionRequest) -> bool:
    """Return true if prompts come as tokens, so that special ones are a part of their text."""
    first = body.prompt[0] if body.prompt else ""
    return not isinstance(body.prompt, str) and not isinstance(first, str)


def _text_of(tokens: Sequence[GeneratedToken]) -> str:
    return "".join(token.text for token in tokens)


def _reason(choice: _Continuation) -> str | None:
    return choice.end.reason if choice.end is not None else None


def _usage(batch: _Continuations) -> dict[str, Any]:
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

    def __init__(self, request: Request, batch: _Continuations) -> None:
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
        ends = [
            self._chunk(i, choice.rest, finish_reason=_reason(choice))
            for i, choice in enumerate(batch.choices)
        ]
        usage = _usage(batch)
        note(self._request, **{k: v for k, v in usage.items() if isinstance(v, int)})
        if self._has_usage:
            value = {**batch.head, "choices": [], "usage": usage, "kvcellar": batch.extra}
            ends.append(frame(value))
        return b"".join([*ends, frame("[DONE]")])

    def _chunk(self, number: int, text: str, **fields: Any) -> bytes:
        if number not in self._begun:
            self._begun.add(number)
            text = self._batch.choices[number].echo + text
        choice = {"index": number, "text": text, "logprobs": None, "finish_reason": None, **fields}
        return frame({**self._batch.head, "choices": [choice], **self._more})
