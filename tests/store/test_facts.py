"""Facts of a file: what is of its type and in its range is given as it is, all else is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvcellar.store.values.facts import (
    MAX_DEPTH,
    MOST_INT,
    BadFactError,
    flag,
    items,
    number,
    object_of,
    parse_json,
    plain,
    text,
    whole,
)

KINDS = {
    "null": (None,),
    "true or false": (True, False),
    "an integer": (-MOST_INT, -1, 0, 1, 5, MOST_INT),
    "a number": (0.0, -1.5, 1e9),
    "a text": ("", "x", "ü", "1", "null"),
    "an array": ([], [1]),
    "an object": ({}, {"x": 1}),
}
VALUES = [(kind, value) for kind, values in KINDS.items() for value in values]

READERS: dict[str, tuple[Callable[..., Any], set[str], str]] = {
    "object": (object_of, {"an object"}, "an object"),
    "array": (items, {"an array"}, "an array"),
    "integer": (lambda v, w: whole(v, w, -MOST_INT), {"an integer"}, "an integer"),
    "number": (number, {"an integer", "a number"}, "a number"),
    "text": (text, {"a text"}, "a text"),
    "flag": (flag, {"true or false"}, "true or false"),
}


@pytest.mark.parametrize("what", READERS)
@pytest.mark.parametrize(("kind", "value"), VALUES)
def test_a_fact_of_another_type_is_refused_by_name(what: str, kind: str, value: Any) -> None:
    read, taken, wanted = READERS[what]
    if kind in taken:
        want = float(value) if what == "number" else value
        got = read(value, "x")
        assert got == want and type(got) is type(want)
    else:
        with pytest.raises(BadFactError, match=f"^x has to be {wanted}, not {kind}$"):
            read(value, "x")


@given(st.integers(-3, 8), st.integers(-2, 4), st.integers(-2, 7))
def test_an_integer_lies_in_its_range_or_is_refused(value: int, least: int, most: int) -> None:
    if least <= value <= most:
        assert whole(value, "x", least, most) == value
    else:
        with pytest.raises(BadFactError, match=f"^x has to lie between {least} and {most}$"):
            whole(value, "x", least, most)


def test_facts_end_where_others_could_not_hold_them() -> None:
    assert whole(0, "x") == 0 and whole(MOST_INT, "x") == MOST_INT == 2**62 - 1
    assert number(-MOST_INT, "x") == -(2.0**62)
    for value in (-1, MOST_INT + 1):
        with pytest.raises(BadFactError, match=r"^x has to lie between 0 and 4611686018427387903$"):
            whole(value, "x")
    for odd in (math.inf, -math.inf, math.nan, 1e19, 2 * MOST_INT, 10**400):
        with pytest.raises(BadFactError, match=r"^x has to be finite$"):
            number(odd, "x")
    assert text("üx", "t", 3) == "üx"
    with pytest.raises(BadFactError, match=r"^t has 3 bytes, at most 2 can be$"):
        text("üx", "t", 2)
    with pytest.raises(BadFactError, match=r"^t is no valid Unicode$"):
        text("\ud83d", "t")


GOOD = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-MOST_INT, MOST_INT)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=4),
    lambda one: st.lists(one, max_size=3) | st.dictionaries(st.text(max_size=3), one, max_size=3),
    max_leaves=8,
)
BAD = st.sampled_from([math.nan, math.inf, -math.inf, MOST_INT + 1, -MOST_INT - 1, 9**99, "\ud83d"])


@given(GOOD)
def test_json_is_given_as_it_is(value: Any) -> None:
    assert parse_json(json.dumps(value), "x") == value == plain(value, "x")


@given(GOOD, BAD, st.sampled_from(["in a list", "in an object", "as a name", "alone"]))
def test_one_bad_value_anywhere_in_json_is_refused(good: Any, bad: Any, where: str) -> None:
    if where == "as a name":
        bad = "\ud83d"
    value: Any = {
        "in a list": [good, [bad]],
        "in an object": {"a": good, "b": {"c": bad}},
        "as a name": {"\ud83d": good},
        "alone": bad,
    }[where]
    with pytest.raises(BadFactError, match=r"x is no JSON|in x is"):
        parse_json(json.dumps(value), "x")
    with pytest.raises(BadFactError, match=r"^a (number|text|name) in x is "):
        plain(value, "x")


@pytest.mark.parametrize("ends", [("[", "]"), ('{"a":', "}")])
def test_json_may_be_nested_so_deep_and_no_deeper(ends: tuple[str, str]) -> None:
    def nested(n: int) -> str:
        return ends[0] * n + "1" + ends[1] * n

    parse_json(nested(MAX_DEPTH), "x")
    for n in (MAX_DEPTH + 1, 200_000):
        with pytest.raises(BadFactError, match=r"^x is nested (deeper than 160|too deep)$"):
            parse_json(nested(n), "x")


@pytest.mark.parametrize("said", ["", "{", "[1,]", "NaN", "[Infinity]", "{'a':1}"])
def test_what_is_no_json_is_refused(said: str) -> None:
    with pytest.raises(BadFactError, match=r"^x is no JSON \(.+\)$"):
        parse_json(said, "x")
