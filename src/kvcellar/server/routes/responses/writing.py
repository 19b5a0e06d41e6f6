"""A response as the events of a stream: numbered, and its items open and close one by one."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from kvcellar.server.dialects import is_whole
from kvcellar.server.dialogue import (
    CallEvent,
    ChatEvent,
    Ended,
    ReasoningEvent,
    Started,
    TextEvent,
)
from kvcellar.server.errors import as_api_error
from kvcellar.server.replies import frame
from kvcellar.server.routes.responses.value import (
    ResponseValue,
    call_item,
    keep,
    status_of,
    text_part,
)
from kvcellar.server.service import service_of
from kvcellar.server.telling import AnswerFrames, agent_facts


class ResponseFrames(AnswerFrames):
    """Events of one response."""

    error_event = "error"

    def __init__(self, request: Request, value: ResponseValue) -> None:
        """Write a response that has not begun."""
        super().__init__(request)
        self._value = value
        self._number = 0
        self._items: list[dict[str, Any]] = []
        self._open: str | CallEvent | None = None
        """The open item: its text so far, or its call."""

    async def of(self, number: int, item: ChatEvent) -> bytes:
        """Write the next event of the answer."""
        if isinstance(item, TextEvent):
            return self._text(item.text) if item.text else b""
        if isinstance(item, CallEvent):
            return self._called(item)
        if isinstance(item, ReasoningEvent):
            return b""
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
        begun = b"" if self._items or self._open is not None else self._begin_text()
        closed, value = begun + self._close(event.reason == "length"), self._value
        value.finish(event)
        value.output = self._items
        value.note(self._request)
        said = await keep(service_of(self._request), value)
        return closed + self._said(f"response.{value.status}", response=said)

    # Items -------------------------------------------------------------------------------------

    def _text(self, text: str) -> bytes:
        begun = b"" if isinstance(self._open, str) else self._begin_text()
        assert isinstance(self._open, str)
        self._open += text
        delta = {"content_index": 0, "delta": text, "logprobs": []}
        return begun + self._said("response.output_text.delta", **self._place(), **delta)

    def _begin_text(self) -> bytes:
        closed = self._close()
        self._open = ""
        added = self._added(self._value.text_item(len(self._items), None, "in_progress"))
        part = {**self._place(), "content_index": 0, "part": text_part("")}
        return closed + added + self._said("response.content_part.added", **part)

    def _called(self, event: CallEvent) -> bytes:
        begun, now = b"", self._open
        if not isinstance(now, CallEvent) or now.index != event.index:
            begun, self._open = self._close(), event
            begun += self._added(call_item(event.call, "in_progress", is_begun=True))
        if not event.text:
            return begun
        kind = "response.function_call_arguments.delta"
        return begun + self._said(kind, **self._place(), delta=event.text)

    def _close(self, is_cut: bool = False) -> bytes:
        """End the item that is open, if one is; ``is_cut`` where the answer has more."""
        now, place = self._open, self._place()
        if now is None:
            return b""
        if isinstance(now, CallEvent):
            is_cut = not is_whole(now.call)
            item = call_item(now.call, status_of(is_cut))
            whole = {"name": now.call.name, "arguments": now.call.arguments}
            kind = "response.function_call_arguments.done"
            done = b"" if is_cut else self._said(kind, **place, **whole)
        else:
            item = self._value.text_item(len(self._items), now, status_of(is_cut))
            at = {**place, "content_index": 0}
            done = self._said("response.output_text.done", **at, text=now, logprobs=[])
            done += self._said("response.content_part.done", **at, part=text_part(now))
        index, self._open = len(self._items), None
        self._items.append(item)
        return done + self._said("response.output_item.done", output_index=index, item=item)

    def _added(self, item: dict[str, Any]) -> bytes:
        return self._said("response.output_item.added", output_index=len(self._items), item=item)

    def _place(self) -> dict[str, Any]:
        index, now = len(self._items), self._open
        item_id = f"msg_{self._value.key}{index}"
        if isinstance(now, CallEvent):
            item_id = f"fc_{now.call.call_id}"
        return {"item_id": item_id, "output_index": index}

    def _said(self, kind: str, **fields: Any) -> bytes:
        value = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return frame(value, kind)
