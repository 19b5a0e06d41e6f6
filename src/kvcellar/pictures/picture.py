"""Pictures as values: read from bytes that somebody sent, within bounds, and named by pixels."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np

from kvcellar.errors import PictureError
from kvcellar.installed import pip_command
from kvcellar.pictures.tokens import NAME_DIGITS

FORMATS = {
    "PNG": "image/png",
    "JPEG": "image/jpeg",
    "WEBP": "image/webp",
    "GIF": "image/gif",
}
"""Formats that are read, by Pillow's names, and their media types."""

MOST_BYTES = 32 << 20
"""Bytes of a picture's file, at most."""

MOST_PIXELS = 32 << 20
"""Pixels of a picture, at most, which is more than 8K has: some 300 MB while it is read,
and 500 of a WebP."""

_STRIP = 1 << 20
"""Pixels that are made bytes, or laid over white, at a time."""

_ORIENTATION = 0x0112
"""Where EXIF says how the camera was held."""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Picture:
    """A picture that somebody sent. Never changes; equal to another of the same pixels.

    Attributes:
        name: 20 hexadecimal digits, of a digest of its size and pixels.
        data: its file as it was sent.
        media_type: such as ``image/png``.
        width: in pixels, as it is looked at.
        height: in pixels.
    """

    name: str
    data: bytes = field(compare=False, repr=False)
    media_type: str = field(compare=False)
    width: int = field(compare=False)
    height: int = field(compare=False)

    @classmethod
    def read(cls, data: bytes) -> Picture:
        """Read a PNG, JPEG, WebP or GIF file (its first frame) and name it by its pixels.

        Its size is looked at before anything is decoded.

        Raises:
            PictureError: it is none of these, is damaged, or has too many bytes or pixels.
        """
        if len(data) > MOST_BYTES:
            raise PictureError(
                f"a picture of {len(data):,} bytes was sent; at most {MOST_BYTES:,} are read, "
                f"make it smaller"
            )
        image, media_type = _opened(data)
        pixels = _upright(image)
        width, height = pixels.size
        size = f"{width}x{height}".encode()
        digest = blake2b(digest_size=16, key=size, person=b"picture")
        for strip in _strips(pixels):
            digest.update(pixels.crop(strip).tobytes())
        return cls(digest.hexdigest()[:NAME_DIGITS], data, media_type, width, height)

    def pixels(self) -> Any:
        """Return its pixels as an image of Pillow in RGB, upright, over white where it is clear."""
        return _upright(_opened(self.data)[0])

    def as_png(self) -> bytes:
        """Return its pixels as a PNG file, without what else its own file says."""
        file = io.BytesIO()
        self.pixels().save(file, "PNG", compress_level=1)
        return file.getvalue()


def _opened(data: bytes) -> tuple[Any, str]:
    """Look at a file's header; return an image of Pillow that is not decoded, and its type.

    Raises:
        PictureError: it is no picture, or has too many pixels.
    """
    image_module = _pillow()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its own bound is another one
            image = image_module.open(io.BytesIO(data), formats=tuple(FORMATS))
    except image_module.DecompressionBombError as error:
        raise PictureError(
            f"a picture of more pixels than Pillow opens was sent; at most {MOST_PIXELS:,} pixels "
            f"are read, make it smaller"
        ) from error
    except Exception as error:  # what it raises for bad files is of any kind
        raise PictureError(
            f"the {len(data):,} bytes that were sent for a picture are no PNG, JPEG, WebP or GIF "
            f"file that can be read; send one of these"
        ) from error
    if not image.width * image.height or image.width * image.height > MOST_PIXELS:
        raise PictureError(
            f"a picture of {image.width} by {image.height} pixels was sent; at most "
            f"{MOST_PIXELS:,} pixels are read, make it smaller"
        )
    return image, FORMATS.get(image.format, "image/jpeg")  # cameras put several JPEGs into one


def _upright(image: Any) -> Any:
    """Decode an image: turned as its camera says, in RGB, over white.

    Raises:
        PictureError: its data are damaged.
    """
    image_module = _pillow()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what stands beside its pixels
            image.seek(0)
            image.load()
            image = _turned(image)
            if image.mode[0] in "IF":  # of more than 8 bits, which Pillow would cut off
                image = image_module.fromarray((np.asarray(image) // 256).astype(np.uint8))
            if image.has_transparency_data:
                return _over_white(image)
            return image if image.mode == "RGB" else image.convert("RGB")
    except Exception as error:  # its decoders raise all kinds
        raise PictureError(
            f"the picture that was sent is damaged ({type(error).__name__}: {str(error)[:200]}); "
            f"send it again"
        ) from error


def _turned(image: Any) -> Any:
    """Turn a decoded image as its camera held it; one that says nothing readable stays."""
    turns = _pillow().Transpose
    how = {
        2: turns.FLIP_LEFT_RIGHT,
        3: turns.ROTATE_180,
        4: turns.FLIP_TOP_BOTTOM,
        5: turns.TRANSPOSE,
        6: turns.ROTATE_270,
        7: turns.TRANSVERSE,
        8: turns.ROTATE_90,
    }
    try:
        turn = how.get(image.getexif().get(_ORIENTATION))
    except Exception:  # damaged beside its pixels
        return image
    return image if turn is None else image.transpose(turn)


def _over_white(image: Any) -> Any:
    """Return an image with clear places in RGB over white: strip by strip, in little memory."""
    image_module = _pillow()
    flat = image_module.new("RGB", image.size)
    for strip in _strips(image):
        part = image.crop(strip).convert("RGBA")
        white = image_module.new("RGBA", part.size, "white")
        white.alpha_composite(part)
        flat.paste(white.convert("RGB"), strip[:2])
    return flat


def _strips(image: Any) -> Iterator[tuple[int, int, int, int]]:
    """Yield boxes of an image from its top to its bottom, as wide as it."""
    n = max(1, _STRIP // image.width)
    for top in range(0, image.height, n):
        yield 0, top, image.width, min(top + n, image.height)


def _pillow() -> Any:
    """Import Pillow; return its module of images.

    Raises:
        PictureError: it is not installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise PictureError(
            f"pictures are read by Pillow, which is not installed; install it with: "
            f"{pip_command('torch')}"
        ) from error
    return Image
