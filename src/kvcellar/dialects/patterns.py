"""From a dialect's literals to the patterns that find them in an answer, as far as it has come.

White space in a literal is as much as the model writes, and so is the space around brackets, colons
and commas. A pattern that matches can match nothing else once more text is there, so an answer is
read the same however it is cut: each ends with a character that it is sure of, or looks for one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

import regex
from regex import Pattern

from kvcellar.dialects.dialect import (
    MARKS,
    CallForm,
    Dialect,
    JsonArguments,
    TaggedArguments,
)

_ATOMS = re.compile(r"\$\w+|\$[<>\[\]]|\s+|[{}\[\]:,]|[^\s{}\[\]:,$]+")
_WORD = rf"""[^\s"'`<>()\[\]{{}}|,:={MARKS}]+"""
_JSON_TEXT = r'(?:[^"\\]|\\.)*'
_HOLES = {
    "$name": f"(?P<name>{_WORD})",
    "$id": f"(?P<id>{_WORD})",
    "$key": rf"(?P<key>[^<>\"\n{MARKS}]+)",
    "$string": "(?P<string>true|false)",
    "$index": r"\d+",
    "$<": "(?P<id>",
    "$>": ")",
    "$[": "(?:",
    "$]": ")?",
}
_QUOTED = {"$name": f"(?P<quoted>{_JSON_TEXT})", "$id": _JSON_TEXT}
_BRACKETS = frozenset("{}[]:,")
_ARGUMENT_KEYS = ('"arguments"', '"parameters"')


@dataclass(frozen=True, slots=True)
class Patterns:
    """Patterns of one model's dialect.

    Attributes:
        begin: finds a block of calls in text, with a line end before it; None: not in text.
        first: matches one at the beginning of an answer; None: as anywhere.
        head: matches what stands before a call's arguments.
        tail: matches what stands behind them; None: nothing does.
        between: matches what stands before the next call of a block; None: there is none.
        end: matches the end of a block; None: it has none.
        thought: finds reasoning that begins; None: not in text.
        first_thought: matches it at the beginning of an answer; None: as anywhere.
        thought_end: finds its end; None: there is none.
        is_object: whether a call is one JSON object, whose keys may come in another order.
    """

    begin: Pattern[str] | None
    first: Pattern[str] | None
    head: Pattern[str]
    tail: Pattern[str] | None
    between: Pattern[str] | None
    end: Pattern[str] | None
    thought: Pattern[str] | None
    first_thought: Pattern[str] | None
    thought_end: Pattern[str] | None
    is_object: bool


@dataclass(frozen=True, slots=True)
class TagPatterns:
    """Patterns of arguments between tags.

    Attributes:
        opening: matches what opens one.
        closing: finds what closes its value, which more tags follow.
        more: matches what follows the last one.
    """

    opening: Pattern[str]
    closing: Pattern[str]
    more: Pattern[str]


@lru_cache(maxsize=64)
def patterns_of(dialect: Dialect) -> Patterns:
    """Compile the patterns of a model's dialect, which has calls in its text."""
    form, marks = dialect.calls, dialect.reasoning
    assert form is not None
    head = f"(?:{'|'.join(_head(dialect, form, head) for head in form.heads)})"
    firsts = [form.begin] if form.is_first else []
    begins = [*([] if form.is_first else [form.begin]), *form.other_begins]
    tail, end = dialect.spelt(form.tail), dialect.spelt(form.end)
    begin = "|".join(loose(dialect.spelt(one)) for one in begins)
    is_marked = marks is not None and dialect.spelt(marks.begin) != marks.begin
    thought = loose(dialect.spelt(marks.begin)) if marks is not None else ""
    return Patterns(
        begin=_compiled(rf"\n?(?:{begin})") if begins else None,
        first=_compiled(rf"\s*{loose(form.begin)}(?={head})") if firsts else None,
        head=_compiled(head),
        tail=_compiled(rf"\s*{loose(tail)}") if tail.strip() else None,
        between=None if form.between is None else _compiled(rf"\s*{loose(form.between)}(?={head})"),
        end=_compiled(rf"\s*{loose(end)}") if end else None,
        thought=_compiled(thought) if is_marked else None,
        first_thought=_compiled(rf"\s*{thought}") if thought and not is_marked else None,
        thought_end=None if marks is None else _compiled(loose(dialect.spelt(marks.end))),
        is_object=isinstance(form.arguments, JsonArguments) and '"$name"' in form.heads[0],
    )


@lru_cache(maxsize=64)
def tag_patterns_of(dialect: Dialect) -> TagPatterns:
    """Compile the patterns of arguments between tags."""
    form = dialect.calls
    assert form is not None and isinstance(form.arguments, TaggedArguments)
    opening, closing = form.arguments.opening, form.arguments.closing
    has_line = opening.endswith("\n")
    first, last = (r"(?:\n|(?=[^\n]))", r"\n?") if has_line else ("", "")
    opens = rf"\s*{loose(dialect.spelt(opening))}"
    behind = rf"\s*{loose(dialect.spelt(form.tail.strip() or form.end))}"
    closes = loose(dialect.spelt(closing.strip()))
    return TagPatterns(
        _compiled(opens + first),
        _compiled(f"{last}{closes}(?={opens}|{behind})"),
        _compiled(behind),
    )


def loose(literal: str) -> str:
    """Write a literal as a pattern that takes other spaces, without those around it."""
    pattern, before, is_apart = "", "", False
    for atom in _ATOMS.findall(literal.strip()):
        if atom.isspace():
            is_apart = True
            continue
        if before and (is_apart or atom in _BRACKETS or before in _BRACKETS):
            pattern += r"\s*"
        is_quoted = before.endswith('"') and atom in _QUOTED
        pattern += _QUOTED[atom] if is_quoted else _escaped(atom)
        before, is_apart = atom, False
    return pattern


def _escaped(atom: str) -> str:
    if atom in _HOLES:
        return _HOLES[atom]
    if atom in _ARGUMENT_KEYS:
        return f"(?:{'|'.join(_ARGUMENT_KEYS)})"
    return re.escape(atom)


def _head(dialect: Dialect, form: CallForm, head: str) -> str:
    ends = ""
    if isinstance(form.arguments, JsonArguments):
        ends = r"\s*(?=\{)"
    elif isinstance(form.arguments, TaggedArguments):
        ends = rf"(?=\s*[<{MARKS}])"
    return rf"\s*{loose(dialect.spelt(head))}{ends}"


def _compiled(pattern: str) -> Pattern[str]:
    return regex.compile(pattern, regex.DOTALL)
