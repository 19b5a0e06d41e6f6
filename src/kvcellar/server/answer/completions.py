"""Continuations of prompts that belong to no conversation, or of an agent's history by tokens."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.requests import Request

from kvcellar.agents import ModelHost, PlannedTurn, Turn, without_salt
from kvcellar.engine import Choice, FinishEvent, GeneratedToken, PromptEvent, SamplingParams
from kvcellar.engine import Request as EngineRequest
from kvcellar.history import History
from kvcellar.hosting.text_limits import refuse_bytes, refuse_text, size_of
from kvcellar.models.text.prompts import encode_plain
from kvcellar.server.answer.answer_facts import header_text
from kvcellar.server.answer.infilling import prompt_between
from kvcellar.server.answer.logprobs import pieces_of
from kvcellar.server.answer.parsing import sampling_of
from kvcellar.server.answer.response_format import form_of
from kvcellar.server.errors import ApiError
from kvcellar.server.schemas.openai import CompletionRequest
from kvcellar.server.state.conversations import Whose
from kvcellar.server.state.service import Service
from kvcellar.server.stream.streams import MergedStream, until_gone

MOST_CHOICES = 256
DEFAULT_MAX_TOKENS = 16


Pieces = Sequence[GeneratedToken]
"""Tokens that come together."""


@dataclass(slots=True)
class Continuation:
    """One continuation as far as it is.

    Attributes:
        prompt: its tokens, as they were given.
        params: how it is sampled.
        n_prompt: how many tokens were read for it: an agent's history comes before its prompt.
        echo: the prompt's text, where it is wanted and does not come as pieces.
        pieces: the prompt's tokens with their texts and log probabilities, where both are wanted.
        scores: the log probabilities of the prompt's tokens from the second on, where wanted.
        tokens: what was sampled.
        end: how it ended.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    n_prompt: int
    echo: str = ""
    pieces: list[GeneratedToken] = field(default_factory=list)
    scores: Sequence[Choice] = ()
    tokens: list[GeneratedToken] = field(default_factory=list)
    end: FinishEvent | None = None

    @property
    def text(self) -> str:
        """All of what was sampled."""
        return "".join(token.text for token in self.tokens) + self.rest

    @property
    def rest(self) -> str:
        """Text that came with the end and no token: held back for a stop text that never came."""
        n_seen = sum(len(token.text) for token in self.tokens)
        return self.end.text[n_seen:] if self.end is not None else ""


@dataclass(slots=True)
class Continuations:
    """All continuations of one request.

    Attributes:
        body: what was asked.
        path: of the model.
        whose: whom it is for.
        head: what answers and chunks begin with.
        choices: the continuations, once the prompts are read.
        notes: what the answers are not held to.
        agent_id: whose answer it became, once that is known.
        notice: what the client should know of that.
    """

    body: CompletionRequest
    path: str
    whose: Whose
    head: Mapping[str, Any]
    choices: list[Continuation] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    agent_id: str | None = None
    notice: str | None = None

    @property
    def only(self) -> Continuation:
        """The continuation of a request for one."""
        (choice,) = self.choices
        return choice

    @property
    def n(self) -> int:
        """Continuations of each prompt."""
        return self.body.n or 1

    @property
    def headers(self) -> dict[str, str]:
        """Headers that say whose turn it is, where it is an agent's."""
        if self.whose.name is None:
            return {}
        said = {"x-agent-id": without_salt(self.agent_id or self.whose.name)}
        if self.notice is not None:
            said["x-agent-notice"] = header_text(without_salt(self.notice))
        return said

    @property
    def extra(self) -> dict[str, Any]:
        """Facts that the protocol has no field for."""
        said = {} if self.notice is None else {"notice": without_salt(self.notice)}
        return {
            **said,
            "ignored": list(self.body.ignored),
            "notes": [*self.body.notes, *self.notes, *said.values()],
        }


