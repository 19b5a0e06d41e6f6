"""Pictures, sounds and files in messages: a text model reads a line in their place."""

from __future__ import annotations

from collections import Counter

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


class LeftOut(Counter[str]):
    """Counts of what was left out of the messages of one request, by kind."""

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


def join_parts(parts: list[tuple[str, bool]]) -> str:
    """Join the texts of a message's parts; lines that stand for something else stand alone.

    Args:
        parts: each a text, and whether it is such a line.
    """
    said = ""
    is_line = False
    for text, is_next_line in parts:
        if (is_line or is_next_line) and said and text and not said.endswith("\n"):
            said += "\n"
        said += text
        is_line = is_next_line
    return said
