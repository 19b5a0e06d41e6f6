"""Dialects of models: how an answer marks its reasoning and its calls of tools, and how it is read.

Imports nothing but checks of text; models, engine and agents read answers by it.

Start in ``dialect.py``, which says what a dialect is, then ``formats.py``, which has all of them;
``known.py`` finds a model's. ``parser.py`` reads answers, ``lark.py`` holds them, and
``messages.py`` makes messages of them.
"""

from kvcellar.dialects.dialect import Dialect, ReasoningMarks
from kvcellar.dialects.known import DIALECTS, choose_dialect, dialect_for
from kvcellar.dialects.parser import AnswerParser
from kvcellar.dialects.parts import Call, CallPart, Part, ReasoningPart, TextPart, is_whole

__all__ = [
    "DIALECTS",
    "AnswerParser",
    "Call",
    "CallPart",
    "Dialect",
    "Part",
    "ReasoningMarks",
    "ReasoningPart",
    "TextPart",
    "choose_dialect",
    "dialect_for",
    "is_whole",
]
