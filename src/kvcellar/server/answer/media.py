"""Pictures, sounds and files in messages: who does not read them reads a line in their place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kvcellar.pictures.picture import Picture
from kvcellar.pictures.placed_text import PicturedText, picture_alone

_KINDS = {
    "image": ("image", "image_url", "input_image"),
    "sound": ("audio", "audio_url", "input_audio"),
    "video": ("video", "video_url", "input_video"),
    "file": ("file", "input_file", "document", "container_upload"),
}
THOUGHT = "thought"
_KIND_OF = {part: kind for kind, parts in _KINDS.items() for part in parts}

MEDIA = frozenset(_KIND_OF)
"""Types of the parts of messages that are no text."""


PICTURES = frozenset(_KINDS["image"])
"""Those of pictures."""


class LeftOut(Counter[str]):
    """Counts of what was left out of the messages of one request, by kind.

    Attributes:
        pictures: names of those that were not, by their links.
        held: those of them that are here, for as long as the request is answered.
    """

    def __init__(self) -> None:
        """Leave nothing out yet."""
        super().__init__()
        self.pictures: dict[str, str] = {}
        self.held: list[Picture] = []

    def anew(self) -> LeftOut:
        """Return the same pictures, and that nothing was left out."""
        found = LeftOut()
        found.pictures, found.held = self.pictures, self.held
        return found

    def shown(self, part: str, link: str | None, name: object = None) -> tuple[PicturedText, bool]:
        """Return a part of a type in ``MEDIA`` as it is read, and whether that is a line.

        Args:
            part: its type.
            link: of a picture.
            name: of its file, where it has one.
        """
        known = self.pictures.get(link or "")
        if known is not None and part in PICTURES:
            return picture_alone(known), False
        return PicturedText(self.line(part, name)), True

    def line(self, part: str, name: object = None) -> str:
        """Count a part of a type in ``MEDIA``, and return the line that the model reads for it.

        Args:
            part: its type.
            name: of its file, where it has one.
        """
        kind = _KIND_OF[part]
        self[kind] += 1
        named = f" {name[:200]}" if isinstance(name, str) and name.strip() else ""
        return f"[{kind}{named}: left out, this model reads text alone]"

    def notes(self) -> list[str]:
        """Say what was left out, for the answer."""
        notes = [
            f"{n} {kind}{'s' * (n > 1)} in the messages left out: this model reads text alone; it "
            f"was told so in {'their' if n > 1 else 'its'} place"
            for kind, n in sorted(self.items())
            if kind != THOUGHT
        ]
        n = self[THOUGHT]
        if n:
            which = "a thought was" if n == 1 else f"{n} thoughts were"
            notes.append(f"{which} left out of what the model reads: not signed here as sent")
        return notes


def join_parts(parts: Iterable[tuple[PicturedText, bool]]) -> PicturedText:
    """Join a message's parts; lines that stand for something else stand alone.

    Args:
        parts: each what it says, and whether it is such a line.
    """
    said = PicturedText()
    is_line = False
    for part, is_next_line in parts:
        if (is_line or is_next_line) and said.text and part.text and not said.text.endswith("\n"):
            said += PicturedText("\n")
        said += part
        is_line = is_next_line
    return said
