"""Requests of Anthropic's messages."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, model_validator

from kvcellar.server.errors import ApiError
from kvcellar.server.schemas.base import (
    MODEL,
    STREAM,
    TOOLS,
    AgentId,
    Body,
    CacheSalt,
    Effort,
    Open,
    SessionId,
    Setting,
    Stops,
    TemplateKwargs,
)
from kvcellar.server.schemas.sampler import AnthropicSamplerBody


class CacheControl(Open):
    """A wish to keep what comes up to here."""

    type: Literal["ephemeral"] = "ephemeral"
    ttl: Literal["5m", "1h"] | None = None


class Source(Open):
    """Source of a document or a picture; of documents text is read, data are not."""

    type: str | None = None
    data: str | None = None
    media_type: str | None = None
    url: str | None = None
    content: str | list[ContentBlock] | None = None

    @property
    def is_text(self) -> bool:
        """True for a document that comes as text."""
        return self.type in ("text", "content")

    @property
    def picture(self) -> str | None:
        """Source of a picture: a data URL, an address, or a link of this server's."""
        if self.type == "base64" and self.data is not None:
            return f"data:{self.media_type or ''};base64,{self.data}"
        return self.url if self.type == "url" else None


class ContentBlock(Open):
    """A piece of content; which fields it has depends on its type."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(max_length=128)
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: Any = None
    tool_use_id: str | None = None
    tool_name: str | None = None
    content: str | list[ContentBlock] | dict[str, Any] | None = None
    is_error: bool | None = None
    source: Source | str | None = None
    title: str | None = None
    thinking: str | None = None
    signature: str | None = None
    cache_control: CacheControl | None = None


class Message(Open):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]


class Tool(Open):
    """A tool with the schema of its input; those that Anthropic runs have a type instead."""

    name: str | None = Field(None, min_length=1, max_length=1024)
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = Field(None, max_length=128)
    strict: bool | None = None
    defer_loading: bool | None = None
    cache_control: CacheControl | None = None

    @property
    def is_function(self) -> bool:
        """True for a tool that the client runs."""
        return self.input_schema is not None or self.type in (None, "custom")

    @model_validator(mode="after")
    def has_schema(self) -> Tool:
        """Refuse a tool that the client runs and that does not say what it takes."""
        if self.is_function and (self.input_schema is None or self.name is None):
            raise ValueError("a tool has a name and an input_schema, or a type that is not custom")
        return self


class ToolChoiceField(Open):
    """Choice of a tool, by kind or name."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(Setting):
    """Format of an answer: a JSON schema."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(Setting):
    """Format of an answer, and how much the model thinks before it."""

    format: OutputFormat | None = None
    effort: Effort | None = None


class ThinkingConfig(Setting):
    """Wish for thinking: whether, for how many tokens, and whether that is shown.

    Clients know more ways of showing than one; all but ``omitted`` show it as it is.
    """

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=0)
    display: str | None = Field(None, max_length=128)


class ThreadField(Setting):
    """Wish for a conversation that is kept here: from now on, or gone on with."""

    type: str = Field(max_length=128, description="create or continue")
    previous_message_id: str | None = Field(
        None, max_length=128, description="The answer of a thread that messages come behind."
    )

    @property
    def is_continued(self) -> bool:
        """True where the server has the messages before those of the request."""
        return self.type == "continue"


class CountRequest(Body):
    """``POST /v1/messages/count_tokens``."""

    model: str | None = Field(None, max_length=512, description=MODEL)
    messages: list[Message] = Field(
        description="The conversation, oldest message first; of a thread, what is new."
    )
    thread: ThreadField | None = None
    system: str | list[ContentBlock] | None = None
    tools: list[Tool] | None = Field(None, max_length=512, description=TOOLS)
    tool_choice: ToolChoiceField | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    agent_id: AgentId | None = None
    cache_salt: CacheSalt | None = None

    @model_validator(mode="after")
    def _has_messages(self) -> CountRequest:
        """Refuse a request without a message, unless it goes on where an answer ended."""
        if not self.messages and not (self.thread and self.thread.is_continued):
            message = "messages: List should have at least 1 item, and has none"
            raise ApiError(400, message, "invalid_request", param="messages")
        return self


class Metadata(Open):
    """Metadata of a client; Claude Code names its session in it."""

    user_id: SessionId | None = None


class MessagesRequest(CountRequest, AnthropicSamplerBody):
    """``POST /v1/messages``."""

    route: ClassVar[str] = "/v1/messages"

    max_tokens: int = Field(ge=1)
    stream: bool | None = Field(None, description=STREAM)
    stop_sequences: Stops | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = Field(
        None, description="Not Anthropic's: the same seed gives the same text."
    )
    output_format: OutputFormat | None = None
    cache_control: CacheControl | None = None
    session_id: SessionId | None = None
    metadata: Metadata | None = None
