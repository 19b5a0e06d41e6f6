"""Threads of Anthropic's messages: a client sends what is new, the server has what came before."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvcellar.dialects.messages import without_tools
from kvcellar.errors import StoreError
from kvcellar.server.answer.dialogue import Ended
from kvcellar.server.errors import ApiError
from kvcellar.server.schemas.anthropic import CountRequest, Message, ThreadField
from kvcellar.server.state.service import Service
from kvcellar.server.state.stored import StoredResponse

PREFIX = "msg_"
_ID = re.compile(PREFIX + "[0-9a-f]{32}")
_SETTINGS = ("system", "tools")
"""Fields that hold for a whole thread; its first request has them."""
_CHANGES = ("tool_addition", "tool_removal")
"""Blocks by which a client changes the tools of a thread that has begun."""


@dataclass(slots=True)
class Thread:
    """A conversation that the server keeps for its client, up to a request's last message.

    Attributes:
        salt: of those who may go on with it.
        added: messages of its agent's that its own do not have, as ``StoredResponse`` has them.
    """

    salt: str
    added: list[dict[str, Any]] = field(default_factory=list)

    async def keep(
        self, service: Service, body: CountRequest, message: dict[str, Any], end: Ended
    ) -> list[str]:
        """Make an answer durable with all that it answered, so that a thread goes on from it.

        Args:
            service: whose store has it.
            body: the request, with the whole conversation.
            message: the answer, as its client is told.
            end: of the answer.

        Returns:
            Notes for the client: why it could not be stored.
        """
        usage = end.usage
        stored = StoredResponse(
            message,
            [_as_read_again(one) for one in _dumped(body.messages)],
            end.agent_id,
            usage.prompt_tokens + usage.completion_tokens,
            [*self.added, *without_tools(end.added)],
            self.salt,
            {name: _dumped(getattr(body, name)) for name in _SETTINGS if getattr(body, name)},
        )
        try:
            await service.responses.keep(message["id"], stored)
        except StoreError as error:
            return [f"the thread is not kept, so send the whole conversation: {error}"]
        return []


async def thread_of(service: Service, body: CountRequest, salt: str) -> Thread | None:
    """Put what a thread has into the request that goes on with it; None: it is of no thread.

    Raises:
        ApiError: 404, what it goes on from is not kept here, for those who share the salt; 400, it
            asks of a thread what none does here, or has other tools or another system message.
    """
    wish = body.thread
    if wish is None:
        return None
    _check(wish, body.messages)
    if not wish.is_continued:
        return Thread(salt)
    stored = await _stored(service, wish.previous_message_id or "", salt)
    _take_settings(body, stored)
    answer = {"role": "assistant", "content": stored.response["content"]}
    said = [*stored.items, answer, *_dumped(body.messages)]
    body.messages = [Message.model_validate(one) for one in _joined(said)]
    return Thread(salt, stored.added)


def _check(wish: ThreadField, messages: Sequence[Message]) -> None:
    """Refuse what a thread cannot do here.

    Raises:
        ApiError: 400.
    """
    named = next(iter(wish.unknown("thread")), None)
    blocks = (b for one in messages if not isinstance(one.content, str) for b in one.content)
    change = next((block.type for block in blocks if block.type in _CHANGES), None)
    if wish.type not in ("create", "continue"):
        said, param = (
            f"a thread's type is create or continue, not {wish.type[:40]!r}",
            "thread.type",
        )
    elif named is not None:
        said, param = f"{named[:80]} is not honoured: nobody here knows it", named[:80]
    elif wish.is_continued != (wish.previous_message_id is not None):
        said = "previous_message_id comes with type continue, and always does"
        param = "thread.previous_message_id"
    elif change is not None:
        said = f"the tools of a thread are those that it began with, so {change} is not honoured"
        param = "messages"
    else:
        return
    said += "; send the whole conversation without thread"
    raise ApiError(400, said, "thread_unsupported_request", param=param)


async def _stored(service: Service, message_id: str, salt: str) -> StoredResponse:
    found = await service.responses.get(message_id) if _ID.fullmatch(message_id) else None
    if found is None or found.salt != salt:
        raise ApiError(
            404,
            f"no thread has the message {message_id[:80]!r}: it was answered outside of one, by "
            f"another server, or long ago; send the whole conversation with thread "
            f'{{"type": "create"}}',
            "thread_not_found",
            param="thread.previous_message_id",
        )
    return found


def _take_settings(body: CountRequest, stored: StoredResponse) -> None:
    """Put the fields that hold for a whole thread into a request that goes on with it.

    Raises:
        ApiError: 400, the request has one of them, and it says otherwise.
    """
    given = {name: getattr(body, name) for name in _SETTINGS if getattr(body, name) is not None}
    thread = {"type": "continue"}
    kept = CountRequest.model_validate({"messages": [], "thread": thread, **stored.settings})
    other = [
        name
        for name, one in given.items()
        if _bare(_dumped(one)) != _bare(stored.settings.get(name) or type(one)())
    ]
    if other:
        raise ApiError(
            400,
            f"{' and '.join(other)} of a thread cannot change, and it began with another; leave it "
            f'out, or send the whole conversation with thread {{"type": "create"}}',
            "thread_fingerprint_mismatch",
            param=other[0],
        )
    for name in _SETTINGS:
        if name not in given:
            setattr(body, name, getattr(kept, name))


def _dumped(value: Any) -> Any:
    """Return a field of a request as it was sent."""
    if isinstance(value, list):
        return [one.model_dump(exclude_none=True) for one in value]
    return value


def _bare(value: Any) -> Any:
    """Return a value without the wishes to keep what comes before parts of it."""
    if isinstance(value, list):
        return [_bare(one) for one in value]
    if isinstance(value, dict):
        return {name: one for name, one in value.items() if name != "cache_control"}
    return value


def _as_read_again(value: Any) -> Any:
    """Return a message or a block as it is read again: no pictures, and no wishes to keep it."""
    if isinstance(value, list):
        return [_as_read_again(one) for one in value]
    if not isinstance(value, dict):
        return value
    found = _bare(value)
    source = found.get("source")
    if isinstance(source, dict) and source.get("type") not in ("text", "content"):
        found["source"] = {name: one for name, one in source.items() if name != "data"}
    elif source is not None:
        found["source"] = _as_read_again(source)
    if "content" in found:
        found["content"] = _as_read_again(found["content"])
    return found


def _joined(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in which an answer that was gone on with is one."""
    joined: list[dict[str, Any]] = []
    for message in messages:
        last = joined[-1] if joined else {}
        if message["role"] == last.get("role") == "assistant":
            content = [*_blocks(last["content"]), *_blocks(message["content"])]
            joined[-1] = {"role": "assistant", "content": content}
        else:
            joined.append(message)
    return joined


def _blocks(content: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content
