"""State machines whose actions have weights.

Hypothesis switches rules off at random, each for a whole example. That finds much elsewhere; a
cache without its forwards is an empty cache, and whatever else is done to it proves nothing. Here
one rule chooses among all actions, those with more weight more often.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

Action = TypeVar("Action", bound=Callable[..., None])


def action(weight: int = 1, **arguments: st.SearchStrategy[Any]) -> Callable[[Action], Action]:
    """Like Hypothesis' ``rule``. A method that overrides an action is the same action."""

    def mark(method: Action) -> Action:
        method.action = (weight, arguments)  # type: ignore[attr-defined]
        return method

    return mark


class ActionMachine(RuleBasedStateMachine):
    """Each step is one of the class's actions."""

    @rule(data=st.data())
    def act(self, data: st.DataObject) -> None:
        actions = {
            name: method.action
            for cls in reversed(type(self).__mro__)
            for name, method in vars(cls).items()
            if hasattr(method, "action")
        }
        names = [name for name, (weight, _) in actions.items() for _ in range(weight)]
        name = data.draw(st.sampled_from(names), label="action")
        arguments = {
            key: data.draw(strategy, label=key) for key, strategy in actions[name][1].items()
        }
        getattr(self, name)(**arguments)
