"""Places of pictures in a forward: which tokens stand for rows, and what turns each token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from kvcellar.backends.torch.bind.pictures import PlacedRows
from kvcellar.errors import StepError
from kvcellar.models.picture_facts import PictureFacts
from kvcellar.models.seeing import Seen, SeenPicture
from kvcellar.pictures.tokens import PlacedPicture
from kvcellar.types import IntArray


class Placing(NamedTuple):
    """Pictures of a forward.

    Attributes:
        rows: that are read in it; none where its tokens stand behind pictures.
        turned: ``[3, T]``, the numbers by which tokens are turned; None: their positions.
        whole: ``(first, stop)`` of tokens that see each other both ways.
    """

    rows: tuple[PlacedRows, ...]
    turned: IntArray | None
    whole: tuple[tuple[int, int], ...]

    @property
    def turned_alike(self) -> IntArray | None:
        """``[T]``, the numbers by which tokens are turned that are of no picture."""
        return None if self.turned is None else self.turned[0]


def place(seen: Seen, at: IntArray, facts: PictureFacts, device: torch.device) -> Placing | None:
    """Find the pictures of a forward; None where it has none to do with.

    Args:
        seen: what was said of its stretches.
        at: ``[T]`` positions of its tokens.
        facts: how the model places pictures.
        device: where the rows are wanted.

    Raises:
        StepError: it was said of other tokens, or a picture that must be whole is not.
    """
    if not any(pictures for pictures, _ in seen):
        return None
    n_said = sum(n for _, n in seen)
    if n_said != len(at):
        raise StepError(f"pictures were said of {n_said} tokens, and the forward has {len(at)}")
    rows: list[PlacedRows] = []
    whole: list[tuple[int, int]] = []
    turned = np.tile(at, (3, 1)) if facts.has_grid else None
    start = 0
    for pictures, n in seen:
        own = at[start : start + n]
        for picture in pictures:
            if picture.placed.stop <= own[0]:
                continue
            found = _rows(picture, own, start, device)
            if found is None:
                continue
            rows.append(found)
            if facts.both_ways:
                whole += _whole(picture.placed, own, start)
        if turned is not None:
            turned[:, start : start + n] = _turned([one.placed for one in pictures], own)
        start += n
    return Placing(tuple(rows), turned, tuple(whole))


def _rows(
    picture: SeenPicture, own: IntArray, start: int, device: torch.device
) -> PlacedRows | None:
    """Return what is read of a picture in a stretch that begins at ``start``; None: nothing."""
    places = picture.placed.places
    numbers = np.searchsorted(places, own)
    is_read = places[np.minimum(numbers, len(places) - 1)] == own
    if not is_read.any():
        return None
    if picture.encoded is None:
        raise StepError(
            f"the forward has tokens of the picture {picture.placed.name}, which nobody has encoded"
        )
    encoded, tokens = picture.encoded, np.flatnonzero(is_read) + start
    index = torch.as_tensor(numbers[is_read], device=encoded.rows.device)
    encoded.await_rows()
    rows, *deep = (one[index] for one in (encoded.rows, *encoded.deep))
    return PlacedRows(torch.as_tensor(tokens, device=device), rows, tuple(deep))


def _whole(placed: PlacedPicture, own: IntArray, start: int) -> Iterator[tuple[int, int]]:
    """Yield the tokens of a picture without others between them, as they are in a stretch.

    Raises:
        StepError: the stretch has some of them, and not all.
    """
    cuts = np.flatnonzero(np.diff(placed.places) != 1) + 1
    for places in np.split(placed.places, cuts):
        first, stop = int(places[0]), int(places[-1]) + 1
        low, high = max(first, int(own[0])), min(stop, int(own[-1]) + 1)
        if low >= high:
            continue
        if (low, high) != (first, stop):
            raise StepError(
                f"the model reads all of a picture at once; this forward has {high - low} of the "
                f"{stop - first} tokens of the picture {placed.name}"
            )
        yield start + first - int(own[0]), start + stop - int(own[0])


def _turned(pictures: list[PlacedPicture], own: IntArray) -> IntArray:
    """Return ``[3, n]``: by what a stretch's tokens are turned behind and within pictures.

    A picture takes as many numbers as its longer side has rows, and counts two of the three parts
    by rows and columns.
    """
    saved, n_before = 0, 0
    for placed in pictures:  # most of a long history's, which need no look at each token
        height, width = placed.grid
        if placed.start + height * width > own[0]:
            break
        saved += height * width - max(height, width)
        n_before += 1
    found = np.tile(own - saved, (3, 1))
    for placed in pictures[n_before:]:
        height, width = placed.grid
        n, first = height * width, placed.start
        assert n, "whoever runs a forward knows its pictures whole"
        is_in = (own >= first) & (own < first + n)
        number = own[is_in] - first
        found[:, is_in] = first - saved
        found[1, is_in] += number // width
        found[2, is_in] += number % width
        saved += n - max(height, width)
        behind = own >= first + n
        found[:, behind] = own[behind] - saved
    return found
