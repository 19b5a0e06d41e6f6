"""Loosens a JSON schema: drops the keywords that no grammar can hold. Knows no library."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

TroubleFn = Callable[[Mapping[str, Any]], str]
"""What keeps a grammar from being made of a schema; nothing where one can be made."""

ANYTHING: dict[str, Any] = {"type": "object"}
"""Any object."""

_MOST_PARTS = 4000
_MOST_DEEP = 64

_TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose value is an object of schemas."""
_LISTED = ("allOf", "anyOf", "oneOf", "prefixItems")
_SAID_ONLY = (
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
    *("$comment", "nullable"),
)
"""Keywords that hold nobody to anything."""
_SINGLE = (
    *("items", "additionalProperties", "additionalItems", "not", "if", "then", "else"),
    *("contains", "propertyNames", "unevaluatedProperties", "unevaluatedItems"),
)


def loosened(schema: Mapping[str, Any], trouble_of: TroubleFn) -> tuple[dict[str, Any], list[str]]:
    """Leave out of a schema what no grammar can be made of, and keep the rest.

    Args:
        schema: any JSON object.
        trouble_of: asked of each keyword by itself.

    Returns:
        A schema that is true of all that ``schema`` is true of, and the places of the keywords that
        it lacks, such as ``properties.tags.uniqueItems``; those that mean nothing are not among
        them. No grammar may be possible even so.
    """
    walk = _Loosening(schema, trouble_of)
    found = walk.of(schema, "", 0)
    return (found if isinstance(found, dict) else dict(ANYTHING)), walk.losses


class _Loosening:
    def __init__(self, root: Mapping[str, Any], trouble_of: TroubleFn) -> None:
        self._root = root
        self._trouble_of = trouble_of
        self._n_parts = 0
        self.losses: list[str] = []

    def of(self, node: Any, path: str, depth: int) -> Any:
        """Return what is left of the schema at ``path``."""
        if isinstance(node, bool):
            return node
        self._n_parts += 1
        if not isinstance(node, Mapping) or depth > _MOST_DEEP or self._n_parts > _MOST_PARTS:
            self.losses.append(path or "the whole")
            return True
        kept: dict[str, Any] = {}
        types = _types(node.get("type"))
        for key, value in node.items():
            where = f"{path}.{key}" if path else key
            if key == "type" and types is not None:
                kept[key] = types
            elif key in _SAID_ONLY:
                kept[key] = value
            elif key == "$ref":
                if self._is_there(value):
                    kept[key] = value
                else:
                    self.losses.append(where)
            elif key == "oneOf" and isinstance(value, list):  # read as anyOf where it has to be
                kept[key], _ = self._inside(key, value, where, depth)
                about = {k: self._root[k] for k in ("$defs", "definitions") if k in self._root}
                if self._trouble_of({**about, key: kept[key]}):
                    self.losses.append(where)
            elif not _says_nothing(key, value):
                inside, stub = self._inside(key, value, where, depth)
                about = {} if types is None or key == "type" else {"type": types}
                if self._trouble_of({**about, key: stub}):
                    self.losses.append(where)
                else:
                    kept[key] = inside
        return kept

    def _inside(self, key: str, value: Any, path: str, depth: int) -> tuple[Any, Any]:
        """Return a keyword's value with its schemas loosened, and with nothing said in these."""
        if key in _NAMED and isinstance(value, Mapping):
            found = {n: self.of(part, f"{path}.{n}", depth + 1) for n, part in value.items()}
            return found, dict.fromkeys(found, True)
        if key in (*_LISTED, "items") and isinstance(value, list):
            parts = [self.of(part, f"{path}.{i}", depth + 1) for i, part in enumerate(value)]
            return parts, [True] * len(parts)
        if key in _SINGLE and isinstance(value, Mapping):
            if self._trouble_of({key: True}):
                return value, True  # it goes as a whole
            return self.of(value, path, depth + 1), True
        return value, value

    def _is_there(self, pointer: Any) -> bool:
        """Return true if a reference leads to a part of this schema."""
        if not isinstance(pointer, str) or not pointer.startswith("#"):
            return False
        here: Any = self._root
        for step in pointer[1:].lstrip("/").split("/") if pointer[1:] else ():
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(here, Mapping) and name in here:
                here = here[name]
            elif isinstance(here, list) and name.isdecimal() and int(name) < len(here):
                here = here[int(name)]
            else:
                return False
        return isinstance(here, Mapping | bool)


def _types(value: Any) -> Any:
    """Types as JSON schema knows them, ``STRING`` as ``string``; None where one is unknown."""
    if isinstance(value, str):
        return value.lower() if value.lower() in _TYPES else None
    if isinstance(value, list) and value and all(isinstance(one, str) for one in value):
        lower = [one.lower() for one in value]
        return lower if all(one in _TYPES for one in lower) else None
    return None


def _says_nothing(key: str, value: Any) -> bool:
    """Return true if a keyword has no meaning with this value."""
    if key == "uniqueItems":
        return value is False
    if key == "propertyNames":  # names are strings
        return value is True or value == {} or value == {"type": "string"}
    if key in ("unevaluatedProperties", "unevaluatedItems"):
        return value is True or value == {}
    return key == "$schema" or (key in ("dependentRequired", "dependentSchemas") and value == {})
