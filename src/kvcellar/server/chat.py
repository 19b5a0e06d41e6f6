"""One answer in a conversation, whatever protocol it was asked in: a request in, events out."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from kvcellar.agents import AgentUsage, ModelHost, Turn, TurnEnd, n_system_of
from kvcellar.agents.lengths import refuse_bytes, size_of
from kvcellar.agents.work import OTHER_BYTES
from kvcellar.engine import SamplingParams, TokenEvent
from kvcellar.engine.generate import GeneratedToken
from kvcellar.errors import DeadlineError, EngineClosedError, ModelError
from kvcellar.models.prompts import common_prefix
from kvcellar.server.calls import (
    THOUGHT_BEGIN,
    THOUGHT_END,
    Call,
    CallParser,
    CallPart,
    TextPart,
    as_message,
    is_whole,
    say_calls,
    say_tools,
    without_tools,
)
from kvcellar.server.conversations import Seat, Whose
from kvcellar.server.errors import ApiError
from kvcellar.server.forms import Form
from kvcellar.server.grammar import MOST_CALLS, Held, TokenGuide
from kvcellar.server.service import Service
from kvcellar.server.streams import Stream
from kvcellar.server.tools import Toolbox, ToolChoice, chosen

__all__ = [
    "Ask",
    "CallEvent",
    "ChatEvent",
    "Ended",
    "Pin",
    "Started",
    "TextEvent",
    "answer",
    "count_tokens",
    "merged",
    "whole",
]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Pin:
    """A wish to keep a beginning of the conversation in the cache.

    Attributes:
        n_messages: how many messages it is.
        ttl_s: for how many seconds.
    """

    n_messages: int
    ttl_s: float


@dataclass(frozen=True, slots=True)
class Ask:
    """What is asked.

    Attributes:
        messages: the whole conversation, as chat templates take it.
        model: a name that is offered; None: the default.
        params: how to sample; without a guide.
        tools: what it may call.
        choice: whether it does, and which.
        is_parallel: whether an answer may have several calls.
        form: what an answer without calls has to be.
        whose: whom it is for, as the client says it.
        pins: what to keep in the cache.
    """

    messages: Sequence[Mapping[str, Any]]
    params: SamplingParams
    model: str | None = None
    tools: Toolbox = field(default_factory=Toolbox)
    choice: ToolChoice = field(default_factory=ToolChoice)
    is_parallel: bool = True
    form: Form | None = None
    whose: Whose = field(default_factory=Whose)
    pins: Sequence[Pin] = ()


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
class TextEvent:
    """A token, and the text that became certain with it, which may be none.

    Where the answer may have calls, a token has no text and a text no token: what is held back for
    a call that may begin is another's text. Tokens come at all where log probabilities are wanted.
    """

    text: str
    token: GeneratedToken | None = None


@dataclass(frozen=True, slots=True)
class CallEvent:
    """A piece of a call; the first one of each call is empty."""

    index: int
    call: Call
    text: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The end.

    Attributes:
        reason: ``stop``, ``length`` or ``tool_calls``; the last where all calls are whole.
        cause: why, as ``engine.generate.Finish`` has it.
        stop_text: the stop text that ended it, if one did.
        text: all text that is in no call.
        calls: all calls.
        usage: what it took.
        agent_id: whose turn it was.
        model: who answered.
        params: how it was sampled.
        pinned_tokens: as in :class:`Started`.
        notice: as in :class:`Started`.
        added: messages of the agent's history that were read behind the system messages of the
            request, which did not have them.
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

    @property
    def is_inside_call(self) -> bool:
        """Whether the answer ended in the middle of its last call."""
        return bool(self.calls) and not is_whole(self.calls[-1])


ChatEvent = Started | TextEvent | CallEvent | Ended


@dataclass(slots=True)
class _Plan:
    """A question in the words of one model."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    held: Held | None
    reads_calls: bool
    knows_calls: bool
    notes: Sequence[str] = ()
    start: Started | None = None
    tokens: Sequence[int] = field(default_factory=tuple)
    is_in_thought: bool = False
    """Whether the prompt ends inside ``<think>``, so that the answer begins with a thought."""
    troubles: Sequence[str] = ()
    """What became of the guide on the way."""

    def guide(self) -> TokenGuide:
        """What the answer is held to, once the prompt is known."""
        held = self.held
        assert held is not None and held.begin is not None and held.begin_in_thought is not None
        guide = held.begin_in_thought() if self.is_in_thought else held.begin()
        self.troubles = guide.troubles
        return guide


