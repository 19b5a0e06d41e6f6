"""OpenAI's completions: prompts that belong to no conversation, or tokens for an agent."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvcellar.agents import ModelHost, Turn, TurnEnd
from kvcellar.agents.lengths import refuse_bytes, refuse_text, size_of
from kvcellar.engine import FinishEvent, PromptEvent, SamplingParams, TokenEvent
from kvcellar.engine import Request as EngineRequest
from kvcellar.engine.generate import GeneratedToken
from kvcellar.errors import DeadlineError, EngineClosedError
from kvcellar.history import History
from kvcellar.server.asking import (
    READS_AGENT,
    ignored_of,
    note,
    predictions,
    sampling_of,
    service_of,
    whose_of,
)
from kvcellar.server.bodies import BodyRoute
from kvcellar.server.chat import merged
from kvcellar.server.conversations import Whose
from kvcellar.server.errors import ApiError
from kvcellar.server.forms import form_of
from kvcellar.server.logprobs import LegacyLogprobs, pieces_of
from kvcellar.server.replies import sse
from kvcellar.server.schemas.openai import CompletionRequest
from kvcellar.server.service import Service, new_id
from kvcellar.server.streams import Stream, frame, until_gone

router = APIRouter(tags=["OpenAI"], route_class=BodyRoute)

MOST_CHOICES = 256
DEFAULT_MAX_TOKENS = 16


@dataclass(slots=True)
class _Choice:
    """One continuation as far as it is.

    Attributes:
        prompt: its tokens, as they were given.
        n_prompt: how many tokens were read for it: an agent's history comes before its prompt.
        echo: the prompt's text, where it is wanted and does not come as pieces.
        pieces: the prompt's tokens with their texts and log probabilities, where both are wanted.
        tokens: what was sampled.
        end: how it ended.
    """

    prompt: tuple[int, ...]
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


@router.post("/v1/completions", response_model=None, dependencies=[READS_AGENT])
async def completions(request: Request, body: CompletionRequest) -> Response:
    """Continue a prompt, or several, ``n`` times each; prompts that begin alike share their KV."""
    service = service_of(request)
    path = service.models.resolve(body.model)
    whose = whose_of(request, body.agent_id)
    headers = {} if whose.name is None else {"x-agent-id": whose.name}
    head = {
        "id": new_id("cmpl-"),
        "object": "text_completion",
        "created": int(time.time()),
        "model": service.models.public(path),
        "system_fingerprint": "kvcellar",
    }
    choices: list[_Choice] = []
    notes: list[str] = []
    events = _events(service, path, body, whose, choices, notes)
    if body.stream:
        request.scope["kvcellar.headers"] = headers
        wants_usage = bool(body.stream_options and body.stream_options.include_usage)
        frames = _frames(request, events, head, choices, body, notes, wants_usage)
        return await sse(request, Stream(frames), headers=ignored_of(body))

    async def to_the_end() -> None:
        async with contextlib.aclosing(events):
            async for _ in events:
                pass

    await until_gone(request, to_the_end())
    host = service.models.registry.host(path)
    usage = _usage(choices, body.n or 1)
    note(request, **{k: v for k, v in usage.items() if isinstance(v, int)})
    found = [
        {
            "index": i,
            "text": choice.echo + _text_of([*choice.pieces, *choice.tokens]) + choice.rest,
            "logprobs": LegacyLogprobs(host).of([*choice.pieces, *choice.tokens])
            if body.logprobs is not None
            else None,
            "finish_reason": _reason(choice),
        }
        for i, choice in enumerate(choices)
    ]
    extra = {"ignored": list(body.ignored), "notes": notes}
    return JSONResponse(
        {**head, "choices": found, "usage": usage, "kvcellar": extra},
        headers={**headers, **ignored_of(body)},
    )


async def _events(
    service: Service,
    path: str,
    body: CompletionRequest,
    whose: Whose,
    choices: list[_Choice],
    notes: list[str],
) -> AsyncGenerator[tuple[int, Sequence[GeneratedToken]], None]:
    """Tokens as they come, with the number of their choice.

    ``choices`` fills up on the way, and ``notes`` with what the answer is not held to.
    """
    n = body.n or 1
    if body.best_of not in (None, 1, n):
        raise ApiError(
            400,
            f"best_of {body.best_of} is not honoured: all of n answers are given, {n} here; "
            f"choose among them by their logprobs",
            "unsupported_field",
            param="best_of",
        )
    async with service.models.registry.use(path) as host:
        prompts = await _prompts(service, host, body)
        form = form_of(body)
        held = None if form is None else await service.grammars.of_form(host, form)
        notes.extend(held.notes if held is not None else ())
        if whose.name is not None and len(prompts) * n > 1:
            raise ApiError(400, "an agent continues one prompt, once; leave n out", param="n")
        if whose.name is not None and body.max_tokens == 0:
            raise ApiError(
                400, "an agent's turn has an answer; give max_tokens above 0", param="max_tokens"
            )
        if whose.name is not None and body.echo and body.logprobs is not None:
            raise ApiError(
                400,
                "log probabilities of a prompt are of a prompt alone; leave the agent out, or echo",
                param="echo",
            )
        with service.admitted(len(prompts) * n):
            sources = []
            n_most = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
            for i, (tokens, echo) in enumerate(one for one in prompts for _ in range(n)):
                choices.append(_Choice(tokens, len(tokens), echo))
                params = sampling_of(
                    body,
                    max_tokens=n_most,
                    logprobs=body.logprobs,
                    index=i % n,
                )
                if held is not None:
                    params = replace(params, guide=held.begin)
                if whose.name is None:
                    sources.append(
                        lambda choice=choices[-1], params=params: _plain(
                            service, host, choice, params, body
                        )
                    )
                else:
                    sources.append(
                        lambda choice=choices[-1], params=params: _of_agent(
                            service, host, whose, choice, params
                        )
                    )
            async with contextlib.aclosing(merged(sources)) as events:
                async for item in events:
                    yield item


async def _plain(
    service: Service,
    host: ModelHost,
    choice: _Choice,
    params: SamplingParams,
    body: CompletionRequest,
) -> AsyncGenerator[Sequence[GeneratedToken], None]:
    """A continuation that is nobody's."""
    service.check_fits(host, choice.prompt)
    wanted = len(choice.prompt) + (params.max_tokens or 0)
    service.pins.make_room(host, min(wanted, host.engine.cache.capacity))
    asked = EngineRequest(
        History(choice.prompt),
        params.for_model(host.sampling),
        deadline_s=service.config.wait_s,
        prompt_logprobs=body.logprobs if body.echo else None,
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
                choice.end = await _checked(service, host, event)


async def _of_agent(
    service: Service, host: ModelHost, whose: Whose, choice: _Choice, params: SamplingParams
) -> AsyncGenerator[Sequence[GeneratedToken], None]:
    """A continuation behind an agent's history, which grows by it."""

    def on_start(tokens: Sequence[int], n_cached: int) -> None:
        service.check_fits(host, tokens)
        choice.n_prompt = len(tokens)

    async with service.conversations.seat([], None, model=host.name, whose=whose) as seat:
        turn = service.agents.turns.generate(
            Turn(
                seat.agent_id,
                tokens=choice.prompt,
                params=params,
                model=host.name,
                deadline_s=service.config.wait_s,
                on_start=on_start,
            )
        )
        async with contextlib.aclosing(turn):
            async for event in turn:
                if isinstance(event, TurnEnd):
                    choice.end = await _checked(service, host, event.finish)
                else:
                    choice.tokens.append(event.token)
                    yield [event.token]


async def _checked(service: Service, host: ModelHost, end: FinishEvent) -> FinishEvent:
    """How it ended, where it did."""
    if isinstance(end.error, DeadlineError):
        raise await service.no_room(host, end.error)
    if end.error is not None:
        raise end.error
    if end.reason not in ("stop", "length"):
        raise EngineClosedError("the server is being stopped; ask the next one")
    return end


async def _prompts(
    service: Service, host: ModelHost, body: CompletionRequest
) -> list[tuple[tuple[int, ...], str]]:
    """The tokens of each prompt, and its text where it is to be echoed without its tokens.

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
    """Whether prompts come as tokens, so that special ones are a part of their text."""
    first = body.prompt[0] if body.prompt else ""
    return not isinstance(body.prompt, str) and not isinstance(first, str)


def _text_of(tokens: Sequence[GeneratedToken]) -> str:
    return "".join(token.text for token in tokens)


def _reason(choice: _Choice) -> str | None:
    return choice.end.reason if choice.end is not None else None


def _usage(choices: Sequence[_Choice], n: int) -> dict[str, Any]:
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


async def _frames(
    request: Request,
    events: AsyncGenerator[tuple[int, Sequence[GeneratedToken]], None],
    head: dict[str, Any],
    choices: list[_Choice],
    body: CompletionRequest,
    notes: list[str],
    wants_usage: bool,
) -> AsyncGenerator[bytes, None]:
    service = service_of(request)
    more = {"usage": None} if wants_usage else {}
    said: dict[int, LegacyLogprobs] = {}
    is_begun: set[int] = set()

    def chunk(index: int, text: str, **fields: Any) -> bytes:
        if index not in is_begun:
            is_begun.add(index)
            text = choices[index].echo + text
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": None, **fields}
        return frame({**head, "choices": [choice], **more})

    async with contextlib.aclosing(events):
        async for index, tokens in events:
            logprobs = None
            if body.logprobs is not None:
                if index not in said:
                    path = service.models.resolve(head["model"])
                    said[index] = LegacyLogprobs(service.models.registry.host(path))
                logprobs = said[index].of(tokens)
            text = _text_of(tokens)
            if text or logprobs:
                yield chunk(index, text, logprobs=logprobs)
    for index, one in enumerate(choices):
        yield chunk(index, one.rest, finish_reason=_reason(one))
    usage = _usage(choices, body.n or 1)
    note(request, **{k: v for k, v in usage.items() if isinstance(v, int)})
    if wants_usage:
        extra = {"ignored": list(body.ignored), "notes": notes}
        yield frame({**head, "choices": [], "usage": usage, "kvcellar": extra})
    yield frame("[DONE]")
