"""A dialect: how models of a family write calls of tools, and mark what they think."""

from __future__ import annotations

from dataclasses import dataclass


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
class Dialect:
    """A way of writing answers.

    Attributes:
        name: by which it can be asked for.
        reasoning: marks of what the model thinks; None: its answers have no such part.
        reasoning_key: the field of an answer's message in which the template takes reasoning;
            empty: in none.
    """

    name: str
    reasoning: ReasoningMarks | None = None
    reasoning_key: str = ""
