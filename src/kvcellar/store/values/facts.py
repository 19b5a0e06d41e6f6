"""Facts that come from a file: read as JSON, each held to the type and range that it has to have.

A file with a valid checksum may still say anything: a checksum finds accidents and is no signature.
Whoever reads one asks for every fact by one of these, and uses nothing that was not asked for.
"""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

MOST_INT = (1 << 62) - 1
"""The largest integer that a file may say: SQLite and NumPy hold it, and one more still fits."""

MAX_DEPTH = 160
"""How deep JSON may be nested: no schema of tools and no message needs as much."""


class BadFactError(ValueError):
    """A fact that is missing, of another type, or outside its range."""


def parse_json(value: str, where: str) -> Any:
    """Read JSON, with numbers that are finite and fit, and texts that are Unicode.

    Raises:
        BadFactError: it is none, or is nested deeper than ``MAX_DEPTH``.
    """
    try:
        found = json.loads(value, parse_constant=_no_constant)
    except RecursionError:
        raise BadFactError(f"{where} is nested too deep") from None
    except ValueError as error:
        raise BadFactError(f"{where} is no JSON ({error})") from None
    return plain(found, where)


def plain(value: Any, where: str) -> Any:
    """Return a JSON value as it is, if all of it can be written, compared and sent again.

    Raises:
        BadFactError: a number is not finite or does not fit, a text is not Unicode, or it is nested
            deeper than ``MAX_DEPTH``.
    """
    _walk(value, where, 0)
    return value


def object_of(value: Any, where: str) -> dict[str, Any]:
    """Return a JSON object."""
    if not isinstance(value, dict):
        raise BadFactError(f"{where} has to be an object, not {_kind(value)}")
    return value


def items(value: Any, where: str) -> list[Any]:
    """Return a JSON array."""
    if not isinstance(value, list):
        raise BadFactError(f"{where} has to be an array, not {_kind(value)}")
    return value


def whole(value: Any, where: str, least: int = 0, most: int = MOST_INT) -> int:
    """Return an integer in ``[least, most]``; true and 1.0 are none."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise BadFactError(f"{where} has to be an integer, not {_kind(value)}")
    if not least <= value <= most:
        raise BadFactError(f"{where} has to lie between {least} and {most}")
    return value


def number(value: Any, where: str) -> float:
    """Return a finite number as a float."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise BadFactError(f"{where} has to be a number, not {_kind(value)}")
    if not abs(value) <= MOST_INT:  # also false of NaN
        raise BadFactError(f"{where} has to be finite")
    return float(value)


def text(value: Any, where: str, most_bytes: int | None = None) -> str:
    """Return a text that is Unicode, of at most ``most_bytes`` bytes of UTF-8."""
    if not isinstance(value, str):
        raise BadFactError(f"{where} has to be a text, not {_kind(value)}")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise BadFactError(f"{where} is no valid Unicode") from None
    if most_bytes is not None and size > most_bytes:
        raise BadFactError(f"{where} has {size} bytes, at most {most_bytes} can be")
    return value


def flag(value: Any, where: str) -> bool:
    """Return true or false."""
    if not isinstance(value, bool):
        raise BadFactError(f"{where} has to be true or false, not {_kind(value)}")
    return value


def _walk(value: Any, where: str, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise BadFactError(f"{where} is nested deeper than {MAX_DEPTH}")
    if isinstance(value, str):
        text(value, f"a text in {where}")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise BadFactError(f"a number in {where} is not finite")
    elif isinstance(value, int):
        if abs(value) > MOST_INT:
            raise BadFactError(f"a number in {where} is too large")
    elif isinstance(value, list):
        for part in value:
            _walk(part, where, depth + 1)
    elif isinstance(value, dict):
        for name, part in value.items():
            text(name, f"a name in {where}")
            _walk(part, where, depth + 1)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "true or false", int: "an integer", float: "a number", str: "a text"}
    return names.get(type(value), "an array" if isinstance(value, list) else "an object")
