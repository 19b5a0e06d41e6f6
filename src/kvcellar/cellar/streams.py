"""Answers as they come, and several that are waited for together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import TypeVar

from kvcellar.agents import TurnEnd
from kvcellar.cellar.answers import Answer, answer_of_turn
from kvcellar.cellar.asking import Wishes
from kvcellar.dialects import AnswerParser, TextPart
from kvcellar.engine import GeneratedToken
from kvcellar.errors import AgentError

T = TypeVar("T")


class AsyncStream:
    """Text of an answer as it comes: iterate over it. Behind the end ``answer`` is the whole.

    Thoughts and calls are no text; the whole has them.
    """

    def __init__(
        self,
        events: AsyncGenerator[GeneratedToken | TurnEnd, None],
        wishes: Wishes,
        on_end: Callable[[str], None],
    ) -> None:
        """Read the events of a turn; ``on_end`` is told whose it was when it has ended."""
        self._events = events
        self._wishes = wishes
        self._on_end = on_end
        self._parser: AnswerParser | None = None
        self._tokens: list[GeneratedToken] = []
        self._answer: Answer | None = None

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> str:
        """Return the next piece of text.

        Raises:
            KVCellarError: the turn ended with an error; what was said is in the history.
        """
        async for event in self._events:
            if isinstance(event, TurnEnd):
                self._on_end(event.agent_id)
                # held back for a stop text, or a mark, that never came
                rest = event.finish.text[sum(len(one.text) for one in self._tokens) :]
                text = self._read(rest, is_last=True)
                notes = self._wishes.notes
                self._answer = answer_of_turn(event, self._tokens, self._parser, notes)
            else:
                self._tokens.append(event)
                text = self._read(event.text)
            if text:
                return text
        raise StopAsyncIteration

    def _read(self, piece: str, *, is_last: bool = False) -> str:
        """Read what came next; return what of the text is certain with it."""
        if self._wishes.reading is None:
            return piece
        if self._parser is None:  # its prompt is known by now
            self._parser = self._wishes.reading.parser()
        parts = self._parser.push(piece)
        if is_last:
            parts += self._parser.flush()
        return "".join(part.text for part in parts if isinstance(part, TextPart))

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End the answer where it has not ended; what was said by then is in the history."""
        await self._events.aclose()

    @property
    def answer(self) -> Answer:
        """The whole answer.

        Raises:
            AgentError: it has not ended.
        """
        if self._answer is None:
            raise AgentError("the answer has not ended; iterate to the end of the stream first")
        return self._answer


async def all_of(calls: Sequence[Awaitable[T]]) -> list[T]:
    """Wait for all of some calls; then raise the first error, if there was one."""
    found = await asyncio.gather(*calls, return_exceptions=True)
    for one in found:
        if isinstance(one, BaseException):
            raise one
    return [one for one in found if not isinstance(one, BaseException)]
