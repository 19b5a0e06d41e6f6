"""A dialect: how models of a family write calls of tools, and mark what they think.

A dialect is described once, in literals; what reads answers (``patterns.py``, ``parser.py``) and
what holds them (``lark.py``) follow from the description. In a literal, ``$name`` stands for the
tool, ``$key`` for an argument, ``$index`` for the call's number, ``$string`` for whether a value is
a string, ``$id`` for the id of the call; ``$<`` and ``$>`` stand around one of more parts, ``$[``
and ``$]`` around what may be missing, which is read and never written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class JsonArguments:
    """Arguments as a JSON object."""


@dataclass(frozen=True, slots=True)
class TaggedArguments:
    """Arguments between tags, strings as they are and all else as JSON.

    Attributes:
        opening: of one, up to its value.
        closing: behind its value.
        has_words: whether a value that is ``null``, ``true`` or ``false`` is written as Python
            does, as templates have it that write whatever is no list and no object as a text.
    """

    opening: str
    closing: str
    has_words: bool = False


@dataclass(frozen=True, slots=True)
class PythonArguments:
    """Arguments as Python writes them, ``key=value`` with commas."""


@dataclass(frozen=True, slots=True)
class BareArguments:
    """Arguments as ``key:value`` with commas: JSON without quotes around keys.

    Attributes:
        quote: stands on both sides of a string, which has no escapes.
    """

    quote: str


Arguments = JsonArguments | TaggedArguments | PythonArguments | BareArguments


@dataclass(frozen=True, slots=True)
class CallForm:
    """A way of writing calls: blocks, each with one call or several.

    Attributes:
        begin: opens a block.
        heads: what stands before a call's arguments; the first is written, all are read.
        arguments: how they are written.
        tail: behind a call's arguments.
        end: closes a block; empty: its last call does.
        between: stands between the calls of a block; None: a block has one call.
        apart: stands between blocks.
        is_first: whether a block can only be at the beginning of an answer, since ``begin`` alone
            could be text.
        other_begins: other ways to open a block, which are read.
    """

    begin: str
    heads: tuple[str, ...]
    arguments: Arguments
    tail: str
    end: str
    between: str | None = None
    apart: str = ""
    is_first: bool = False
    other_begins: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """Marks around what a model thinks.

    Attributes:
        begin: opens it; a prompt may end with it.
        end: closes it.
    """

    begin: str = "<think>"
    end: str = "</think>"


@dataclass(frozen=True, slots=True)
class MarkToken:
    """A token of a model's vocabulary that a dialect has as a mark.

    Attributes:
        content: how it is spelt.
        token_id: the token.
        is_special: whether text is shown without it.
    """

    content: str
    token_id: int
    is_special: bool


@dataclass(frozen=True, slots=True)
class Dialect:
    """A way of writing answers.

    Attributes:
        name: by which it can be asked for.
        calls: how calls are written; None: in messages of channels (harmony).
        reasoning: marks of what the model thinks; None: its answers have no such part, or a channel
            for it.
        reasoning_key: the field of an answer's message in which the template takes reasoning;
            empty: in none.
        tokens: marks that the model has tokens for. Such a mark is one where the token came, and
            never where text is spelt like it.
    """

    name: str
    calls: CallForm | None = None
    reasoning: ReasoningMarks | None = None
    reasoning_key: str = ""
    tokens: tuple[MarkToken, ...] = ()

    @property
    def has_channels(self) -> bool:
        """True where an answer is a row of messages in channels, as with harmony."""
        return self.calls is None

    @property
    def thinks(self) -> bool:
        """True where an answer may have reasoning."""
        return self.reasoning is not None or self.has_channels

    @property
    def thought(self) -> ReasoningMarks | None:
        """Marks around the thought with which an answer begins; None where there is none."""
        return CHANNEL_OF_THOUGHTS if self.has_channels else self.reasoning

    def marks(self) -> dict[int, str]:
        """Return what stands for each mark's token in the text that is read: one character.

        It is a lone surrogate, which no text has.
        """
        return {token.token_id: mark_of(i) for i, token in enumerate(self.tokens)}

    def spelt(self, text: str) -> str:
        """Return a literal with the characters that stand for tokens."""
        for i, token in enumerate(self.tokens):  # the longest first
            text = text.replace(token.content, mark_of(i))
        return text

    def written(self, text: str, *, is_shown: bool = False) -> str:
        """Return a text with tokens spelt out; ``is_shown``: without those that are special."""
        for i, token in enumerate(self.tokens):
            spelt = "" if is_shown and token.is_special else token.content
            text = text.replace(mark_of(i), spelt)
        return text

    def literals(self) -> list[str]:
        """Return all literals that marks are looked for in."""
        if self.has_channels:
            return list(CHANNEL_MARKS)
        form = self.calls
        assert form is not None
        found = [form.begin, *form.other_begins, *form.heads, form.tail, form.end]
        if isinstance(form.arguments, TaggedArguments):
            found += [form.arguments.opening, form.arguments.closing]
        elif isinstance(form.arguments, BareArguments):
            found.append(form.arguments.quote)
        if self.reasoning is not None:
            found += [self.reasoning.begin, self.reasoning.end]
        return found

    def of_vocabulary(self, added: Mapping[str, tuple[int, bool]]) -> Dialect:
        """Return the dialect of a model.

        Args:
            added: token and whether it is special, of each text that the vocabulary adds.
        """
        said = "\0".join(self.literals())
        found = [
            MarkToken(content, token_id, is_special)
            for content, (token_id, is_special) in added.items()
            if len(content) > 1 and content in said
        ]
        found.sort(key=lambda token: (-len(token.content), token.content))
        return replace(self, tokens=tuple(found[:MOST_MARKS]))


CHANNEL_MARKS = (
    *("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>"),
    "<|return|>",
)
"""Marks of harmony, in which an answer is a row of messages."""

CHANNEL_OF_THOUGHTS = ReasoningMarks("<|channel|>analysis<|message|>", "<|end|>")

MOST_MARKS = 64


def mark_of(number: int) -> str:
    """Return the character that stands for a mark in the text that is read."""
    return chr(0xDC00 + number)


MARKS = f"{mark_of(0)}-{mark_of(MOST_MARKS - 1)}"
"""All such characters, as regular expressions write a range of them."""
