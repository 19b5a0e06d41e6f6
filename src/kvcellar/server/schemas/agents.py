"""Requests of the agents' own routes."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field, model_validator

from kvcellar.server.schemas.base import (
    MODEL,
    STREAM,
    TOOLS,
    Body,
    TemplateKwargs,
)
from kvcellar.server.schemas.openai import SamplingFields


class CreateRequest(Body):
    """``POST /v1/agents``."""

    model_config = ConfigDict(extra="forbid")

    id: str | None = Field(None, max_length=128, description="Its name; made up without one.")
    title: str = Field("", description="What people read: any text. Else the first words said.")
    model: str | None = Field(None, max_length=512, description=MODEL)
    system: str | None = Field(None, description="Its system message.")
    tools: list[dict[str, Any]] | None = Field(None, max_length=512, description=TOOLS)


class RenameRequest(Body):
    """``POST /v1/agents/{agent_id}/rename``."""

    model_config = ConfigDict(extra="forbid")

    title: str = Field(description="Any text on one line; empty: the first words said.")


class PlaceRequest(Body):
    """A place in a history, in tokens or in turns."""

    model_config = ConfigDict(extra="forbid")

    position: int | None = Field(None, ge=0, lt=2**31, description="Tokens from the beginning.")
    turn: int | None = Field(
        None,
        gt=-(2**31),
        lt=2**31,
        description="Turns from the beginning; negative: from the end.",
    )


class ForkRequest(PlaceRequest):
    """``POST /v1/agents/{agent_id}/fork``."""

    id: str | None = Field(None, max_length=128, description="Name of the new one.")


FOLLOWS = (
    "history_digest of the agent, as its client knows it: where it has another one by now, or is "
    "in a turn, 409 and nothing is changed."
)


class RewindRequest(PlaceRequest):
    """``POST /v1/agents/{agent_id}/rewind``; without a place: before the last turn."""

    follows: str | None = Field(None, max_length=64, description=FOLLOWS)


class GenerateRequest(SamplingFields):
    """``POST /v1/agents/{agent_id}/generate``."""

    route: ClassVar[str] = "/v1/agents"
    takes_unknown: ClassVar[bool] = False

    text: str | None = Field(None, description="What somebody says.")
    images: list[str] | None = Field(
        None,
        max_length=256,
        description="Pictures before the text: data URLs, base64, or links of this server.",
    )
    tokens: list[int] | None = Field(None, description="Or tokens behind the history.")
    go_on: bool = Field(False, description="Or nothing: the last answer is gone on with.")
    follows: str | None = Field(None, max_length=64, description=FOLLOWS)
    role: Literal["user", "tool"] = "user"
    chat_template_kwargs: TemplateKwargs | None = None
    max_tokens: int | None = Field(None, ge=1)
    priority: int = Field(0, ge=-1000, le=1000, description="Higher goes first.")
    stream: bool | None = Field(None, description=STREAM)
    background: bool = Field(
        False,
        description="Go on to the end though the client leaves; `live` joins it, `stop` ends it.",
    )

    @model_validator(mode="after")
    def one_of_them(self) -> GenerateRequest:
        """Refuse a turn with more than one of text, tokens and go_on, or none."""
        if [self.text is not None, self.tokens is not None, self.go_on].count(True) != 1:
            raise ValueError("give one of text, tokens and go_on")
        if self.tokens is not None and self.chat_template_kwargs:
            raise ValueError("no template writes tokens; leave chat_template_kwargs out")
        if self.images and self.text is None:
            raise ValueError("pictures go with a text; give text, which may be empty")
        return self
