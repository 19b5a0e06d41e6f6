"""Pictures in messages, as chat templates take them: parts between texts, or a line in their place.

A message says with ``pictures`` where in its content they stand. While a conversation is made so
that a template takes it, texts are joined and moved: so each picture is a mark in its text until
that is done, and becomes a part then.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from kvcellar.errors import ModelError
from kvcellar.models.seeing import Look

Message = dict[str, Any]

LINE = "[image: left out, this model reads text alone]"
"""What a model reads in place of a picture that it cannot read."""


def names_in(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the pictures in a conversation, in their order."""
    return [str(one["name"]) for message in messages for one in message.get("pictures") or ()]


def marked_pictures(messages: Sequence[Message], mark: str) -> tuple[list[Message], list[str]]:
    """Return messages with a mark in the content for each picture, and the names in their order."""
    return [_put(message, mark) for message in messages], names_in(messages)


def left_out(messages: Sequence[Message]) -> tuple[list[Message], tuple[str, ...]]:
    """Return messages with a line in place of each picture, and what there is to say of it."""
    n = len(names_in(messages))
    notes = (
        f"{n} image{'s' * (n > 1)} in the messages left out: this model reads text alone; it was "
        f"told so in {'their' if n > 1 else 'its'} place",
    )
    return [_put(message, LINE, is_line=True) for message in messages], notes


def _put(message: Message, said: str, *, is_line: bool = False) -> Message:
    """Return a message with a text where each of its pictures stands, and without its pictures."""
    pictures = message.get("pictures")
    if not pictures:
        return message
    content, parts, at = str(message.get("content") or ""), [], 0
    for stop in sorted(min(max(int(one["at"]), 0), len(content)) for one in pictures):
        parts += [content[at:stop], said]
        at = stop
    parts = [part for part in (*parts, content[at:]) if part]
    plain = {key: value for key, value in message.items() if key != "pictures"}
    return {**plain, "content": _lines(parts, said) if is_line else "".join(parts)}


def _lines(parts: Sequence[str], line: str) -> str:
    """Join texts so that each line stands alone."""
    text = ""
    for before, part in zip(("", *parts), parts, strict=False):
        if text and line in (before, part) and not text.endswith("\n") and part[:1] != "\n":
            text += "\n"
        text += part
    return text


def picture_parts(message: Message, mark: str) -> Message:
    """Return a message whose content is in parts, where it has marks of pictures."""
    content = message.get("content")
    if not isinstance(content, str) or mark not in content:
        return message
    parts: list[dict[str, str]] = []
    for i, text in enumerate(content.split(mark)):
        parts += [{"type": "image"}] * (i > 0)
        parts += [{"type": "text", "text": text}] * bool(text)
    return {**message, "content": parts}


def with_looks(text: str, written: str, looks: Sequence[Look], mark: str) -> str:
    """Return a rendered conversation in which the model's own text stands for each picture.

    Args:
        text: as the template writes it.
        written: what it writes for a picture.
        looks: at the pictures, in their order.
        mark: before control tokens that messages spell, which stand for no picture; may be empty.

    Raises:
        ModelError: the template wrote fewer of them than there are, or more.
    """
    left = list(looks)
    pattern = re.compile(f"({mark})?{re.escape(written)}" if mark else f"(){re.escape(written)}")

    def put(found: re.Match[str]) -> str:
        if found[1]:
            return found[0]
        return left.pop(0).text if left else found[0]

    made, n_written = pattern.sub(put, text), sum(not one[1] for one in pattern.finditer(text))
    if n_written != len(looks):
        raise ModelError(
            f"the model's chat template writes {n_written} of the {len(looks)} pictures in these "
            f"messages; put pictures where it reads them, such as into the user's messages"
        )
    return made
