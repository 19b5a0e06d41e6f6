"""Requests of llama.cpp's and vLLM's routes about tokens, and of fillings."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, model_validator

from kvcellar.server.schemas.base import (
    MODEL,
    STREAM,
    TOOLS,
    Open,
    QuestionBody,
    TemplateKwargs,
)
from kvcellar.server.schemas.openai import (
    ChatMessage,
    FunctionTool,
    SamplingFields,
    Tokens,
)


class TokenizeRequest(QuestionBody):
    """``POST /tokenize``: ``content`` as llama.cpp has it; ``prompt`` or ``messages`` as vLLM."""

    model: str | None = Field(None, max_length=512, description=MODEL)
    content: str | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1)
    tools: list[FunctionTool] | None = Field(None, max_length=512, description=TOOLS)
    chat_template_kwargs: TemplateKwargs | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def says_one_thing(self) -> TokenizeRequest:
        """Refuse a request without a text, or with several."""
        if sum(one is not None for one in (self.content, self.prompt, self.messages)) != 1:
            raise ValueError("give one of content, prompt and messages")
        return self


class DetokenizeRequest(QuestionBody):
    """``POST /detokenize``."""

    model: str | None = Field(None, max_length=512, description=MODEL)
    tokens: Tokens


class ExtraFile(Open):
    """Another file, which is read before the gap."""

    text: str
    filename: str = Field("", max_length=1000)


class InfillRequest(SamplingFields):
    """``POST /infill``: what belongs between two texts."""

    route: ClassVar[str] = "/infill"

    model: str | None = Field(None, max_length=512, description=MODEL)
    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: list[ExtraFile] | None = Field(None, max_length=256)
    prompt: str = ""
    n_predict: int | None = Field(None, ge=-1, description="-1: to the end of the context.")
    samplers: list[str] | str | None = None
    stream: bool | None = Field(None, description=STREAM)
