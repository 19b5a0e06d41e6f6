"""Finds the part of a JSON schema that an answer can be held to: all of it, some, or nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llguidance import LLMatcher

from kvcellar.server.errors import ApiError
from kvcellar.server.guide import one_line
from kvcellar.server.loosening import ANYTHING, loosened

_STYLE = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "json_allow_general_unicode_escapes": True,
}
"""JSON as Python writes it: spaces in one way, so that every answer ends.

A model that begins an escape finds its character: were only control characters to be had so, it
would write one of those.
"""

_MOST_ASKED = 20_000
"""Keywords of one request that are looked at one by one; it takes seconds."""


@dataclass(slots=True)
class HeldArguments:
    """The schema that a tool's arguments are held to, and what that lacks of the tool's own."""

    tool: Mapping[str, Any]
    schema: dict[str, Any]
    losses: list[str] = field(default_factory=list)
    trouble: str = ""
    """Why they are held to no schema."""

    @property
    def name(self) -> str:
        """Name of the tool."""
        return str(self.tool["function"]["name"])

    def note(self) -> str | None:
        """Say what the arguments are not held to; None where they are held to all."""
        if self.trouble:
            return (
                f"tool {self.name}: its arguments are held to be an object and to nothing else: "
                f"{self.trouble}"
            )
        if self.losses:
            return f"tool {self.name}: its arguments are not held to {few(self.losses)}"
        return None


class KeywordChecks:
    """Checks of the keywords in one request's schemas, as many as there is time for."""

    def __init__(self) -> None:
        """Create checks of which none is made."""
        self._n_left = _MOST_ASKED

    def trouble_of(self, schema: Mapping[str, Any]) -> str:
        """Say why no grammar can be made of a keyword; nothing where one can."""
        self._n_left -= 1
        return _trouble_of(schema) if self._n_left >= 0 else "the schemas are too large"


def held_arguments(tool: Mapping[str, Any], asked: KeywordChecks) -> HeldArguments:
    """Find out what a tool's arguments can be held to."""
    own = dict(tool["function"].get("parameters") or {"properties": {}})
    own.setdefault("type", "object")
    held, losses, trouble = _holdable(own, asked)
    if not trouble and held.get("type") != "object":
        types = held.get("type")
        if types is not None and "object" not in types:
            trouble = f"its schema says {json.dumps(types)[:80]} and arguments are an object"
        held["type"] = "object"
        trouble = trouble or _trouble_of(held, is_lenient=True)
    return HeldArguments(tool, dict(ANYTHING) if trouble else held, losses, trouble)


def _holdable(
    schema: Mapping[str, Any], asked: KeywordChecks
) -> tuple[dict[str, Any], list[str], str]:
    """Return what there is a grammar of, what it lacks of the schema, and why there is none."""
    try:
        if not _trouble_of(schema):
            return dict(schema), [], ""
        held, losses = loosened(schema, asked.trouble_of)
        return held, losses, _trouble_of(held, is_lenient=True)
    except RecursionError:
        return dict(ANYTHING), [], "its schema is nested too deeply"


def _trouble_of(schema: Mapping[str, Any], *, is_lenient: bool = False) -> str:
    """Say why no grammar can be made of a schema; nothing where one can."""
    text = schema_json(schema) if is_lenient else json.dumps({**schema, "x-guidance": _STYLE})
    said = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(text))
    return "" if said.startswith("WARNING") else one_line(said)


def answer_schema(schema: Mapping[str, Any], is_strict: bool) -> tuple[dict[str, Any], list[str]]:
    """Return what an answer is held to, and what is left out of its schema.

    Raises:
        ApiError: 400, something is although it must not, or there is no grammar.
    """
    held, losses, trouble = _holdable(schema, KeywordChecks())
    if trouble or (losses and is_strict):
        what = f" of {few(losses)}" if losses else f": {trouble}"
        raise ApiError(
            400,
            f"no grammar can be made of response_format{what}, so an answer cannot be held to it; "
            f'leave it out, or say "strict": false to go without it',
            "invalid_schema",
            param="response_format",
        )
    return held, losses


def check_promise(one: HeldArguments, is_strict: bool) -> None:
    """Refuse a call that has to come and has to be right, and cannot be held to be.

    Raises:
        ApiError: 400, so it is.
    """
    if one.trouble:
        what = f" of {few(one.losses)}" if one.losses else f": {one.trouble}"
    elif one.losses and is_strict:
        what = f" of {few(one.losses)}, and the tool is strict"
    else:
        return
    raise ApiError(
        400,
        f"tool_choice wants a call of {one.name!r}, and no grammar can be made{what}; leave that "
        f"out of its parameters, or let the model choose",
        "invalid_schema",
        param="tools",
    )


def schema_json(schema: Mapping[str, Any]) -> str:
    """Write a schema as llguidance takes it, with one way to write each value."""
    return json.dumps({**schema, "x-guidance": {**_STYLE, "coerce_one_of": True, "lenient": True}})


def few(places: Sequence[str]) -> str:
    """Name the first places in a schema, and how many more there are."""
    more = f" and {len(places) - 5} more" if len(places) > 5 else ""
    return ", ".join(place[:120] for place in places[:5]) + more
