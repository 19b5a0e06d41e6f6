"""Kinds of values that a schema takes: strings, and which of them, and what else.

Where values stand between tags, a string is written as it is and all else as JSON, so that what a
text means depends on its schema. The rule is one for grammars, readers and writers: where a value
can be a string or something else, a text that is JSON of something else that the schema takes is
that; every other text is the string that it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

ALL_KINDS = frozenset(("string", "number", "boolean", "null", "object", "array"))
NO_TEXT = ALL_KINDS - {"string"}

_MOST_STEPS = 2000
"""Schemas that are looked at for one question; what is left of a larger one takes anything."""

_MOST_DEPTH = 24
"""Levels of schemas inside of each other that are looked at; a deeper one takes anything."""

_CHOICES = ("anyOf", "oneOf")
_OWN = ("type", "nullable", "enum", "const", "allOf", "$ref", *_CHOICES)


class SchemaKinds:
    """Answers what schemas take, that stand in one whole schema, to which they may refer."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        """Answer for schemas inside of ``root``."""
        self._root = root
        self._n_left = 0

    def narrowed(self, schema: Any, kinds: frozenset[str]) -> dict[str, Any] | None:
        """Return the part of a schema that takes values of some kinds; None: it takes none."""
        self._n_left = _MOST_STEPS
        return self._narrowed(schema, kinds)

    def is_text(self, schema: Any) -> bool:
        """Return true if a schema takes strings alone, so that a value can be told as it comes."""
        return self.narrowed(schema, NO_TEXT) is None and self.takes_text(schema)

    def takes_text(self, schema: Any) -> bool:
        """Return true if a schema takes strings, alone or among others."""
        return self.narrowed(schema, frozenset(("string",))) is not None

    def texts(self, schema: Any) -> list[str] | None:
        """Return the strings that a schema takes where it names them; None: any."""
        part = self.narrowed(schema, frozenset(("string",)))
        return [] if part is None else _named(part)

    def takes(self, schema: Any, value: Any) -> bool:
        """Return true if a schema takes a value, by its kind and by the values that are named.

        What else a schema says (lengths, properties, formats) is not looked at.
        """
        self._n_left = _MOST_STEPS
        return self._takes(schema, value)

    def _narrowed(
        self, schema: Any, kinds: frozenset[str], depth: int = 0
    ) -> dict[str, Any] | None:
        self._n_left -= 1
        if schema is False:
            return None
        if not isinstance(schema, Mapping) or self._n_left < 0 or depth > _MOST_DEPTH:
            return {"type": sorted(kinds)}
        if "$ref" in schema:
            rest = {key: value for key, value in schema.items() if key != "$ref"}
            target = self._target(schema["$ref"])
            return self._narrowed({"allOf": [target, rest]} if rest else target, kinds, depth + 1)
        made = {key: value for key, value in schema.items() if key not in _OWN}
        types = _types_of(schema)
        left = sorted(kinds) if types is None else [one for one in types if _kind(one) in kinds]
        if not left:
            return None
        named = _values_of(schema)
        if named is not None:
            own = [
                one
                for one in named
                if kind_of(one) in kinds and self._takes(schema, one, depth + 1)
            ]
            return {"enum": own} if own else None
        for key in _CHOICES:
            if isinstance(schema.get(key), Sequence):
                parts = [self._narrowed(one, kinds, depth + 1) for one in schema[key]]
                made[key] = [one for one in parts if one is not None]
                if not made[key]:
                    return None
        if isinstance(schema.get("allOf"), Sequence):
            every = [self._narrowed(one, kinds, depth + 1) for one in schema["allOf"]]
            if any(one is None for one in every):
                return None
            if len(every) == 1 and not made and types is None:
                return every[0]
            made["allOf"] = every
        if types is not None or not any(key in made for key in ("allOf", *_CHOICES)):
            made["type"] = left[0] if len(left) == 1 else left
        return made

    def _takes(self, schema: Any, value: Any, depth: int = 0) -> bool:
        self._n_left -= 1
        if not isinstance(schema, Mapping) or self._n_left < 0 or depth > _MOST_DEPTH:
            return schema is not False
        if "$ref" in schema and not self._takes(self._target(schema["$ref"]), value, depth + 1):
            return False
        types = _types_of(schema)
        if types is not None and not any(_is_of(value, one) for one in types):
            return False
        named = _values_of(schema)
        if named is not None and not any(_is_same(value, one) for one in named):
            return False
        for key in _CHOICES:
            some = schema.get(key)
            if isinstance(some, Sequence) and not any(
                self._takes(one, value, depth + 1) for one in some
            ):
                return False
        every = schema.get("allOf")
        return not isinstance(every, Sequence) or all(
            self._takes(one, value, depth + 1) for one in every
        )

    def _target(self, reference: Any) -> Any:
        """Return what a reference names; one that names nothing here takes anything."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return True
        found: Any = self._root
        for part in reference[1:].split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, Mapping) or key not in found:
                return True
            found = found[key]
        return found


def kind_of(value: Any) -> str:
    """Return the kind of a value of JSON."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "object" if isinstance(value, Mapping) else "array"


def _kind(type_name: str) -> str:
    return "number" if type_name == "integer" else type_name


def _types_of(schema: Mapping[str, Any]) -> list[str] | None:
    """Return the types that a schema names; None where it names none."""
    said = schema.get("type")
    found = [said] if isinstance(said, str) else said
    if not isinstance(found, list):
        return None
    types = [one.lower() for one in found if isinstance(one, str)]
    return [*types, "null"] if schema.get("nullable") is True else types


def _values_of(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return the values that a schema names; None where it names none."""
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def _is_of(value: Any, type_name: str) -> bool:
    if type_name == "integer":
        return kind_of(value) == "number" and (isinstance(value, int) or value.is_integer())
    return kind_of(value) == type_name


def _is_same(a: Any, b: Any) -> bool:
    return kind_of(a) == kind_of(b) and bool(a == b)


def _named(schema: Mapping[str, Any]) -> list[str] | None:
    """Return all strings that a schema of strings names; None where any may come."""
    if "enum" in schema:
        return list(schema["enum"])
    for key in _CHOICES:
        if key in schema:
            parts = [_named(one) for one in schema[key]]
            if all(part is not None for part in parts):
                return list(dict.fromkeys(text for part in parts for text in part or ()))
    named = [one for one in map(_named, schema.get("allOf", ())) if one is not None]
    return [text for text in named[0] if all(text in one for one in named)] if named else None
