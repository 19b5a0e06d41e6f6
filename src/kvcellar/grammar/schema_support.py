"""Finds the part of a JSON schema that an answer can be held to: all of it, some, or nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from llguidance import LLMatcher

from kvcellar.dialects.held import STYLE, HeldArguments, few, schema_json
from kvcellar.errors import GrammarError
from kvcellar.grammar.guide import one_line
from kvcellar.grammar.schema_relax import ANYTHING, loosened

_MOST_ASKED = 20_000
"""Keywords of one request that are looked at one by one; it takes seconds."""


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
    text = schema_json(schema) if is_lenient else json.dumps({**schema, "x-guidance": STYLE})
    said = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(text))
    return "" if said.startswith("WARNING") else one_line(said)


def answer_schema(schema: Mapping[str, Any], is_strict: bool) -> tuple[dict[str, Any], list[str]]:
    """Return what an answer is held to, and what is left out of its schema.

    Raises:
        GrammarError: something is although it must not, or there is no grammar.
    """
    held, losses, trouble = _holdable(schema, KeywordChecks())
    if trouble or (losses and is_strict):
        what = f" of {few(losses)}" if losses else f": {trouble}"
        raise GrammarError(
            f"no grammar can be made of response_format{what}, so an answer cannot be held to it; "
            f'leave it out, or say "strict": false to go without it',
            "invalid_schema",
            param="response_format",
        )
    return held, losses


def check_promise(one: HeldArguments, is_strict: bool) -> None:
    """Refuse a call that has to come and has to be right, and cannot be held to be.

    Raises:
        GrammarError: so it is.
    """
    if one.trouble:
        what = f" of {few(one.losses)}" if one.losses else f": {one.trouble}"
    elif one.losses and is_strict:
        what = f" of {few(one.losses)}, and the tool is strict"
    else:
        return
    raise GrammarError(
        f"tool_choice wants a call of {one.name!r}, and no grammar can be made{what}; leave that "
        f"out of its parameters, or let the model choose",
        "invalid_schema",
        param="tools",
    )
