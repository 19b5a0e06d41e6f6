"""Text with pictures in it: what a message says, while it is put together of its parts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvcellar.checks import whole
from kvcellar.errors import KVCellarError, PictureError
from kvcellar.pictures.tokens import NAME_DIGITS

PICTURES = "pictures"
"""The key of a message beside ``content``: ``{"name": ..., "at": ...}`` of each picture in it, in
their order, ``at`` the characters of ``content`` before it."""

_NAME = re.compile(f"[0-9a-f]{{{NAME_DIGITS}}}")


def pictures_of(message: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return the pictures of a message in their order: name, and its place in the content.

    Raises:
        PictureError: they are not as they have to be.
    """
    listed, content = message.get(PICTURES), message.get("content") or ""
    if not listed:
        return []
    try:
        if not isinstance(content, str) or not isinstance(listed, Sequence):
            raise TypeError
        found = [(str(one["name"]), whole(one["at"], "at")) for one in listed]
        if not all(_NAME.fullmatch(name) and 0 <= at <= len(content) for name, at in found):
            raise ValueError
    except (TypeError, KeyError, ValueError, KVCellarError) as error:
        raise PictureError(
            "pictures of a message are a list of objects with the name of a picture and at, the "
            "characters of its content, a text, that stand before it"
        ) from error
    return sorted(found, key=lambda one: one[1])


@dataclass(frozen=True, slots=True)
class PicturedText:
    """A text, and the pictures that stand in it.

    Attributes:
        text: without the pictures.
        pictures: name of each, and the characters of ``text`` before it, ascending.
    """

    text: str = ""
    pictures: tuple[tuple[str, int], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.text or self.pictures)

    def __add__(self, behind: PicturedText) -> PicturedText:
        n = len(self.text)
        moved = ((name, at + n) for name, at in behind.pictures)
        return PicturedText(self.text + behind.text, (*self.pictures, *moved))

    def pictures_alone(self) -> PicturedText:
        """Return the pictures without the text."""
        return PicturedText("", tuple((name, 0) for name, _ in self.pictures))

    def fields(self) -> dict[str, Any]:
        """Return the fields of a message that says it."""
        if not self.pictures:
            return {"content": self.text}
        listed = [{"name": name, "at": at} for name, at in self.pictures]
        return {"content": self.text, PICTURES: listed}


def picture_alone(name: str) -> PicturedText:
    """Return a picture without text."""
    return PicturedText("", ((name, 0),))


def of_message(message: Mapping[str, Any]) -> PicturedText:
    """Return what a message says whose content is text, with its pictures."""
    return PicturedText(str(message.get("content") or ""), tuple(pictures_of(message)))


def joined(parts: Iterable[PicturedText], between: str = "\n") -> PicturedText:
    """Join texts with something between two of them; beside a picture there is nothing."""
    found, ends_in_text = PicturedText(), False
    for part in parts:
        starts_in_text = not part.pictures or part.pictures[0][1] > 0
        if ends_in_text and starts_in_text:
            found += PicturedText(between)
        found += part
        ends_in_text = not part.pictures or part.pictures[-1][1] < len(part.text)
    return found


def pieces(message: Mapping[str, Any]) -> list[str | Mapping[str, Any]]:
    """Return what a message says in its order: texts, and what is known of each picture."""
    text, found, start = str(message.get("content") or ""), list[str | Mapping[str, Any]](), 0
    for picture in message.get(PICTURES) or ():
        at = int(picture["at"])
        found += [text[start:at]] if at > start else []
        found.append(picture)
        start = at
    return [*found, text[start:]] if text[start:] or not found else found
