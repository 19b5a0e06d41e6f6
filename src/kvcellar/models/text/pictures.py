"""Pictures in messages, as chat templates take them: parts between texts, or text in their place.

A message says with ``pictures`` where in its content they stand. While a conversation is made so
that a template takes it, texts are joined and moved: so each picture is a mark in its text until
that is done, with its number, and becomes a part then, or what stands for a picture in text.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvcellar.errors import ModelError
from kvcellar.models.seeing import Look
from kvcellar.pictures.placed_text import PICTURES, pictures_of

Message = dict[str, Any]

LINE = "[image: left out, this model reads text alone]"
"""Line that a model without pictures reads in place of one."""


_BELOW = "[image: shown below]"
"""Stands in the result of a tool for a picture that follows it."""


def names_in(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the pictures in a conversation, in their order.

    Raises:
        PictureError: ``pictures`` of a message are not as they have to be.
    """
    return [name for message in messages for name, _ in pictures_of(message)]


def marked_pictures(messages: Sequence[Message], mark: str) -> list[Message]:
    """Return messages with a mark in the content for each picture, and its number."""
    numbers = itertools.count()
    return [_put(message, lambda: f"{mark}{next(numbers)}{mark}") for message in messages]


def left_out(messages: Sequence[Message]) -> tuple[list[Message], tuple[str, ...]]:
    """Return messages with a line in place of each picture, and what there is to say of it."""
    n = len(names_in(messages))
    notes = (
        f"{n} image{'s' * (n > 1)} in the messages left out: this model reads text alone; it was "
        f"told so in {'their' if n > 1 else 'its'} place",
    )
    return [_put(message, lambda: LINE, _lines) for message in messages], notes


def _put(
    message: Message, say: Callable[[], str], join: Callable[[Sequence[str]], str] = "".join
) -> Message:
    """Return a message with a text where each of its pictures stands, and without its pictures."""
    placed = pictures_of(message)
    if not placed:
        return message
    content, parts, at = str(message.get("content") or ""), [], 0
    for _, stop in placed:
        parts += [content[at:stop], say()]
        at = stop
    parts = [part for part in (*parts, content[at:]) if part]
    plain = {key: value for key, value in message.items() if key != PICTURES}
    return {**plain, "content": join(parts)}


def _lines(parts: Sequence[str]) -> str:
    """Join texts so that what stands for a picture is a line of its own."""
    text = ""
    for before, part in zip(("", *parts), parts, strict=False):
        if text and LINE in (before, part) and not text.endswith("\n") and part[:1] != "\n":
            text += "\n"
        text += part
    return text


def behind_results(messages: Sequence[Message], mark: str) -> list[Message]:
    """Return messages with the pictures of tools' results in a message of the user behind these.

    For a template that writes results as JSON, or leaves pictures out there: a line stands where
    each of them was.

    Args:
        messages: with a mark in the content for each picture, and its number.
        mark: of pictures.
    """
    found: list[Message] = []
    held: list[str] = []
    for message in messages:
        content = message.get("content")
        if message.get("role") != "tool" and held:
            found.append({"role": "user", "content": "".join(held)})
            held = []
        if message.get("role") == "tool" and isinstance(content, str) and mark in content:
            pieces = content.split(mark)
            held += [f"{mark}{number}{mark}" for number in pieces[1::2]]
            pieces[1::2] = [_BELOW] * len(pieces[1::2])
            message = {**message, "content": "".join(pieces)}
        found.append(message)
    return [*found, {"role": "user", "content": "".join(held)}] if held else found


def picture_parts(
    messages: Sequence[Message], mark: str, order: list[int], in_text: str = ""
) -> list[Message]:
    """Return messages whose content is in parts where it has marks of pictures.

    Args:
        messages: as a template takes them.
        mark: of pictures; empty: there are none.
        order: is made the numbers of the pictures, in the order in which they stand now.
        in_text: stands in the text for each of them, for a template that writes text alone; empty:
            a part does.
    """
    order.clear()
    if not mark:
        return list(messages)
    return [_in_parts(message, mark, order, in_text) for message in messages]


def _in_parts(message: Message, mark: str, order: list[int], in_text: str) -> Message:
    content = message.get("content")
    if not isinstance(content, str) or mark not in content:
        return message
    pieces = content.split(mark)
    order += [int(number) for number in pieces[1::2]]
    if in_text:
        pieces[1::2] = [in_text] * len(pieces[1::2])
        return {**message, "content": "".join(pieces)}
    parts: list[dict[str, str]] = []
    for i, piece in enumerate(pieces):
        if i % 2:
            parts.append({"type": "image"})
        elif piece:
            parts.append({"type": "text", "text": piece})
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
            f"the model's chat template writes {n_written} of {len(looks)} pictures in these "
            f"messages; put them where it reads them: into the user's messages, also behind the "
            f"result of a tool that made them"
        )
    return made
