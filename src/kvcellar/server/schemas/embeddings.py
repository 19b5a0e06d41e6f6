"""Requests for embeddings."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, Field

from kvcellar.server.schemas.base import (
    MODEL,
    QuestionBody,
)
from kvcellar.server.schemas.ollama import ModelName, WithOptions
from kvcellar.server.schemas.openai import Texts, Tokens

Dimensions = Annotated[int, Field(ge=1, description="The first numbers of a vector alone.")]


class EmbeddingsRequest(QuestionBody):
    """``POST /v1/embeddings``."""

    route: ClassVar[str] = "/v1/embeddings"

    model: str | None = Field(None, max_length=512, description=MODEL)
    input: str | Texts | Tokens | Annotated[list[Tokens], Field(fail_fast=True)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Dimensions | None = None
    pooling: Literal["mean", "last", "cls"] | None = None


class OllamaEmbedRequest(WithOptions):
    """``POST /api/embed``."""

    model: ModelName
    input: str | Texts
    truncate: bool | None = Field(None, description="Cut texts that are too long, as is the rule.")
    dimensions: Dimensions | None = None
    keep_alive: Any = None


class OllamaEmbeddingsRequest(WithOptions):
    """``POST /api/embeddings``, which older clients call."""

    model: ModelName
    prompt: str = Field(validation_alias=AliasChoices("prompt", "input"))
    keep_alive: Any = None
