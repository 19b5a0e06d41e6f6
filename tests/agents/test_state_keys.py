"""The layout of a model with recurrent layers, read from what is stored of an agent."""

from __future__ import annotations

import json

import pytest

from kvcellar.agents.records.checking import key_of
from kvcellar.errors import StoreError
from kvcellar.history import History
from kvcellar.store import Reference
from tests.store.fakes import FULL, STATE, WINDOW, make_key

KEY = make_key(groups=[FULL, WINDOW], state=STATE)


def reference(layout_json: str) -> Reference:
    return Reference("a", "model", layout_json, History(), metadata={"kv_dtype": "float32"})


def test_a_stored_agent_of_a_model_with_states_is_still_the_models() -> None:
    key = key_of(reference(KEY.layout.as_json))
    assert key == KEY
    assert key.layout.state == STATE
    assert key_of(reference(make_key(groups=[FULL, WINDOW]).layout.as_json)) != KEY


@pytest.mark.parametrize(
    "states", [None, 5, [], [[]], [[["recurrent", []]]], [[["recurrent", [0]]]], [[["x", [1]]]],
               [[["recurrent", [2**50]]]], [[["recurrent", [True]]]], [[["recurrent"]]], [["ab"]]]
)  # fmt: skip
def test_states_that_cannot_be_are_refused(states: object) -> None:
    layout = json.loads(KEY.layout.as_json) | {"states": states}
    with pytest.raises(StoreError, match="cannot be read"):
        key_of(reference(json.dumps(layout)))
