"""Pictures as people and clients give them: files, bytes, base64 and data URLs."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote_to_bytes

from kvcellar.errors import PictureError
from kvcellar.pictures.picture import FORMATS, MOST_BYTES, Picture

Given = str | Path | bytes | Picture
"""A picture: the path of its file, the file's bytes, or what was read already."""

_MOST_TEXT = MOST_BYTES * 4 // 3 + 4
_DATA_URL = re.compile(r"data:([^,;]*)((?:;[^,;]*)*),", re.IGNORECASE)
_UNSAID = ("", "application/octet-stream", "binary/octet-stream", "image/jpg", "image/*")
"""Media types that say nothing, or are said wrongly by many."""


def bytes_of(given: Given) -> bytes:
    """Return the file of a picture.

    Raises:
        PictureError: it cannot be read.
    """
    if isinstance(given, Picture):
        return given.data
    return bytes(given) if isinstance(given, bytes | bytearray | memoryview) else file_of(given)


def file_of(path: str | Path) -> bytes:
    """Return the bytes of a picture's file.

    Raises:
        PictureError: it cannot be read, or is too large for a picture.
    """
    if str(path).startswith(("http:/", "https:/")):
        raise PictureError(f"{str(path)[:200]!r} is an address; give the file of a picture")
    try:
        with Path(path).expanduser().open("rb") as file:
            return file.read(MOST_BYTES + 1)
    except (OSError, ValueError, TypeError) as error:
        said = getattr(error, "strerror", None) or error
        raise PictureError(f"the picture {str(path)[:200]!r} cannot be read: {said}") from error


def decode_picture(text: str) -> bytes:
    """Return the bytes of a file that came as a data URL, or as base64 alone.

    Raises:
        PictureError: it is neither, or says that it is no PNG, JPEG, WebP or GIF.
    """
    text = text.strip()
    head = _DATA_URL.match(text[:256])
    body = text[head.end() :] if head else text
    if head is not None:
        media_type, more = head[1].strip().lower(), head[2].lower().replace(" ", "")
        if media_type not in (*FORMATS.values(), *_UNSAID):
            raise PictureError(
                f"a picture of type {media_type[:60]!r} was sent, and "
                f"{', '.join(FORMATS.values())} are read; send one of these"
            )
        if not more.endswith(";base64"):
            raise PictureError("a picture came in a data URL without base64; send it in base64")
    elif text[:5].lower() == "data:":
        raise PictureError(
            "a picture came in a data URL without a type and base64; send data:image/png;base64,..."
        )
    elif "://" in text[:64]:
        raise PictureError(
            f"a picture came as {text[:60]!r}, which is no address that is fetched; send its file "
            f"in base64"
        )
    if len(body) > 2 * _MOST_TEXT:  # not even without its line ends
        raise PictureError(f"a picture has more than {MOST_BYTES:,} bytes; make it smaller")
    if "%" in body:
        body = unquote_to_bytes(body).decode("latin-1")
    try:
        data = base64.b64decode("".join(body.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise PictureError(
            f"a picture came as {len(body):,} characters that are no base64 ({error}); send its "
            f"file in base64"
        ) from error
    if not data:
        raise PictureError("a picture came without any bytes; send its file in base64")
    return data


def list_of(images: Sequence[Given] | Given | None) -> list[Given]:
    """Return pictures as a list, of which one may stand for itself."""
    if images is None:
        return []
    return [images] if isinstance(images, str | Path | bytes | Picture) else list(images)
