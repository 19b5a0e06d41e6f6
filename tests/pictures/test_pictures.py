"""Pictures as values: what is read, what is refused, and what two have in common."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from kvcellar.errors import PictureError
from kvcellar.pictures import picture as module
from kvcellar.pictures.picture import Picture
from kvcellar.pictures.shelf import PictureShelf
from tests.pictures.fakes import picture_file


def saved(image: Image.Image, form: str, **more: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **more)
    return file.getvalue()


def pixels(seed: int = 0, height: int = 24, width: int = 32) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


@pytest.mark.parametrize(
    ("form", "media_type", "more"),
    [
        ("PNG", "image/png", {}),
        ("WEBP", "image/webp", {"lossless": True}),
        ("JPEG", "image/jpeg", {}),
        ("GIF", "image/gif", {}),
    ],
)
def test_four_formats_are_read(form: str, media_type: str, more: dict[str, Any]) -> None:
    data = saved(Image.fromarray(pixels()), form, **more)
    found = Picture.read(data)
    assert (found.media_type, found.width, found.height) == (media_type, 32, 24)
    assert found.data == data and len(found.name) == 20
    assert np.array_equal(
        np.asarray(found.pixels()), np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    )


def test_the_same_pixels_are_one_picture_whatever_their_file() -> None:
    image = Image.fromarray(pixels())
    names = {
        Picture.read(saved(image, "PNG")).name,
        Picture.read(saved(image, "PNG", compress_level=0)).name,
        Picture.read(saved(image, "WEBP", lossless=True)).name,
    }
    assert len(names) == 1


@given(st.integers(0, 1), st.integers(0, 23), st.integers(0, 31), st.integers(0, 2))
def test_one_other_pixel_is_another_picture(seed: int, y: int, x: int, c: int) -> None:
    one = pixels(seed)
    other = one.copy()
    other[y, x, c] ^= 1
    names = {Picture.read(saved(Image.fromarray(a), "PNG")).name for a in (one, other)}
    assert len(names) == 2


def test_the_same_pixels_in_another_shape_are_another_picture() -> None:
    flat = pixels().reshape(-1)
    names = {
        Picture.read(saved(Image.fromarray(flat.reshape(h, w, 3)), "PNG")).name
        for h, w in ((24, 32), (32, 24), (12, 64))
    }
    assert len(names) == 3


def test_a_picture_is_looked_at_upright_and_over_white() -> None:
    turned = Image.fromarray(pixels())
    exif = Image.Exif()
    exif[0x0112] = 6
    found = Picture.read(saved(turned, "PNG", exif=exif))
    assert (found.width, found.height) == (24, 32)
    clear = np.dstack([pixels(), np.zeros((24, 32), np.uint8)])
    assert (np.asarray(Picture.read(saved(Image.fromarray(clear), "PNG")).pixels()) == 255).all()


def test_a_picture_of_16_bits_is_seen_as_it_is() -> None:
    grey = np.linspace(0, 65535, 24 * 32).astype(np.uint16).reshape(24, 32)
    found = np.asarray(Picture.read(saved(Image.fromarray(grey), "PNG")).pixels())
    assert np.array_equal(found, np.repeat((grey >> 8).astype(np.uint8)[..., None], 3, 2))


def test_the_first_frame_of_a_gif_is_read() -> None:
    frames = [Image.fromarray(pixels(seed)).quantize(8) for seed in (1, 2)]
    found = Picture.read(saved(frames[0], "GIF", save_all=True, append_images=frames[1:]))
    assert np.array_equal(np.asarray(found.pixels()), np.asarray(frames[0].convert("RGB")))


def bomb(width: int, height: int) -> bytes:
    """A PNG file of a few bytes that says it has so many pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(b"\0" * 1000)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    )


SVG = b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "no PNG"),
        (b"hello", "no PNG"),
        (SVG, "no PNG"),
        (saved(Image.fromarray(pixels()), "BMP"), "no PNG"),
        (saved(Image.fromarray(pixels()), "TIFF"), "no PNG"),
        (saved(Image.fromarray(pixels()), "PNG")[:-40], "damaged"),
        (saved(Image.fromarray(pixels(0, 200, 200)), "JPEG")[:3000], "damaged"),
        (bomb(60_000, 60_000), "pixels are read, make it smaller"),
        (bomb(10_000, 8_000), "10000 by 8000 pixels"),
        (bomb(4000, 4000), "damaged"),
    ],
)
def test_what_is_no_picture_is_refused(data: bytes, said: str) -> None:
    with pytest.raises(PictureError, match=said):
        Picture.read(data)


def test_files_beyond_the_bound_are_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 100)
    with pytest.raises(PictureError, match="at most 100 are read"):
        Picture.read(picture_file())


# The shelf ----------------------------------------------------------------------------------------


def test_a_shelf_keeps_what_fits_and_what_somebody_holds() -> None:
    files = [picture_file(seed) for seed in range(4)]
    shelf = PictureShelf(most_bytes=2 * len(files[0]) + 100)
    held = shelf.add(Picture.read(files[0]))
    names = [held.name, *(shelf.add(Picture.read(file)).name for file in files[1:])]
    assert shelf.get(names[0]) is held
    assert shelf.get(names[3]).data == files[3]
    with pytest.raises(PictureError, match=f"{names[1]} is not here any more"):
        shelf.get(names[1])


def test_a_shelf_finds_what_was_saved() -> None:
    shelf, one = PictureShelf(), Picture.read(picture_file())
    shelf.saved_by({one.name: one.data}.get)
    assert shelf.get(one.name) == one


def test_a_file_that_comes_again_is_not_decoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    shelf, n = PictureShelf(), []
    read = Picture.read

    def counted(data: bytes) -> Picture:
        n.append(data)
        return read(data)

    monkeypatch.setattr(Picture, "read", counted)
    one = shelf.read(picture_file())
    assert shelf.read(picture_file()) is one and len(n) == 1
    assert shelf.read(picture_file(), "a salt of somebody" * 9) is one and len(n) == 2
