"""One history in one file: a zip archive, nothing compressed, of the very files of the store."""

from __future__ import annotations

import os
import struct
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from kvcellar.errors import PictureError, StoreError
from kvcellar.home import open_own
from kvcellar.pictures.picture import MOST_BYTES, Picture
from kvcellar.store.disk.cold import ColdTier
from kvcellar.store.disk.folder import SUFFIX
from kvcellar.store.disk.listing import root_of
from kvcellar.store.values.blocks import Info, Kind, opened
from kvcellar.store.values.format import Bytes, DamagedError, FileBytes, read_from
from kvcellar.store.values.references import Reference, unpack_reference

Progress = Callable[[float, str], None]

REFERENCE = f"reference{SUFFIX}"
_PICTURES = "pictures/"
_EPOCH = (1980, 1, 1, 0, 0, 0)


def export_reference(
    cold: ColdTier,
    ref: Reference,
    pictures: Mapping[str, bytes],
    file: Path,
    on_progress: Progress | None,
) -> int:
    """Write one file with a history, its blocks and pictures; see ``Store.export_reference``."""
    partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
    try:
        partial.unlink(missing_ok=True)  # of a process that died, or planted: never written into
        fd = open_own(partial, os.O_CREAT | os.O_EXCL | os.O_RDWR)
        with os.fdopen(fd, "w+b") as raw:
            with zipfile.ZipFile(raw, "w", zipfile.ZIP_STORED) as archive:
                _write(cold, ref, archive, on_progress)
                for name, data in pictures.items():
                    archive.writestr(_entry(f"{_PICTURES}{name}"), data)
            raw.flush()
            os.fsync(raw.fileno())
        partial.replace(file)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
        reason = error.strerror or error
        raise StoreError(f"{file} cannot be written ({reason}); choose another place") from error
    if on_progress is not None:
        on_progress(1.0, "exported")
    return file.stat().st_size


def _write(
    cold: ColdTier, ref: Reference, archive: zipfile.ZipFile, on_progress: Progress | None
) -> None:
    """Add a history's blocks, up to the first that is gone, and the reference of what is there."""
    wanted = _entries(ref)
    there: set[bytes] = set()
    n_stored = 0 if ref.blocks else ref.n_stored
    for n, (kind, address, name) in enumerate(wanted):
        if on_progress is not None:
            on_progress(n / len(wanted), f"writing block {n + 1} of {len(wanted)}")
        if kind is Kind.BLOCK and len(there) < n:
            continue  # behind one that is gone
        sealed = cold.read(kind, address)
        if sealed is None:
            continue
        _add(archive, name, sealed.file.data)
        there.add(address)
        if kind is Kind.BLOCK:
            n_stored = min(sealed.info.stop, ref.n_stored)
    kept = replace(
        ref,
        blocks=tuple(a for a in ref.blocks if a in there),
        n_stored=n_stored,
        boundaries=tuple(b for b in ref.boundaries if b.address in there),
    )
    _add(archive, REFERENCE, kept.pack().data)


def verify_export(file: Path, on_progress: Progress | None) -> Reference:
    """Read all of an export, one block at a time; returns its reference.

    Raises:
        StoreError: it is none, or damaged.
    """
    with _reading(file) as archive:
        ref = unpack_reference(_read(archive, REFERENCE))
        parent, at = root_of(ref), 0
        entries = _entries(ref)
        for n, (kind, address, name) in enumerate(entries):
            if on_progress is not None:
                on_progress(n / len(entries), f"verifying block {n + 1} of {len(entries)}")
            sealed = opened(_read(archive, name))
            sealed.check_finite()
            info = sealed.info
            _check_place(ref, info, kind, address)
            if kind is Kind.BLOCK:
                if (info.parent, info.start) != (parent, at):
                    raise DamagedError(f"{name} does not follow the block before it")
                parent, at = info.address, info.stop
        if ref.blocks and at < ref.n_stored:
            raise DamagedError(f"its blocks hold {at} tokens, it speaks of {ref.n_stored}")
    if on_progress is not None:
        on_progress(1.0, "verified")
    return ref


def reference_of(file: Path) -> Reference:
    """Return the reference in an export, of which nothing else was looked at.

    Raises:
        StoreError: it is no export.
    """
    with _reading(file) as archive:
        return unpack_reference(_read(archive, REFERENCE))


