"""Rows of pictures: what a model's vision part makes of each, once, beside the engine's steps.

A picture is encoded when the first of its tokens is to be computed, and not before: what the cache
holds of it needs no rows. That happens in a thread of its own, so that others' tokens go on
meanwhile. Rows are kept for the same picture at another place, as many as fit.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass

from kvcellar.models.seeing import EncodedPicture, EncodeFn

ROWS_BYTES = 256 << 20
"""Bytes of rows that are kept, at most."""


@dataclass(slots=True)
class PictureCounts:
    """Counts of pictures since the engine was made.

    Attributes:
        encoded_pictures: pictures that the vision part has read.
        reused_pictures: times that rows were there already.
        failed_pictures: pictures that could not be read.
        encoding_s: seconds that the vision part took.
        picture_bytes: bytes of rows that are kept now.
    """

    encoded_pictures: int = 0
    reused_pictures: int = 0
    failed_pictures: int = 0
    encoding_s: float = 0.0
    picture_bytes: int = 0


class PictureRows:
    """Rows by the name of their picture. ``encode`` runs in a thread; the rest in the engine's."""

    def __init__(self, encode: EncodeFn, most_bytes: int = ROWS_BYTES) -> None:
        """Keep nothing yet; the thread starts with the first picture that is wanted."""
        self._encode, self._most_bytes = encode, most_bytes
        self._kept: OrderedDict[str, EncodedPicture] = OrderedDict()
        self._failed: dict[str, Exception] = {}
        self._wanted: set[str] = set()
        self._asked: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self.counts = PictureCounts()

    def take(self, name: str) -> EncodedPicture | None:
        """Return a picture's rows; None: they are on their way, and come without being asked again.

        Raises:
            Exception: what the last try to encode it raised; the next time it is tried again.
        """
        with self._changed:
            error = self._failed.pop(name, None)
            if error is not None:
                raise error
            found = self._kept.get(name)
            if found is not None:
                self._kept.move_to_end(name)
                if name in self._wanted:
                    self._wanted.discard(name)
                else:
                    self.counts.reused_pictures += 1
                return found
            if name not in self._wanted:
                self._wanted.add(name)
                self._asked.put(name)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="kvcellar-pictures", daemon=True
                )
                self._thread.start()
        return None

    def wait(self, timeout_s: float) -> None:
        """Wait until one more picture is encoded, or was tried, but no longer than that."""
        with self._changed:
            self._changed.wait(timeout_s)

    def close(self) -> None:
        """End the thread, behind the picture that it reads; nothing is encoded any more."""
        self._asked.put(None)
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        while (name := self._asked.get()) is not None:
            started = time.perf_counter()
            try:
                found: EncodedPicture | Exception = self._encode(name)
            except Exception as error:  # for whoever asked; others go on
                found = error
            with self._changed:
                self.counts.encoding_s += time.perf_counter() - started
                if isinstance(found, EncodedPicture):
                    self._keep(name, found)
                else:
                    self.counts.failed_pictures += 1
                    self._failed[name] = found
                    self._wanted.discard(name)
                self._changed.notify_all()

    def _keep(self, name: str, found: EncodedPicture) -> None:
        """Keep rows; those that were not asked for longest go, but none that somebody awaits."""
        self._kept[name] = found
        self.counts.encoded_pictures += 1
        self.counts.picture_bytes += found.n_bytes
        for old in list(self._kept):
            if self.counts.picture_bytes <= self._most_bytes:
                return
            if old not in self._wanted:
                self.counts.picture_bytes -= self._kept.pop(old).n_bytes
