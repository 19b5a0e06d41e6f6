"""Fields that the requests of all protocols have in common."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from kvcellar.server.errors import ApiError
from kvcellar.server.schemas.aliases import by_own_names, notes_on
from kvcellar.server.schemas.fields import MOST_UNKNOWN, refuse_or_ignore
from kvcellar.server.schemas.histories import refuse_histories
from kvcellar.valid import valid_json

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


def _not_none(value: int) -> int:
    if value == 0:
        raise PydanticCustomError("no_tokens", "an answer has at least 1 token; -1: no limit")
    return value


MostTokens = Annotated[
    int,
    Field(ge=-1, description="Of the answer; -1: as many as the context has room for."),
    AfterValidator(_not_none),
]
MODEL = "As /v1/models lists it; the default one where it is left out."
STREAM = "Send the answer in pieces, as it comes."
TOOLS = "Functions that the model may call."
"""Descriptions of fields that several protocols have."""
Stop = Annotated[str, Field(min_length=1, max_length=1000)]
Stops = Annotated[list[Stop], Field(max_length=MOST_STOPS), AfterValidator(_bounded)]
AgentId = Annotated[
    str, Field(max_length=128, description="The agent whose turn it is; see X-Agent-Id.")
]
SessionId = Annotated[
    str,
    Field(max_length=4096, description="What the client calls its conversation: a hint."),
]


CacheSalt = Annotated[
    str, Field(max_length=1024, description="Nothing is shared with requests of another salt.")
]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
TemplateKwargs = Annotated[
    dict[Annotated[str, Field(max_length=128)], Any],
    Field(max_length=64, description="What the model's chat template takes, by its own names."),
]


class Open(BaseModel):
    """A part of a request, in which fields that nobody here knows are let pass.

    Clients are newer than servers.
    """

    model_config = ConfigDict(extra="ignore")


class Setting(Open):
    """A setting of an answer that has fields of its own; those that nobody knows are named."""

    model_config = ConfigDict(extra="allow")

    def unknown(self, name: str) -> Iterator[str]:
        """Yield the fields below it that nobody here knows, behind the setting's own name."""
        yield from (f"{name}.{extra}" for extra in self.__pydantic_extra__ or {})
        for field, info in type(self).model_fields.items():
            inner = getattr(self, field)
            if isinstance(inner, Setting):
                yield from inner.unknown(f"{name}.{info.alias or field}")


class Body(Open):
    """A whole request: every text and key in it is valid Unicode, every number finite."""

    @model_validator(mode="before")
    @classmethod
    def _made_valid(cls, value: Any) -> Any:
        value = valid_json(value)
        if isinstance(value, dict):
            refuse_histories(value, _names_of(cls))
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _no_flag_is_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse true and false where numbers are wanted; they would be read as 1 and 0."""
        if info.field_name is not None and _takes_numbers_alone(cls, info.field_name):
            _refuse_flags(value)
        return value


class QuestionBody(Body):
    """A request for an answer: no field that would change it is ignored in silence.

    Attributes:
        route: where it is sent; of requests that are none themselves: nothing.
        takes_unknown: whether fields that nobody knows are let pass, and said to be ignored.
    """

    model_config = ConfigDict(extra="allow")
    route: ClassVar[str] = ""
    takes_unknown: ClassVar[bool] = True
    _ignored: tuple[str, ...] = PrivateAttr(())
    _notes: tuple[str, ...] = PrivateAttr(())

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on fields that are honoured otherwise than elsewhere."""
        return self._notes

    @property
    def ignored(self) -> tuple[str, ...]:
        """Names of the fields that nobody here knows."""
        return self._ignored

    def ignore(self, name: str) -> None:
        """Say that a field inside of a message is not honoured."""
        if name not in self._ignored:
            self._ignored = (*self._ignored, name)

    @model_validator(mode="before")
    @classmethod
    def _by_their_names(cls, value: Any) -> Any:
        """Read fields by the names and values that other servers have for them."""
        return by_own_names(value, _names_of(cls)) if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _fields_are_known(self) -> QuestionBody:
        extra = self.__pydantic_extra__ or {}
        declared = set(_names_of(type(self)))
        elsewhere: dict[str, str] = {}
        for other in _all_below(QuestionBody):
            for name in _names_of(other) if other.route else ():
                elsewhere.setdefault(name, other.route)
        unknown: list[str] = []
        for field, info in type(self).model_fields.items():
            setting = getattr(self, field)
            if isinstance(setting, Setting):
                unknown += setting.unknown(info.alias or field)
        for name, value in extra.items():
            if refuse_or_ignore(name, value, declared, elsewhere):
                unknown.append(name)
            if len(unknown) > MOST_UNKNOWN:
                raise ApiError(
                    400,
                    f"the request has more than {MOST_UNKNOWN} fields that nobody here knows",
                    "unknown_field",
                    param=name[:40],
                )
        if unknown and not self.takes_unknown:
            names = ", ".join(name[:40] for name in unknown[:5])
            raise ApiError(
                400, f"there is no field {names}", "unknown_field", param=unknown[0][:40]
            )
        self._notes = tuple(notes_on(extra))
        self._ignored = tuple(
            name if re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name) else "?" for name in unknown
        )
        extra.clear()
        return self


@functools.cache
def _takes_numbers_alone(kind: type[Body], name: str) -> bool:
    """Return true if a field takes numbers, or lists of them, and neither flags nor anything."""
    kinds = list(_kinds_in(kind.model_fields[name].annotation))
    return (int in kinds or float in kinds) and bool not in kinds and Any not in kinds


def _kinds_in(kind: Any) -> Iterator[Any]:
    """Yield the types that an annotation names, however deep."""
    inside = get_args(kind)
    if not inside:
        yield kind
    for one in inside:
        yield from _kinds_in(one)


def _refuse_flags(value: Any) -> None:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    kinds = set(map(type, inside))
    if isinstance(value, bool) or bool in kinds:
        raise PydanticCustomError("flag", "a number is wanted, and true and false are none")
    if list in kinds:
        for one in inside:
            _refuse_flags(one)


def _names_of(kind: type[Body]) -> list[str]:
    """Return the fields of a request as clients call them."""
    return [field.alias or name for name, field in kind.model_fields.items()]


def _all_below(kind: type[QuestionBody]) -> Iterator[type[QuestionBody]]:
    for child in kind.__subclasses__():
        yield child
        yield from _all_below(child)