async def answer(service: Service, ask: Ask) -> AsyncGenerator[ChatEvent, None]:
    """One answer. Leaving the iteration ends it, and frees what it held.

    Raises:
        ApiError: it is refused, before its first event.
        KVCellarError: as ``Turns.generate``.
    """
    name = service.models.resolve(ask.model)
    with service.admitted():
        async with service.models.registry.use(name) as host:
            lent = await _lent(service, host, ask)
            plan = await _plan(service, host, replace(ask, messages=[*lent, *ask.messages]))
            async with service.conversations.seat(
                plan.messages, plan.tools, model=name, whose=ask.whose
            ) as seat:
                seat.added = [*lent, *seat.added]
                events = _events(service, host, ask, plan, seat)
                async with contextlib.aclosing(events):
                    async for event in events:
                        seat.has_answered |= isinstance(event, Ended)
                        yield event


async def _lent(service: Service, host: ModelHost, ask: Ask) -> list[dict[str, Any]]:
    """The system messages of a named agent, where the request has tools and none of its own.

    A template that knows no tools is told of them in a system message, which would seem to be
    another one than the agent's.
    """
    name, has_own = ask.whose.name, bool(n_system_of(ask.messages))
    if name is None or has_own or not ask.tools.given or _knows_calls(host):
        return []
    if not await service.agents.directory.has(name):
        return []
    known = without_tools(service.agents.directory.conversation(name))
    return known[: n_system_of(known)]


async def _plan(service: Service, host: ModelHost, ask: Ask) -> _Plan:
    """What the model is told, and what its answer is held to."""
    size = size_of(ask.messages, ask.tools.given)
    if host.tokenizer is not None:
        refuse_bytes(host.tokenizer, size.n_bytes, host.context)
    messages, tools, knows = await service.agents.work.run(
        size.cost, _in_words_of, host, ask.messages, ask.tools.given
    )
    callable_ = chosen(ask.tools, ask.choice)
    form, held = ask.form, None
    if callable_ and form is not None and form.kind != "schema":
        raise ApiError(
            400,
            f"{form.field} says what the answer has to be, and the model may call tools instead; "
            f"give one of them, or a JSON schema, or tool_choice none",
            "invalid_value",
            param=form.field,
        )
    if callable_:
        is_one = not ask.is_parallel or (ask.choice.names is not None and len(callable_) == 1)
        held = await service.grammars.of_calls(
            host,
            callable_,
            is_forced=ask.choice.mode == "required",
            most=1 if is_one else MOST_CALLS,
            schema=form.value if form is not None else None,
            is_strict=form is None or form.is_strict,
            strict=ask.tools.strict,
        )
    elif form is not None:
        held = await service.grammars.of_form(host, form)
    notes = [*ask.tools.notes(), *(held.notes if held else ())]
    return _Plan(messages, tools, held, bool(callable_), knows, notes)


def _in_words_of(
    host: ModelHost, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None, bool]:
    """Messages and tools as the model's template takes them; and whether it knows calls."""
    knows = _knows_calls(host)
    plain = [dict(message) if knows else say_calls(message) for message in messages]
    listed = [dict(tool) for tool in tools] or None
    if listed and not knows:
        return say_tools(plain, listed), None, knows
    return plain, listed, knows


def _knows_calls(host: ModelHost) -> bool:
    """Whether a model's template says tools and calls by itself."""
    return "tool_calls" in str(getattr(host.tokenizer, "chat_template", None) or "")


