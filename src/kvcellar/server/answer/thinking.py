"""Wishes for thinking: what a request says of it, in the words of a model's template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvcellar.agents import ModelHost, TemplateReport
from kvcellar.server.errors import ApiError

EFFORTS = ("minimal", "low", "medium", "high", "xhigh", "max")
"""Degrees of thinking, ascending; ``none`` is below them."""

_PLAIN = ("low", "medium", "high")
"""Those that a template takes which writes the word as it is."""

_SWITCHES = ("enable_thinking", "thinking")
"""What templates call whether a model thinks."""


@dataclass(frozen=True, slots=True)
class Thinking:
    """Wishes of a request for how much the model thinks.

    Attributes:
        template_kwargs: what the chat template is given, by its own names.
        is_wanted: whether it thinks; None: as the model does by itself.
        effort: ``none``, or one of ``EFFORTS``; None: as the model does.
        budget: tokens that it may think; None: as many as it likes.
    """

    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    is_wanted: bool | None = None
    effort: str | None = None
    budget: int | None = None


@dataclass(frozen=True, slots=True)
class Wish:
    """Wishes in one model's words.

    Attributes:
        template_kwargs: what its chat template is given.
        budget: tokens that it may think; None: any number.
        notes: what cannot be had, for the answer.
    """

    template_kwargs: dict[str, Any]
    budget: int | None
    notes: Sequence[str]


def wish_of(thinking: Thinking, host: ModelHost, *, has_marks: bool) -> Wish:
    """Put wishes into the words of a model's template.

    Args:
        thinking: the wishes.
        host: the model.
        has_marks: whether its answers mark what it thinks, so that it can be bounded.

    Raises:
        ApiError: 400, ``chat_template_kwargs`` has what the template does not take.
    """
    template = host.template or TemplateReport(())
    takes = template.takes
    thinking = _without_words(thinking, takes)
    effort, is_wanted, budget = thinking.effort, thinking.is_wanted, thinking.budget
    if effort == "none":
        is_wanted = False
    elif effort is not None and is_wanted is None:
        is_wanted = True
    notes: list[str] = []
    kwargs: dict[str, Any] = {}
    switches = [name for name in _SWITCHES if name in takes]
    if is_wanted is not None:
        kwargs.update(dict.fromkeys(switches, is_wanted))
    if is_wanted is False:
        if "reasoning_effort" in takes and "none" in template.texts:
            kwargs["reasoning_effort"] = "none"
        elif not switches:  # what it thinks all the same ends at once
            budget = 0 if has_marks else None
    elif effort is not None:
        kwargs.update(_degree(effort, template, notes))
    if is_wanted and not (has_marks or takes & {*_SWITCHES, "reasoning_effort"}):
        notes.append("the model was asked to think, and its chat template knows no thinking")
    if budget is not None and "thinking_budget" in takes:
        kwargs["thinking_budget"] = budget
    if budget is not None and not has_marks:
        notes.append("thinking has no bound: this model does not mark what it thinks")
        budget = None
    return Wish({**kwargs, **thinking.template_kwargs}, budget, notes)


def only_one(**given: Any) -> Any:
    """Return the value that fields give which mean the same; None where none does.

    Args:
        given: the values, by the names of their fields.

    Raises:
        ApiError: 400, two of them differ.
    """
    said = {name: value for name, value in given.items() if value is not None}
    first = next(iter(said), None)
    for name, value in said.items():
        if first is not None and value != said[first]:
            raise ApiError(
                400,
                f"{first} is {said[first]} and {name}, which means the same, is {value}; give one "
                f"of them",
                "invalid_value",
                param=name,
            )
    return None if first is None else said[first]


def _without_words(thinking: Thinking, takes: frozenset[str]) -> Thinking:
    """Read what is given to a template that does not take it, where it has a meaning without.

    Raises:
        ApiError: 400, it has none.
    """
    given = {k: v for k, v in thinking.template_kwargs.items() if k in takes}
    for name, value in thinking.template_kwargs.items():
        if name in takes or value is None:
            continue
        if name in _SWITCHES and isinstance(value, bool):
            thinking = replace(thinking, is_wanted=value)
        elif name == "reasoning_effort" and value in ("none", *EFFORTS):
            thinking = replace(thinking, effort=value)
        elif name == "thinking_budget" and type(value) is int and value >= 0:
            thinking = replace(thinking, budget=value)
        else:
            raise ApiError(
                400,
                f"the model's chat template takes no argument {name[:64]!r}; it takes "
                f"{', '.join(sorted(takes)) or 'none'}",
                "unsupported_field",
                param="chat_template_kwargs",
            )
    return replace(thinking, template_kwargs=given)


def _degree(effort: str, template: TemplateReport, notes: list[str]) -> dict[str, Any]:
    """Return the argument by which a template takes a degree of thinking, or the nearest it has."""
    if "reasoning_effort" not in template.takes:
        if effort != "medium":  # which asks for nothing
            notes.append(
                f"reasoning effort {effort}: the model's chat template knows no degrees of thinking"
            )
        return {}
    said = [word for word in EFFORTS if word in template.texts]
    if effort in said or (effort in _PLAIN and len(said) < 2):
        return {"reasoning_effort": effort}
    at = EFFORTS.index(effort)
    known = said if len(said) > 1 else _PLAIN
    nearest = min(known, key=lambda word: (abs(EFFORTS.index(word) - at), -EFFORTS.index(word)))
    notes.append(f"reasoning effort {effort}: the model's chat template was given {nearest}")
    return {"reasoning_effort": nearest}
