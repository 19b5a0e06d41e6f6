"""A response as a value: what clients see of it at any moment, and what is stored of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from kvcellar.dialects import Call
from kvcellar.dialects.messages import without_tools
from kvcellar.errors import StoreError
from kvcellar.server.answer.answer_facts import extra_of, note, notes_of, predictions
from kvcellar.server.answer.dialogue import Ended
from kvcellar.server.schemas.openai import NamedTool
from kvcellar.server.schemas.responses import ResponseRequest
from kvcellar.server.state.service import Service, as_mapping
from kvcellar.server.state.signing import Signer
from kvcellar.server.state.stored import StoredResponse

PREFIX = "resp_"


@dataclass(slots=True)
class ResponseValue:
    """A response as it is now.

    Attributes:
        response_id: what clients call it.
        created: seconds since 1970.
        body: what was asked.
        model: who answers, as clients call it.
        before: items of the conversation that it goes on from, as they were sent and answered.
        added: messages of that conversation's agent that its items do not have.
        output: its own items.
        usage: tokens, at the end.
        status: ``in_progress``, ``completed``, ``incomplete`` or ``failed``.
        extra: what the protocol has no field for.
        error: what went wrong.
        end: the end of the answer, once it is there.
        salt: of those who may see it.
        signer: seals reasoning for clients that keep the conversation themselves.
    """

    response_id: str
    created: int
    body: ResponseRequest
    model: str
    signer: Signer
    before: list[dict[str, Any]] = field(default_factory=list)
    added: list[dict[str, Any]] = field(default_factory=list)
    output: list[dict[str, Any]] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    status: str = "in_progress"
    extra: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    end: Ended | None = None
    salt: str = ""

    @property
    def key(self) -> str:
        """Part that the ids of its items have in common."""
        return self.response_id[len(PREFIX) :]

    def sampled(self, name: str) -> Any:
        """Return a setting as it was used; before the end, as it was asked for."""
        return getattr(self.body if self.end is None else self.end.params, name)

    @property
    def is_stored(self) -> bool:
        """True if it is to be stored, as far as it is known; what has failed is not."""
        return self.body.store is not False and self.status != "failed"

    def items(self) -> list[dict[str, Any]]:
        """Return the conversation that it answers, as it was sent."""
        body = self.body
        if isinstance(body.input, str):
            part = {"type": "input_text", "text": body.input}
            given: list[dict[str, Any]] = [{"role": "user", "content": [part]}]
        else:
            given = [item.model_dump(exclude_none=True) for item in body.input]
        return [*self.before, *(sent_item(item, f"{self.key}i{i}") for i, item in enumerate(given))]

    def as_json(self) -> dict[str, Any]:
        """Return the response as clients see it now."""
        body = self.body
        is_cut = self.status == "incomplete"
        choice = body.tool_choice or "auto"
        text_format = as_mapping(body.text.format) if body.text and body.text.format else None
        if text_format and body.text and body.text.format and body.text.format.json_schema:
            text_format["schema"] = text_format.pop("json_schema")
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self.created,
            "status": self.status,
            "background": False,
            "conversation": {"id": body.conversation_id} if body.conversation_id else None,
            "error": self.error,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self.model,
            "output": self.output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
            "store": self.is_stored,
            "temperature": self.sampled("temperature"),
            "text": {"format": text_format or {"type": "text"}},
            "tool_choice": as_mapping(choice) if isinstance(choice, NamedTool) else choice,
            "tools": [as_mapping(tool) for tool in body.tools or ()],
            "top_p": self.sampled("top_p"),
            "truncation": "disabled",
            "usage": self.usage,
            "metadata": body.metadata or {},
            "kvcellar": self.extra,
        }

    def finish(self, end: Ended) -> None:
        """Take the end of the answer into the response."""
        self.end = end
        self.output = []
        is_cut = end.reason == "length"
        if end.reasoning:
            status = status_of(is_cut and not (end.text or end.calls))
            self.output.append(self.reasoning_item(0, end.reasoning, status))
        if end.text or not end.calls:
            status = status_of(is_cut and not end.calls)
            self.output.append(self.text_item(len(self.output), end.text, status))
        for call in end.calls:
            status = status_of(end.is_inside_call and call is end.calls[-1])
            self.output.append(self.call_item(call, status))
        self.usage = usage_of(end)
        self.status = status_of(is_cut)
        self.extra = extra_of(end, self.body)
        if end.reasoning and self._wants_summary:
            said = "reasoning is not summed up; all of it is in the content of its item"
            self.extra["notes"].append(said)

    @property
    def _wants_summary(self) -> bool:
        wish = self.body.reasoning
        return wish is not None and (wish.summary or wish.generate_summary) not in (None, "none")

    def text_item(self, index: int, text: str | None, status: str) -> dict[str, Any]:
        """Return an item of text; None: of none yet."""
        content = [] if text is None else [text_part(text)]
        return {
            "id": f"msg_{self.key}{index}",
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def reasoning_item(self, index: int, text: str | None, status: str) -> dict[str, Any]:
        """Return an item of reasoning; None: of none yet."""
        is_sealed = "reasoning.encrypted_content" in (self.body.include or ())
        return {
            "id": f"rs_{self.key}{index}",
            "type": "reasoning",
            "status": status,
            "summary": [],
            "content": [] if text is None else [reasoning_part(text)],
            "encrypted_content": self.signer.seal(text) if is_sealed and text else None,
        }

    def call_id(self, call: Call) -> str:
        """Return the id of the item of a call."""
        return f"fc_{self.key}{call.call_id}"

    def call_item(self, call: Call, status: str, *, is_begun: bool = False) -> dict[str, Any]:
        """Return an item of a call; where it has only begun, without its arguments."""
        return {
            "id": self.call_id(call),
            "type": "function_call",
            "call_id": call.call_id,
            "name": call.name,
            "arguments": "" if is_begun else call.arguments,
            "status": status,
        }

    def note(self, request: Request) -> None:
        """Put what it took into the request's line of the log."""
        if self.end is not None:
            usage = self.end.usage
            note(
                request,
                agent=self.end.agent_id,
                prompt_tokens=usage.prompt_tokens,
                cached_tokens=usage.cached_tokens,
                completion_tokens=usage.completion_tokens,
                **notes_of(usage),
            )