async def _events(
    service: Service, host: ModelHost, ask: Ask, plan: _Plan, seat: Seat
) -> AsyncGenerator[ChatEvent, None]:
    call_ids = f"c{uuid.uuid4().hex[:7]}"  # with the call's number 9 characters, as Mistral wants
    parser = CallParser(call_ids)
    plan.messages = [dict(message) for message in seat.messages]
    tools = _tools_of_turn(plan.tools, is_appended=seat.is_appended)

    def keep(text: str) -> dict[str, Any]:
        """The message that clients will send back for this answer."""
        again = CallParser(call_ids, plan.is_in_thought)
        if plan.reads_calls:
            again.push(text)
            again.flush()
        message = as_message(again.text if plan.reads_calls else text, again.calls)
        return message if plan.knows_calls else say_calls(message)

    def on_start(tokens: Sequence[int], n_cached: int) -> None:
        service.check_fits(host, tokens)
        wanted = len(tokens) + (ask.params.max_tokens or 0)
        service.pins.make_room(host, min(wanted, host.engine.cache.capacity))
        plan.tokens = tokens
        if ask.form is None:  # a form leaves no room for a thought
            plan.is_in_thought = parser.is_in_thought = _opens_thought(host, tokens)
        n_pinned = len(tokens) if pinned is None else common_prefix(pinned, tokens)
        name = service.models.public(host.name)
        plan.start = Started(seat.agent_id, name, len(tokens), n_cached, n_pinned, seat.notice)

    cost = size_of(plan.messages, plan.tools).cost if ask.pins else 0
    cost += OTHER_BYTES if ask.pins else 0
    pinned = await service.agents.work.run(cost, _beginning, service, host, plan, ask)
    turn = service.agents.turns.generate(
        Turn(
            seat.agent_id,
            messages=plan.messages,
            tools=tools,
            params=replace(ask.params, guide=plan.guide if plan.held and plan.held.begin else None),
            model=host.name,
            deadline_s=service.config.wait_s,
            answer=keep,
            on_start=on_start,
            is_continuing=seat.is_continuing,
        )
    )
    started_s, last_s, n_seen = time.perf_counter(), None, 0
    async with contextlib.aclosing(turn):
        async for event in turn:
            if isinstance(event, TokenEvent):
                now = time.perf_counter()
                service.metrics.token(host.name, started_s, last_s, now)
                if last_s is None and plan.start is not None:
                    yield plan.start
                last_s = now
                n_seen += len(event.token.text)
                if plan.reads_calls:
                    if event.token.logprob is not None:
                        yield TextEvent("", event.token)
                    for part in parser.push(event.token.text):
                        yield _event_of(part)
                else:
                    parser.text += event.token.text
                    yield TextEvent(event.token.text, event.token)
            elif last_s is None or event.finish.reason not in ("stop", "length"):
                raise await _failure(service, host, event)
            else:
                rest = event.finish.text[n_seen:]  # held back for a stop text that never came
                if not plan.reads_calls and rest:
                    parser.text += rest
                    yield TextEvent(rest)
                for part in (*parser.push(rest), *parser.flush()) if plan.reads_calls else ():
                    yield _event_of(part)
                await _pin(service, host, ask, plan)
                used = ask.params.for_model(host.sampling)
                end = _ended(event, parser, service.models.public(host.name), plan, used)
                yield replace(end, added=seat.added)


def _tools_of_turn(
    tools: list[dict[str, Any]] | None, *, is_appended: bool
) -> list[dict[str, Any]] | None:
    """Tools as an agent's turn takes them: whoever sends what is new alone keeps the agent's."""
    return [] if tools is None and not is_appended else tools


def _opens_thought(host: ModelHost, prompt: Sequence[int]) -> bool:
    """Whether a prompt ends with the mark of a thought, whose end comes as text."""
    assert host.tokenizer is not None
    end = host.tokenizer.decode(list(prompt[-16:]), skip_special_tokens=False)
    if not end.rstrip().endswith(THOUGHT_BEGIN):
        return False
    mark = host.tokenizer.encode(THOUGHT_END, add_special_tokens=False)
    return THOUGHT_END in host.tokenizer.decode(mark, skip_special_tokens=True)


def _event_of(part: TextPart | CallPart) -> ChatEvent:
    if isinstance(part, TextPart):
        return TextEvent(part.text)
    return CallEvent(part.index, part.call, part.text)


def _ended(
    event: TurnEnd, parser: CallParser, model: str, plan: _Plan, params: SamplingParams
) -> Ended:
    finish = event.finish.finish
    assert finish is not None, "an answer that was stopped, or has no more room, says by what"
    is_called = bool(parser.calls) and is_whole(parser.calls[-1])
    return Ended(
        reason="tool_calls" if is_called and finish.reason == "stop" else finish.reason,
        cause=finish.cause,
        stop_text=finish.stop_text,
        text=parser.text,
        calls=tuple(parser.calls),
        usage=replace(event.usage, notes=(*event.usage.notes, *plan.notes, *plan.troubles)),
        agent_id=event.agent_id,
        model=model,
        params=params,
        pinned_tokens=plan.start.pinned_tokens if plan.start else 0,
        notice=plan.start.notice if plan.start else None,
    )


