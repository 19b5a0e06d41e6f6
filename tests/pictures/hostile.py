"""Files of pictures as cameras, programs and strangers make them, and what becomes of them."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
from hypothesis import strategies as st
from PIL import Image, ImageCms

PNG = b"\x89PNG\r\n\x1a\n"
TURNED = ("PNG with EXIF and ICC", "JPEG L", "JPEG RGB", "JPEG CMYK", "WEBP RGB", "WEBP RGBA")
"""Those whose camera was held on its side."""


@cache
def pictures() -> dict[str, bytes]:
    """Files of 32 by 24 pixels that are read: every format, and the modes that each has."""
    return dict(_made())


def _made() -> Iterator[tuple[str, bytes]]:
    rgb = Image.fromarray(np.random.default_rng(5).integers(0, 256, (24, 32, 3), np.uint8))
    palette, grey, clear = rgb.convert("P"), rgb.convert("L"), rgb.convert("RGBA")
    clear.putalpha(grey)
    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "x" * 50
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    frames = {"save_all": True, "append_images": [rgb.rotate(90)]}
    for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"):
        image = grey.convert("I").convert(mode) if mode == "I;16" else rgb.convert(mode)
        yield f"PNG {mode}", _file(image, "PNG")
    yield "PNG with EXIF and ICC", _file(rgb, "PNG", exif=exif, icc_profile=profile)
    yield "PNG of frames", _file(rgb, "PNG", **frames)
    yield "PNG P, one clear colour", _file(palette, "PNG", transparency=3)
    yield "PNG P, clear colours", _file(palette, "PNG", transparency=bytes(range(256)))
    yield "PNG L, clear", _file(grey, "PNG", transparency=5)
    yield "PNG RGB, clear", _file(rgb, "PNG", transparency=(1, 2, 3))
    for mode in ("L", "RGB", "CMYK"):
        yield f"JPEG {mode}", _file(rgb.convert(mode), "JPEG", exif=exif, icc_profile=b"junk" * 20)
        yield f"JPEG {mode} progressive", _file(rgb.convert(mode), "JPEG", progressive=True)
    yield "JPEGs of a camera in one file", _file(rgb, "MPO", **frames)
    for mode, image in (("RGB", rgb), ("RGBA", clear)):
        yield f"WEBP {mode}", _file(image, "WEBP", exif=exif, icc_profile=profile)
        yield f"WEBP {mode} lossless", _file(image, "WEBP", lossless=True)
    yield "WEBP of frames", _file(rgb, "WEBP", **frames)
    yield "GIF", _file(palette, "GIF")
    yield "GIF of frames", _file(palette, "GIF", transparency=0, disposal=2, **frames)


def _file(image: Image.Image, form: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


_NUMBERS = [
    b"\xff" * 4,
    b"\x7f" + b"\xff" * 3,
    b"\0" * 4,
    b"\0\0\xff\xff",
    b"\0\1\0\0",
    b"\xff\xff",
]


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A picture's file that is cut off, flipped, overwritten, filled up or put together of two."""
    files = list(pictures().values())
    data = bytearray(draw(st.sampled_from(files)))
    for _ in range(draw(st.integers(1, 4))):
        near = draw(st.booleans())  # what is said of sizes stands at the beginning
        at = draw(st.integers(0, max(0, min(len(data), 96 if near else 4096) - 1)))
        how = draw(st.sampled_from(["cut", "flip", "number", "drop", "fill", "other"]))
        if how == "cut":
            del data[at:]
        elif how == "flip" and data:
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif how == "number":
            number = draw(st.sampled_from(_NUMBERS))
            data[at : at + len(number)] = number
        elif how == "drop":
            del data[at : at + draw(st.integers(1, 20))]
        elif how == "fill":
            data[at:at] = draw(st.binary(min_size=1, max_size=20))
        else:
            other = draw(st.sampled_from(files))
            data[at:] = other[draw(st.integers(0, len(other) - 1)) :]
    return with_sums(bytes(data)) if draw(st.booleans()) else bytes(data)


def with_sums(data: bytes) -> bytes:
    """Return a PNG with the sums that its chunks have to have; others as they are."""
    if not data.startswith(PNG):
        return data
    made, at = PNG, len(PNG)
    while at + 12 <= len(data):
        (n,) = struct.unpack(">I", data[at : at + 4])
        if at + 12 + n > len(data):
            break
        body = data[at + 4 : at + 8 + n]
        made += data[at : at + 4] + body + struct.pack(">I", zlib.crc32(body))
        at += 12 + n
    return made + data[at:]
