"""Wishes for thinking, in the words of templates that have few, many or none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvcellar.agents import check_template
from kvcellar.server.answer.thinking import Thinking, wish_of
from kvcellar.server.errors import ApiError
from tests.server.scripted import chat_tokenizer

SWITCH = "{{ enable_thinking }}"
OTHER_SWITCH = "{{ thinking }}"
WRITTEN = "{{ reasoning_effort if reasoning_effort is defined else 'medium' }}"
TWO = "{% if reasoning_effort == 'none' or reasoning_effort == 'high' %}{% endif %}"
MAX = "{% if reasoning_effort == 'max' or reasoning_effort == 'high' %}{% endif %}{{ thinking }}"
BUDGET = "{{ thinking_budget }}"
PLAIN = "{{ messages }}"


def wish(template: str, has_marks: bool = True, **wishes: Any) -> Any:
    tokenizer = chat_tokenizer(template)
    host: Any = SimpleNamespace(tokenizer=tokenizer, template=check_template(tokenizer))
    return wish_of(Thinking(**wishes), host, has_marks=has_marks)


@pytest.mark.parametrize(
    ("template", "wishes", "given", "budget", "n_notes"),
    [
        (SWITCH, {}, {}, None, 0),
        (SWITCH, {"effort": "none"}, {"enable_thinking": False}, None, 0),
        (OTHER_SWITCH, {"is_wanted": False}, {"thinking": False}, None, 0),
        (SWITCH, {"effort": "medium"}, {"enable_thinking": True}, None, 0),
        (SWITCH, {"effort": "low"}, {"enable_thinking": True}, None, 1),
        (WRITTEN, {"effort": "low"}, {"reasoning_effort": "low"}, None, 0),
        (WRITTEN, {"effort": "minimal"}, {"reasoning_effort": "low"}, None, 1),
        (WRITTEN, {"effort": "max"}, {"reasoning_effort": "high"}, None, 1),
        (WRITTEN, {"effort": "none"}, {}, 0, 0),
        (TWO, {"effort": "none"}, {"reasoning_effort": "none"}, None, 0),
        (MAX, {"effort": "max"}, {"reasoning_effort": "max", "thinking": True}, None, 0),
        (MAX, {"effort": "low"}, {"reasoning_effort": "high", "thinking": True}, None, 1),
        (BUDGET, {"budget": 9}, {"thinking_budget": 9}, 9, 0),
        (PLAIN, {"is_wanted": False}, {}, 0, 0),
        (PLAIN, {"template_kwargs": {"enable_thinking": False}}, {}, 0, 0),
        (PLAIN, {"template_kwargs": {"reasoning_effort": "high"}}, {}, None, 1),
        (PLAIN, {"template_kwargs": {"thinking_budget": 5}}, {}, 5, 0),
        (
            SWITCH,
            {"is_wanted": True, "template_kwargs": {"enable_thinking": False}},
            {"enable_thinking": False},
            None,
            0,
        ),
    ],
)
def test_a_wish_becomes_what_the_template_takes(template, wishes, given, budget, n_notes):
    found = wish(template, **wishes)
    assert (found.template_kwargs, found.budget) == (given, budget)
    assert len(found.notes) == n_notes, found.notes


def test_what_a_model_without_thoughts_is_asked_for_is_noted():
    assert wish(PLAIN, has_marks=False, is_wanted=False).notes == []
    assert wish(PLAIN, has_marks=False, effort="none").budget is None
    (note,) = wish(PLAIN, has_marks=False, is_wanted=True).notes
    assert "knows no thinking" in note
    (note,) = wish(PLAIN, has_marks=False, budget=100).notes
    assert "no bound" in note
    with pytest.raises(ApiError, match="takes no argument 'preserve_thinking'; it takes none"):
        wish(PLAIN, template_kwargs={"preserve_thinking": True})
