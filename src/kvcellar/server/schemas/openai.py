"""Requests of OpenAI's completions and chat completions."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, model_validator

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
    Stop,
    Stops,
    TemplateKwargs,
)
from kvcellar.server.schemas.sampler import SamplerBody

TokenKey = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Pattern = Annotated[str, Field(max_length=4096)]
Grammar = Annotated[str, Field(max_length=65536)]
Choices = Annotated[list[Annotated[str, Field(max_length=1000)]], Field(max_length=256)]


Texts = Annotated[list[str], Field(fail_fast=True)]
Tokens = Annotated[list[int], Field(fail_fast=True)]
"""Lists by the hundred thousand, of which one wrong item says enough."""


class SamplingFields(SamplerBody):
    """Settings of sampling, as in OpenAI's requests, with what local servers add."""

    logit_bias: dict[TokenKey, Bias] | None = Field(
        None, max_length=1024, description="From tokens to what is added to their logits."
    )
    seed: int | None = Field(
        None, ge=-(2**63), lt=2**63, description="Draws depend on it and the logits alone."
    )
    stop: Stop | Stops | None = Field(
        None, description="Texts at which the answer ends, and which are no part of it."
    )
    stop_token_ids: list[TokenId] | None = Field(
        None, max_length=64, description="Tokens at which the answer ends."
    )
    ignore_eos: bool | None = Field(None, description="Sample on after the model's end token.")
    min_tokens: int | None = Field(None, ge=0, description="Before them no end token comes.")


class StreamOptions(Setting):
    """Options of a streamed response."""

    include_usage: bool | None = None


class FunctionCall(Open):
    """The inside of a call."""

    name: str = Field(max_length=1024)
    arguments: str | dict[str, Any] | None = None


class CustomCall(Open):
    """The inside of a call of a tool that takes text."""

    name: str = Field(max_length=1024)
    input: str | None = None


class SentToolCall(Open):
    """A call in an answer that comes back."""

    id: str | None = None
    type: str = "function"
    function: FunctionCall | None = None
    custom: CustomCall | None = None

    @model_validator(mode="after")
    def one_of_both(self) -> SentToolCall:
        """Refuse a call that is neither of a function nor of a tool that takes text."""
        if self.function is None and self.custom is None:
            raise ValueError("a call has a function")
        return self


class FileName(Open):
    """The name of a file; the rest is not read."""

    filename: str | None = None


class ImageUrl(Open):
    """Address of a picture: a data URL, or where it is to be fetched from."""

    url: str | None = None
    detail: str | None = None


class ContentPart(Open):
    """A piece of a message."""

    type: str
    text: str | None = None
    refusal: str | None = None
    thinking: str | list[ContentPart] | None = None
    file: FileName | None = None
    image_url: ImageUrl | str | None = None

    @property
    def picture(self) -> str | None:
        """Source of a picture: a data URL, an address, or a link of this server's."""
        return self.image_url.url if isinstance(self.image_url, ImageUrl) else self.image_url

    @property
    def detail(self) -> str | None:
        """Wish how a picture is read."""
        return self.image_url.detail if isinstance(self.image_url, ImageUrl) else None

    @property
    def filename(self) -> str | None:
        """The name of a file, which is not read."""
        return self.file.filename if self.file else None

    @property
    def thought(self) -> str | None:
        """Text of a part of type ``thinking`` or ``reasoning``; None of any other."""
        if self.type not in ("thinking", "reasoning"):
            return None
        if isinstance(self.thinking, list):
            return "".join(part.text or "" for part in self.thinking)
        return self.thinking or self.text or ""


class AudioName(Open):
    """A sound by its id."""

    id: str | None = None


class ChatMessage(Open):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[SentToolCall] | None = None
    tool_call_id: str | None = None
    function_call: FunctionCall | None = Field(None, description="As it was before tool_calls.")
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    audio: AudioName | None = Field(None, description="A sound that was answered: refused.")

    @model_validator(mode="after")
    def _is_not_elsewhere(self) -> ChatMessage:
        """Refuse an answer that is named in place of what it says."""
        if self.audio is not None and not self.content:
            raise ApiError(
                400,
                f"a message is the sound {str(self.audio.id)[:80]!r}, and none is kept here; send "
                f"its words as content",
                "unsupported_content",
                param="messages",
            )
        return self

    @property
    def said(self) -> str | list[ContentPart] | None:
        """Content without what was thought."""
        if not isinstance(self.content, list):
            return self.content
        return [part for part in self.content if part.thought is None]

    @property
    def thought(self) -> str:
        """Reasoning before what is said, in any of the fields and parts that have it."""
        parts = self.content if isinstance(self.content, list) else ()
        fields = self.reasoning_content or self.reasoning or self.thinking
        return fields or "".join(part.thought or "" for part in parts)


class Function(Open):
    """A function that may be called."""

    name: str = Field(min_length=1, max_length=1024)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomTool(Open):
    """A tool that takes text."""

    name: str | None = None


class FunctionTool(Open):
    """A tool. Only functions are run here; others are left out."""

    type: str = Field(max_length=128)
    function: Function | None = None
    custom: CustomTool | None = None

    @model_validator(mode="after")
    def has_function(self) -> FunctionTool:
        """Refuse a tool of type function that has none."""
        if self.type == "function" and self.function is None:
            raise ValueError("a tool of type function has a function")
        return self


class NamedFunction(Open):
    """A function by its name."""

    name: str


class AllowedTools(Open):
    """Tools that may be called, of all that are told."""

    mode: Literal["auto", "required"] = "auto"
    tools: list[NamedTool] = Field(min_length=1, max_length=512)


