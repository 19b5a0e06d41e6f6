"""Upkeep of the cold tier: verify every byte, remove what nobody needs."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from kvcellar.errors import StoreError
from kvcellar.pictures.tokens import pictures_in
from kvcellar.store.disk.catalogue import Catalogue, is_damage
from kvcellar.store.disk.cold import ColdTier
from kvcellar.store.disk.pictures import NAMES, PictureFiles
from kvcellar.store.values.references import Reference
from kvcellar.store.values.reports import (
    EventKind,
    GcReport,
    SharedStats,
    StoreStats,
    TierStats,
    VerifyReport,
)

PICTURE_GRACE_S = 3600.0
"""Pictures that were put in the last hour stay: what names them may not be written yet."""

Progress = Callable[[float, str], None]


def verify(
    cold: ColdTier,
    pictures: PictureFiles,
    on_progress: Progress | None,
    check: Callable[[Reference], None],
) -> VerifyReport:
    """Read every byte; see ``Store.verify``. Others may write meanwhile."""
    started = time.perf_counter()
    try:
        cold.ask(Catalogue.check)
    except sqlite3.Error as error:  # also the one that was made in its place
        if not is_damage(error):
            raise
    with cold.locked():
        cold.refresh()
    paths = list(cold.folder.block_paths())
    total = sum(_size(path) for _, _, path in paths) or 1
    n = size = done = 0
    damaged = []
    for kind, address, path in paths:
        if on_progress is not None:
            on_progress(done / total, f"verifying {n + 1} of {len(paths)} blocks")
        done += _size(path)
        n_damaged = cold.events.count(EventKind.DAMAGED)
        sealed = cold.read(kind, address) if path.exists() else None  # others remove some
        if sealed is not None:
            n, size = n + 1, size + sealed.size_bytes
        elif cold.events.count(EventKind.DAMAGED) > n_damaged:
            damaged.append(address.hex())
    if not cold.journal.check():
        damaged.append(cold.folder.journal.name)
    damaged += pictures.verify()
    names, bad, incomplete = _verify_references(cold, check)
    if on_progress is not None:
        on_progress(1.0, "verified")
    seconds = time.perf_counter() - started
    return VerifyReport(n, size, damaged, len(names), bad, incomplete, seconds)


def _verify_references(
    cold: ColdTier, check: Callable[[Reference], None]
) -> tuple[list[str], list[str], dict[str, int]]:
    """Check all references, while nobody changes them.

    Returns:
        The names of the good ones, the files of the others, and by name of each history that cannot
        be restored whole, how many of its tokens can.
    """
    names, bad, incomplete = [], [], {}
    with cold.locked():
        for path in sorted(cold.folder.reference_paths()):
            name = cold.references.repair(path, check)
            if name is None:
                bad.append(path.name)
            else:
                names.append(name)
        cold.refresh()  # others have written while blocks were read
        for file in bad:
            ref = _repaired(cold, file)
            if ref is not None:
                names.append(ref.name)
                _cut_to_what_is_there(cold, ref)
        for name in names:
            ref = cold.reference(name)
            if ref is not None:
                n_there = _n_restorable(cold, ref)
                if n_there < ref.n_stored:
                    incomplete[name] = n_there
    return names, bad, incomplete


def _repaired(cold: ColdTier, file_name: str) -> Reference | None:
    for row in cold.ask(Catalogue.references):
        if cold.folder.of_reference(row.name).name == file_name:
            return cold.reference(row.name)
    return None


def _cut_to_what_is_there(cold: ColdTier, ref: Reference) -> None:
    """Cut a repaired reference to the blocks that are there, which may be fewer."""
    n = _n_restorable(cold, ref)
    if n < ref.n_stored:
        there = [address for address in ref.blocks if cold.info(address) is not None]
        blocks = tuple(ref.blocks[: next(i for i, a in enumerate(ref.blocks) if a not in there)])
        boundaries = tuple(b for b in ref.boundaries if cold.info(b.address) is not None)
        kept = replace(ref, blocks=blocks, n_stored=n, boundaries=boundaries)
        cold.put_reference(replace(kept, revision=ref.revision + 1))


def _n_restorable(cold: ColdTier, ref: Reference) -> int:
    """Count the tokens that a reference's leading blocks cover, up to the first that is gone."""
    at = 0
    for address in ref.blocks:
        info = cold.info(address)
        if info is None:
            return at
        at = min(info.stop, ref.n_stored)
    return ref.n_stored


def stats(
    cold: ColdTier,
    pictures: PictureFiles,
    warm: TierStats,
    queued_bytes: int,
    shared: SharedStats | None,
) -> StoreStats:
    """Count what the cold tier has, beside what is known of the others; see ``Store.stats``."""
    totals = cold.ask(Catalogue.totals)
    quarantined = sum(size for _, size in cold.folder.quarantine_files())
    n_pictures, picture_bytes = pictures.size()
    size_bytes = totals["block_bytes"] + totals["ref_bytes"] + quarantined
    return StoreStats(
        warm=warm,
        cold=TierStats(totals["blocks"], size_bytes, cold.limit_bytes),
        n_references=totals["refs"],
        referenced_bytes=totals["held"],
        unshared_bytes=totals["unshared"],
        quarantined_bytes=quarantined,
        queued_bytes=queued_bytes,
        events=cold.events.counts(),
        shared=shared,
        n_pictures=n_pictures,
        picture_bytes=picture_bytes,
    )


def collect(
    cold: ColdTier,
    pictures: PictureFiles,
    protect: Collection[bytes],
    grace_s: float,
    is_emptying_quarantine: bool,
) -> GcReport:
    """Remove what no reference needs; see ``Store.gc``."""
    with cold.locked():
        cold.refresh()
        n_leftovers = cold.folder.clear_staging()
        n, freed = cold.collect(protect, grace_s)
        n_pictures, more = pictures.remove(named_pictures(cold), max(grace_s, PICTURE_GRACE_S))
        freed += more
        n_quarantined = 0
        if is_emptying_quarantine:
            for path, size in cold.folder.quarantine_files():
                path.unlink(missing_ok=True)
                n_quarantined, freed = n_quarantined + 1, freed + size
        before = cold.size_bytes()
        had = _with_kv(cold)
        with contextlib.suppress(StoreError):  # tokens alone take more than the limit
            cold.make_room(0, protect)
        evicted = sorted(had - _with_kv(cold))
        after = cold.size_bytes()
        freed += before - after
        return GcReport(n, freed, n_leftovers, n_quarantined, evicted, after, n_pictures)


def named_pictures(cold: ColdTier) -> set[str]:
    """Return the names of the pictures that any history, record or document here names."""
    found = cold.journal.mentions(NAMES)
    for name in cold.ask(Catalogue.reference_names):
        ref = cold.reference(name)
        if ref is not None:
            found |= pictures_of(ref)
    return found


def pictures_of(ref: Reference) -> set[str]:
    """Return the names of the pictures in a history's tokens and its caller's metadata."""
    said = json.dumps(ref.metadata, default=str).encode()
    in_tokens = {placed.name for placed in pictures_in(ref.tokens.tokens)}
    return in_tokens | {match.decode() for match in NAMES.findall(said)}


def _with_kv(cold: ColdTier) -> set[str]:
    return {row.name for row in cold.ask(Catalogue.references) if not row.is_evicted}


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
