"""Pictures of histories in the shared tier: each once, by the name that its pixels give it."""

from __future__ import annotations

import contextlib
import threading
import time

from kvcellar.errors import PictureError
from kvcellar.pictures.picture import MOST_BYTES, Picture
from kvcellar.store.shared.guarded_calls import AwayError, Reach
from kvcellar.store.shared.places import ForeignError
from kvcellar.store.values.reports import EventKind, EventLog

ASK_S = 10.0
"""How long one picture may take to come."""

PUT_S = 60.0

TRUSTED_S = 86400.0
"""How long a picture that was there is believed to be there still."""

MOST_KNOWN = 1 << 14


class SharedPictures:
    """Pictures of a place, so that two who write one write the same. For any thread."""

    def __init__(self, reading: Reach, writing: Reach, events: EventLog) -> None:
        """Create a view that knows of no picture yet."""
        self._reading, self._writing, self._events = reading, writing, events
        self._there: dict[str, float] = {}
        self._lock = threading.Lock()

    def has(self, name: str) -> bool:
        """Return true if a picture was there a while ago, and nobody has to look again."""
        with self._lock:
            return time.monotonic() - self._there.get(name, -TRUSTED_S) < TRUSTED_S

    def put(self, name: str, data: bytes) -> None:
        """Hand a picture in, where the place has it not.

        Raises:
            AwayError: the place does not answer.
        """
        key = key_of(name)
        with contextlib.suppress(ForeignError):
            if self._writing.ask(lambda place: place.read(key, MOST_BYTES), PUT_S) != data:
                self._writing.ask(lambda place: place.write(key, data), PUT_S)
        self._note(name)

    def get(self, name: str) -> bytes | None:
        """Return the file of a picture that has these pixels; None where there is none."""
        key = key_of(name)
        try:
            data = self._reading.ask(lambda place: place.read(key, MOST_BYTES), ASK_S)
            if data is None or Picture.read(data).name == name:
                return data
            why = "it has other pixels than its name says"
        except AwayError:
            return None
        except (ForeignError, PictureError) as error:
            why = str(error)
        self._events.add(EventKind.DAMAGED, key, f"{why}; it is not used")
        return None

    def _note(self, name: str) -> None:
        with self._lock:
            if len(self._there) > MOST_KNOWN:
                self._there.clear()
            self._there[name] = time.monotonic()


def key_of(name: str) -> str:
    """Return the name that a picture has in a place."""
    return f"pictures/{name[:2]}/{name}"
