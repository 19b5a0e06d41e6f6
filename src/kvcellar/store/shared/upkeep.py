"""Upkeep of a shared place: count what is in it, and free what nobody needs.

Words stay as long as their agent does; what is given up for room or age is KV. Whoever wanted that
computes it again, and hands it in again.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from kvcellar.errors import StoreError
from kvcellar.pictures.tokens import NAME_DIGITS
from kvcellar.store.disk.upkeep import pictures_of
from kvcellar.store.shared.blocks import key_of
from kvcellar.store.shared.manifests import TOMBSTONE, Manifest, is_register, unpack_manifest
from kvcellar.store.shared.pictures import key_of as key_of_picture
from kvcellar.store.shared.places import Entry, PlaceError, PlaceState, SharedPlace
from kvcellar.store.values.blocks import ADDRESS_BYTES
from kvcellar.store.values.format import BrokenError, DamagedError

T = TypeVar("T")

TOMBSTONE_S = 30 * 86400.0
"""How long a place remembers that an agent was deleted, for machines that were away meanwhile."""

DOCUMENT_S = 30 * 86400.0
"""How long a place keeps documents that nobody has written again, responses that can be got, and
pictures that no history names, since documents may."""

_FOLDERS = ("blocks/", "windows/")
_BLOCK = re.compile(rf"(?:blocks|windows)/(..)/\1[0-9a-f]{{{2 * ADDRESS_BYTES - 2}}}")
_DOCUMENT = re.compile("documents/[0-9a-f]{32}")
_PICTURE = re.compile(rf"pictures/(..)/\1[0-9a-f]{{{NAME_DIGITS - 2}}}")
_AT_ONCE = 500


@dataclass(frozen=True, slots=True)
class PlaceStats:
    """A shared place at one moment.

    Attributes:
        n_agents: histories of which it has a state.
        n_blocks: blocks and boundary states.
        size_bytes: of these.
    """

    n_agents: int
    n_blocks: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class PlaceGcReport:
    """Report of freeing room in a shared place.

    Attributes:
        n_blocks: blocks, boundary states and pictures that were removed.
        freed_bytes: of these.
        n_agents: histories whose KV was given up.
        size_bytes: of the blocks that remain.
    """

    n_blocks: int
    freed_bytes: int
    n_agents: int
    size_bytes: int


def count(place: SharedPlace) -> PlaceStats:
    """Count what is in a place.

    Raises:
        StoreError: it does not answer.
    """
    blocks = _asked(place, _blocks)
    agents = filter(is_register, _asked(place, lambda place: place.numbers("agents/")))
    size_bytes = sum(entry.size_bytes for entry in blocks.values())
    return PlaceStats(sum(1 for _ in agents), len(blocks), size_bytes)


def collect(
    place: SharedPlace,
    *,
    limit_bytes: int | None = None,
    keep_s: float | None = None,
    grace_s: float,
) -> PlaceGcReport:
    """Remove blocks that no history needs, then the KV of histories that nobody goes on with.

    Args:
        place: what is freed; others may write to it meanwhile.
        limit_bytes: blocks may take so much; KV of the history that was silent longest goes first.
        keep_s: KV of histories that were silent for longer goes; None: it stays.
        grace_s: what was written in the last so many seconds stays, since its history may not be
            handed in yet.

    Raises:
        StoreError: it does not answer, or has a state that cannot be read here, whose blocks
            would count as nobody's; what was removed by then is gone.
    """
    now = time.time()
    states = _asked(place, lambda place: _states(place, now))
    blocks = _asked(place, _blocks)
    held: set[str] = set()
    size = n_given_up = 0
    for saved_s, manifest in sorted(states, key=lambda state: -state[0]):
        keys = {key_of(info.kind, info.address) for info in manifest.infos} - held
        more = sum(blocks[key].size_bytes for key in keys if key in blocks)
        is_old = keep_s is not None and now - saved_s > keep_s
        if is_old or (limit_bytes is not None and size + more > limit_bytes):
            n_given_up += bool(more)
            continue
        held |= keys
        size += more
    gone = {
        key: entry.size_bytes
        for key, entry in blocks.items()
        if key not in held and now - entry.modified_s > grace_s
    }
    pictures = _asked(place, _pictures)
    named = {key_of_picture(name) for _, manifest in states for name in pictures_of(manifest.ref)}
    gone |= {
        key: entry.size_bytes
        for key, entry in pictures.items()
        if key not in named and now - entry.modified_s > max(grace_s, DOCUMENT_S)
    }
    documents = _asked(place, lambda place: [*place.entries("documents/")])
    old = (entry.key for entry in documents if now - entry.modified_s > DOCUMENT_S)
    names = [*gone, *filter(_DOCUMENT.fullmatch, old)]
    for at in range(0, len(names), _AT_ONCE):
        _asked(place, lambda place, at=at: place.drop(names[at : at + _AT_ONCE]))  # type: ignore[misc]
    left = sum(entry.size_bytes for key, entry in blocks.items() if key not in gone)
    return PlaceGcReport(len(gone), sum(gone.values()), n_given_up, left)


def _blocks(place: SharedPlace) -> Mapping[str, Entry]:
    """Return the blocks and boundary states of a place; what else lies there is somebody's own."""
    found = (entry for folder in _FOLDERS for entry in place.entries(folder))
    return {entry.key: entry for entry in found if _BLOCK.fullmatch(entry.key)}


def _pictures(place: SharedPlace) -> Mapping[str, Entry]:
    found = place.entries("pictures/")
    return {entry.key: entry for entry in found if _PICTURE.fullmatch(entry.key)}


def _states(place: SharedPlace, now: float) -> list[tuple[float, Manifest]]:
    """Read the latest state of every history, and when it was handed in; forget old deletions."""
    found = []
    written: dict[str, float] = {}
    for entry in place.entries("agents/"):
        for register in (entry.key, entry.key.rpartition("/")[0]):
            written[register] = max(entry.modified_s, written.get(register, 0.0))
    for register in filter(is_register, place.numbers("agents/")):
        state = place.latest(register)
        if state is None:
            continue
        if state.data != TOMBSTONE:
            try:
                manifest = _newest_whole(place, register, state)
                found.append((written.get(register, now), manifest))
            except DamagedError as error:
                raise StoreError(
                    f"{place.title} has a state at {register} that cannot be read here ({error}); "
                    f"nothing was removed: use the version of kvcellar that wrote it, or remove it"
                ) from error
        elif now - written.get(register, now) > TOMBSTONE_S:
            place.forget(register)
    return found


def _newest_whole(place: SharedPlace, register: str, state: PlaceState) -> Manifest:
    """Return the latest state of a register that was not cut short.

    Raises:
        DamagedError: there is none, or it cannot be read here.
    """
    while True:
        try:
            return unpack_manifest(register, state.data)
        except BrokenError:
            before = place.earlier(register, state.number)
            if before is None:
                raise
            state = before


def _asked(place: SharedPlace, request: Callable[[SharedPlace], T]) -> T:
    try:
        return request(place)
    except PlaceError as error:
        raise StoreError(str(error)) from error
