"""Requests of Ollama's API."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, Field

from kvcellar.server.schemas.base import (
    STREAM,
    TOOLS,
    AgentId,
    Open,
    QuestionBody,
    Stop,
    Stops,
)
from kvcellar.server.schemas.sampler import OllamaSamplerBody

ModelName = Annotated[str, Field(max_length=512)]
Think = bool | Literal["low", "medium", "high"]


class Options(OllamaSamplerBody):
    """Settings of sampling by Ollama's names; those of its process are taken and not looked at."""

    seed: int | None = Field(None, ge=-(2**63), lt=2**63, description="-1: any.")
    num_predict: int | None = Field(None, ge=-2, description="-1: to the end of the context.")
    stop: Stop | Stops | None = None


class WithOptions(QuestionBody):
    """A request that has settings in an object of their own."""

    options: Options | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on fields, and on options, that are honoured otherwise than elsewhere."""
        return self._notes + (self.options.notes if self.options else ())

    @property
    def ignored(self) -> tuple[str, ...]:
        """Names of the fields, and of the options, that nobody here knows."""
        return self._ignored + (self.options.ignored if self.options else ())


class OllamaBody(WithOptions):
    """A request for an answer: how, and whether as a stream, which is the rule."""

    model: ModelName
    stream: bool | None = Field(None, description=STREAM)
    format: Literal["", "json"] | dict[str, Any] | None = None
    think: Think | None = None
    keep_alive: float | str | None = Field(None, description="0 and nothing to answer: unload.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    agent_id: AgentId | None = None


class OllamaFunction(Open):
    """The inside of a call."""

    name: str = Field(max_length=1024)
    arguments: dict[str, Any] = Field(default_factory=dict)


class OllamaCall(Open):
    """A call in an answer that comes back."""

    id: str | None = None
    function: OllamaFunction


class OllamaMessage(Open):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = Field(None, validation_alias=AliasChoices("tool_name", "name"))
    tool_call_id: str | None = None


class ToolFunction(Open):
    """A function that may be called."""

    name: str = Field(min_length=1, max_length=1024)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class OllamaTool(Open):
    """A tool; a client may leave its type out."""

    type: str | None = Field(None, max_length=128)
    function: ToolFunction


class OllamaChatRequest(OllamaBody):
    """``POST /api/chat``."""

    route: ClassVar[str] = "/api/chat"

    messages: list[OllamaMessage] = Field(default_factory=list)
    tools: list[OllamaTool] | None = Field(None, max_length=512, description=TOOLS)


class OllamaGenerateRequest(OllamaBody):
    """``POST /api/generate``."""

    route: ClassVar[str] = "/api/generate"

    prompt: str = ""
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    images: list[str] | None = None
    context: list[int] | None = None
    raw: bool | None = None


class OllamaName(Open):
    """A model that is asked about; older clients call its field ``name``."""

    model: ModelName = Field(validation_alias=AliasChoices("model", "name"))
    stream: bool | None = Field(None, description=STREAM)
