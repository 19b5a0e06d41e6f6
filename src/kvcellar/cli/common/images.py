"""Pictures of a command: files, read where it runs, and handed on in base64."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from kvcellar.errors import PictureError
from kvcellar.installed import pip_command
from kvcellar.pictures.given import file_of

if TYPE_CHECKING:
    from kvcellar.hosting.pictures import HostLooks
    from kvcellar.models import LoadedModel
    from kvcellar.pictures.picture import Picture


_TEXT_ALONE = ("native", "mlx", "executorch")
"""Backends that read no pictures, whatever the model."""


def read_images(files: Sequence[Path] | None, backend: str | None = None) -> list[str]:
    """Return the files of pictures in base64.

    Args:
        files: their paths; None: there are none.
        backend: that was chosen to run the model; None: none was.

    Raises:
        PictureError: one cannot be read, or is no picture, as far as can be told here; or the
            backend reads none.
    """
    if files and backend in _TEXT_ALONE:
        lacks = find_spec("torch") is None
        raise PictureError(
            f"pictures are read on torch, and the backend {backend} reads text alone; leave "
            f"--backend {backend} out, or choose --backend torch"
            + (f", once it is installed: {pip_command('torch')}" if lacks else "")
        )
    return [base64.b64encode(_looked_at(file)).decode() for file in files or ()]


def _looked_at(file: Path) -> bytes:
    """Return a picture's file, which is one where that can be told: a server may be elsewhere.

    Raises:
        PictureError: it is none.
    """
    data = file_of(file)
    if find_spec("PIL") is not None:
        from kvcellar.pictures.picture import Picture

        try:
            Picture.read(data)
        except PictureError as error:
            raise PictureError(f"{str(file)!r}: {error}") from error
    return data


def eyes_of(model: LoadedModel) -> HostLooks | None:
    """Return what reads pictures for a model of this process; None: it reads text alone."""
    if model.pictures is None:
        return None
    from kvcellar.hosting.pictures import HostLooks
    from kvcellar.pictures.shelf import PictureShelf

    return HostLooks(model.pictures, PictureShelf())


def shelved(model: LoadedModel, eyes: HostLooks | None, images: Sequence[str]) -> list[Picture]:
    """Read pictures that came in base64; return them, at hand for as long as they are held.

    Raises:
        PictureError: one cannot be read, or the model reads text alone.
    """
    if not images:
        return []
    from kvcellar.hosting.given_pictures import reads_text_alone
    from kvcellar.pictures.given import decode_picture

    if eyes is None:
        raise reads_text_alone(model.name, len(images), model.no_pictures)
    return [eyes.shelf.read(decode_picture(one)) for one in images]
