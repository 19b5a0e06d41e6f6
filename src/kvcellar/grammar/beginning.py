"""Begins to hold an answer to its grammar and its thought, once its prompt is known."""

from __future__ import annotations

from collections.abc import Sequence

from kvcellar.dialects import ReasoningMarks
from kvcellar.engine import Guide
from kvcellar.grammar.grammars import Constraint
from kvcellar.grammar.thought_budget import ThoughtBound, ThoughtBudget
from kvcellar.hosting.host import ModelHost


def begin_guide(
    host: ModelHost,
    held: Constraint | None,
    marks: ReasoningMarks | None,
    budget: int | None = None,
    *,
    is_in_thought: bool,
    has_form: bool,
) -> tuple[Guide, Sequence[str]]:
    """Return the guide of one answer, and where it will say what it could not hold.

    Args:
        host: the model.
        held: what the answer is held to; None: to nothing, and there is a budget.
        marks: around the model's thoughts.
        budget: tokens that it may think; None: any number.
        is_in_thought: whether the prompt ends inside a thought.
        has_form: whether what comes behind the thought is held, and not the thought.
    """
    guide, troubles = None, []
    if held is not None and held.begin is not None:
        assert held.begin_in_thought is not None
        is_within = is_in_thought and not has_form
        guide = held.begin_in_thought() if is_within else held.begin()
        troubles = guide.troubles
    is_behind = is_in_thought and has_form
    if is_behind or (budget is not None and marks is not None):
        assert marks is not None, "a prompt opens a thought by a mark"
        bound = ThoughtBound.of(budget, marks, host)
        return ThoughtBudget(bound, guide, is_in_thought, is_behind), troubles
    assert guide is not None, "who is held to nothing has no guide"
    return guide, troubles
