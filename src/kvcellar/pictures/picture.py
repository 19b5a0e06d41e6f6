"""Pictures as values: read from bytes that somebody sent, within bounds, and named by pixels."""

from __future__ import annotations

import io
import warnings
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
"""Pixels of a picture, at most, which is more than 8K has: some 300 MB while it is read."""

_STRIP = 256
"""Rows of pixels that are made bytes at a time."""


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
        for top in range(0, height, _STRIP):
            strip = (0, top, width, min(top + _STRIP, height))
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
    image_module, errors = _pillow()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its own bound is another one
            image = image_module.open(io.BytesIO(data), formats=tuple(FORMATS))
    except image_module.DecompressionBombError as error:
        raise PictureError(
            f"a picture of more pixels than Pillow opens was sent; at most {MOST_PIXELS:,} pixels "
            f"are read, make it smaller"
        ) from error
    except errors as error:
        raise PictureError(
            f"the {len(data):,} bytes that were sent for a picture are no PNG, JPEG, WebP or GIF "
            f"file that can be read; send one of these"
        ) from error
    if not image.width * image.height or image.width * image.height > MOST_PIXELS:
        raise PictureError(
            f"a picture of {image.width} by {image.height} pixels was sent; at most "
            f"{MOST_PIXELS:,} pixels are read, make it smaller"
        )
    return image, FORMATS[image.format]


def _upright(image: Any) -> Any:
    """Decode an image: turned as its camera says, in RGB, over white.

    Raises:
        PictureError: its data are damaged.
    """
    from PIL import ImageOps

    _, errors = _pillow()
    image_module = _pillow()[0]
    try:
        image.seek(0)
        image.load()
        image = ImageOps.exif_transpose(image)
        if image.mode[0] in "IF":  # of more than 8 bits, which Pillow would cut off
            image = image_module.fromarray((np.asarray(image) // 256).astype(np.uint8))
        if image.has_transparency_data:
            clear = image.convert("RGBA")
            image = image_module.new("RGBA", clear.size, "white")
            image.alpha_composite(clear)
        return image.convert("RGB")
    except errors as error:
        raise PictureError(
            f"the picture that was sent is damaged ({type(error).__name__}: {error}); send it again"
        ) from error


def _pillow() -> tuple[Any, tuple[type[BaseException], ...]]:
    """Import Pillow; return its module of images, and what it raises for bad files.

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
    # What its decoders raise for damaged files is of many kinds.
    bad = OSError, SyntaxError, ValueError, EOFError, KeyError, IndexError, TypeError
    return Image, (*bad, OverflowError, MemoryError, Image.DecompressionBombError)
