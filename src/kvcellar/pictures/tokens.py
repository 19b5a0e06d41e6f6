"""Tokens of pictures: placeholders of a history that say which picture stands there.

A model reads a picture as rows that its vision part makes, in place of the embeddings of so many
placeholder tokens, which all have the same id. In a history that id would be the same for every
picture. So a placeholder carries more above the 20 bits of its id: that it is one, whether it
begins a picture, and in turn 40 bits of what follows. Two placeholders have the picture's name, 80
bits of a digest of its pixels; the third has how its rows lie in a grid, for models that turn
positions by it.

So a history stays one array of integers, and all that compares, hashes, stores and matches tokens
tells pictures apart without knowing of them: two never share K and V, and the same one at the same
place always does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvcellar.errors import PictureError, PromptError
from kvcellar.types import IntArray

LEAST_ROWS = 3
"""Placeholders that a picture has at least: fewer could not name it."""

NAME_DIGITS = 20
"""Hexadecimal digits of a picture's name."""

_ID_BITS = 20
_PART_BITS = 40
_SIDE_BITS = _PART_BITS // 2
_IS_PICTURE = 1 << (_ID_BITS + _PART_BITS)
_BEGINS = _IS_PICTURE << 1
_ID_MASK = (1 << _ID_BITS) - 1
_PART_MASK = (1 << _PART_BITS) - 1
_MOST_SIDE = (1 << _SIDE_BITS) - 1
_MOST_ID = (1 << 31) - 1


class PlacedPicture(NamedTuple):
    """A picture in a history.

    Attributes:
        name: its name; empty where the history ends before it is told whole.
        places: ``[n]`` positions of its placeholders, ascending; other tokens may lie between.
        grid: (height, width) in which its rows lie; (0, 0) for models that ask for none.
    """

    name: str
    places: IntArray
    grid: tuple[int, int]

    @property
    def start(self) -> int:
        """Position of its first placeholder."""
        return int(self.places[0])

    @property
    def stop(self) -> int:
        """Position behind its last placeholder."""
        return int(self.places[-1]) + 1


def placeholders(token_id: int, name: str, n: int, grid: tuple[int, int] = (0, 0)) -> IntArray:
    """Return the ``[n]`` tokens that stand for a picture.

    Args:
        token_id: of the model's placeholder.
        name: of the picture.
        n: rows that the model reads for it.
        grid: (height, width) of these rows; (0, 0) where the model does not ask for it.

    Raises:
        PictureError: there are too few rows to name a picture by, the grid is too large, or the
            model has more tokens than any has today.
    """
    if n < LEAST_ROWS:
        raise PictureError(
            f"a picture of {n} tokens is too small to be told from others; send one that this "
            f"model reads as {LEAST_ROWS} tokens or more"
        )
    if max(grid) > _MOST_SIDE:
        raise PictureError(
            f"a picture of {grid[0]} by {grid[1]} tokens is too large; a side may have {_MOST_SIDE}"
        )
    if not 0 <= token_id <= _ID_MASK:
        raise PictureError(f"a placeholder may have an id up to {_ID_MASK}, got {token_id}")
    value = int(name, 16)
    parts = [value >> _PART_BITS, value & _PART_MASK, (grid[0] << _SIDE_BITS) + grid[1]]
    tokens = np.resize(np.array(parts, np.int64), n)
    tokens = (tokens << _ID_BITS) | (_IS_PICTURE | token_id)
    tokens[0] |= _BEGINS
    return tokens


def ids_of(tokens: IntArray) -> IntArray:
    """Return the ids in the vocabulary of a history's tokens, ``[n]``: what a model embeds.

    Without a copy where there is no picture. Tokens that are none stay what they are, so that
    whoever checks ids sees wrong ones.
    """
    is_picture = is_placeholder(tokens)
    if not is_picture.any():
        return tokens
    return np.where(is_picture, tokens & _ID_MASK, tokens)