async def _failure(service: Service, host: ModelHost, event: TurnEnd) -> Exception:
    """Why a turn has ended without an answer."""
    error = event.finish.error
    if isinstance(error, DeadlineError):
        return await service.no_room(host, error)
    if error is not None:
        return error
    if event.finish.reason == "length":
        return ApiError(
            503,
            f"no cell was left for an answer: {event.finish.finish.detail}"
            if event.finish.finish
            else "no cell was left for an answer",
            "cache_full",
            retry_after_s=5,
        )
    return EngineClosedError("the server is being stopped; ask the next one")


def _beginning(service: Service, host: ModelHost, plan: _Plan, ask: Ask) -> Sequence[int] | None:
    """Tokens of the messages that the longest pin covers; None: it covers all there is."""
    n = max((pin.n_messages for pin in ask.pins), default=-1)
    if n < 0 or host.tokenizer is None:
        return ()
    if n >= len(ask.messages):
        return None
    n += len(plan.messages) - len(ask.messages)  # a message for the tools came in front
    with contextlib.suppress(ModelError):
        return service.agents.turns.prompt_of(host, plan.messages[:n], plan.tools, is_asking=False)
    return ()


async def _pin(service: Service, host: ModelHost, ask: Ask, plan: _Plan) -> None:
    n = plan.start.pinned_tokens if plan.start else 0
    if n:
        await service.pins.pin(host, plan.tokens[:n], max(pin.ttl_s for pin in ask.pins))


async def count_tokens(service: Service, ask: Ask) -> int:
    """Count the tokens that a turn would have as its prompt; nothing is computed or changed.

    Raises:
        UnknownAgentError: it is for an agent that is not there.
        ContextError: it is longer than the model's context, as its bytes say.
        ModelError: the template refuses it, or there is none.
    """
    async with service.models.registry.use(service.models.resolve(ask.model)) as host:
        if host.tokenizer is None:
            raise ModelError(f"model {host.name!r} has no tokenizer, so nothing can be counted")
        size = size_of(ask.messages, ask.tools.given)
        refuse_bytes(host.tokenizer, size.n_bytes, host.context)

        work = service.agents.work
        given = [*await _lent(service, host, ask), *ask.messages]
        messages, tools, _ = await work.run(size.cost, _in_words_of, host, given, ask.tools.given)
        meant = await service.conversations.meant(messages, model=host.name, whose=ask.whose)
        agent_id = None
        if meant is not None:
            messages, agent_id = [dict(message) for message in meant.messages], meant.agent_id
            tools = _tools_of_turn(tools, is_appended=meant.is_appended)

        def count() -> int:
            return len(service.agents.turns.prompt_of(host, messages, tools, agent_id=agent_id))

        return await work.run(size_of(messages, tools).cost + OTHER_BYTES, count)


async def whole(events: AsyncGenerator[ChatEvent, None]) -> tuple[Ended, list[GeneratedToken]]:
    """An answer to its end, and its tokens where they came one by one."""
    tokens = []
    async with contextlib.aclosing(events):
        async for event in events:
            if isinstance(event, TextEvent) and event.token is not None:
                tokens.append(event.token)
            if isinstance(event, Ended):
                return event, tokens
    raise AssertionError("an answer ends")


async def merged(
    sources: Sequence[Callable[[], AsyncGenerator[T, None]]],
) -> AsyncGenerator[tuple[int, T], None]:
    """The items of several generators as they come, with the number of each; all end together."""
    if len(sources) == 1:
        async with contextlib.aclosing(sources[0]()) as only:
            async for one in only:
                yield 0, one
        return
    streams = [Stream(source()) for source in sources]
    waiting = {asyncio.create_task(s.take()): i for i, s in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index = waiting.pop(task)
                item = task.result()
                if item is not None:
                    yield index, item
                    waiting[asyncio.create_task(streams[index].take())] = index
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for stream in streams:
            await stream.close()
