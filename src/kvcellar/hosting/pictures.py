"""Pictures for one model: looked at for its prompts, and encoded for its engine."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

from kvcellar.models.seeing import EncodedPicture, Look, PictureReader
from kvcellar.pictures.shelf import PictureShelf
from kvcellar.spec import picture_room

MOST_LOOKS = 4096
"""Pictures of which is remembered what stands for them in a prompt."""


class HostLooks:
    """Looks of one model at the pictures on a shelf. For several threads.

    Attributes:
        reader: the model's.
        shelf: where pictures are found by their names.
    """

    def __init__(self, reader: PictureReader, shelf: PictureShelf) -> None:
        """Look at no picture yet."""
        self.reader, self.shelf = reader, shelf
        self.alone: Callable[[Callable[[], None]], object] = lambda load: load()
        """Calls a function while nothing else of the model runs."""
        self._is_loaded = False
        self._known: OrderedDict[str, Look] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def written(self) -> str:
        """The text that the model's chat template writes where a picture stands."""
        return self.reader.written

    @property
    def in_text(self) -> str:
        """The text that stands for a picture where the template writes messages' text alone."""
        return self.reader.in_text

    @property
    def token_id(self) -> int:
        """Id of the placeholder for a row of a picture."""
        return self.reader.token_id

    @property
    def room(self) -> int:
        """Bytes that may be kept of what the vision part makes, and of files nobody holds each."""
        return picture_room(self.reader.size_bytes)

    def look(self, name: str) -> Look:
        """Return what stands in a prompt for a picture; the processor runs once for each.

        Raises:
            PictureError: it is not here any more, or the model cannot read it.
        """
        with self._lock:
            found = self._known.get(name)
            if found is not None:
                self._known.move_to_end(name)
                return found
        found = self.reader.look(self.shelf.get(name))
        with self._lock:
            self._known[name] = found
            if len(self._known) > MOST_LOOKS:
                self._known.popitem(last=False)
        return found

    def encode(self, name: str) -> EncodedPicture:
        """Have the model's vision part read a picture.

        Raises:
            PictureError: it is not here any more, or the model cannot read it.
            ModelError: the vision part's weights cannot be loaded.
        """
        picture = self.shelf.get(name)
        if not self._is_loaded:
            self.alone(self.reader.load)
            self._is_loaded = True
        return self.reader.encode(picture)
