"""Requests about OpenAI's conversations."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from kvcellar.server.schemas.base import Body
from kvcellar.server.schemas.responses import AnyItem

Metadata = Annotated[dict[str, str], Field(max_length=16)]


class ConversationRequest(Body):
    """``POST /v1/conversations``."""

    items: list[AnyItem] | None = Field(None, max_length=1000)
    metadata: Metadata | None = None


class ConversationUpdate(Body):
    """``POST /v1/conversations/{id}``."""

    metadata: Metadata


class ItemsRequest(Body):
    """``POST /v1/conversations/{id}/items``."""

    items: list[AnyItem] = Field(min_length=1, max_length=1000)
