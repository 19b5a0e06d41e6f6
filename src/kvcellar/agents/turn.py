"""Runs turns: what is new in, events out. Start here.

`Turn`, what is asked, and `PlannedTurn` are in ``planning.py``.

Find what the cache and the store hold of the history, bring back what is worth it, queue the
request, and when it has ended save what is new, in the background.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvcellar.agents.accounting import TurnEnd, miss_of, took_of, usage_of
from kvcellar.agents.directory import Directory
from kvcellar.agents.dropped import DroppedStates
from kvcellar.agents.kv.residence import BroughtBack, bring_back
from kvcellar.agents.leasing import Hold, changing
from kvcellar.agents.lifecycle import Lifecycle
from kvcellar.agents.lookup import Lookup
from kvcellar.agents.planning import PlannedTurn, Turn, kwargs_of, plan_turn, record_turn
from kvcellar.agents.publishing import Publisher
from kvcellar.agents.records.agent import AgentRecord
from kvcellar.agents.records.checking import check_said
from kvcellar.agents.records.looks import recalled, say_turn
from kvcellar.agents.records.names import derived_id, salt_of
from kvcellar.agents.text.live_text import LiveEvent, LiveText, Over
from kvcellar.agents.text.match_messages import continues, join, n_matched
from kvcellar.agents.text.reading import reading_of
from kvcellar.engine import Event, EventStream, FinishEvent, GeneratedToken, Request
from kvcellar.engine.loop.text import StopMatcher, StopsFn
from kvcellar.errors import (
    AgentHeldError,
    EngineClosedError,
    HistoryChangedError,
    MovedOnError,
    PictureLostError,
    PromptError,
    StoreError,
)
from kvcellar.history import History
from kvcellar.hosting.host import ModelHost
from kvcellar.hosting.messages import Messages
from kvcellar.hosting.models import ModelRegistry
from kvcellar.hosting.text_limits import refuse_bytes, refuse_text, size_of
from kvcellar.hosting.thread_lanes import OTHER_BYTES, Work
from kvcellar.hosting.volatile import apply_rules, keep_known
from kvcellar.models.text.prompts import encode, render
from kvcellar.store import SaveTicket, Store
from kvcellar.valid import valid_json

log = logging.getLogger("kvcellar.agents")

_POLL_S = 0.05

MOST_COUNTED = 4
"""A conversation of so many contexts is counted to its end where somebody asks how long it is."""


@dataclass(frozen=True, slots=True, eq=False)
class Turns:
    """Runs turns: one of each agent at a time, those of different agents in one batch.

    Attributes:
        store: where histories are.
        models: who runs them.
        directory: who there is.
        lookup: finds whose history a conversation continues.
        publisher: saves what a turn has said.
        lifecycle: makes branches for turns that an agent cannot take.
        dropped: takes what a turn replaces.
        work: threads for long texts.
        live: tells those who look on what comes.
        rules: names of rules for volatile text that apply.
        is_verified: whether a few restored rows are computed again before they are used.
        control_tokens_in_text: whether text of messages may spell control tokens.
    """

    store: Store
    models: ModelRegistry
    directory: Directory
    lookup: Lookup
    publisher: Publisher
    lifecycle: Lifecycle
    dropped: DroppedStates
    work: Work
    live: LiveText
    rules: Collection[str]
    is_verified: bool
    control_tokens_in_text: bool

    async def generate(self, turn: Turn) -> AsyncGenerator[GeneratedToken | TurnEnd, None]:
        """Run one turn: what is new in, events out, the last a :class:`TurnEnd`.

        Leaving the iteration ends the turn; what was sampled by then stays in the history.

        Raises:
            UnknownAgentError: there is none of that name.
            ModelError: the model cannot be loaded; nothing was changed.
            KVCellarError: as ``running``.
        """
        agent = await self.directory.find(turn.agent_id)
        async with (
            self.models.use(turn.model or agent.model) as own,
            self.running(turn, own.isolated(salt_of(agent.agent_id))) as running,
        ):
            async for event in running.events:
                running.take(event)
                if isinstance(event, GeneratedToken):
                    yield event
        yield running.end

    @contextlib.asynccontextmanager
    async def running(self, turn: Turn, host: ModelHost) -> AsyncIterator[RunningTurn]:
        """Run one turn for as long as the block lasts; turns of one agent go one after the other.

        Its events come from the engine as they are; the block gives each of them to ``take``. It
        may be left at any time, which ends the turn; what was sampled by then stays in the history,
        which is durable behind the block.

        Args:
            turn: what is asked.
            host: who answers, for those who share the agent's salt; it is the caller's to hold.

        Raises:
            UnknownAgentError: there is none of that name.
            AgentError: the messages do not continue its history, though they have to; nothing was
                changed.
            MovedOnError: the turn follows another history than it has, or will have when it has
                ended what it is in; nothing was changed.
            PromptError: there is nothing to answer, or no room for it; nothing was changed.
            ModelError: the model's template refuses the messages; nothing was changed.
        """
        agent = self.directory.on_model(await self.directory.find(turn.agent_id), host)
        assert host.space.salt == salt_of(agent.agent_id), "nobody reads what others' KV says"
        self._check_free(turn, agent)
        async with (
            self._planned(turn, agent, host) as (planned, agent, hold),
            self._replacing(planned, agent),
        ):
            with self.live.turn(agent, planned.turn.asked, turn.reading):
                async with self._queued(planned, agent, host, hold) as running:
                    yield running

    def _check_free(self, turn: Turn, agent: AgentRecord) -> None:
        """Refuse a turn that follows a history behind which another one has begun.

        It would wait for the end of that one, only to be refused then.

        Raises:
            MovedOnError: there is such a turn.
        """
        now = self.live.under_way(agent.agent_id)
        if turn.follows is not None and now is not None:
            digest, n_turns = agent.history_digest, len(agent.turns)
            raise MovedOnError(
                agent.agent_id, turn.follows, digest, n_turns, is_under_way=True, asked=now.asked
            )

    @contextlib.asynccontextmanager
    async def _planned(
        self, turn: Turn, agent: AgentRecord, host: ModelHost
    ) -> AsyncIterator[tuple[PlannedTurn, AgentRecord, Hold]]:
        """Plan a turn and have its agent to itself: the one it is for, or else a branch of that.

        There is a branch where another process does not let go of the agent, and where the history
        that the turn has to continue has gone another way meanwhile. So no turn is lost, and none
        is put behind what its client has not seen.
        """
        notice: str | None = None
        async with contextlib.AsyncExitStack() as stack:
            try:
                held = changing(self.publisher, agent, progress=turn.progress)
                hold = await stack.enter_async_context(held)
                if self.publisher.is_diverged(agent):
                    await stack.aclose()
                    agent, notice = await self._parted(agent)
                    hold = await stack.enter_async_context(changing(self.publisher, agent))
                elif hold.has_news and turn.messages is not None:
                    # nobody replaces what he has not seen
                    turn = replace(turn, is_continuing=True)
                elif hold.has_news:
                    notice = (
                        f"another process has talked with agent {agent.agent_id!r} meanwhile; this "
                        f"turn is behind what was said there"
                    )
                agent.check_follows(turn.follows)
                planned = await self._plan(turn, agent, host)
            except (AgentHeldError, HistoryChangedError) as error:
                await stack.aclose()
                if turn.follows is not None:  # whoever holds the agent goes on with it
                    raise
                agent = await stack.enter_async_context(self._branched(turn, agent))
                hold = await stack.enter_async_context(changing(self.publisher, agent))
                planned = await self._plan(replace(turn, is_continuing=False), agent, host)
                said, _, _ = str(error).partition(";")
                notice = f"{said}, so the answer is in its branch {agent.agent_id}"
            yield replace(planned, notice=notice), agent, hold

    async def _parted(self, agent: AgentRecord) -> tuple[AgentRecord, str]:
        """Make the branch that takes a turn where another machine has gone on with its agent.

        Returns:
            The branch, and what its client should know of it.
        """
        branch = await self.lifecycle.part(agent)
        return branch, (
            f"another machine has gone on with agent {agent.agent_id!r} while this one could not "
            f"ask, so what was said here is its branch {branch.agent_id}, and the answer is there"
        )

    @contextlib.asynccontextmanager
    async def _branched(self, turn: Turn, agent: AgentRecord) -> AsyncIterator[AgentRecord]:
        """Make a branch of an agent for a turn that cannot be its own; without a turn it goes."""
        n_turns = None
        if turn.messages is not None:
            n_turns = join(agent, valid_json(turn.messages), self.rules).n_turns
        name = agent.branch_of or agent.agent_id
        branch = await self.lifecycle.branch_off(agent, name, n_turns)
        before = branch.turns
        try:
            yield branch
        finally:
            if branch.turns == before:
                await self.lifecycle.forget(branch.agent_id)

    async def _plan(self, turn: Turn, agent: AgentRecord, host: ModelHost) -> PlannedTurn:
        """Plan what an agent's turn brings, in a thread where that is much.

        Raises:
            HistoryChangedError: it has to continue the history, and does not.
            ContextError: it is longer than the model's context, as its bytes say.
            PromptError, ModelError: as ``generate``.
        """
        cost = n_bytes = 0
        if turn.is_chat:
            said = turn.messages
            if said is None:
                said = [*agent.messages, *(turn.behind or ())]
            n_bytes, cost = size_of(turn.text, said, turn.tools or agent.tools)
            cost += OTHER_BYTES

        def plan() -> PlannedTurn:
            if turn.is_chat and host.tokenizer is not None:
                refuse_bytes(host.tokenizer, n_bytes, host.context)
            text, behind = valid_json((turn.text, turn.behind))
            given = (turn.messages, turn.tools, turn.template_kwargs)
            messages, tools, kwargs = valid_json(given)
            check_said(messages if behind is None else behind, tools, kwargs)
            own = replace(
                turn,
                agent_id=agent.agent_id,
                text=text,
                behind=behind,
                messages=messages,
                tools=tools,
                template_kwargs=kwargs,
            )
            return plan_turn(
                own,
                agent,
                host,
                self.rules,
                control_tokens_in_text=self.control_tokens_in_text,
                n_matched=self._matched(own, agent),
            )

        return await self.work.run(cost, plan)

    def _matched(self, turn: Turn, agent: AgentRecord) -> int | None:
        """Count the messages of a turn that are its agent's; None: nobody had to know so far.

        Raises:
            HistoryChangedError: it has to continue the history, and does not.
        """
        joined, n = turn.joined, None
        if turn.messages is None:
            return None
        if joined is not None and joined.messages is turn.messages and joined.holds_for(agent):
            n = joined.n_common
        if not turn.is_continuing:
            return n
        said = Messages(turn.messages)
        n = n_matched(agent, said, self.rules) if n is None else n
        if not continues(agent, said, n):
            raise HistoryChangedError(
                f"the history of agent {agent.agent_id!r} was changed while this turn waited for "
                f"its own"
            )
        return n

    @contextlib.asynccontextmanager
    async def _replacing(self, planned: PlannedTurn, agent: AgentRecord) -> AsyncIterator[None]:
        """Have what a turn drops of an agent's history where ``undo`` finds it."""
        before, name = agent.turns, None
        said = None if agent.live.is_passing or not before else planned.messages
        if said is not None and not continues(agent, said, planned.n_matched):
            name = await self.dropped.drop(agent, "replace", agent.agent_id, uuid.uuid4().hex)
        try:
            yield
        finally:
            if name is not None and agent.turns == before:  # there was no turn
                await self.dropped.forget(name)

    @contextlib.asynccontextmanager
    async def _queued(
        self, planned: PlannedTurn, agent: AgentRecord, host: ModelHost, hold: Hold
    ) -> AsyncIterator[RunningTurn]:
        """Bring the history back, have it answered, and save what is new."""
        started_s = time.perf_counter()
        turn, prompt = planned.turn, planned.prompt
        settings = turn.params.for_model(host.sampling)
        reading = turn.reading
        if reading is not None and host.tokenizer is not None:
            reading.begin(host.tokenizer, prompt)
        own = host.reading(len(prompt))
        request = Request(
            prompt,
            settings,
            turn.priority,
            turn.deadline_s,
            snapshots_at=planned.snapshots_at,
            space=own.space,
            marks=None if reading is None else reading.marks,
            finder=_finder_of(planned, agent, host),
        )
        host.costs.recall(agent.rates)
        if not agent.live.is_passing:
            await self.publisher.expect_pictures(planned.messages or ())
        back = await bring_back(
            own,
            self.store,
            prompt.prefix(len(prompt) - 1),
            is_verified=self.is_verified,
            progress=turn.progress,
        )
        try:
            if turn.on_start is not None:
                turn.on_start(planned, back.n_cached + back.n_restored)
            agent.live.expected = History(prompt)
            running = RunningTurn(self, planned, agent, host, hold, back, started_s)
            async with running.queued(request) as one:
                yield one
        finally:
            back.release(host)
            agent.live.request_id = None
            agent.live.expected = History()

    async def stop(self, agent_id: str) -> bool:
        """End the turn that an agent is in, and wait until what it said is in the history.

        Whoever asked for it is told that it was cancelled. Returns whether there was a turn.

        Raises:
            UnknownAgentError: there is none of that name.
        """
        agent = await self.directory.find(agent_id)
        async with contextlib.aclosing(self.live.listen(agent.agent_id)) as events:
            if self.live.under_way(agent.agent_id) is None:
                return False
            over = asyncio.ensure_future(_end_of(events))
            try:
                while not over.done():  # before its request there is a restore
                    request_id, host = agent.live.request_id, self.directory.host_of(agent)
                    if request_id is not None and host is not None:
                        with contextlib.suppress(EngineClosedError):
                            await host.service.cancel(request_id)
                    await asyncio.wait({over}, timeout=_POLL_S)
            finally:
                over.cancel()
                await asyncio.wait({over})
        return True

    async def look(self, agent_id: str) -> None:
        """Have those who look on told how far the prompt of an agent's turn is read, if it is not.

        Waits for the end of the engine's step.
        """
        agent = self.directory.known(agent_id)
        if agent is None or not self.live.awaits(agent_id):
            return
        request_id, host = agent.live.request_id, self.directory.host_of(agent)
        if request_id is None or host is None:
            return
        with contextlib.suppress(EngineClosedError):
            now = await host.between_steps(lambda engine: engine.prompt_progress(request_id))
            if now is not None:
                self.live.progress(agent_id, now)

    def prompt_of(
        self,
        host: ModelHost,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        is_asking: bool = True,
        agent_id: str | None = None,
    ) -> History:
        """Return the tokens of a conversation, as a turn that is given it has them.

        Args:
            host: the model.
            messages: the whole conversation.
            tools: definitions of its tools; None: those of the agent, if one is named.
            template_kwargs: what else the template takes; None: the agent's, likewise.
            is_asking: end with the opening of an answer.
            agent_id: whose history it goes on from, where that is known.

        Raises:
            ContextError: it is so much longer than the context that not all of it was counted.
            PromptError: the model has no tokenizer, or its template takes no such argument.
            ModelError: its template refuses the messages, or there is none.
        """
        if host.tokenizer is None:
            raise PromptError(f"model {host.name!r} has no tokenizer; give tokens")
        agent: AgentRecord | None = None
        known = self.directory.known
        kwargs = template_kwargs
        if agent_id is not None:
            agent = known(agent_id, host.name) or known(agent_id)
            tools = agent.tools if agent is not None and tools is None else tools
            kwargs = kwargs_of(kwargs, agent, host)
        elif {"date", "reasoning"} & set(self.rules):  # what they do depends on the history
            salt = host.space.salt
            place = self.lookup.place_of(messages, tools, model=host.name, salt=salt)
            agent = known(place.agent_id, place.model) if place is not None else None
        read = apply_rules(messages, tools, self.rules)
        if agent is not None:
            n = agent.messages.n_matched(read.messages, self.rules)
            read = keep_known(read, agent.messages, n, self.rules)
        rendered = render(
            host.tokenizer,
            read.messages,
            read.tools,
            template_kwargs=kwargs,
            is_asking=is_asking,
            control_tokens_in_text=self.control_tokens_in_text,
            looks=recalled(host.looks, agent),
        )
        refuse_text(host.tokenizer, rendered.text, host.context, times=MOST_COUNTED)
        return History(encode(host.tokenizer, rendered))


