"""Placeholders: a history alone says which pictures it has, and no two are alike."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.errors import PictureError, PromptError
from kvcellar.pictures.tokens import (
    LEAST_ROWS,
    check_ids,
    check_pictures,
    ids_of,
    is_in_vocabulary,
    pictures_in,
    placeholders,
    usable,
)
from kvcellar.prefix import key_of
from kvcellar.space import Space

NAMES = st.text("0123456789abcdef", min_size=20, max_size=20)
GRIDS = st.tuples(st.integers(0, 2**20 - 1), st.integers(0, 2**20 - 1))
PICTURES = st.tuples(NAMES, st.integers(LEAST_ROWS, 40), GRIDS)
TEXTS = st.lists(st.integers(0, 2**31 - 1), max_size=6)


@given(st.lists(st.one_of(PICTURES, TEXTS), max_size=6))
def test_a_history_says_its_pictures(parts: list) -> None:
    tokens, ids, expected = [], [], []
    for part in parts:
        if isinstance(part, tuple):
            name, n, grid = part
            expected.append((name, list(range(len(tokens), len(tokens) + n)), grid))
            tokens += placeholders(7, name, n, grid).tolist()
            ids += [7] * n
        else:
            tokens += part
            ids += part
    found = pictures_in(np.array(tokens, np.int64))
    assert [(p.name, p.places.tolist(), p.grid) for p in found] == expected
    assert ids_of(np.array(tokens, np.int64)).tolist() == ids
    assert [is_in_vocabulary(t) for t in tokens].count(False) == sum(
        part[1] for part in parts if isinstance(part, tuple)
    )


@given(PICTURES, PICTURES)
def test_pictures_with_other_names_begin_otherwise(a: tuple, b: tuple) -> None:
    first, second = (placeholders(7, *one)[:LEAST_ROWS].tolist() for one in (a, b))
    assert (first == second) == (a[0] == b[0] and a[2] == b[2])


@given(PICTURES, st.integers(0, 80), st.booleans())
def test_nothing_is_gone_on_from_inside_of_a_picture_that_is_not_told(
    one: tuple, n: int, is_whole: bool
) -> None:
    before, behind = [1, 2, 3], [4, 5]
    rows = placeholders(7, *one).tolist()
    tokens = np.array([*before, *rows, *rows, *behind], np.int64)
    n = min(n, len(tokens))
    found = usable(tokens, n, is_whole=is_whole)
    starts = [3, 3 + len(rows)]
    inside = [at for at in starts if at < n < at + len(rows)]
    if not inside:
        assert found == n
    elif is_whole or n - inside[0] < LEAST_ROWS:
        assert found == inside[0]
    else:
        assert found == n


def test_rows_that_are_separated_are_one_picture() -> None:
    rows = placeholders(7, "0" * 19 + "1", 6, (2, 3)).tolist()
    tokens = np.array([9, *rows[:3], 8, *rows[3:], 8, 9], np.int64)
    (found,) = pictures_in(tokens)
    assert found.places.tolist() == [1, 2, 3, 5, 6, 7] and (found.start, found.stop) == (1, 8)
    assert usable(tokens, 3, is_whole=False) == 1
    assert usable(tokens, 6, is_whole=False) == 6 and usable(tokens, 6, is_whole=True) == 1


def test_too_few_rows_and_too_large_grids_are_refused() -> None:
    with pytest.raises(PictureError, match="too small"):
        placeholders(7, "0" * 20, LEAST_ROWS - 1)
    with pytest.raises(PictureError, match="too large"):
        placeholders(7, "0" * 20, 8, (1 << 20, 1))


@given(PICTURES, st.text(min_size=1, max_size=8))
def test_spaces_have_pictures_of_their_own(one: tuple, salt: str) -> None:
    tokens = placeholders(7, *one)
    own = key_of(tokens, Space(salt=salt))
    assert own[:LEAST_ROWS].tolist() != tokens[:LEAST_ROWS].tolist()
    other = key_of(placeholders(7, "f" * 20, one[1], one[2]), Space(salt=salt))
    assert (own.tolist() == other.tolist()) == (one[0] == "f" * 20)


def test_a_client_cannot_send_rows_of_pictures_as_tokens() -> None:
    check_ids([0, 2**31 - 1])
    for bad in (-1, 2**31, int(placeholders(7, "0" * 20, 4)[0])):
        with pytest.raises(PromptError, match="ids of the model's vocabulary"):
            check_ids([1, bad])


def test_a_history_that_is_none_of_ours_is_refused() -> None:
    good = placeholders(7, "0" * 20, 6, (2, 3))
    check_pictures(np.array([1, *good, 2, *good], np.int64))
    for bad in (
        good[1:],
        good[:2],
        good[::-1],
        [*good[:4], good[0]],
        placeholders(7, "1" * 20, 6, (2, 2)),
    ):
        tokens = np.array([1, *bad, 2], np.int64)
        assert len(pictures_in(tokens)) >= 1
        with pytest.raises(PictureError):
            check_pictures(tokens)
    other = good.copy()
    other[3] += 1
    with pytest.raises(PictureError, match="not told whole"):
        check_pictures(other)
