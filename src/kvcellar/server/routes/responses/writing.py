"""A response as the events of a stream: numbered, and its items open and close one by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from kvcellar.dialects import CallPart, ReasoningPart, TextPart, is_whole
from kvcellar.server.answer.answer_facts import AnswerFrames, agent_facts
from kvcellar.server.answer.dialogue import (
    ChatEvent,
    Ended,
    PartEvent,
    Started,
)
from kvcellar.server.errors import as_api_error
from kvcellar.server.routes.responses.value import (
    ResponseValue,
    keep,
    reasoning_part,
    status_of,
    text_part,
)
from kvcellar.server.state.service import service_of
from kvcellar.server.stream.replies import frame


@dataclass(slots=True)
class ItemText:
    """Text of an item: of the answer, or of what the model thinks."""

    is_reasoning: bool
    text: str = ""


class ResponseFrames(AnswerFrames):
    """Events of one response."""

    error_event = "error"

    def __init__(self, request: Request, value: ResponseValue) -> None:
        """Write a response that has not begun."""
        super().__init__(request)
        self._value = value
        self._number = 0
        self._items: list[dict[str, Any]] = []
        self._open: ItemText | CallPart | None = None
        """The open item: its text so far, or its call."""

    async def of(self, number: int, item: ChatEvent) -> bytes:
        """Write the next event of the answer."""
        if isinstance(item, PartEvent):
            part = item.part
            if isinstance(part, CallPart):
                return self._called(part)
            return self._text(part) if part.text else b""
        return self._start(item) if isinstance(item, Started) else await self._end(item)

    def failed(self, error: Exception) -> bytes:
        """Write an error: as one of the response, where that has begun."""
        if not self._number:
            return super().failed(error)
        closed, value, refusal = self._close(is_cut=True), self._value, as_api_error(error)
        value.output, value.status = self._items, "failed"
        value.error = {"code": refusal.code or "server_error", "message": str(refusal)}
        return closed + self._said("response.failed", response=value.as_json())

    def _start(self, event: Started) -> bytes:
        self._value.extra = agent_facts(event)
        now = self._value.as_json()
        created = self._said("response.created", response=now)
        return created + self._said("response.in_progress", response=now)

    async def _end(self, event: Ended) -> bytes:
        is_cut, value = event.reason == "length", self._value
        closed = self._close(is_cut)
        if not (event.text or event.calls):  # an answer without calls has an item of its text
            closed += self._begin_text(is_reasoning=False) + self._close(is_cut)
        value.finish(event)
        value.output = self._items
        value.note(self._request)
        said = await keep(service_of(self._request), value)
        return closed + self._said(f"response.{value.status}", response=said)

    # Items -------------------------------------------------------------------------------------

    def _text(self, part: TextPart | ReasoningPart) -> bytes:
        is_reasoning, begun = isinstance(part, ReasoningPart), b""
        if not isinstance(self._open, ItemText) or self._open.is_reasoning != is_reasoning:
            begun = self._begin_text(is_reasoning=is_reasoning)
        assert isinstance(self._open, ItemText)
        self._open.text += part.text
        at = {**self._place(), "content_index": 0, "delta": part.text}
        if is_reasoning:
            return begun + self._said("response.reasoning_text.delta", **at)
        return begun + self._said("response.output_text.delta", **at, logprobs=[])

    def _begin_text(self, *, is_reasoning: bool) -> bytes:
        closed = self._close()
        self._open = ItemText(is_reasoning)
        item, part = self._value.text_item, text_part("")
        if is_reasoning:
            item, part = self._value.reasoning_item, reasoning_part("")
        added = self._added(item(len(self._items), None, "in_progress"))
        at = {**self._place(), "content_index": 0, "part": part}
        return closed + added + self._said("response.content_part.added", **at)

    def _called(self, part: CallPart) -> bytes:
        begun, now = b"", self._open
        if not isinstance(now, CallPart) or now.index != part.index:
            begun, self._open = self._close(), part
            begun += self._added(self._value.call_item(part.call, "in_progress", is_begun=True))
        if not part.text:
            return begun
        kind = "response.function_call_arguments.delta"
        return begun + self._said(kind, **self._place(), delta=part.text)

    def _close(self, is_cut: bool = False) -> bytes:
        """End the item that is open, if one is; ``is_cut`` where the answer has more."""
        now, place = self._open, self._place()
        if now is None:
            return b""
        if isinstance(now, CallPart):
            is_cut = not is_whole(now.call)
            item = self._value.call_item(now.call, status_of(is_cut))
            whole = {"name": now.call.name, "arguments": now.call.arguments}
            kind = "response.function_call_arguments.done"
            done = b"" if is_cut else self._said(kind, **place, **whole)
        else:
            item, done = self._text_done(now, place, is_cut)
        index, self._open = len(self._items), None
        self._items.append(item)
        return done + self._said("response.output_item.done", output_index=index, item=item)

    def _text_done(
        self, said: ItemText, place: dict[str, Any], is_cut: bool
    ) -> tuple[dict[str, Any], bytes]:
        """Return the open item of text as it is at its end, and the events of that."""
        index, at = len(self._items), {**place, "content_index": 0}
        if said.is_reasoning:
            item, part = self._value.reasoning_item, reasoning_part(said.text)
            done = self._said("response.reasoning_text.done", **at, text=said.text)
        else:
            item, part = self._value.text_item, text_part(said.text)
            done = self._said("response.output_text.done", **at, text=said.text, logprobs=[])
        done += self._said("response.content_part.done", **at, part=part)
        return item(index, said.text, status_of(is_cut)), done

    def _added(self, item: dict[str, Any]) -> bytes:
        return self._said("response.output_item.added", output_index=len(self._items), item=item)

    def _place(self) -> dict[str, Any]:
        index, now = len(self._items), self._open
        kind = "rs" if isinstance(now, ItemText) and now.is_reasoning else "msg"
        item_id = f"{kind}_{self._value.key}{index}"
        if isinstance(now, CallPart):
            item_id = self._value.call_id(now.call)
        return {"item_id": item_id, "output_index": index}

    def _said(self, kind: str, **fields: Any) -> bytes:
        value = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return frame(value, kind)
