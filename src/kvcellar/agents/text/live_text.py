"""Parts of answers as they come, for those who look on beside the one who asked."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field, replace

from kvcellar.agents.records.agent import AgentRecord
from kvcellar.agents.text.reading import Reading
from kvcellar.dialects import AnswerParser, Call, CallPart, Part, ReasoningPart, TextPart
from kvcellar.engine import PromptProgress
from kvcellar.engine.mailbox import Mailbox


@dataclass(frozen=True, slots=True)
class Begun:
    """A turn has begun, or was under way when somebody began to look on.

    Attributes:
        asked: what it answers; None where tokens were given.
        follows: digest of the history that it goes on from.
        parts: what it has thought, said and called by now.
    """

    asked: str | None
    follows: str
    parts: tuple[Part, ...] = ()


@dataclass(frozen=True, slots=True)
class AnswerPieces:
    """Pieces of an answer have come: of a thought, of text, of calls."""

    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Over:
    """The turn has ended, and is in the history, unless it said nothing.

    Attributes:
        history_digest: of that history.
        reason: why the answer ended, as ``TurnRecord`` has it; None where there was none.
    """

    history_digest: str
    reason: str | None


LiveEvent = Begun | PromptProgress | AnswerPieces | Over


@dataclass(slots=True)
class _LiveTurn:
    """A turn under way."""

    asked: str | None
    follows: str
    reading: Reading | None
    parser: AnswerParser | None = None
    progress: PromptProgress | None = None
    is_answered: bool = False
    text: list[str] = field(default_factory=list)

    def read(self, text: str, *, is_last: bool = False) -> tuple[Part, ...]:
        """Read what came next; without a reading all of it is text."""
        self.is_answered |= bool(text)
        if self.reading is None:
            self.text.append(text)
            return (TextPart(text),) if text else ()
        if self.parser is None:  # its prompt is known by now
            self.parser = self.reading.parser()
        return (*self.parser.push(text), *(self.parser.flush() if is_last else ()))

    def so_far(self) -> Begun:
        return Begun(self.asked, self.follows, self._parts())

    def _parts(self) -> tuple[Part, ...]:
        """Return all that was read, each kind in one piece."""
        parser = self.parser
        if parser is None:
            return (TextPart("".join(self.text)),) if self.text else ()
        calls = [replace(call) for call in parser.calls]
        return (
            *([ReasoningPart(parser.reasoning)] if parser.reasoning else ()),
            *([TextPart(parser.text)] if parser.text else ()),
            *(part for i, one in enumerate(calls) for part in _pieces(i, one)),
        )


@dataclass(slots=True, eq=False)
class _Listener:
    """Somebody who looks on, and on which loop."""

    loop: asyncio.AbstractEventLoop
    events: Mailbox[LiveEvent] = field(default_factory=Mailbox)

    def tell(self, event: LiveEvent) -> None:
        self.loop.call_soon_threadsafe(self.events.put, event)


def _pieces(index: int, call: Call) -> tuple[Part, ...]:
    begun = CallPart(index, call, "")
    return (begun, CallPart(index, call, call.arguments)) if call.arguments else (begun,)


class LiveText:
    """Answers of the turns that are under way. For callers on any event loop and thread."""

    def __init__(self) -> None:
        """Know of no turn."""
        self._turns: dict[str, _LiveTurn] = {}
        self._listeners: dict[str, list[_Listener]] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def turn(
        self, agent: AgentRecord, asked: str | None, reading: Reading | None = None
    ) -> Iterator[None]:
        """Say that an agent's turn is under way, for as long as the block lasts."""
        agent_id, before = agent.agent_id, agent.turns
        turn = _LiveTurn(asked, agent.history_digest, reading)
        with self._lock:
            self._turns[agent_id] = turn
            self._tell(agent_id, turn.so_far())
        try:
            yield
        finally:
            with self._lock:
                rest = self._turns.pop(agent_id).read("", is_last=True)
                if rest:
                    self._tell(agent_id, AnswerPieces(rest))
                reason = None if agent.turns is before else agent.turns[-1].reason
                self._tell(agent_id, Over(agent.history_digest, reason))

    def under_way(self, agent_id: str) -> Begun | None:
        """Return the turn that an agent is in, and what it has said by now; None: in none."""
        with self._lock:
            turn = self._turns.get(agent_id)
            return None if turn is None else turn.so_far()

    def awaits(self, agent_id: str) -> bool:
        """Return whether an agent is in a turn of which no answer has come yet."""
        with self._lock:
            turn = self._turns.get(agent_id)
            return turn is not None and not turn.is_answered

    def progress(self, agent_id: str, now: PromptProgress) -> None:
        """Say how far the prompt of an agent's turn is read, unless it is answered by now."""
        with self._lock:
            turn = self._turns.get(agent_id)
            if turn is not None and not turn.is_answered and turn.progress != now:
                turn.progress = now
                self._tell(agent_id, now)

    def say(self, agent_id: str, text: str) -> None:
        """Say what came next in the turn of an agent."""
        with self._lock:
            turn = self._turns.get(agent_id)
            parts = turn.read(text) if turn is not None and text else ()
            if parts:
                self._tell(agent_id, AnswerPieces(parts))

    async def listen(self, agent_id: str) -> AsyncGenerator[LiveEvent, None]:
        """Tell of the turns of an agent, from the one that is under way on, without an end."""
        listener = _Listener(asyncio.get_running_loop())
        with self._lock:
            turn = self._turns.get(agent_id)
            begun = None if turn is None else turn.so_far()
            self._listeners.setdefault(agent_id, []).append(listener)
        try:
            if begun is not None:
                yield begun
            while True:
                yield await listener.events.get()
        finally:
            with self._lock:
                left = self._listeners[agent_id]
                left.remove(listener)
                if not left:
                    del self._listeners[agent_id]

    def _tell(self, agent_id: str, event: LiveEvent) -> None:
        for listener in self._listeners.get(agent_id, ()):
            listener.tell(event)