async def _end_of(events: AsyncIterator[LiveEvent]) -> None:
    """Listen until the turn that is heard is over."""
    async for event in events:
        if isinstance(event, Over):
            return


def _finder_of(planned: PlannedTurn, agent: AgentRecord, host: ModelHost) -> StopsFn:
    """Return what finds the stop texts of a turn: in the text of its answer alone."""
    turn, reading = planned.turn, planned.turn.reading
    if reading is None and turn.is_chat and host.tokenizer is not None and turn.params.stop:
        reading = reading_of(host, agent.messages, agent.tools, has_marks=False)
        reading.begin(host.tokenizer, planned.prompt)
    return StopMatcher if reading is None else reading.finder


class RunningTurn:
    """One turn in the engine, and what is recorded when it ends.

    Attributes:
        planned: the turn, with what became of it by now.
        events: of its request, as the engine tells them.
    """

    events: EventStream

    def __init__(
        self,
        turns: Turns,
        planned: PlannedTurn,
        agent: AgentRecord,
        host: ModelHost,
        hold: Hold,
        back: BroughtBack,
        started_s: float,
    ) -> None:
        """Create a turn that is not queued yet, and was begun at ``started_s``."""
        self._turns = turns
        self.planned = planned
        self._agent = agent
        self._host = host
        self._hold = hold
        self._back = back
        self._started_s = started_s
        self._first_s: float | None = None
        self._finish: FinishEvent | None = None
        self._end: TurnEnd | None = None
        self._save: SaveTicket | None = None
        self._lock = threading.Lock()
        self._is_over = False
        self._n_told = 0

    @property
    def end(self) -> TurnEnd:
        """The end of the turn, behind the block in which it ran to it."""
        assert self._end is not None, "a turn that ran to its end has one"
        return self._end

    def take(self, event: Event) -> None:
        """Take note of an event of the turn, which whoever reads them has just read."""
        if isinstance(event, GeneratedToken):
            if self._first_s is None:
                self._first_s = time.perf_counter() - self._started_s
                self._back.release(self._host)
            self._agent.live.expected.append(event.token_id)
            self._tell(event.text)
        elif isinstance(event, FinishEvent):
            self._finish = event
            self._tell(event.text[self._n_told :])  # held back for a stop text that never came

    def _tell(self, text: str) -> None:
        """Tell a piece of the answer to those who look on."""
        self._n_told += len(text)
        self._turns.live.say(self._agent.agent_id, text)

    @contextlib.asynccontextmanager
    async def queued(self, request: Request) -> AsyncIterator[RunningTurn]:
        """Queue the turn's request; behind the block what it said is recorded and durable.

        A reader that leaves ends it: then too the history is recorded before this returns.
        """
        self.events = await self._host.service.submit(request, self._on_finish)
        with self._lock:
            if not self._is_over:
                self._agent.live.request_id = self.events.request_id
        try:
            yield self
        finally:
            with contextlib.suppress(EngineClosedError):
                await self.events.cancel()
                async for event in self.events:
                    self.take(event)
            await self._make_durable()
            self._note_end()

    def _note_end(self) -> None:
        """Sum up what the turn took, where it has ended."""
        if self._finish is not None:
            planned, agent = self.planned, self._agent
            usage = usage_of(planned, agent, self._finish, self._back, self._first_s)
            self._end = TurnEnd(
                agent.agent_id,
                self._finish,
                usage,
                self._save,
                agent.history_digest,
                planned.notice,
            )

    async def _make_durable(self) -> None:
        """Have what a turn said on disk before anybody is told that it has ended."""
        try:
            await self._turns.publisher.make_durable(self._agent)
        except StoreError as error:
            said = (
                f"this turn of {self._agent.label} is not on disk and is lost if the process ends"
            )
            log.error("%s: %s", said, error)
            self._note(f"{said}: {error}; make room, and the next turn keeps it too")

    def _on_finish(self, event: FinishEvent) -> None:
        """Record the turn. In the engine's thread: what it computed is still in the cache."""
        if isinstance(event.error, PictureLostError):
            say_turn(event.error, self._agent)
        with self._lock:
            self._is_over, self._agent.live.request_id = True, None
        try:
            self._save = self._record(event)
        except Exception as error:  # a full or closed store must not end the engine
            self._note(f"K and V of this turn were not saved: {error}")

    def _record(self, event: FinishEvent) -> SaveTicket | None:
        """Take the turn into the agent's history and save it."""
        planned, agent, host = self.planned, self._agent, self._host
        usage = event.usage
        if usage is not None:
            n_computed = usage.prompt_tokens - usage.cached_tokens
            host.costs.learn_prefill(n_computed, usage.time_to_first_token_s)
        agent.miss = miss_of(planned, agent, host, event, self._back, self._turns.rules)
        if not event.token_ids and event.reason in ("error", "deadline", "cancelled"):
            return None
        took = took_of(agent, event, self._back, self._started_s)
        if self._hold.is_lost:
            agent = self._agent = self._beside()
        record_turn(planned, agent, host, event, took)
        agent.limit_stored(agent.turns[-1].start)
        agent.live.beside, agent.is_rewound = None, False
        agent.advance()
        agent.live.is_passing = False
        is_interrupted = event.reason not in ("stop", "length")
        return self._turns.publisher.after_turn(host, agent, is_interrupted=is_interrupted)

    def _beside(self) -> AgentRecord:
        """Make a branch for a turn whose agent another process may have extended meanwhile.

        The agent stays as it was when the turn began, and takes over what the other has said.
        """
        agent = self._agent
        new_id = derived_id(agent.agent_id, f"-{uuid.uuid4().hex[:6]}")
        branch = agent.forked(new_id, len(agent.tokens), None)
        branch.branch_of = agent.branch_of or agent.agent_id
        self._turns.directory.add(branch)
        self._note(
            f"the lease of agent {agent.agent_id!r} ended before this turn did, so another process "
            f"may have gone on from it; the answer is in its branch {new_id}"
        )
        return branch

    def _note(self, said: str) -> None:
        """Have the answer say something of its turn."""
        before = self.planned.notice
        notice = said if before is None else f"{before}; {said}"
        self.planned = replace(self.planned, notice=notice)