def checked_pictures(file: Path, names: Collection[str]) -> list[str]:
    """Return which pictures are in an export, of some; each has the pixels that its name says.

    Raises:
        StoreError: one has others, or is no picture.
    """
    found = []
    with _reading(file) as archive:
        there = set(archive.namelist())
        for name in sorted(names):
            if f"{_PICTURES}{name}" not in there:
                continue
            try:
                is_right = Picture.read(_read_picture(archive, name)).name == name
            except PictureError as error:
                raise DamagedError(f"picture {name} is none: {error}") from error
            if not is_right:
                raise DamagedError(f"picture {name} has other pixels than its name says")
            found.append(name)
    return found


def picture_of_export(file: Path, name: str) -> bytes:
    """Return the file of a picture in an export.

    Raises:
        StoreError: it is gone.
    """
    with _reading(file) as archive:
        return _read_picture(archive, name)


def publish_export(cold: ColdTier, file: Path, ref: Reference, protect: Collection[bytes]) -> None:
    """Publish a verified export as ``ref``, blocks first. Only within ``cold.locked``.

    Raises:
        StoreError: there is no room, or the file has changed meanwhile; no reference was published.
    """
    with _reading(file) as archive:
        for kind, address, name in _entries(ref):
            sealed = opened(_read(archive, name))
            _check_place(ref, sealed.info, kind, address)
            cold.put(sealed, {*protect, *ref.addresses}, ref.name, is_imported=True)
        cold.settle()
        cold.put_reference(ref, protect)


@contextmanager
def _reading(file: Path) -> Iterator[zipfile.ZipFile]:
    """Open an archive; whatever is wrong with it is said in one way."""
    try:
        with file.open("rb") as raw, zipfile.ZipFile(raw) as archive:
            yield archive
    except (
        DamagedError,
        KeyError,
        ValueError,
        EOFError,
        OverflowError,
        RuntimeError,  # an entry that is encrypted, or of a later version of the format
        struct.error,
        zipfile.BadZipFile,
    ) as error:
        raise StoreError(
            f"{file} is not a whole export of a history ({error}); export it again; nothing was "
            f"published"
        ) from error
    except OSError as error:
        raise StoreError(f"{file} cannot be imported ({error}); nothing was published") from error


def _entries(ref: Reference) -> list[tuple[Kind, bytes, str]]:
    """Return kind, address and name in the archive of all that a reference needs."""
    wanted = [(Kind.BLOCK, a) for a in ref.blocks]
    wanted += [(Kind.BOUNDARY, b.address) for b in ref.boundaries]
    return [(kind, a, f"{kind.value}s/{a.hex()}{SUFFIX}") for kind, a in wanted]


def _read_picture(archive: zipfile.ZipFile, name: str) -> bytes:
    info = _checked_entry(archive, f"{_PICTURES}{name}")
    if info.file_size > MOST_BYTES:
        raise DamagedError(f"{name} has {info.file_size:,} bytes, of at most {MOST_BYTES:,}")
    with archive.open(info) as entry:
        return entry.read(info.file_size)


def _read(archive: zipfile.ZipFile, name: str) -> FileBytes:
    info = _checked_entry(archive, name)
    with archive.open(info) as entry:
        return read_from(entry, info.file_size)


def _checked_entry(archive: zipfile.ZipFile, name: str) -> zipfile.ZipInfo:
    info = archive.getinfo(name)
    assert archive.fp is not None
    n_bytes = os.fstat(archive.fp.fileno()).st_size
    if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
        raise DamagedError(f"{name} is compressed, which an export never is")
    if not 0 <= info.header_offset <= info.header_offset + info.file_size <= n_bytes:
        raise DamagedError(f"{name} is said to be larger than the file")
    return info


def _check_place(ref: Reference, info: Info, kind: Kind, address: bytes) -> None:
    if (info.kind, info.address, info.root) != (kind, address, root_of(ref)):
        raise DamagedError(f"{address.hex()} is another block, or of another model")
    tokens = ref.tokens[info.start : info.stop]
    if not np.array_equal(info.tokens[: len(tokens)], tokens):
        raise DamagedError(f"{address.hex()} holds other tokens than the history has there")


def _add(archive: zipfile.ZipFile, name: str, data: Bytes) -> None:
    archive.writestr(_entry(name), data.data)


def _entry(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name, _EPOCH)
    info.external_attr = 0o600 << 16
    return info
