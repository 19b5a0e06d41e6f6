"""Histories of the shared tier: handed in from the local store, and taken over into it.

A state is handed in behind the one that this store has taken over last, or not at all: where
another machine's came first, the two have diverged, and neither is lost.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import math
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from kvcellar.errors import StoreError
from kvcellar.store.disk.cold import ColdTier
from kvcellar.store.shared.blocks import SharedBlocks
from kvcellar.store.shared.guarded_calls import AwayError, Reach
from kvcellar.store.shared.ledger import DELETED, Known, Ledger
from kvcellar.store.shared.manifests import (
    TOMBSTONE,
    Manifest,
    block_tokens_of,
    is_register,
    pack_manifest,
    register_of,
    unpack_manifest,
)
from kvcellar.store.shared.places import PlaceState, SharedPlace
from kvcellar.store.values.blocks import Info, Kind, address_of
from kvcellar.store.values.format import BrokenError, DamagedError
from kvcellar.store.values.layout import root_address
from kvcellar.store.values.references import DROPPED, Boundary, Reference
from kvcellar.store.values.reports import EventKind, EventLog

log = logging.getLogger("kvcellar.store")

ASK_S = 5.0
"""How long one answer about a history is waited for."""


class Pulled(enum.Enum):
    """Outcomes of asking the tier for a history's latest state.

    SAME: it has nothing that is new here, or does not answer.
    TAKEN: its state is the local store's now.
    GONE: another machine has deleted it, and so has the local store now.
    DIVERGED: it has one that does not follow from the local state, which it does not have either.
    """

    SAME = "same"
    TAKEN = "taken"
    GONE = "gone"
    DIVERGED = "diverged"


class DivergedError(Exception):
    """Another machine has handed in a state that the local one does not follow; not for callers."""


class SharedHistories:
    """Both ways between the local store and the tier. For threads; one push at a time."""

    def __init__(
        self,
        reading: Reach,
        writing: Reach,
        blocks: SharedBlocks,
        ledger: Ledger,
        cold: ColdTier,
        events: EventLog,
        hand_in: Callable[[str], None],
        put_pictures: Callable[[Reference], None],
    ) -> None:
        """Create the ways; nothing is asked yet.

        Args:
            reading: asks for what there is.
            writing: hands in.
            blocks: what is known of them there.
            ledger: what is known of states there.
            cold: the local store.
            events: where trouble is said.
            hand_in: called with the name of a history that the place has lost.
            put_pictures: hands in the pictures of a state that are here.
        """
        self._reach = reading
        self._writing = writing
        self._blocks = blocks
        self._ledger = ledger
        self._cold = cold
        self._events = events
        self._hand_in_again = hand_in
        self._put_pictures = put_pictures
        self._told: set[tuple[str, str]] = set()
        self._lock = threading.Lock()
        self._deleted: set[str] = set()
        """Registers of histories that were deleted here since a push of theirs began last."""
        self._behind: dict[str, tuple[int, ...]] = {}
        """By register the serial numbers of its states up to the last known one, latest first."""

    # Out of the tier ---------------------------------------------------------------------------

    def pull(self, register: str, *, is_giving_way: bool = False) -> Pulled:
        """Take over a history's state where the tier has a newer one.

        Args:
            register: of the history.
            is_giving_way: take it over also where the local state has gone on by itself.

        Raises:
            StoreError: it could not be written here.
        """
        try:
            known = self._ledger.get(register)
            state = self._reach.ask(lambda place: _news(place, register, known), ASK_S)
            if state is None:
                return Pulled.SAME
            latest = state.number
            state = self._newest_whole(register, state)
            if state.number < latest and known is not None and known.number >= state.number:
                return Pulled.SAME
            return self._follow(register, state, known, is_giving_way)
        except (StoreError, OSError, sqlite3.Error):
            raise
        except AwayError:
            return Pulled.SAME
        except Exception as error:  # whatever a stranger may have written there
            if not isinstance(error, DamagedError):
                log.debug("a state could not be read", exc_info=True)
            self._say(register, f"{error}; the state here stays")
            return Pulled.SAME

    def _newest_whole(self, register: str, state: PlaceState) -> PlaceState:
        """Return the latest state, or that before it which was not cut short.

        Raises:
            BrokenError: all that are left were.
        """
        latest, why = state, ""
        while state.data != TOMBSTONE:
            try:
                unpack_manifest(register, state.data)
                break
            except BrokenError as error:
                why = why or str(error)
                at = state.number
                before = self._reach.ask(lambda place, at=at: place.earlier(register, at), ASK_S)  # type: ignore[misc]
                if before is None or before.data == TOMBSTONE:  # a damaged file deletes nothing
                    raise BrokenError(why) from None
                state = before
        if why:
            said = f"state {latest.number} of it is damaged ({why}); gone back to {state.number}"
            self._say(register, f"{said}, the newest that is whole")
        return state

    def _say(self, register: str, what: str) -> None:
        """Say what is wrong with a history's state there, once."""
        if (register, what) not in self._told:
            self._told.add((register, what))
            self._events.add(EventKind.DAMAGED, register, what)

    def pull_all(self, folder: str, wait_s: float = math.inf) -> None:
        """Take over all states below a folder of registers that are new, for so long.

        Raises:
            StoreError: one could not be written here.
        """
        deadline = time.monotonic() + wait_s
        known = self._ledger.all()  # first, so that what is handed in meanwhile is not missed
        try:
            numbers = self._reach.ask(lambda place: place.numbers(f"{folder}/"), ASK_S)
        except AwayError:
            return
        self._miss(folder, numbers, known)
        for register, number in numbers.items():
            if not is_register(register):
                continue
            is_news = register not in known or known[register].number != number
            if is_news and time.monotonic() < deadline:
                self.pull(register)

    def _miss(self, folder: str, numbers: Mapping[str, int], known: Mapping[str, Known]) -> None:
        """Have handed in again what a place has lost: it was emptied, or put back."""
        for register, was in known.items():
            is_lost = was.serial > 0 and numbers.get(register, 0) < was.number
            if is_lost and self._ledger.get(register) == was and register.startswith(f"{folder}/"):
                self._blocks.distrust()
                self._ledger.put(register, was._replace(n_stored=-1))
                self._hand_in_again(was.name)

    def _follow(
        self, register: str, state: PlaceState, known: Known | None, is_giving_way: bool
    ) -> Pulled:
        """Make a state of the tier the local one, unless that has gone on by itself."""
        if state.data == TOMBSTONE:
            return self._remove(register, state, known)
        manifest = unpack_manifest(register, state.data)
        name = manifest.ref.name
        self._blocks.learn(manifest.infos)
        if _is_older(state.number, manifest.ref.serial, known):
            return Pulled.SAME
        with self._cold.locked():
            if register in self._deleted:
                return Pulled.SAME  # what is there may be what was on its way then
            local = self._local_serial(name)
            follows = local in (0, manifest.ref.serial)
            if known is not None and local == known.serial:
                follows = follows or _is_behind(known, state.number, manifest)
            if not follows and not is_giving_way:
                return Pulled.DIVERGED
            if not follows:
                self._cold.journal.forget(name)
            if local != manifest.ref.serial:
                self._cold.put_reference(self._as_local(manifest.ref))
            self._note(register, state.number, manifest)
        return Pulled.SAME if local == manifest.ref.serial else Pulled.TAKEN

    def _remove(self, register: str, state: PlaceState, known: Known | None) -> Pulled:
        if known is None:
            return Pulled.SAME
        with self._cold.locked():
            self._ledger.put(register, Known(known.name, state.number, 0, 0, 0))
            if self._local_serial(known.name) not in (0, known.serial):
                return Pulled.SAME  # it has gone on here: that is handed in again
            return Pulled.GONE if self._cold.remove_reference(known.name) else Pulled.SAME

    def is_same(self, name: str) -> bool:
        """Return whether the local state is the one that the tier had last, as far as is known."""
        known = self._ledger.get(register_of(name))
        return known is not None and known.serial == self._local_serial(name)

    def _local_serial(self, name: str) -> int:
        """Return the number of the latest state that is durable here; 0: there is none."""
        ref = self._cold.reference(name)
        recorded = self._cold.journal.after(name, 0 if ref is None else ref.serial)
        return recorded[-1][0] if recorded else 0 if ref is None else ref.serial

    def _as_local(self, ref: Reference) -> Reference:
        """Return a state of the tier on those of its blocks that are here."""
        before = self._cold.reference(ref.name)
        kept: list[bytes] = []
        n_stored = 0
        for address in ref.blocks:
            info = self._cold.info(address)
            if info is None:
                break
            kept.append(address)
            n_stored = min(info.stop, ref.n_stored)
        is_here = [b for b in ref.boundaries if self._cold.info(b.address) is not None]
        if not ref.blocks:
            n_stored = ref.n_stored if is_here else 0
        return replace(
            ref,
            blocks=tuple(kept),
            n_stored=n_stored,
            boundaries=tuple(b for b in is_here if b.length <= n_stored),
            revision=1 if before is None else before.revision + 1,
        )

    def delete(self, name: str) -> None:
        """Have it known that a history was deleted here, for ``push`` to say so there.

        Within ``locked`` of the local store, so that nobody takes it over again meanwhile.
        """
        register = register_of(name)
        with self._lock:
            self._deleted.add(register)
            known = self._ledger.get(register)
            if known is not None:
                self._ledger.put(register, known._replace(serial=DELETED))

    def deleted(self) -> list[str]:
        """Return the histories that were deleted here and may still be there."""
        return [known.name for known in self._ledger.all().values() if known.serial == DELETED]

    # Into the tier -----------------------------------------------------------------------------

    def push(self, name: str, *, is_whole: bool) -> int:
        """Hand in the local state of a history; return its serial number, 0 where there is none.

        Args:
            name: of the history.
            is_whole: with all blocks that are stored of it here, which are written first; else
                its words, on the blocks that are there.

        Raises:
            AwayError: the place does not answer; what it has is whole.
            DivergedError: another machine's state is there.
            OSError: a local file cannot be read.
        """
        register = register_of(name)
        with self._lock:
            self._deleted.discard(register)
            known = self._ledger.get(register)
        ref = self._cold.reference(name)
        if ref is None:
            if known is not None and known.serial == DELETED:  # one that is damaged here is not
                self._hand_in(register, name, None, known)
            return 0
        if name.startswith(DROPPED) or (ref.serial and _is_there(ref, known)):
            return ref.serial
        if is_whole:
            addresses = (*ref.blocks, *(boundary.address for boundary in ref.boundaries))
            here = [info for info in map(self._cold.info, addresses) if info is not None]
            for info in self._blocks.missing(here):
                self._put(info)
        is_new = is_whole or known is None or known.serial != ref.serial
        if ref.serial and is_new:  # before the words that name them
            self._put_pictures(ref)
        if ref.serial and is_new:  # of what is nobody's there are only blocks, found by content
            self._hand_in(register, name, ref, known)
        return ref.serial

    def _put(self, info: Info) -> None:
        if self._cold.folder.is_unproven(info.address):  # nobody else's to use either
            return
        with contextlib.suppress(FileNotFoundError):  # removed here meanwhile: so not handed in
            data = self._cold.folder.of(info.kind, info.address).read_bytes()
            self._blocks.put(info, data)

    def _hand_in(
        self, register: str, name: str, ref: Reference | None, known: Known | None
    ) -> Known:
        """Make a local state the tier's, with the blocks that it has; None: it is deleted.

        Raises:
            AwayError: the place does not answer.
            DivergedError: another machine's state is there.
        """
        serial = 0 if ref is None else ref.serial
        shown, infos = (None, {}) if ref is None else self._on_what_is_there(ref)
        for _ in range(3):
            state = self._writing.ask(lambda place: _news(place, register, known), ASK_S)
            at = 1 if known is None else known.number + 1
            behind = self._known_behind(register, known)
            if known is None and ref is not None and state is not None:
                there = self._same_there(register, state, ref)
                if there is not None:
                    return there
            if state is not None:
                behind = _behind_of(register, state, behind)
                is_ours = behind[0] in (serial, None if known is None else known.serial)
                if not is_ours and not _is_older(state.number, behind[0], known):
                    raise DivergedError(name)
                at = state.number + 1
            data = TOMBSTONE if shown is None else pack_manifest(shown, infos, behind)
            next_state = register, at, data
            if self._writing.ask(lambda place, to=next_state: place.advance(*to), ASK_S):  # type: ignore[misc]
                now = Known(name, at, serial, 0, 0)
                if shown is not None:
                    now = Known(name, at, serial, shown.n_stored, len(shown.boundaries))
                with self._lock:
                    if register in self._deleted:  # while it was on its way: the next push says so
                        now = now._replace(serial=DELETED)
                    self._ledger.put(register, now)
                self._behind[register] = (serial, *behind)
                return now
        raise DivergedError(name)

    def _same_there(self, register: str, state: PlaceState, ref: Reference) -> Known | None:
        """Note a state that a place has already, as it does where it was moved; else None."""
        try:
            manifest = unpack_manifest(register, state.data)
        except DamagedError:
            return None
        there = manifest.ref
        is_whole = there.n_stored >= ref.n_stored and len(there.boundaries) >= len(ref.boundaries)
        if there.serial != ref.serial or not is_whole:
            return None
        self._note(register, state.number, manifest)
        return self._ledger.get(register)

    def _known_behind(self, register: str, known: Known | None) -> tuple[int, ...]:
        """Return what lies behind the next state: all that is known of it, the latest first."""
        if known is None:
            return ()
        behind = self._behind.get(register, ())
        return behind if behind[:1] == (known.serial,) else (known.serial,)

    def _on_what_is_there(self, ref: Reference) -> tuple[Reference, dict[bytes, Info]]:
        """Cut a state to the blocks that are in the tier, more than the local store may have."""
        size = block_tokens_of(ref)
        parent = root_address(ref.fingerprint, ref.layout_json)
        infos: dict[bytes, Info] = {}
        blocks: list[bytes] = []
        n_stored = 0
        for start in range(0, len(ref.tokens), size):
            part = ref.tokens[start : start + size]
            own = address_of(Kind.BLOCK, parent, part)
            at = start // size
            found = [a for a in (own, *ref.blocks[at : at + 1]) if self._blocks.info(a) is not None]
            if not found:
                break
            info = self._blocks.info(found[0])
            assert info is not None
            infos[found[0]], parent = info, own
            blocks.append(found[0])
            n_stored = min(start + len(part), info.stop)
        boundaries: list[Boundary] = []
        for boundary in ref.boundaries:
            info = self._blocks.info(boundary.address)
            if info is not None:
                infos[boundary.address] = info
                boundaries.append(boundary)
        if not ref.blocks and boundaries:
            n_stored = boundaries[-1].length
        cut = replace(
            ref,
            blocks=tuple(blocks),
            n_stored=n_stored,
            boundaries=tuple(b for b in boundaries if b.length <= n_stored),
            is_evicted=False,
        )
        return cut, infos

    def _note(self, register: str, number: int, manifest: Manifest) -> None:
        ref = manifest.ref
        known = Known(ref.name, number, ref.serial, ref.n_stored, len(ref.boundaries))
        self._ledger.put(register, known)
        self._behind[register] = (ref.serial, *manifest.behind)


