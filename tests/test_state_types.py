"""Values that say what recurrent layers keep: their shapes are checked, their bytes counted."""

from __future__ import annotations

import pytest

from kvcellar.errors import ConfigError
from kvcellar.sight import Sight
from kvcellar.states import STATE_SIGHT, StateGroup, StateShape
from kvcellar.types import LayerGroup, ModelCacheParams

CONV, SSM = StateShape("convolution", (6, 4)), StateShape("recurrent", (2, 8, 8))


def test_a_slot_is_as_large_as_the_states_of_all_layers():
    assert StateGroup(((CONV, SSM), (CONV,))).slot_bytes == 4 * (24 + 128 + 24)


@pytest.mark.parametrize(
    ("layers", "why"),
    [
        ((), "at least one layer"),
        (((),), "at least one layer"),
        (((("memory", (2,)),),), "convolution, recurrent"),
        (((("recurrent", ()),),), "at least one length"),
        (((("recurrent", (2, 0)),),), "at least 1"),
    ],
)
def test_states_that_cannot_be_are_refused(layers, why):
    with pytest.raises(ConfigError, match=why):
        StateGroup(layers)


def test_states_come_behind_the_groups_of_rows():
    group = LayerGroup((0,), 2, 4, 4, window=8)
    params = ModelCacheParams(1, groups=(group,), state=StateGroup(((SSM,),)))
    assert params.sights == (Sight(8), STATE_SIGHT)
    assert "1 recurrent layer, 512 bytes of states" in str(params)


def test_a_sequence_goes_on_from_states_of_the_position_before():
    assert [STATE_SIGHT.first_seen(p) for p in (0, 1, 7)] == [0, 0, 6]
