"""The pictures of OpenAI's items: where they stand, and where their links go."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from kvcellar.server.answer.media import PICTURES
from kvcellar.server.answer.pictures import SentPicture
from kvcellar.server.schemas.responses import Item, ItemPart, OtherItem

SCREENS = ("computer_screenshot", *PICTURES)
"""Pictures in what comes of tools that are not run here."""


def pictures_of_items(
    items: Sequence[Item | OtherItem], values: Sequence[dict[str, Any]] = ()
) -> Iterator[SentPicture]:
    """Yield the pictures of items.

    Args:
        items: as they are read.
        values: as they are stored, which get the links, too.
    """
    for number, item in enumerate(items):
        stored = values[number] if values else {}
        if isinstance(item, OtherItem):
            output = (item.model_extra or {}).get("output")
            if item.type.endswith("_output"):
                yield from pictures_of_other(output, is_known=bool(values))
            continue
        for field in ("content", "output"):
            parts, kept = getattr(item, field), stored.get(field)
            for i, part in enumerate(parts if isinstance(parts, list) else ()):
                if part.type not in PICTURES:
                    continue
                also = kept[i] if isinstance(kept, list) else {}
                wish = "input_image.detail" if part.detail not in (None, "auto") else None

                def put(link: str, part: ItemPart = part, also: dict[str, Any] = also) -> None:
                    part.image_url = link
                    if also:
                        also["image_url"] = link

                yield SentPicture(part.picture, "input", put, wish, is_known=bool(values))


def pictures_of_other(output: Any, *, is_known: bool = False) -> Iterator[SentPicture]:
    """Yield the pictures in what came of a tool that is not run here, such as a screen."""
    parts = output if isinstance(output, list) else [output]
    for part in parts:
        if isinstance(part, dict) and part.get("type") in SCREENS and part.get("image_url"):
            source = part["image_url"]
            given = source if isinstance(source, str) else None
            put = partial(part.__setitem__, "image_url")
            yield SentPicture(given, "input", put, is_known=is_known)
