"""Models that read pictures: what their processor and vision part make, and runners that place it.

A picture is *looked at* before its prompt is made: the processor says how many rows the model reads
for it, and what stands around them. It is *encoded* when its rows are to be computed: the vision
part makes them. Both are asked of a :class:`PictureReader`, which belongs to the loaded model. A
:class:`SeeingRunner` takes the rows in place of the embeddings of a picture's placeholders.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol, runtime_checkable

from kvcellar.errors import PictureError
from kvcellar.models.runner import Runner
from kvcellar.pictures.picture import Picture
from kvcellar.pictures.tokens import PlacedPicture


class Look(NamedTuple):
    """Text and size of a picture as a model's processor has it, before any of it is computed.

    Attributes:
        text: what stands in a prompt in place of the reader's ``written``: ``n_rows`` of its
            placeholders, and what the model was trained to read around and between them.
        n_rows: placeholders in it.
        grid: (height, width) in which the rows lie; (0, 0) for models that do not ask for it.
    """

    text: str
    n_rows: int
    grid: tuple[int, int] = (0, 0)


def _at_once() -> None:
    """Wait for nothing."""


class EncodedPicture(NamedTuple):
    """Rows that a model's vision part makes of a picture, as its runner takes them.

    Attributes:
        rows: ``[n_rows, hidden_size]`` of the backend: in place of the placeholders' embeddings.
        deep: rows of the same shape, each to be added to the hidden states of the placeholders
            behind one of the first layers, in their order; none for most models.
        n_bytes: of all of these.
        await_rows: has what a thread gives the device from now on wait until the rows are there;
            called before they are read, each time. The thread itself does not wait.
    """

    rows: Any
    deep: tuple[Any, ...]
    n_bytes: int
    await_rows: Callable[[], None] = _at_once


EncodeFn = Callable[[str], EncodedPicture]
"""Finds a picture by its name and has the model's vision part encode it."""


class SeenPicture(NamedTuple):
    """A picture of a sequence whose tokens are run.

    Attributes:
        placed: where its placeholders stand in the sequence.
        encoded: what is read there; None where none of them is in the forward.
    """

    placed: PlacedPicture
    encoded: EncodedPicture | None


class PictureReader(Protocol):
    """Protocol of what reads pictures of a loaded model. For several threads.

    Attributes:
        written: what a chat template writes where a picture stands, to be replaced by
            ``Look.text``.
        in_text: stands in a message for a picture where a template writes text alone: ``written``,
            and what else a template would write around it.
        token_id: of the placeholder.
        is_whole: rows of a picture see each other both ways, so that all tokens of one have to be
            in the same forward.
        size_bytes: of the vision part's weights in memory, loaded or not.
    """

    written: str
    in_text: str
    token_id: int
    is_whole: bool
    size_bytes: int

    def look(self, picture: Picture) -> Look:
        """Run the processor on a picture.

        Raises:
            PictureError: the model cannot read it, such as one that is too narrow.
        """
        ...

    def load(self) -> None:
        """Read the vision part's weights, unless they are there.

        While nothing else of the model runs: libraries set types of the whole process meanwhile.

        Raises:
            ModelError: they cannot be read; the next call tries again.
        """
        ...

    def encode(self, picture: Picture) -> EncodedPicture:
        """Run the vision part on a picture, once it is loaded; its rows are there on return.

        Raises:
            PictureError: the model cannot read it.
            DeviceMemoryError: the device has no memory for it.
        """
        ...


Seen = Sequence[tuple[Sequence[SeenPicture], int]]
"""Pictures of a forward, by stretch in the order of the token axis: those of the stretch's sequence
that begin before its end, and how many tokens the stretch has."""


@runtime_checkable
class SeeingRunner(Runner, Protocol):
    """A runner whose tokens may be placeholders of pictures, or stand behind them.

    Attributes:
        is_whole: as its model's ``PictureReader`` has it.
    """

    is_whole: bool

    def seeing(self, stretches: Seen) -> AbstractContextManager[None]:
        """Have the forwards of a block read pictures.

        Forwards are given ids of the vocabulary, and positions in the sequence, as without
        pictures: the runner finds by ``places`` which tokens are placeholders, and where a model
        turns positions otherwise behind a picture.
        """
        ...


def seeing(runner: Runner, stretches: Seen) -> AbstractContextManager[None]:
    """Have a runner's forwards read pictures; see :class:`SeeingRunner`.

    Where no sequence has any, any runner will do.
    """
    if not any(pictures for pictures, _ in stretches):
        return nullcontext()
    assert isinstance(runner, SeeingRunner), "looked at when a request comes"
    return runner.seeing(stretches)


def unseen(n_pictures: int) -> PictureError:
    """Make the refusal of a prompt with pictures for a model that reads none."""
    return PictureError(
        f"the prompt has {n_pictures} picture{'s' * (n_pictures > 1)} and this model reads text "
        f"alone; choose a model that reads pictures"
    )
