"""Requests of OpenAI's responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    TypeAdapter,
    field_validator,
    model_validator,
)

from kvcellar.server.errors import ApiError
from kvcellar.server.schemas.base import (
    MODEL,
    STREAM,
    TOOLS,
    AgentId,
    CacheSalt,
    Effort,
    MostTokens,
    Open,
    SessionId,
    Setting,
    TemplateKwargs,
)
from kvcellar.server.schemas.openai import NamedTool, SamplingFields


class ItemPart(Open):
    """A piece of an item's content."""

    model_config = ConfigDict(extra="allow")

    type: str
    text: str | None = None
    refusal: str | None = None
    filename: str | None = None
    image_url: str | None = None
    detail: str | None = None

    @property
    def picture(self) -> str | None:
        """Source of a picture: a data URL, an address, or a link of this server's."""
        return self.image_url


class Item(Open):
    """One item of the input; which fields it has depends on its type.

    All that was sent is kept: it can be listed again.
    """

    model_config = ConfigDict(extra="allow")

    type: str | None = None
    id: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[ItemPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ItemPart] | None = None
    summary: list[ItemPart] | None = None
    encrypted_content: str | None = None


class OtherItem(Open):
    """An item of a tool that is not run here: told to the model as text, whatever it holds."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(max_length=128)


_READ = ("message", "function_call", "function_call_output", "reasoning", "item_reference")


def _kind(item: Any) -> str:
    """Return ``item`` for an item that is read, ``other`` for any other."""
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return "item" if not isinstance(kind, str) or kind in _READ else "other"


AnyItem = Annotated[
    Annotated[Item, Tag("item")] | Annotated[OtherItem, Tag("other")], Discriminator(_kind)
]


_ITEMS: TypeAdapter[list[AnyItem]] = TypeAdapter(list[AnyItem])


def read_items(values: Sequence[Any]) -> list[Item | OtherItem]:
    """Return items as they were sent, or answered, as their models."""
    return list(_ITEMS.validate_python(list(values)))


class FlatTool(Open):
    """A function, flat; tools of other types are left out."""

    type: str = Field(max_length=128)
    name: str | None = Field(None, min_length=1, max_length=1024)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def has_name(self) -> FlatTool:
        """Refuse a function without a name."""
        if self.type == "function" and self.name is None:
            raise ValueError("a tool of type function has a name")
        return self


class TextFormat(Setting):
    """Format of an answer: text, JSON, or JSON by a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextConfig(Setting):
    """Wrapper around an answer's format."""

    format: TextFormat | None = None


class ReasoningConfig(Setting):
    """Wish for thinking: how much, and whether that is summed up."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed", "none"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ConversationId(Open):
    """A conversation by its id."""

    id: str = Field(max_length=128)


class ResponseRequest(SamplingFields):
    """``POST /v1/responses``."""

    route: ClassVar[str] = "/v1/responses"

    model: str | None = Field(None, max_length=512, description=MODEL)
    input: str | list[AnyItem]
    instructions: str | None = None
    previous_response_id: str | None = Field(None, max_length=128)
    conversation: Annotated[str, Field(max_length=128)] | ConversationId | None = None
    max_output_tokens: MostTokens | None = None
    stream: bool | None = Field(None, description=STREAM)
    store: bool | None = None
    tools: list[FlatTool] | None = Field(None, max_length=512, description=TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    metadata: dict[str, str] | None = Field(None, max_length=16)
    include: list[str] | None = Field(None, max_length=64)
    reasoning: ReasoningConfig | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    agent_id: AgentId | None = None
    cache_salt: CacheSalt | None = None
    session_id: SessionId | None = None
    prompt_cache_key: SessionId | None = None

    @property
    def conversation_id(self) -> str | None:
        """Id of the conversation that it goes on from and adds to."""
        named = self.conversation
        return named.id if isinstance(named, ConversationId) else named


class InputRequest(ResponseRequest):
    """``POST /v1/responses/input_tokens`` and ``compact``: a conversation without an answer."""

    route: ClassVar[str] = ""

    input: str | list[AnyItem] = Field(default_factory=list)

    @field_validator("input", mode="before")
    @classmethod
    def _none_is_none(cls, value: Any) -> Any:
        return [] if value is None else value

    @model_validator(mode="after")
    def _is_no_stream(self) -> InputRequest:
        """Refuse to stream what comes in one piece."""
        if self.stream:
            message = "stream is not honoured: this comes in one piece; leave it out"
            raise ApiError(400, message, "unsupported_field", param="stream")
        return self
