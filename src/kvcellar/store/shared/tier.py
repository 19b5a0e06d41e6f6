"""The shared tier of a store: what several machines have of agents and their KV. Start here.

The local disk stays in front of it: what is saved goes there first and is handed in behind, and
what comes from the tier is kept there. No verb fails because the tier does.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator

from kvcellar.store.disk.catalogue import Catalogue
from kvcellar.store.disk.cold import ColdTier
from kvcellar.store.disk.leases import Leases
from kvcellar.store.disk.pictures import PictureFiles
from kvcellar.store.disk.upkeep import pictures_of
from kvcellar.store.shared.blocks import SharedBlocks
from kvcellar.store.shared.guarded_calls import AwayError, Reach
from kvcellar.store.shared.histories import Pulled, SharedHistories
from kvcellar.store.shared.leases import TierLeases
from kvcellar.store.shared.ledger import Ledger
from kvcellar.store.shared.manifests import folder_of, register_of
from kvcellar.store.shared.pictures import SharedPictures
from kvcellar.store.shared.places import ForeignError, PlaceError, SharedPlace
from kvcellar.store.shared.pusher import Pusher
from kvcellar.store.values.references import DROPPED, Reference
from kvcellar.store.values.reports import EventKind, EventLog, SharedStats

TIMEOUT_S = 30.0
"""How long the place may take for one request."""

DURABLE_S = 2.0
"""How long a turn waits for its words to be there, beside the local disk, before it is told."""

CLOSE_S = 10.0
"""How long closing waits for the tier; what it lacks then is handed in when the store is opened."""

POLL_S = 2.0

MOST_PULLING_S = 5.0
"""How long taking over states of all agents may hold up somebody who asks; the rest comes later."""

log = logging.getLogger("kvcellar.store")


class SharedTier:
    """One place, as one store sees it. For any thread.

    Attributes:
        title: URL of the place, without what is secret in it.
        place: what it is in.
        reading: asks it for what it has.
        writing: hands in to it.
        blocks: content-addressed blocks and boundary states.
        pictures: of the histories, by name.
    """

    def __init__(
        self, place: SharedPlace, cold: ColdTier, pictures: PictureFiles, events: EventLog
    ) -> None:
        """Begin to hand in what a place lacks; nothing is waited for."""
        self.title = place.title
        self.place = place
        self._cold = cold
        self._events = events
        self.reading = Reach(place, "reading", events)
        self.writing = Reach(place, "writing", events)
        self.blocks = SharedBlocks(self.reading, self.writing, events)
        self.pictures = SharedPictures(self.reading, self.writing, events)
        self._ledger = Ledger(cold.folder.shared, self.title)
        ways = self.reading, self.writing, self.blocks, self._ledger
        self._histories = SharedHistories(
            *ways, cold, events, self.hand_in, lambda ref: self._put_pictures(ref, pictures)
        )
        self._pusher = Pusher(self._histories, self.writing, events)
        self._polled_s = -POLL_S
        self._polling = threading.Lock()
        for name in (*cold.ask(Catalogue.reference_names), *self._histories.deleted()):
            if "@" in name:  # an agent's; what is nobody's is handed in when it is saved
                self.hand_in(name)

    def _put_pictures(self, ref: Reference, files: PictureFiles) -> None:
        """Hand in the pictures of a history that are here.

        Raises:
            AwayError: the place does not answer.
        """
        for name in sorted(pictures_of(ref)):
            if not self.pictures.has(name) and (data := files.get(name)) is not None:
                self.pictures.put(name, data)

    def hand_in(self, name: str) -> None:
        """Have a history handed in; waits for nothing."""
        if not name.startswith(DROPPED):
            self._pusher.offer(name)

    def delete(self, name: str) -> None:
        """Have other machines know that a history was deleted here; waits for nothing."""
        with self._said(name):
            self._histories.delete(name)
        self.hand_in(name)

    def wait(self, name: str, serial: int) -> bool:
        """Wait a moment until the words of a state are there; false where they are not yet."""
        return self._pusher.wait(name, serial, DURABLE_S)

    def flush(self, wait_s: float = CLOSE_S, name: str | None = None) -> bool:
        """Wait until a history, or every one, is there whole; false where it takes too long."""
        return self._pusher.flush(wait_s, None if name is None else [name])

    def pull(self, name: str, *, is_giving_way: bool = False) -> Pulled:
        """Take over a history's state where the tier has a newer one that can be written here.

        Args:
            name: of the history.
            is_giving_way: take it over also where the local state, which is lost then, has gone on
                by itself.
        """
        pulled = Pulled.SAME
        with self._said(name):
            pulled = self._histories.pull(register_of(name), is_giving_way=is_giving_way)
        if pulled is Pulled.DIVERGED:
            self._pusher.diverged.add(name)
        elif pulled is not Pulled.SAME or self._is_same(name):
            self._pusher.diverged.discard(name)
        return pulled

    def agreed(self, name: str, data: bytes) -> bytes | None:
        """Return what all machines have under a name: these bytes, where nobody was there before.

        None while the place is away, or takes nothing and has none.
        """
        register = f"agreed/{name}"
        with contextlib.suppress(AwayError, ForeignError):
            state = self.reading.ask(lambda place: place.latest(register), DURABLE_S)
            if state is None:
                self.writing.ask(lambda place: place.advance(register, 1, data), DURABLE_S)
                state = self.reading.ask(lambda place: place.latest(register), DURABLE_S)
            return None if state is None else state.data
        return None

    def _is_same(self, name: str) -> bool:
        """Return whether the tier has the local state; another process may have handed it in."""
        if name in self._pusher.diverged:
            with self._said(name):
                return self._histories.is_same(name)
        return False

    def pull_all(self, agent_id: str | None = None) -> None:
        """Take over all states that are new; asked often, it asks the place every 2 s.

        Args:
            agent_id: whose are asked for now, before all others.
        """
        with self._said(self.title):
            if agent_id is not None:
                self._histories.pull_all(folder_of(agent_id))
            with self._polling:
                if time.monotonic() - self._polled_s >= POLL_S:
                    self._histories.pull_all("agents", MOST_PULLING_S)
                    self._polled_s = time.monotonic()

    @contextlib.contextmanager
    def _said(self, subject: str) -> Iterator[None]:
        """Say what goes wrong in an event: nobody's turn ends for it, whatever lies in a place."""
        try:
            yield
        except Exception as error:
            log.debug("a state could not be taken over", exc_info=True)
            self._events.add(EventKind.WRITE_FAILED, subject, f"not taken over: {error}")

    def leases(self, local: Leases) -> Leases:
        """Return the leases among all machines, in front of which are those of this one."""
        return TierLeases(local, self.writing)

    def is_diverged(self, name: str) -> bool:
        """Return whether another machine's state of a history came before the one here."""
        return name in self._pusher.diverged

    def stats(self) -> SharedStats:
        """Return what is known of the tier at this moment; nothing is asked."""
        trouble = self.reading.trouble or self.writing.trouble
        return SharedStats(self.title, trouble, self._pusher.n_waiting)

    def close(self) -> None:
        """Hand in what waits, for a while, and let go of the place."""
        self._pusher.close(CLOSE_S)
        self.reading.close()
        self.writing.close()
        with contextlib.suppress(PlaceError):
            self.place.close()
        self._ledger.close()
