"""Constraints on an answer, in whichever field a client says them: a schema, or a grammar."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from kvcellar.errors import PromptError
from kvcellar.grammar.form import ResponseFormat
from kvcellar.server.errors import ApiError
from kvcellar.server.schemas.openai import FormFields, JsonFormat
from kvcellar.valid import read_json, valid_json


def form_of(body: FormFields) -> ResponseFormat | None:
    """Return what an answer has to be; None for anything.

    Raises:
        ApiError: 400, two fields say it, or one says nothing that can be.
    """
    found = [form for form in _all_of(body) if form is not None]
    if len(found) > 1:
        raise ApiError(
            400,
            f"{found[0].field} and {found[1].field} both say what the answer has to be; give one",
            "invalid_value",
            param=found[1].field,
        )
    return found[0] if found else None


def _all_of(body: FormFields) -> list[ResponseFormat | None]:
    outputs = body.structured_outputs
    found = [
        _of_format(body.response_format),
        _schema(body.guided_json, "guided_json"),
        _schema(body.json_schema_, "json_schema"),
        _other("regex", body.guided_regex, "guided_regex"),
        _other("regex", body.regex, "regex"),
        _other("choice", body.guided_choice, "guided_choice"),
        _other("grammar", body.guided_grammar, "guided_grammar"),
        _other("grammar", body.grammar, "grammar"),
    ]
    if outputs is not None:
        found += [
            _schema(outputs.json_, "structured_outputs.json"),
            _schema({"type": "object"} if outputs.json_object else None, "structured_outputs"),
            _other("regex", outputs.regex, "structured_outputs.regex"),
            _other("choice", outputs.choice, "structured_outputs.choice"),
            _other("grammar", outputs.grammar, "structured_outputs.grammar"),
        ]
    return found


def _of_format(wanted: JsonFormat | None) -> ResponseFormat | None:
    field = "response_format"
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return ResponseFormat("schema", wanted.object_schema or {"type": "object"}, field)
    if wanted.json_schema is None or wanted.json_schema.json_schema is None:
        raise ApiError(400, f"{field} json_schema comes without a schema", param=field)
    is_strict = wanted.json_schema.strict is not False
    return ResponseFormat("schema", wanted.json_schema.json_schema, field, is_strict)


def _schema(value: Mapping[str, Any] | str | None, field: str) -> ResponseFormat | None:
    if value is None:
        return None
    if isinstance(value, str):
        try:
            value = valid_json(read_json(value))
        except (ValueError, RecursionError, PromptError):
            value = None
        if not isinstance(value, Mapping):
            raise ApiError(400, f"{field} is a text that is no JSON schema", param=field)
    return ResponseFormat("schema", value, field)


def _other(
    kind: Literal["regex", "choice", "grammar"], value: str | list[str] | None, field: str
) -> ResponseFormat | None:
    return None if value is None or value == "" else ResponseFormat(kind, value, field)
