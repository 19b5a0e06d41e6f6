"""Checks of arguments: callers' values as plain ones, one rule per kind of value.

A float, a bool, a text or None where a whole number belongs is refused with an error of ours, also
where Python could make a number of it: ``1.5`` cut to 1 is another token's cell.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from kvcellar.errors import ConfigError, KVCellarError

__all__ = ["flag", "number", "seen", "text", "whole", "wholes"]

_INT = {int}


def whole(
    value: Any,
    what: str,
    error: type[KVCellarError] = ConfigError,
    *,
    least: int | None = None,
    most: int | None = None,
) -> int:
    """Return a whole number as an ``int``: a Python or NumPy integer, or a tensor of one.

    Args:
        value: what was given.
        what: its name, for the message.
        error: what is raised.
        least: the lowest that is taken.
        most: the highest that is taken.

    Raises:
        KVCellarError: ``error``: it is none, or out of bounds.
    """
    if type(value) is not int:
        value = _index(value, what, error)
    if (least is not None and value < least) or (most is not None and value > most):
        raise error(f"{what} must be {_bounds(least, most)}, got {seen(value)}")
    return int(value)


def _index(value: Any, what: str, error: type[KVCellarError]) -> int:
    if not isinstance(value, bool | np.bool_):
        try:
            return operator.index(value)
        except (TypeError, ValueError, RuntimeError):  # of tensors, which say it in their own ways
            pass
    raise error(f"{what} must be a whole number, got {seen(value)}")


def _bounds(least: int | None, most: int | None) -> str:
    if most is None:
        return f"at least {least}"
    return f"at most {most}" if least is None else f"{least} to {most}"


def wholes(values: Any, what: str, error: type[KVCellarError] = ConfigError) -> list[int]:
    """Return whole numbers as a new list of ``int``: of a list, a tuple, a range, an array ...

    Raises:
        KVCellarError: ``error``: it is no sequence, or one of them is no whole number.
    """
    if type(values) is list or type(values) is tuple:
        if not values or set(map(type, values)) == _INT:
            return list(values)
    elif isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind in "iu":
        found: list[int] = values.tolist()
        return found
    if not isinstance(values, str | bytes | bytearray | Mapping):
        try:
            items = list(values)
        except TypeError:
            pass
        else:
            return [whole(item, f"each of {what}", error) for item in items]
    raise error(f"{what} must be a sequence of whole numbers, got {seen(values)}")


def number(value: Any, what: str) -> float:
    """Return a finite real number as it was given.

    Raises:
        ConfigError: it is none, is a bool, or is infinite or NaN.
    """
    if isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool):
        try:
            if math.isfinite(value):
                return cast(float, value)
        except OverflowError:  # a whole number beyond all floats
            pass
    raise ConfigError(f"{what} must be a number, got {seen(value)}")


def flag(value: Any, what: str) -> bool:
    """Return true or false.

    Raises:
        ConfigError: it is neither.
    """
    if not isinstance(value, bool | np.bool_):
        raise ConfigError(f"{what} must be True or False, got {seen(value)}")
    return bool(value)


def text(value: Any, what: str, error: type[KVCellarError] = ConfigError) -> str:
    """Return a text.

    Raises:
        KVCellarError: ``error``: it is none.
    """
    if not isinstance(value, str):
        raise error(f"{what} must be a text, got {seen(value)}")
    return value


def seen(value: Any) -> str:
    """Say what was given, in a few characters, whatever it is."""
    if isinstance(value, int) and abs(value) >= 10**20:
        return f"a number of {value.bit_length()} bits"
    try:
        shown = repr(value)
    except Exception:
        shown = f"a {type(value).__name__}"
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