@asynccontextmanager
async def continued(
    service: Service, batch: Continuations
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
    async with service.models.registry.use(batch.path) as own:
        host = own.isolated(whose.salt)
        if body.suffix:
            await _fill_in(service, host, body)
        prompts = await _prompts(service, host, body)
        form = form_of(body)
        held = None if form is None else await service.grammars.of_form(host, form)
        batch.notes.extend(held.notes if held is not None else ())
        if whose.name is not None:
            _check_turn(body, len(prompts) * batch.n)
        with service.admitted(len(prompts) * batch.n):
            wanted = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
            n_most = None if wanted < 0 else wanted
            for tokens, echo in prompts:
                for i in range(batch.n):
                    params = sampling_of(body, max_tokens=n_most, logprobs=body.logprobs, index=i)
                    if held is not None:
                        params = replace(params, guide=held.begin)
                    batch.choices.append(Continuation(tokens, params, len(tokens), echo))
            if whose.name is None:
                yield [_plain(service, host, choice, body) for choice in batch.choices]
            else:
                yield [_of_agent(service, host, batch)]


async def _fill_in(service: Service, host: ModelHost, body: CompletionRequest) -> None:
    """Make the prompt of a request with a suffix one that asks for what is between the two.

    Raises:
        ApiError: 400, the model has no tokens for that, or the prompt is not one text.
    """
    if not isinstance(body.prompt, str) or body.echo:
        raise ApiError(
            400,
            "a suffix goes with a prompt that is one text, and without echo",
            "invalid_value",
            param="suffix",
        )
    behind = body.suffix or ""
    body.prompt, ends = await prompt_between(service, host, body.prompt, behind, field="suffix")
    body.stop_token_ids = [*(body.stop_token_ids or ()), *ends]


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
    if _most_scored(body) is not None:
        raise ApiError(
            400,
            "log probabilities of a prompt are of a prompt alone; leave the agent out, or echo",
            param="echo" if body.prompt_logprobs is None else "prompt_logprobs",
        )


async def _plain(
    service: Service, host: ModelHost, choice: Continuation, body: CompletionRequest
) -> AsyncGenerator[Pieces, None]:
    """Continue a prompt that is nobody's."""
    service.check_context(host, choice.prompt)
    wanted = len(choice.prompt) + (choice.params.max_tokens or 0)
    service.pins.make_room(host, min(wanted, host.engine.cache.capacity))
    asked = EngineRequest(
        History(choice.prompt),
        choice.params.for_model(host.sampling),
        deadline_s=service.config.wait_s,
        prompt_logprobs=_most_scored(body),
        space=host.space,
    )
    started_s, last_s = time.perf_counter(), None
    async with await host.service.submit(asked) as stream:
        async for event in stream:
            if isinstance(event, GeneratedToken):
                now = time.perf_counter()
                service.metrics.token(host.name, started_s, last_s, now)
                last_s = now
                choice.tokens.append(event)
                yield [event]
            elif isinstance(event, PromptEvent):
                choice.scores = event.scores
                if body.echo and body.logprobs is not None:
                    choice.pieces = await _echoed(service, host, choice, body)
                    yield choice.pieces
            else:
                choice.end = event
                await service.check_finish(host, event)


def _most_scored(body: CompletionRequest) -> int | None:
    """Return how many likeliest tokens are wanted beside each of the prompt; None: no scores."""
    wanted = [body.prompt_logprobs, body.logprobs if body.echo else None]
    return max((n for n in wanted if n is not None), default=None)


async def _echoed(
    service: Service, host: ModelHost, choice: Continuation, body: CompletionRequest
) -> list[GeneratedToken]:
    """Return the prompt's tokens with their texts, and the log probabilities that are wanted."""
    n, has_specials = body.logprobs, _is_tokens(body)
    scores = [one._replace(top_logprobs=one.top_logprobs[:n]) for one in choice.scores]

    def decode() -> list[GeneratedToken]:
        return pieces_of(host, choice.prompt, scores, has_specials=has_specials)

    cost = 8 * len(choice.prompt)  # each token is decoded with those around it
    return await service.agents.work.run(cost, decode)


async def score_prompt(
    service: Service, host: ModelHost, tokens: Sequence[int], n: int
) -> Sequence[Choice]:
    """Return the log probability of each token of a prompt from the second on.

    Args:
        service: whose model it is.
        host: of the model.
        tokens: the prompt; all of it is computed.
        n: how many of the likeliest are wanted beside each.

    Raises:
        ApiError: it is longer than the context, or there was no room for it.
    """
    params = SamplingParams(max_tokens=0)
    body = CompletionRequest.model_validate({"prompt": list(tokens), "prompt_logprobs": n})
    choice = Continuation(tuple(tokens), params, len(tokens))
    with service.admitted():
        async for _ in _plain(service, host, choice, body):
            pass
    return choice.scores


async def _of_agent(
    service: Service, host: ModelHost, batch: Continuations
) -> AsyncGenerator[Pieces, None]:
    """Continue a prompt behind an agent's history, which grows by it."""
    choice = batch.only

    def on_start(planned: PlannedTurn, n_cached: int) -> None:
        service.check_context(host, planned.prompt)
        choice.n_prompt = len(planned.prompt)
        batch.agent_id, batch.notice = planned.turn.agent_id, planned.notice

    turn = Turn(
        tokens=choice.prompt,
        params=choice.params,
        model=host.name,
        deadline_s=service.config.wait_s,
        on_start=on_start,
    )
    async with service.conversations.seat(turn, batch.whose) as seat:
        async with service.agents.turns.running(seat.turn, host) as running:
            async for event in running.events:
                running.take(event)
                if isinstance(event, GeneratedToken):
                    choice.tokens.append(event)
                    yield [event]
        choice.end = running.end.finish
        batch.agent_id, batch.notice = running.end.agent_id, running.end.notice
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
            ids = encode_plain(tokenizer, prompt, add_special_tokens=has_specials)
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


async def to_the_end(request: Request, stream: MergedStream[Pieces]) -> None:
    """Wait until continuations have ended, for as long as their client does.

    Raises:
        ClientGone: it does not.
        Exception: what one of them raised.
    """

    async def take_all() -> None:
        async with stream:
            async for _ in stream:
                pass

    await until_gone(request, take_all())
