"""Pictures as they are given: paths, bytes, base64 and data URLs."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.errors import PictureError
from kvcellar.pictures import given as module
from kvcellar.pictures.given import bytes_of, decode_picture, file_of, list_of
from kvcellar.pictures.picture import Picture
from tests.pictures.fakes import picture_file

FILE = picture_file(1)
TEXT = base64.b64encode(FILE).decode()


@pytest.mark.parametrize(
    "text",
    [
        TEXT,
        f"data:image/png;base64,{TEXT}",
        f"DATA:Image/PNG;name=a.png;BASE64,{TEXT}",
        f"data:;base64,{TEXT}",
        f"data:application/octet-stream;base64,{TEXT}",
        f"data:image/gif;base64,{TEXT}",  # what is in it counts
        "data:image/png;base64," + TEXT.replace("+", "%2B").replace("/", "%2F"),
        "\n".join(TEXT[i : i + 76] for i in range(0, len(TEXT), 76)) + "\n",
    ],
)
def test_the_file_is_what_was_encoded(text: str) -> None:
    assert decode_picture(text) == FILE


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "without any bytes"),
        ("data:", "without a type"),
        ("data:image/png,abc", "without base64"),
        ("data:image/svg+xml;base64,PHN2Zy8+", "'image/svg\\+xml'"),
        ("data:text/html;base64,PHN2Zy8+", "'text/html'"),
        ("data:image/png;base64,abc", "no base64"),
        ("ä" * 8, "no base64"),
        ("/etc/passwd!", "no base64"),
    ],
)
def test_what_is_no_file_is_refused(text: str, words: str) -> None:
    with pytest.raises(PictureError, match=words):
        decode_picture(text)


def test_a_text_that_is_too_long_is_refused_before_it_is_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_MOST_TEXT", 100)
    with pytest.raises(PictureError, match="make it smaller"):
        decode_picture("A" * 201)


@given(st.text(max_size=80))
def test_any_text_is_bytes_or_refused(text: str) -> None:
    try:
        assert decode_picture(text)
    except PictureError as error:
        assert len(str(error)) < 400


def test_a_path_bytes_and_a_picture_are_the_same(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(FILE)
    for one in (path, str(path), FILE, bytearray(FILE), Picture.read(FILE)):
        assert bytes_of(one) == FILE
        assert list_of(one) == [one] or isinstance(one, bytearray)
    assert list_of(None) == [] and list_of((path, FILE)) == [path, FILE]
    assert file_of(path) == FILE
    for bad in (tmp_path, tmp_path / "none", "\0", 5):
        with pytest.raises(PictureError, match="cannot be read"):
            bytes_of(bad)  # type: ignore[arg-type]
