"""Keys of models: what may share blocks has one root, and names on disk stay what they are."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from kvcellar.errors import ConfigError
from kvcellar.history import History
from kvcellar.store import RowLayout
from kvcellar.store.values.blocks import Kind, address_of, boundary_link, chain
from kvcellar.store.values.layout import root_address
from kvcellar.store.values.references import file_stem
from tests.store.fakes import CHUNK, FULL, STATE, WINDOW, make_key

SALTS = st.sampled_from(["", "guest", "\nrope:", "a\nsalt:b"])
BORDERS = st.sampled_from([None, 1, 4096])


def test_names_of_what_is_stored_are_what_they_were() -> None:
    """Another name is another block: all that was ever stored would be lost."""
    key = make_key("model", [FULL, WINDOW, CHUNK], "k8v4", 4, STATE)
    tokens = History([5, 6, 7, 8, 2**62])
    first, tail = chain(key, tokens)
    end = boundary_link(key, tokens)
    assert (first.start, first.stop, tail.start, tail.stop) == (0, 4, 4, 5)
    assert (first.parent, tail.parent) == (key.root, first.address)
    assert (end.parent, end.start, end.stop) == (first.address, 4, 5)
    names = [address.hex() for address in (key.root, first.address, tail.address, end.address)]
    assert [*names, file_stem("poet@ü")] == [
        "ea7485022928aa25e6cdd5485ffc4c5b",
        "938ed2a37328ba6a10960d274134d88b",
        "0d88afa8b3bc067746f98909ee92ff9a",
        "725623137a6bce374633db40b02bb40c",
        "c2bd6d433a6d6c61106dd92f4d9b8e41",
    ]


@given(SALTS, SALTS, BORDERS)
def test_who_shares_a_salt_shares_blocks_and_nobody_else(
    salt: str, other: str, border: int | None
) -> None:
    bare = make_key("m") if border is None else make_key("m").turning(border)
    key = bare.salted(salt)
    assert key.salt == salt
    assert key.salted(other) == bare.salted(other) and key.salted("") == bare
    assert (key == bare.salted(other)) is (salt == other)
    assert (key.fingerprint == bare.fingerprint) is (salt == "")


@given(st.sampled_from(["", "guest"]), BORDERS, st.integers(1, 9000))
def test_long_texts_of_a_model_that_turns_them_otherwise_have_a_key_of_their_own(
    salt: str, border: int | None, n: int
) -> None:
    key = make_key("m").salted(salt)
    key = key if border is None else key.turning(border)
    found = key.for_length(n)
    is_long = border is not None and n > border
    assert (found == key) is not is_long
    assert found.for_any_length() == key == key.for_any_length()
    assert found.salt == salt and found.for_length(n) == found
    assert found.salted("other").for_any_length() == key.salted("other")
    if border is not None:
        assert key != make_key("m").salted(salt)
        assert key.for_length(border) is key and key.for_length(border + 1) != key


def test_keys_are_equal_by_what_is_stored_and_by_nothing_else() -> None:
    key = make_key("m")
    assert key == make_key("m") and hash(key) == hash(make_key("m"))
    others = [make_key("n"), make_key("m", kv_dtype="int8"), make_key("m", block_tokens=4)]
    others += [make_key("m", [FULL, WINDOW]), make_key("m", [WINDOW]), make_key("m", [CHUNK])]
    others += [make_key("m", state=STATE)]
    assert len({key, *others}) == 1 + len(others)
    assert key != key.root and key != "m"
    assert key.root == root_address("m", key.layout.as_json) and len(key.root) == 16


def test_a_block_and_a_boundary_state_of_the_same_tokens_have_two_names() -> None:
    tokens = np.array([1, 2])
    kinds = {address_of(kind, b"p" * 16, tokens) for kind in Kind}
    places = {address_of(Kind.BLOCK, parent * 16, tokens) for parent in (b"p", b"q")}
    assert len(kinds | places | {address_of(Kind.BLOCK, b"p" * 16, tokens[::-1])}) == 4


def test_a_layout_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="a block has at least 1 token, got 0"):
        RowLayout((FULL,), "float32", 0)
    RowLayout((FULL,), "float32", 1)
    with pytest.raises(ConfigError):
        RowLayout((FULL,), "float33")


def test_a_layout_says_what_rows_and_states_take() -> None:
    layout = make_key(groups=[FULL, WINDOW], kv_dtype="float16", state=STATE).layout
    assert (layout.full_groups, layout.window_groups) == ((0,), (1,))
    assert layout.rows_bytes(10) == 10 * 2 * 2 * (8 + 4) * 2  # layers, heads, numbers, bytes
    assert layout.slot_bytes == (6 * 3 + 2 * 4 * 4 + 5) * 4 and layout.has_boundaries
    assert make_key(groups=[WINDOW]).layout.has_boundaries
    assert make_key(groups=[FULL], state=STATE).layout.has_boundaries
    alone = make_key(groups=[FULL]).layout
    assert not alone.has_boundaries and alone.slot_bytes == 0
