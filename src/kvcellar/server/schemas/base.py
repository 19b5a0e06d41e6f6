"""What the requests of all protocols have in common."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from kvcellar.valid import valid_json

__all__ = ["AgentId", "Body", "Open", "Stop", "Stops"]

MOST_STOPS = 64
MOST_STOP_CHARACTERS = 8192


def _bounded(stops: list[str]) -> list[str]:
    n = sum(map(len, stops))
    if n > MOST_STOP_CHARACTERS:
        raise PydanticCustomError(
            "stops_too_long",
            "all stop texts together have {n} characters and the limit is {limit}",
            {"n": n, "limit": MOST_STOP_CHARACTERS},
        )
    return stops


Stop = Annotated[str, Field(min_length=1, max_length=1000)]
Stops = Annotated[list[Stop], Field(max_length=MOST_STOPS), AfterValidator(_bounded)]
AgentId = Annotated[str, Field(min_length=1, max_length=128)]


class Open(BaseModel):
    """A part of a request, in which fields that nobody here knows are let pass.

    Clients are newer than servers.
    """

    model_config = ConfigDict(extra="ignore")


class Body(Open):
    """A whole request: every text and key in it is valid Unicode, every number finite."""

    @model_validator(mode="before")
    @classmethod
    def _made_valid(cls, value: Any) -> Any:
        return valid_json(value)
