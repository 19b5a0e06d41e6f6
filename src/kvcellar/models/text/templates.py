"""Reads chat templates without rendering a conversation: which arguments one takes beside it."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

from kvcellar.errors import ModelError, PromptError, TemplateLimitError
from kvcellar.models.text.controls import is_rendered_here
from kvcellar.models.text.fitting import reads_thoughts
from kvcellar.models.text.rendering import ask_renderer

DEFAULT = "default"
TOOL_USE = "tool_use"
"""Names of chat templates, where a model has several."""

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


def templates_of(tokenizer: Any) -> dict[str, str]:
    """Return a tokenizer's chat templates by name: ``default`` first, and others such as tool_use.

    What has only one template has it as ``default``; what has none, none.
    """
    given = getattr(tokenizer, "chat_template", None) or {}
    named = given if isinstance(given, dict) else {DEFAULT: given}
    found = {name: text for name, text in named.items() if isinstance(text, str)}
    return {name: found[name] for name in sorted(found, key=lambda name: name != DEFAULT)}


def text_of_templates(tokenizer: Any) -> str:
    """Return the text of all of a tokenizer's chat templates; empty: it has none."""
    return "\n".join(templates_of(tokenizer).values())


def template_for(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None
) -> str:
    """Return the template that a conversation is written by.

    That is ``tool_use`` where there are tools, as with transformers, or calls that ``default``
    would leave out.

    Raises:
        ValueError: none of several templates is for it.
    """
    named = templates_of(tokenizer)
    has_calls = any(message.get("tool_calls") for message in messages)
    is_left_out = has_calls and "tool_calls" not in named.get(DEFAULT, "")
    if TOOL_USE in named and is_left_out:
        return named[TOOL_USE]
    return str(tokenizer.get_chat_template(None, tools))


def _templates_of(tokenizer: Any) -> list[str]:
    if not is_rendered_here(tokenizer):
        return []
    return list(templates_of(tokenizer).values())


@lru_cache(maxsize=64)
def _variables(template: str) -> frozenset[str]:
    return frozenset(_asked("variables", template))


def _asked(what: str, template: str) -> list[str]:
    try:
        return ask_renderer({what: template}).split("\0")
    except ModelError:  # it will not render either, and say why
        return []