def is_placeholder(tokens: IntArray) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return ``[n]``: true where a token stands for a row of a picture."""
    found: np.ndarray[tuple[int], np.dtype[np.bool_]] = tokens & _IS_PICTURE != 0
    return found & (tokens >= 0)


def is_in_vocabulary(token: int) -> bool:
    """Return true if a token is an id of some vocabulary, and no row of a picture."""
    return 0 <= token <= _MOST_ID


def check_ids(tokens: Sequence[int] | IntArray) -> None:
    """Refuse tokens of which one is no id of any vocabulary, such as a row of a picture.

    What clients send as tokens is text: pictures come as pictures.

    Raises:
        PromptError: there is such a token.
    """
    bad = next((token for token in tokens if not is_in_vocabulary(int(token))), None)
    if bad is not None:
        raise PromptError(f"tokens are ids of the model's vocabulary, got {bad}")


def pictures_in(tokens: IntArray) -> tuple[PlacedPicture, ...]:
    """Return the pictures of a history in their order; one that is cut off at its end, too."""
    places = np.flatnonzero(is_placeholder(tokens))
    if not len(places):
        return ()
    own = tokens[places]
    starts = np.flatnonzero(own & _BEGINS)
    if not len(starts) or starts[0]:  # cut off at its beginning: no product of ours
        starts = np.concatenate(([0], starts))
    return tuple(
        _placed(own[at:stop], places[at:stop])
        for at, stop in zip(starts, [*starts[1:], len(places)], strict=True)
    )


def _placed(tokens: IntArray, places: IntArray) -> PlacedPicture:
    parts = [int(part) for part in (tokens[:LEAST_ROWS] >> _ID_BITS) & _PART_MASK]
    if len(parts) < LEAST_ROWS or not tokens[0] & _BEGINS:
        return PlacedPicture("", places, (0, 0))
    grid = parts[2] >> _SIDE_BITS, parts[2] & _MOST_SIDE
    return PlacedPicture(f"{(parts[0] << _PART_BITS) + parts[1]:0{NAME_DIGITS}x}", places, grid)


def check_pictures(tokens: IntArray) -> None:
    """Refuse a history whose pictures are not as ``placeholders`` makes them.

    Raises:
        PictureError: so it is: a row is missing or another's, or the grid has not as many.
    """
    for one in pictures_in(tokens):
        own, n = tokens[one.places], len(one.places)
        ids = {int(token) & _ID_MASK for token in own}
        if not one.name or len(ids) > 1:
            raise PictureError(f"a picture at token {one.start} is not told whole")
        if (own != placeholders(ids.pop(), one.name, n, one.grid)).any():
            raise PictureError(f"the rows of the picture at token {one.start} do not fit")
        if one.grid != (0, 0) and one.grid[0] * one.grid[1] != n:
            raise PictureError(
                f"the picture at token {one.start} has {n} rows in a grid of {one.grid[0]} by "
                f"{one.grid[1]}"
            )


def usable(tokens: IntArray, n: int, *, is_whole: bool) -> int:
    """Return how many of the first ``n`` tokens of a history can be gone on from.

    All of them, but where they end in a picture that they do not tell from every other, or whose
    rows see each other both ways: then those before it.

    Args:
        tokens: of the history.
        n: what a cache holds of it.
        is_whole: a picture's rows see those behind them, so that half of one is of no use.
    """
    behind = tokens[n:][is_placeholder(tokens[n:])]
    if not len(behind) or behind[0] & _BEGINS:  # no picture, or the next one is another
        return n
    before = np.flatnonzero(is_placeholder(tokens[:n]))
    begins = np.flatnonzero(tokens[before] & _BEGINS)
    if not len(begins):
        return n
    n_rows = len(before) - int(begins[-1])
    return int(before[begins[-1]]) if is_whole or n_rows < LEAST_ROWS else n
