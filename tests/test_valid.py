"""Whatever comes in is valid Unicode and JSON afterwards, and the same where it was before."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.errors import PromptError
from kvcellar.valid import MOST_DEPTH, nearest, valid_json, valid_text

ANY_TEXT = st.text(st.one_of(st.characters(), st.sampled_from("\ud83d\ude00é😀")), max_size=12)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), ANY_TEXT),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(ANY_TEXT, inner, max_size=4),
    max_leaves=12,
)


@given(text=ANY_TEXT)
def test_any_text_can_be_encoded_and_valid_text_is_left_alone(text: str) -> None:
    found = valid_text(text)
    found.encode()
    assert valid_text(found) is found
    try:
        text.encode()
    except UnicodeEncodeError:
        assert "\ufffd" in found or "😀" in found
    else:
        assert found is text


@pytest.mark.parametrize(
    ("given_text", "wanted"),
    [
        ("a \ud83d b", "a \ufffd b"),
        ("\ude00\ud83d", "\ufffd\ufffd"),
        ("\ud83d\ude00!", "😀!"),
        ("é", "é"),
    ],
)
def test_half_a_pair_becomes_one_replacement_character(given_text: str, wanted: str) -> None:
    assert valid_text(given_text) == wanted


@given(value=VALUES)
def test_a_value_is_valid_everywhere_in_it(value: object) -> None:
    found = valid_json(value)
    json.dumps(found, ensure_ascii=False).encode()
    if json.loads(json.dumps(value)) == found:
        assert valid_json(found) is found


def test_what_json_has_no_number_for_is_refused_by_its_place() -> None:
    with pytest.raises(PromptError, match=r"tools\.0\.x is inf"):
        valid_json({"tools": [{"x": float("inf")}]})
    with pytest.raises(PromptError, match="nan"):
        valid_json(float("nan"))


def test_a_value_that_is_nested_without_end_is_refused_by_its_place() -> None:
    value: object = 1
    for _ in range(MOST_DEPTH):
        value = [value]
    assert valid_json(value) is value
    for _ in range(100_000):
        value = [value]
    with pytest.raises(PromptError, match=f"more than {MOST_DEPTH} levels"):
        valid_json({"deep": value})
    while isinstance(value, list):  # let go of it level by level
        value = value[0]


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("prot", ["port", "prompt"]),  # a neighbour's place is nearer than two letters
        ("PORT", ["port", "export"]),
        ("smolm2", ["smollm2"]),
        ("llama3", ["llama3.2"]),
        ("xyzzy", []),
        ("", []),
    ],
)
def test_names_that_come_near_are_found_the_nearest_first(name, near):
    assert nearest(name, ["export", "prompt", "port", "top-p", "smollm2", "llama3.2"]) == near
