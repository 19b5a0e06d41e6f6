"""Forms of answers: JSON of a schema, or a text of a grammar."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """The form that a request wants its answer in.

    Attributes:
        kind: ``schema``: JSON of that schema; ``regex``: a text that it matches; ``choice``: one of
            some texts; ``grammar``: a text of that grammar, in Lark or GBNF.
        value: a mapping, a text, a list of texts, or a text.
        field: which field of the request says so.
        is_strict: of a schema, whether a keyword that no grammar can hold is refused.
    """

    kind: Literal["schema", "regex", "choice", "grammar"]
    value: Any
    field: str
    is_strict: bool = True
