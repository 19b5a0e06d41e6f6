"""Pictures of a command: files, read where it runs, and handed on in base64."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path

from kvcellar.pictures.given import file_of


def read_images(files: Sequence[Path] | None) -> list[str]:
    """Return the files of pictures in base64; what is in them whoever reads them looks at.

    Raises:
        PictureError: one cannot be read.
    """
    return [base64.b64encode(file_of(file)).decode() for file in files or ()]