def _news(place: SharedPlace, register: str, known: Known | None) -> PlaceState | None:
    """Return the latest state of a register, where that is not the one that is known."""
    if place.number(register) in (0, 0 if known is None else known.number):
        return None
    return place.latest(register)


def _behind_of(register: str, state: PlaceState, known: tuple[int, ...]) -> tuple[int, ...]:
    """Return the serial numbers of a state and of those behind it; 0 is one that was deleted.

    One that nobody can read counts as that which is known, and is followed: else nothing would be
    handed in any more. Who wrote it finds that its own is not among these.

    Raises:
        DamagedError: it was written so, perhaps by a later version of this package.
    """
    if state.data == TOMBSTONE:
        return (0,)
    try:
        manifest = unpack_manifest(register, state.data)
    except BrokenError:
        if not known:
            raise
        return known
    return (manifest.ref.serial, *manifest.behind)


def _is_behind(known: Known, number: int, manifest: Manifest) -> bool:
    """Return whether a state follows the known one; of one far behind it that is believed.

    It does not where the place was put back in between, and another machine was there first.
    """
    at = number - known.number - 1
    if at < 0:
        return known.serial in manifest.behind
    return at >= len(manifest.behind) or manifest.behind[at] == known.serial


def _is_older(number: int, serial: int, known: Known | None) -> bool:
    """Return whether a state of the tier is one before that which is known.

    So it is where the place was put back to what it held earlier.
    """
    return known is not None and number < known.number and serial < known.serial


def _is_there(ref: Reference, known: Known | None) -> bool:
    """Return true if the tier has a state, with all that is stored of it here."""
    return (
        known is not None
        and known.serial == ref.serial
        and known.n_stored >= ref.n_stored
        and (known.n_stored > ref.n_stored or known.n_boundaries >= len(ref.boundaries))
    )
