"""All dialects, and which of them a model speaks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from kvcellar.agents import ModelHost
from kvcellar.server.dialects.dialect import Dialect, ReasoningMarks

DIALECTS: Mapping[str, Dialect] = MappingProxyType(
    {
        dialect.name: dialect
        for dialect in (Dialect("hermes", ReasoningMarks(), "reasoning_content"),)
    }
)
"""Every dialect by its name."""

_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


def dialect_of(host: ModelHost) -> Dialect:
    """Return the dialect that a model's answers are in."""
    return choose_dialect(str(getattr(host.tokenizer, "chat_template", None) or ""))


def choose_dialect(template: str, name: str | None = None) -> Dialect:
    """Return the dialect of a chat template.

    Args:
        template: its text; empty for none.
        name: of a dialect, where somebody has chosen one.
    """
    dialect = DIALECTS[name or "hermes"]
    key = next((key for key in _REASONING_KEYS if f".{key}" in template), "")
    marks = ReasoningMarks()
    has_marks = marks.begin in template or marks.end in template
    return replace(dialect, reasoning=marks if has_marks or key else None, reasoning_key=key)
