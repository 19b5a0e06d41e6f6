"""Helpers of the indexes: lengths that can be resumed, arrays that are copied, keys of spaces."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.history import History
from kvcellar.prefix import key_of
from kvcellar.prefix.nodes import can_resume, cells_array, joined, owned, token_array
from kvcellar.sight import Sight
from kvcellar.space import LONG, SHARED, Space
from tests.bookkeeping.byte_simulator import first_seen, sight_of

WINDOW = st.sampled_from([None, 1, 2, 3, 7, Sight(chunk=1), Sight(chunk=4)])


@given(
    windows=st.lists(WINDOW, min_size=1, max_size=3),
    holes=st.lists(st.sets(st.integers(0, 19)), min_size=3, max_size=3),
    stop=st.integers(1, 20),
    floor=st.integers(0, 19),
)
def test_a_length_can_be_resumed_where_all_that_its_next_token_sees_is_held(
    windows, holes, stop, floor
):
    floor = min(floor, stop - 1)
    sights = [sight_of(window) for window in windows]
    reach = max(sight.most_before for sight in sights)
    cells = np.array([[-1 if p in gone else p for p in range(stop)] for gone in holes])
    cells = cells[: len(windows)]
    want = [
        all(
            window is None or (cells[group, first_seen(window, n) : n] >= 0).all()
            for group, window in enumerate(windows)
        )
        for n in range(floor + 1, stop + 1)
    ]
    for first in {0, max(0, min(floor, floor + 1 - reach))}:
        assert can_resume(cells[:, first:], sights, first, floor).tolist() == want


def test_tokens_that_are_int64_already_are_not_copied():
    array, history = np.arange(5), History([1, 2])
    assert token_array(array) is array
    assert np.shares_memory(token_array(history), history.tokens)
    for tokens in ([], [1, 2], (3,), array.astype(np.uint8), np.empty(0)):
        made = token_array(tokens)
        assert made.dtype == np.int64 and made.tolist() == list(tokens)


def test_cells_that_are_given_are_copied():
    given_cells = [np.arange(3), np.arange(3, dtype=np.int32)]
    made = cells_array(given_cells, 2, 3)
    assert made.dtype == np.int64 and made.tolist() == [[0, 1, 2]] * 2
    made[0, 0] = 9
    assert given_cells[0][0] == 0
    assert cells_array([np.empty(0)] * 2, 2, 0).shape == (2, 0)


def test_a_part_is_copied_where_it_would_keep_more_than_twice_its_size_alive():
    base = np.arange(10)
    assert owned(base) is base
    assert owned(base[:5]).base is base
    assert owned(base[6:]).base is None and owned(base[6:]).tolist() == [6, 7, 8, 9]


def test_arrays_are_joined_in_their_order_and_none_of_them_is_an_empty_one():
    assert joined([np.array([3]), np.array([1, 2])]).tolist() == [3, 1, 2]
    assert joined([]).dtype == np.int64 and joined([]).size == 0


@pytest.mark.parametrize("space", [Space(salt="ours"), Space("sql", "ours", LONG), Space("sql")])
def test_tokens_of_a_space_have_its_digest_above_their_32_bits(space):
    text = "\0".join((space.adapter, space.salt, space.rope)).encode()
    digest = blake2b(text, digest_size=16, person=b"space").digest()
    parts = [int.from_bytes(digest[i : i + 4], "little") % 2**31 for i in (0, 4, 8, 12)]
    tokens = np.array([0, 1, 2**32 - 1, 7, 5 + (3 << 32), 9])  # of a picture: bits above 32
    keys = key_of(tokens, space)
    assert keys.dtype == np.int64
    assert keys.tolist() == [t ^ (parts[i % 4] << 32) for i, t in enumerate(tokens.tolist())]
    assert key_of(History(tokens.tolist()), space).tolist() == keys.tolist()
    assert key_of(tokens.astype(np.int32)[:1], space).dtype == np.int64
    assert key_of(tokens[:0], space).size == 0


def test_in_the_shared_space_tokens_are_themselves():
    tokens = np.arange(5)
    assert key_of(tokens, SHARED) is tokens
