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

Key = tuple[str, str]
"""The salt of a space, whose rows are nobody else's, and the name of a picture."""


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
    """Rows by the picture that they are of. ``encode`` runs in a thread, all else in the engine's.

    Who waits for a picture asks for it in every step. One that nobody asks for any more is not
    encoded, and neither its rows nor its failure is kept for anybody.
    """

    def __init__(self, encode: EncodeFn, most_bytes: int = ROWS_BYTES) -> None:
        """Keep nothing yet; the thread starts with the first picture that is wanted."""
        self._encode, self._most_bytes = encode, most_bytes
        self._kept: OrderedDict[Key, EncodedPicture] = OrderedDict()
        self._failed: dict[Key, Exception] = {}
        self._wanted: set[Key] = set()
        """Pictures that the last step asked for, and that are not encoded yet."""
        self._asking: set[Key] = set()
        """Pictures that this step has asked for so far, and that are not encoded yet."""
        self._asked: queue.SimpleQueue[Key | None] = queue.SimpleQueue()
        self._queued: set[Key] = set()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self.counts = PictureCounts()

    def begin_step(self) -> None:
        """Take note that a step begins: what was not asked for in the last one is not awaited."""
        with self._changed:
            self._wanted, self._asking = self._asking, set()
            for key in self._failed.keys() - self._wanted:
                del self._failed[key]
            self._shrink()

    def take(self, name: str, salt: str = "") -> EncodedPicture | None:
        """Return a picture's rows; None: they are on their way, to be asked for in the next step.

        Raises:
            Exception: what encoding it raised; the next time it is tried again.
        """
        key = salt, name
        with self._changed:
            error = self._failed.pop(key, None)
            if error is not None:
                raise error
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
                self.counts.reused_pictures += key not in self._wanted | self._asking
                return found
            self._asking.add(key)
            if key not in self._queued and not self._is_closed:
                self._queued.add(key)
                self._asked.put(key)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="kvcellar-pictures", daemon=True
                )
                self._thread.start()
        return None

    def wait(self, timeout_s: float) -> None:
        """Wait until one more picture is encoded, or was tried, but no longer than that."""
        with self._changed:
            if not self._kept.keys() & self._asking and not self._failed.keys() & self._asking:
                self._changed.wait(timeout_s)

    def close(self) -> None:
        """End the thread, behind the picture that it reads; nothing is encoded any more."""
        self._is_closed = True
        self._asked.put(None)
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        while (key := self._asked.get()) is not None and not self._is_closed:
            with self._changed:
                is_awaited = key in self._wanted or key in self._asking
                if not is_awaited:
                    self._queued.discard(key)
            if is_awaited:
                self._encode_one(key)

    def _encode_one(self, key: Key) -> None:
        started = time.perf_counter()
        try:
            found: EncodedPicture | Exception = self._encode(key[1])
        except Exception as error:  # for whoever asked; others go on
            found = error
        with self._changed:
            self._queued.discard(key)
            self.counts.encoding_s += time.perf_counter() - started
            if isinstance(found, EncodedPicture):
                self._kept[key] = found
                self.counts.encoded_pictures += 1
                self.counts.picture_bytes += found.n_bytes
            else:
                self.counts.failed_pictures += 1
                self._failed[key] = found
            self._shrink()
            self._changed.notify_all()

    def _shrink(self) -> None:
        """Let go of rows that were not asked for longest, but of none that somebody awaits."""
        for key in list(self._kept):
            if self.counts.picture_bytes <= self._most_bytes:
                return
            if key not in self._wanted and key not in self._asking:
                self.counts.picture_bytes -= self._kept.pop(key).n_bytes
