"""Pictures that are given to a model beside what is said: read, shelved, and put into a message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvcellar.errors import PictureError
from kvcellar.pictures.given import Given, bytes_of
from kvcellar.pictures.picture import Picture
from kvcellar.pictures.placed_text import PicturedText, of_message, picture_alone

if TYPE_CHECKING:
    from kvcellar.hosting.host import ModelHost


def read_pictures(host: ModelHost, given: Sequence[Given]) -> list[Picture]:
    """Read pictures for a model; they are on its shelf for as long as somebody holds them.

    They are read through, so it is for threads.

    Raises:
        PictureError: one cannot be read, or the model reads text alone; nothing was changed.
    """
    if given and not host.reads_pictures:
        raise reads_text_alone(host.name, len(given), host.no_pictures)
    return [host.shelf.read(bytes_of(one)) for one in given]


def reads_text_alone(model: str, n: int, why: str = "") -> PictureError:
    """Return a refusal of ``n`` pictures by a model that reads none.

    Args:
        model: its name.
        n: pictures that were given.
        why: as ``LoadedModel.no_pictures`` says it; empty: nobody would think that it reads any.
    """
    if why:
        return PictureError(
            f"model {model!r} reads no pictures here: {why}, or leave the {n} "
            f"picture{'s' * (n > 1)} out"
        )
    return PictureError(
        f"model {model!r} reads text alone; leave the {n} picture{'s' * (n > 1)} out, or ask a "
        f"model that reads pictures"
    )


def with_pictures(message: Mapping[str, Any], pictures: Sequence[Picture]) -> dict[str, Any]:
    """Return a message with pictures before its text, behind those that it has.

    Raises:
        PictureError: its content is no text.
    """
    if not pictures:
        return dict(message)
    if not isinstance(message.get("content") or "", str):
        raise PictureError("pictures go before a text, and the message has parts; give its text")
    before = sum((picture_alone(one.name) for one in pictures), PicturedText())
    return {**message, **(before + of_message(message)).fields()}
