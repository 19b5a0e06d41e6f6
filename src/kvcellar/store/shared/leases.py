"""Leases among machines: names in the shared tier that can be made only once, and that expire.

Clocks of machines differ, and are set: a lease ends for its holder by his own steady clock, and for
others when the time that it names is over, or when they have seen it unchanged for as long as one
lasts.

A lease says who should extend a history. What keeps two from doing so is that a state is handed in
only behind the one before it. So a place that is away costs no turn: leases are this machine's
alone then, and who went on beside somebody else is found out when states are handed in.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace

from kvcellar.errors import LeaseHeldError, LeaseLostError
from kvcellar.store.disk.leases import Lease, Leases
from kvcellar.store.shared.guarded_calls import AwayError, Reach
from kvcellar.store.shared.places import ForeignError, SharedPlace
from kvcellar.store.values.references import file_stem

TTL_S = 8.0
"""How long a lease lasts that nobody renews: what a machine that died keeps others waiting, who are
patient for a little longer than that."""

ASK_S = 2.0

MOST_LEASE_BYTES = 1 << 12


class TierLeases:
    """Leases in one place, behind those of this machine's processes. See ``Leases``."""

    def __init__(self, local: Leases, reach: Reach) -> None:
        """Create leases of which none is taken."""
        self._local = local
        self._reach = reach
        self._lock = threading.Lock()
        self._held: dict[str, Lease] = {}
        """By token the leases that the place has."""
        self._left: set[str] = set()
        """Tokens of leases that were released while the place was away, which it still has."""
        self._seen: dict[str, tuple[tuple[str, str, float], float]] = {}
        """By name another's lease that was in the way, and since when."""

    def take(self, name: str) -> Lease:
        """See ``Leases``; where the place is away, of this machine alone."""
        lease = self._local.take(name)
        shared = replace(lease, expires_s=time.monotonic() + TTL_S)
        try:
            owner = self._reach.ask(lambda place: self._take(place, shared), ASK_S)
        except (AwayError, ForeignError):
            return lease
        if owner is not None:
            self._local.release(lease)
            raise LeaseHeldError(name, owner)
        with self._lock:
            self._held[lease.token] = shared
        return shared

    def renew(self, lease: Lease) -> Lease:
        """See ``Leases``; where the place is away, it counts as renewed."""
        self._local.renew(lease)
        later = replace(lease, expires_s=time.monotonic() + TTL_S)
        try:
            is_mine = self._reach.ask(lambda place: self._renew(place, later), ASK_S)
        except (AwayError, ForeignError):
            is_mine = True
        if not is_mine:
            raise LeaseLostError(lease.name)
        return later

    def release(self, lease: Lease) -> None:
        """See ``Leases``; waits for nobody: the place hears of it behind what it was asked."""
        with self._lock:
            is_shared = self._held.pop(lease.token, None) is not None
        try:
            if is_shared:
                self._reach.ask(lambda place: _release(place, lease), ASK_S)
        except (AwayError, ForeignError):
            with self._lock:
                self._left.add(lease.token)
        finally:
            self._local.release(lease)

    def close(self) -> None:
        """See ``Leases``."""
        with self._lock:
            held = list(self._held.values())
        for lease in held:
            self.release(lease)
        self._local.close()

    def _take(self, place: SharedPlace, lease: Lease) -> str | None:
        """Take a lease; return its owner where another has it."""
        for _ in range(3):
            if place.create(_key(lease.name), _written(lease), TTL_S):
                with self._lock:
                    self._seen.pop(lease.name, None)
                return None
            owner, token, expires_s = there = _read(place, lease.name)
            if token == lease.token:  # it was made, and the answer was lost
                return None
            if expires_s > time.time() and not self._is_over(lease.name, there):
                return owner
            place.drop([_key(lease.name)])
        return "another machine"

    def _is_over(self, name: str, there: tuple[str, str, float]) -> bool:
        """Return true if this machine left a lease, or saw one unchanged for its time."""
        with self._lock:
            if there[1] in self._left:
                self._left.discard(there[1])
                return True
            before, since_s = self._seen.get(name, (None, 0.0))
            if before != there:
                self._seen[name] = there, time.monotonic()
                return False
            is_over = time.monotonic() - since_s >= TTL_S
            if is_over:
                del self._seen[name]
            return is_over

    def _renew(self, place: SharedPlace, lease: Lease) -> bool:
        """Give a lease that is still this one a later end; false where another has it."""
        _, token, _ = _read(place, lease.name)
        if token != lease.token:
            return token == "" and self._take(place, lease) is None
        place.write(_key(lease.name), _written(lease))
        return True


def _written(lease: Lease) -> bytes:
    """Return a lease as the place has it, with the time at which it ends for others."""
    return json.dumps([lease.owner, lease.token, time.time() + TTL_S]).encode()


def _release(place: SharedPlace, lease: Lease) -> None:
    if _read(place, lease.name)[1] == lease.token:
        place.drop([_key(lease.name)])


def _read(place: SharedPlace, name: str) -> tuple[str, str, float]:
    """Return owner, token and end of what is there; nobody's, of long ago, where there is none."""
    try:
        owner, token, expires_s = json.loads(place.read(_key(name), MOST_LEASE_BYTES) or b"[]")
        return str(owner), str(token), float(expires_s)
    except (ValueError, TypeError, RecursionError, ForeignError):
        return "", "", 0.0


def _key(name: str) -> str:
    return f"leases/{file_stem(name)}"
