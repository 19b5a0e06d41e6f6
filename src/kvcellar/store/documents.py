"""Documents of a store's caller: texts by an id, here and where a place is shared also there."""

from __future__ import annotations

import contextlib

from kvcellar.store.disk.journal import Journal
from kvcellar.store.shared.guarded_calls import AwayError
from kvcellar.store.shared.places import ForeignError
from kvcellar.store.shared.tier import SharedTier
from kvcellar.store.values.references import file_stem

ASK_S = 2.0
"""How long a shared place is waited for; what it does not take then is here alone."""

MOST_DOCUMENT_BYTES = 1 << 26


class Documents:
    """Documents in the journal, and in front of them those of the shared tier. For any thread.

    What is shared is asked first, since another machine may have changed it. An empty one there
    says that it was deleted.
    """

    def __init__(self, journal: Journal, shared: SharedTier | None) -> None:
        """Create the way to documents; none is read yet."""
        self._journal = journal
        self._shared = shared

    def put(self, document_id: str, payload: bytes) -> None:
        """Make a document durable here, and hand it in where the place takes it now.

        Raises:
            StoreError: it could not be written here; nothing was changed.
        """
        self._journal.put_document(document_id, payload)
        self._hand_in(document_id, payload)

    def get(self, document_id: str) -> bytes | None:
        """Return a document; None where there is none of that id."""
        if self._shared is not None:
            key = _key(document_id)
            with contextlib.suppress(AwayError, ForeignError):
                reading = self._shared.reading
                found = reading.ask(lambda place: place.read(key, MOST_DOCUMENT_BYTES), ASK_S)
                if found is not None:
                    return found or None
        return self._journal.document(document_id)

    def drop(self, document_id: str) -> bool:
        """Forget a document, durably; false where there is none of that id."""
        is_there = self.get(document_id) is not None
        self._journal.drop_document(document_id)
        if is_there:
            self._hand_in(document_id, b"")
        return is_there

    def _hand_in(self, document_id: str, payload: bytes) -> None:
        if self._shared is not None:
            key = _key(document_id)
            with contextlib.suppress(AwayError, ForeignError):
                self._shared.writing.ask(lambda place: place.write(key, payload), ASK_S)


def _key(document_id: str) -> str:
    return f"documents/{file_stem(document_id)}"
