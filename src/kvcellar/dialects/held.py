"""Schemas that arguments of calls are held to, as grammars have them in them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

STYLE = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "json_allow_general_unicode_escapes": True,
}
"""JSON as Python writes it: spaces in one way, so that every answer ends.

A model that begins an escape finds its character: were only control characters to be had so, it
would write one of those.
"""


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


def schema_json(schema: Mapping[str, Any]) -> str:
    """Write a schema as llguidance takes it, with one way to write each value."""
    return json.dumps({**schema, "x-guidance": {**STYLE, "coerce_one_of": True, "lenient": True}})


def few(places: Sequence[str]) -> str:
    """Name the first places in a schema, and how many more there are."""
    more = f" and {len(places) - 5} more" if len(places) > 5 else ""
    return ", ".join(place[:120] for place in places[:5]) + more
