"""Texts with pictures in them, against lists of characters and pictures."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvcellar.pictures.placed_text import PicturedText, joined, of_message, picture_alone, pieces

PARTS = st.lists(st.one_of(st.text(max_size=4), st.sampled_from([1, 2, 3])), max_size=8)


def made(parts: list[str | int]) -> PicturedText:
    """A text put together of its parts; numbers are pictures."""
    found = PicturedText()
    for part in parts:
        found += picture_alone(f"{part:020x}") if isinstance(part, int) else PicturedText(part)
    return found


def in_order(said: PicturedText) -> list[str]:
    """Its characters and its pictures in their order."""
    found = []
    for piece in pieces(said.fields()):
        found += [f"picture {piece['name']}"] if not isinstance(piece, str) else list(piece)
    return found


@given(PARTS)
def test_a_picture_stands_where_it_was_put(parts: list[str | int]) -> None:
    want: list[str] = []
    for part in parts:
        want += [f"picture {part:020x}"] if isinstance(part, int) else list(part)
    said = made(parts)
    assert in_order(said) == want
    assert of_message(said.fields()) == said and bool(said) == bool(want)
    assert [at for _, at in said.pictures] == sorted(at for _, at in said.pictures)
    assert said.pictures_alone().pictures == tuple((name, 0) for name, _ in said.pictures)


@given(st.lists(PARTS, max_size=4))
def test_nothing_is_put_beside_a_picture(parts: list[list[str | int]]) -> None:
    said = joined((made(one) for one in parts), "\n")
    assert [name for name, _ in said.pictures] == [
        f"{part:020x}" for one in parts for part in one if isinstance(part, int)
    ]
    texts = ["".join(part for part in one if isinstance(part, str)) for one in parts]
    if not said.pictures:
        assert said.text == "\n".join(texts)
    assert "".join(in_order(said)).replace("\n", "") == "".join(
        "".join(in_order(made(one))) for one in parts
    ).replace("\n", "")


def test_a_message_without_pictures_says_nothing_of_them() -> None:
    assert PicturedText("a").fields() == {"content": "a"}
    both = PicturedText("a") + picture_alone("1") + PicturedText("b")
    assert both.fields() == {"content": "ab", "pictures": [{"name": "1", "at": 1}]}
    assert joined([PicturedText("a"), picture_alone("1"), PicturedText("b")]) == both
    assert joined([PicturedText("a"), PicturedText("b")]).text == "a\nb"
    assert pieces({"content": ""}) == [""] and pieces({"content": None}) == [""]
