"""One answer in a conversation, whatever the protocol: a ``Question`` in, events out."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

from kvcellar.agents import ModelHost, PlannedTurn, Turn, TurnEnd, without_salt
from kvcellar.dialects import (
    AnswerParser,
    Call,
    CallPart,
    Part,
    ReasoningPart,
    TextPart,
    is_whole,
)
from kvcellar.engine import GeneratedToken, Guide
from kvcellar.engine.loop.generating import Finish
from kvcellar.errors import ModelError
from kvcellar.grammar.beginning import begin_guide
from kvcellar.grammar.grammars import MOST_CALLS, Constraint
from kvcellar.history import History
from kvcellar.hosting.text_limits import size_of
from kvcellar.hosting.thread_lanes import OTHER_BYTES
from kvcellar.models.text.prompts import begun_of
from kvcellar.server.answer.dialogue import (
    ChatEvent,
    Ended,
    PartEvent,
    Question,
    Started,
)
from kvcellar.server.answer.to_template import Wording, word
from kvcellar.server.answer.tools import chosen
from kvcellar.server.errors import ApiError
from kvcellar.server.state.conversations import Seat
from kvcellar.server.state.service import Service
from kvcellar.server.stream.streams import MergedStream


async def answer(service: Service, question: Question) -> AsyncGenerator[ChatEvent, None]:
    """Answer a question. Leaving the iteration ends the answer, and frees what it held.

    Raises:
        ApiError: it is refused, before its first event.
        KVCellarError: as ``Turns.generate``.
    """
    name = service.models.resolve(question.model)
    _check_answerable(question)
    with service.admitted():
        async with service.models.registry.use(name) as own:
            host = own.isolated(question.whose.salt)
            turn, wording = await word(service, host, question)
            held = await _held(service, host, question)
            async with service.conversations.seat(turn, question.whose) as seat:
                said = _Answer(service, host, question, wording, held, seat)
                turn = await said.begin()
                async with service.agents.turns.running(turn, host) as running:
                    async for event in running.events:
                        running.take(event)
                        if isinstance(event, GeneratedToken):
                            for one in said.take(event):
                                yield one
                            check_calls(said.parser)
                for one in await said.end(running.end):
                    yield one


async def read_prompt(service: Service, question: Question) -> History:
    """Return the tokens that a turn would have as its prompt; nothing is computed or changed.

    Raises:
        UnknownAgentError: it is for an agent that is not there.
        ContextError: it is longer than the model's context, as its bytes say.
        ModelError: the template refuses it, or there is none.
    """
    async with service.models.registry.use(service.models.resolve(question.model)) as own:
        host = own.isolated(question.whose.salt)
        if host.tokenizer is None:
            raise ModelError(f"model {host.name!r} has no tokenizer, so it reads no messages")
        turn, _ = await word(service, host, question)
        turn = await service.conversations.meant(turn, question.whose)
        messages, tools = turn.messages or (), turn.tools
        kwargs, agent_id = turn.template_kwargs, turn.agent_id or None

        def read() -> History:
            turns = service.agents.turns
            return turns.prompt_of(host, messages, tools, template_kwargs=kwargs, agent_id=agent_id)

        return await service.agents.work.run(size_of(messages, tools).cost + OTHER_BYTES, read)


async def whole(
    service: Service, questions: Sequence[Question]
) -> list[tuple[Ended, list[GeneratedToken]]]:
    """Answer questions to their ends, all at once; with the tokens where they came one by one."""
    tokens: list[list[GeneratedToken]] = [[] for _ in questions]
    ends: dict[int, Ended] = {}
    async with MergedStream.of(*(answer(service, question) for question in questions)) as events:
        async for number, event in events:
            if isinstance(event, PartEvent) and event.token is not None:
                tokens[number].append(event.token)
            elif isinstance(event, Ended):
                ends[number] = event
    return [(ends[i], tokens[i]) for i in range(len(questions))]


def _check_answerable(question: Question) -> None:
    """Refuse a question that ends with calls, behind which their results come and no answer.

    Raises:
        ApiError: 400, so it does.
    """
    last = question.messages[-1] if question.messages else {}
    if last.get("role") == "assistant" and last.get("tool_calls"):
        raise ApiError(
            400,
            "a turn needs a message to answer, and the last one has calls; send their results",
            "invalid_value",
            param="messages",
        )


async def _held(service: Service, host: ModelHost, question: Question) -> Constraint | None:
    """Find out what an answer is held to: the tools that it may call, and its form.

    Raises:
        ApiError: 400, no grammar can be made of it, or the two contradict each other.
    """
    callable_, form = chosen(question.tools, question.choice), question.form
    if form is not None and begun_of(question.messages):
        raise ApiError(
            400,
            f"{form.field} holds an answer from its beginning, and this one has begun: the last "
            f"message is the assistant's; leave one of them out",
            "invalid_value",
            param=form.field,
        )
    if not callable_:
        return None if form is None else await service.grammars.of_form(host, form)
    if form is not None and form.kind != "schema":
        raise ApiError(
            400,
            f"{form.field} says what the answer has to be, and the model may call tools instead; "
            f"give one of them, or a JSON schema, or tool_choice none",
            "invalid_value",
            param=form.field,
        )
    is_one = not question.is_parallel or (question.choice.names is not None and len(callable_) == 1)
    return await service.grammars.of_calls(
        host,
        callable_,
        is_forced=question.choice.mode == "required",
        most=1 if is_one else MOST_CALLS,
        schema=form.value if form is not None else None,
        is_strict=form is None or form.is_strict,
        strict=question.tools.strict,
    )


def check_calls(parser: AnswerParser, finish: Finish | None = None) -> None:
    """Refuse to go on where a call that was begun is none.

    Args:
        parser: of the answer.
        finish: how the answer has ended; None: it goes on.

    Raises:
        ApiError: 502, the model wrote no arguments.
    """
    trouble, calls = parser.trouble, parser.calls
    is_ended = finish is not None and finish.cause == "eos"
    if not trouble and is_ended and calls and not is_whole(calls[-1]):
        trouble = f"the call of {calls[-1].name!r} is malformed: the model ended inside of it"
    if trouble:
        raise ApiError(502, f"{trouble[:300]}; ask again", "malformed_call")


def reason_of(parser: AnswerParser, finish: Finish) -> str:
    """Return why an answer has ended, in the words of chat completions."""
    is_called = bool(parser.calls) and is_whole(parser.calls[-1])
    return "tool_calls" if is_called and finish.reason == "stop" else finish.reason


class _Answer:
    """One answer on its way: from the agent's turn to the events that protocols write."""

    def __init__(
        self,
        service: Service,
        host: ModelHost,
        question: Question,
        wording: Wording,
        held: Constraint | None,
        seat: Seat,
    ) -> None:
        """Create an answer of which nothing is said yet."""
        self._service = service
        self._host = host
        self._question = question
        self._wording = wording
        self._held = held
        self._seat = seat
        self._reading = wording.reading
        self.parser = self._reading.parser()
        self._n_thought = 0
        self._pinned: History | None = History()
        self._start: Started | None = None
        self._guide_troubles: Sequence[str] = ()
        self._started_s = time.perf_counter()
        self._last_s: float | None = None
        self._n_seen = 0
        self._renamed: dict[str, Call] = {}

    # The turn ----------------------------------------------------------------------------------

    async def begin(self) -> Turn:
        """Return the turn that is to be run: with how it is answered."""
        self._pinned = await self._pinned_prefix()
        is_held = self._held is not None and self._held.begin is not None
        is_bounded = self._wording.wish.budget is not None and self._reading.dialect.thought
        is_guided = is_held or is_bounded
        params = replace(self._question.params, guide=self._guide if is_guided else None)
        return replace(self._seat.turn, params=params, on_start=self._on_start)

    async def _pinned_prefix(self) -> History | None:
        """Return tokens of the messages that the longest pin covers; None: of all messages."""
        question, host = self._question, self._host
        n = max((pin.n_messages for pin in question.pins), default=-1)
        if n < 0 or host.tokenizer is None:
            return History()
        if n >= len(question.messages):
            return None
        turn = self._seat.turn
        messages, tools, kwargs = turn.messages or (), turn.tools, turn.template_kwargs
        n += len(messages) - len(question.messages)  # what came in front

        def begin() -> History:
            with contextlib.suppress(ModelError):
                turns = self._service.agents.turns
                return turns.prompt_of(
                    host, messages[:n], tools, template_kwargs=kwargs, is_asking=False
                )
            return History()

        cost = size_of(messages, tools).cost + OTHER_BYTES
        return await self._service.agents.work.run(cost, begin)

    def _on_start(self, planned: PlannedTurn, n_cached: int) -> None:
        """Take note of the prompt, or refuse it, before it is queued."""
        service, host, prompt = self._service, self._host, planned.prompt
        service.check_context(host, prompt)
        wanted = len(prompt) + (self._question.params.max_tokens or 0)
        service.pins.make_room(host, min(wanted, host.engine.cache.capacity))
        self.parser = self._reading.parser()
        n_pinned = len(prompt)
        if self._pinned is not None:
            n_pinned = prompt.common_prefix(self._pinned)
        self._pinned = prompt.prefix(n_pinned)
        name, agent_id = service.models.public(host.name), without_salt(planned.turn.agent_id)
        notice = self._notice(planned.notice)
        self._start = Started(agent_id, name, len(prompt), n_cached, n_pinned, notice)

    def _notice(self, of_turn: str | None) -> str | None:
        """Return what the client should know of whose turn it is, and whether it is kept."""
        said = (of_turn, self._seat.notice)
        return without_salt("; ".join(one for one in said if one)) or None

    def _guide(self) -> Guide:
        """Begin to hold the answer to its grammar and its thought, once the prompt is known."""
        guide, self._guide_troubles = begin_guide(
            self._host,
            self._held,
            self._reading.dialect.thought,
            self._wording.wish.budget,
            is_in_thought=self._reading.is_in_reasoning,
            has_form=self._question.form is not None,
        )
        return guide

    # What it says ------------------------------------------------------------------------------

    def take(self, token: GeneratedToken) -> list[ChatEvent]:
        """Turn the next token into events; with the first one, that the prompt is in."""
        now = time.perf_counter()
        self._service.metrics.token(self._host.name, self._started_s, self._last_s, now)
        is_first, self._last_s = self._last_s is None, now
        self._n_seen += len(token.text)
        said: list[ChatEvent] = [self._start] if is_first and self._start is not None else []
        is_thought = self.parser.is_in_reasoning
        parts = self.parser.push(token.text)
        is_thought |= self.parser.is_in_reasoning
        self._n_thought += is_thought or any(isinstance(one, ReasoningPart) for one in parts)
        if len(parts) == 1 and not isinstance(parts[0], CallPart):
            return [*said, PartEvent(parts[0], token)]
        if token.logprob is not None:
            said.append(PartEvent(ReasoningPart("") if is_thought else TextPart(""), token))
        return [*said, *map(self._event_of, parts)]

    async def end(self, event: TurnEnd) -> list[ChatEvent]:
        """Turn the end of the turn into events: what was held back, and the end of the answer.

        Raises:
            ApiError, KVCellarError: there was no answer, or it ended with an error.
        """
        await self._service.check_finish(self._host, event.finish)
        if self._last_s is None:
            assert event.finish.finish is not None, "who has no cell is told so"
            message = f"no cell was left for an answer: {event.finish.finish.detail}"
            raise ApiError(503, message, "cache_full", retry_after_s=5)
        rest = event.finish.text[self._n_seen :]  # held back for a stop text that never came
        parts = (*self.parser.push(rest), *self.parser.flush())
        said = list(map(self._event_of, parts))
        check_calls(self.parser, event.finish.finish)
        if self._pinned:
            ttl_s = max(pin.ttl_s for pin in self._question.pins)
            await self._service.pins.pin(self._host, self._pinned, ttl_s)
        self._seat.has_answered = True
        return [*said, self._ended(event)]

    def _ended(self, event: TurnEnd) -> Ended:
        finish, start, calls = event.finish.finish, self._start, self.parser.calls
        assert finish is not None, "an answer that was stopped, or has no more room, says by what"
        held_notes = self._held.notes if self._held is not None else ()
        asked, wish = self._question, self._wording.wish
        notes = [*wish.notes, *asked.tools.notes(), *asked.left_out.notes(), *held_notes]
        notes += self._guide_troubles
        joined = self._seat.turn.joined
        return Ended(
            reason=reason_of(self.parser, finish),
            cause=finish.cause,
            stop_text=finish.stop_text,
            text=self.parser.text,
            reasoning=self.parser.reasoning,
            reasoning_tokens=self._n_thought,
            calls=tuple(map(self._as_called, calls)),
            usage=replace(
                event.usage,
                notes=(*map(without_salt, event.usage.notes), *notes),
                rules=(*self._wording.rules, *event.usage.rules),
            ),
            agent_id=without_salt(event.agent_id),
            model=self._service.models.public(self._host.name),
            params=self._question.params.for_model(self._host.sampling),
            pinned_tokens=start.pinned_tokens if start else 0,
            notice=self._notice(event.notice),
            added=[*self._wording.lent, *(joined.added if joined is not None else ())],
        )

    def _event_of(self, part: Part) -> PartEvent:
        if isinstance(part, CallPart):
            part = replace(part, call=self._as_called(part.call))
        return PartEvent(part)

    def _as_called(self, call: Call) -> Call:
        """Return a call by the name that its client has for the tool."""
        name = self._question.tools.names.get(call.name)
        if name is None:
            return call
        own = self._renamed.setdefault(call.call_id, Call(call.call_id, name))
        own.arguments = call.arguments
        return own