class NamedTool(Open):
    """A tool that has to be called, or several that may be.

    The name is inside ``function`` or ``custom`` in chat completions, and beside the type in
    responses; so are the tools that are allowed.
    """

    type: str = Field(max_length=128)
    name: str | None = None
    function: NamedFunction | None = None
    custom: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[NamedTool] | None = Field(None, min_length=1, max_length=512)

    @property
    def called(self) -> str:
        """Its name; its type, where it has none."""
        inside = self.function or self.custom
        return self.name or (inside.name if inside else self.type)

    @model_validator(mode="after")
    def has_name(self) -> NamedTool:
        """Refuse a function without a name, and a list of allowed tools without tools."""
        if self.type == "function" and not (self.name or self.function):
            raise ValueError("a choice of type function names one")
        if self.type == "allowed_tools" and not (self.tools or self.allowed_tools):
            raise ValueError("a choice of type allowed_tools has tools")
        return self


class JsonSchema(Setting):
    """A schema with a name."""

    name: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class JsonFormat(Setting):
    """Format of an answer: text, JSON, or JSON by a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    object_schema: dict[str, Any] | None = Field(None, alias="schema")


class StructuredOutputs(Open):
    """Format of an answer as vLLM's requests say it: one of these fields."""

    model_config = ConfigDict(extra="forbid")

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: Pattern | None = None
    choice: Choices | None = None
    grammar: Grammar | None = None


class FormFields(SamplingFields):
    """Settings of sampling, and what an answer has to be: in one of these fields."""

    response_format: JsonFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: Pattern | None = None
    guided_choice: Choices | None = None
    guided_grammar: Grammar | None = None
    grammar: Grammar | None = Field(None, description="Lark, or llama.cpp's GBNF.")
    json_schema_: dict[str, Any] | None = Field(None, alias="json_schema")
    regex: Pattern | None = None


class ReasoningWish(Setting):
    """Wish for thinking, as OpenRouter's requests say it."""

    effort: Effort | None = None
    max_tokens: int | None = Field(None, ge=0)
    enabled: bool | None = None
    exclude: bool | None = None


class ThinkingSwitch(Setting):
    """Switch of thinking, as requests to DeepSeek's and GLM's servers say it."""

    type: Literal["enabled", "disabled", "auto", "adaptive"]
    budget_tokens: int | None = Field(None, ge=0)


class ScoredFields(FormFields):
    """Settings of sampling, what an answer has to be, and whether the prompt is scored."""

    prompt_logprobs: int | None = Field(
        None, ge=0, le=20, description="Of each token of the prompt, and so many others beside it."
    )


class ChatRequest(ScoredFields):
    """``POST /v1/chat/completions``."""

    route: ClassVar[str] = "/v1/chat/completions"

    model: str | None = Field(None, max_length=512, description=MODEL)
    messages: list[ChatMessage] = Field(
        min_length=1, description="The conversation, oldest message first."
    )
    max_tokens: MostTokens | None = None
    max_completion_tokens: MostTokens | None = None
    n: int | None = Field(None, ge=1, le=64, description="Answers, which share the prompt.")
    stream: bool | None = Field(None, description=STREAM)
    stream_options: StreamOptions | None = None
    logprobs: bool | None = Field(None, description="Tell each token's log probability.")
    top_logprobs: int | None = Field(
        None, ge=0, le=20, description="And so many of the likeliest others'."
    )
    tools: list[FunctionTool] | None = Field(None, max_length=512, description=TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = Field(
        None, description="Whether it may, may not or has to call, or which one."
    )
    parallel_tool_calls: bool | None = Field(None, description="False: one call at a time.")
    continue_final_message: bool | None = Field(
        None, description="True where the last message is the assistant's, which is gone on with."
    )
    add_generation_prompt: bool | None = Field(
        None, description="False where the last message is the assistant's."
    )
    chat_template_kwargs: TemplateKwargs | None = None
    enable_thinking: bool | None = None
    thinking: ThinkingSwitch | None = None
    thinking_budget: int | None = Field(None, ge=0, description="Tokens that it may think.")
    thinking_token_budget: int | None = Field(None, ge=0, description="The same.")
    reasoning_effort: Effort | None = None
    reasoning: ReasoningWish | None = None
    include_reasoning: bool | None = None
    agent_id: AgentId | None = None
    cache_salt: CacheSalt | None = None
    session_id: SessionId | None = None
    prompt_cache_key: SessionId | None = None


class CompletionRequest(ScoredFields):
    """``POST /v1/completions``."""

    route: ClassVar[str] = "/v1/completions"

    model: str | None = Field(None, max_length=512, description=MODEL)
    prompt: str | Texts | Tokens | Annotated[list[Tokens], Field(fail_fast=True)] = ""
    max_tokens: int | None = Field(
        None, ge=-1, description="0: read the prompt alone. -1: no limit."
    )
    n: int | None = Field(None, ge=1, le=64, description="Answers, which share the prompt.")
    stream: bool | None = Field(None, description=STREAM)
    stream_options: StreamOptions | None = None
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = None
    suffix: str | None = Field(None, description="What comes behind the answer.")
    best_of: int | None = Field(None, ge=1, description="No more than n, or 1.")
    add_special_tokens: bool | None = Field(
        None, description="Whether a text begins with the model's own tokens, such as its BOS."
    )
    agent_id: AgentId | None = None
    cache_salt: CacheSalt | None = None
    session_id: SessionId | None = None
