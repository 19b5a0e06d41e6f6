"""Reads chat templates without rendering a conversation: which arguments one takes beside it."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from functools import lru_cache
from typing import Any

from kvcellar.errors import ModelError, PromptError, TemplateLimitError
from kvcellar.models.controls import is_rendered_by_transformers
from kvcellar.models.fitting import reads_thoughts
from kvcellar.models.rendering import ask_renderer

_GIVEN = {"messages", "tools", "documents", "conversations", "chat_template"} | {
    "add_generation_prompt",
    "continue_final_message",
    "return_assistant_tokens_mask",
}
"""Variables that a conversation gives to its template, and no request by another name."""


def template_kwargs_of(tokenizer: Any) -> frozenset[str]:
    """Return the names of the arguments that a chat template takes beside the conversation.

    Such as ``enable_thinking``; empty without a template, or where it is not Jinja.
    """
    found = [_variables(template) for template in _templates_of(tokenizer)]
    special: set[str] = set(tokenizer.special_tokens_map) if found else set()
    return frozenset(set().union(*found) - _GIVEN - special - {""})


def check_template_kwargs(tokenizer: Any, names: Collection[str]) -> None:
    """Make sure that a chat template takes arguments of some names.

    Raises:
        PromptError: there is one that it does not take.
    """
    known = template_kwargs_of(tokenizer) if names else frozenset()
    for name in names:
        if name not in known:
            raise PromptError(
                f"the model's chat template takes no argument {name[:64]!r}; it takes "
                f"{', '.join(sorted(known)) or 'none'}"
            )


def texts_of(tokenizer: Any) -> frozenset[str]:
    """Return the literal texts in a chat template, such as values that it compares with."""
    found = (_asked("literals", template) for template in _templates_of(tokenizer))
    return frozenset().union(*found)


def reads_reasoning(tokenizer: Any) -> bool:
    """Return true if a chat template reads the reasoning of a message apart from its content."""
    templates = _templates_of(tokenizer)
    special = tokenizer.special_tokens_map.items() if templates else ()
    words = tuple((name, word) for name, word in special if isinstance(word, str))
    with contextlib.suppress(TemplateLimitError):
        return any(reads_thoughts(template, words) for template in templates)
    return False


def _templates_of(tokenizer: Any) -> list[str]:
    if not is_rendered_by_transformers(tokenizer):
        return []
    template = tokenizer.chat_template
    every = template.values() if isinstance(template, dict) else [template]
    return [one for one in every if isinstance(one, str)]


@lru_cache(maxsize=64)
def _variables(template: str) -> frozenset[str]:
    return frozenset(_asked("variables", template))


def _asked(what: str, template: str) -> list[str]:
    try:
        return ask_renderer({what: template}).split("\0")
    except ModelError:  # it will not render either, and say why
        return []