async def keep(service: Service, value: ResponseValue) -> dict[str, Any]:
    """Store a response that is to be stored, and return it as clients are told then.

    Where it cannot be stored, it says so itself.
    """
    said, end = value.as_json(), value.end
    if end is not None and value.body.conversation_id is not None and value.status != "failed":
        await _add_to_conversation(service, value, said)
    if end is None or not value.is_stored:
        return said
    n_tokens = end.usage.prompt_tokens + end.usage.completion_tokens
    added = [*value.added, *without_tools(end.added)]
    stored = StoredResponse(said, value.items(), end.agent_id, n_tokens, added, value.salt)
    try:
        await service.responses.keep(value.response_id, stored)
    except StoreError as error:
        notes = [*said["kvcellar"]["notes"], f"it could not be stored: {error}"]
        said |= {"store": False, "kvcellar": {**said["kvcellar"], "notes": notes}}
    return said


async def _add_to_conversation(
    service: Service, value: ResponseValue, said: dict[str, Any]
) -> None:
    """Put what was sent and answered behind a conversation's items, or say why that cannot be."""
    new = [*value.items()[len(value.before) :], *value.output]
    known = [item["id"] for item in value.before]
    conversation_id = value.body.conversation_id or ""
    try:
        is_added = await service.stored_conversations.append(conversation_id, known, new)
        why = "" if is_added else "the conversation has changed meanwhile"
    except StoreError as error:
        why = str(error)
    if why:
        notes = [*said["kvcellar"]["notes"], f"its items are not in the conversation: {why}"]
        said["kvcellar"] = {**said["kvcellar"], "notes": notes}


def usage_of(end: Ended) -> dict[str, Any]:
    """Return the tokens that an answer took."""
    usage = end.usage
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {
            "reasoning_tokens": end.reasoning_tokens,
            **predictions([usage]),
        },
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def text_part(text: str) -> dict[str, Any]:
    """Return the only part of an item of text."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def reasoning_part(text: str) -> dict[str, Any]:
    """Return the only part of an item of reasoning."""
    return {"type": "reasoning_text", "text": text}


def status_of(is_cut: bool) -> str:
    """Return the status of a response or an item that has ended."""
    return "incomplete" if is_cut else "completed"


def sent_item(item: dict[str, Any], key: str) -> dict[str, Any]:
    """Return an item as it was sent, with the fields that every listed item has."""
    if "type" not in item:
        item = {"type": "message", **item}
    kind = {"message": "msg", "function_call": "fc", "function_call_output": "fco"}
    content = item.get("content")
    if item["type"] == "message" and isinstance(content, str):
        part = "output_text" if item.get("role") == "assistant" else "input_text"
        item = {**item, "content": [{"type": part, "text": content}]}
    return {"id": f"{kind.get(item['type'], 'item')}_{key}", "status": "completed", **item}
