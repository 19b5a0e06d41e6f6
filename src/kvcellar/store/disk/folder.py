"""The store's folder: names, modes, a lock, and writing so that a crash leaves all or nothing.

``write`` makes a temporary file whole and durable, ``publish`` renames it, ``settle`` makes renames
durable. Whoever publishes a reference settles its blocks before.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import stat
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import lock_descriptor

from kvcellar.errors import StoreError
from kvcellar.home import SERVER_LOCK, open_own
from kvcellar.store.values.blocks import Kind
from kvcellar.store.values.format import VERSION, Bytes, DamagedError, read_header
from kvcellar.store.values.references import file_stem

RESERVE_BYTES = 64 << 10

FORMAT = f"kvcellar store {VERSION}\n"
SUFFIX = ".safetensors"
PREVIOUS = ".previous"
_FORMAT_LINE = re.compile(r"kvcellar store \d+\n")
_MOST_LOOKED_AT = 100
"""Files whose version is looked at where the store's own is lost."""

_POLL_S = 0.005
_MAKING_S = 60.0
"""How long a new folder waits for another process that makes or clears it."""


class Folder:
    """Paths below one folder, all of it for its owner's eyes alone (0700, files 0600)."""

    def __init__(self, path: Path) -> None:
        """Make the folder where it is not there.

        Raises:
            StoreError: it cannot be made or is of another version.
        """
        self.path = path
        self.blocks = path / "blocks"
        self.windows = path / "windows"
        self.references = path / "references"
        self.staging = path / "tmp"
        self.quarantined = path / "quarantine"
        self.leases = path / "leases"
        self.unproven = path / "unproven"
        self.pictures = path / "pictures"
        self.catalogue = path / "catalogue.sqlite"
        self.journal = path / "journal.sqlite"
        self.journal_reserve = path / "journal.reserve"
        self.shared = path / "shared.sqlite"
        self._lock_path = path / "lock"
        self._thread_lock = threading.RLock()
        self._depth = 0
        self._numbers = itertools.count()
        self._make()

    def _make(self) -> None:
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._refuse_links()
            marker = self.path / "format"
            found = self._read_format(marker)
            if found != FORMAT:
                self._mark(marker, found)
            for folder in self._folders():
                if not folder.is_dir():
                    folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise StoreError(
                f"{self.path} cannot hold a store ({error.strerror}); give a folder that can be "
                f"written to"
            ) from error

    def _mark(self, marker: Path, found: str | None) -> None:
        """Write the file that says the version, if this may be a store of this version.

        Only one process at a time does: another would clear away what is half-written.
        """
        if found is None:
            self._refuse_others()
            self.path.chmod(0o700)
        elif _FORMAT_LINE.fullmatch(found):
            raise StoreError(
                f"{self.path} is {found.strip()!r}, this version knows {FORMAT.strip()!r}; "
                f"use the version that made it, or another folder"
            )
        with self.locked(_MAKING_S):
            found = self._read_format(marker)
            if found == FORMAT:
                return
            for folder in self._folders():
                folder.mkdir(mode=0o700, exist_ok=True)
            if not self._is_of_this_version():
                raise StoreError(
                    f"{marker} is {'lost' if found is None else 'damaged'}, and no file of the "
                    f"store shows its version; if this version of kvcellar made it, write the "
                    f"line {FORMAT.strip()!r} into that file, else give another folder"
                )
            self._write(FORMAT.encode()).replace(marker)

    def _refuse_links(self) -> None:
        """See that what stands under our names is ours: folders and files, never a link elsewhere.

        The store's own folder may be a link.
        """
        sqlite = [
            base.with_name(base.name + suffix)
            for base in (self.catalogue, self.journal, self.shared)
            for suffix in ("", "-wal", "-shm")
        ]
        sqlite.append(self.journal_reserve)
        files = [self.path / "format", self.path / SERVER_LOCK, self._lock_path, *sqlite]
        folders = (*self._folders(), self.leases, self.unproven, self.pictures)
        for path in (*folders, *files):
            is_folder = path in folders
            try:
                mode = path.lstat().st_mode
            except FileNotFoundError:
                continue
            if not (stat.S_ISDIR(mode) if is_folder else stat.S_ISREG(mode)):
                what = "a link" if stat.S_ISLNK(mode) else "something else"
                raise StoreError(
                    f"{path} is {what} where a store has a {'folder' if is_folder else 'file'} of "
                    f"its own, so it was not touched; remove it, or give another folder (the whole "
                    f"store may lie behind a link, nothing inside of it)"
                )

    @staticmethod
    def _read_format(marker: Path) -> str | None:
        """Read the beginning of the file that says the version; None where there is none."""
        try:
            fd = open_own(marker, os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            return os.read(fd, 200).decode("utf-8", "replace")
        finally:
            os.close(fd)

    def _refuse_others(self) -> None:
        there = [entry.name for entry in self.path.iterdir()]
        if there and not {"blocks", "references", "tmp", "lock"} & set(there):
            raise StoreError(
                f"{self.path} is no store and not empty (it holds {sorted(there)[0]}); give a "
                f"folder of its own"
            )

    def _is_of_this_version(self) -> bool:
        """Return whether a file shows that this version wrote it, or there is no file at all."""
        n = 0
        for folder in (self.references, self.blocks, self.windows):
            for path, _ in itertools.islice(_files(folder), _MOST_LOOKED_AT):
                n += 1
                with contextlib.suppress(DamagedError, FileNotFoundError):
                    read_header(path)
                    return True
        return not n

    def _folders(self) -> tuple[Path, ...]:
        return self.blocks, self.windows, self.references, self.staging, self.quarantined

    # Names -------------------------------------------------------------------------------------

    def of(self, kind: Kind, address: bytes) -> Path:
        """Return the file of a block or boundary state."""
        folder = self.blocks if kind is Kind.BLOCK else self.windows
        return folder / f"{address.hex()}{SUFFIX}"

    def of_reference(self, name: str) -> Path:
        """Return the file of a reference's latest state."""
        return self.references / f"{file_stem(name)}{SUFFIX}"

    def reference_paths(self) -> dict[Path, str]:
        """Return the latest states' files, each with a stamp that every publication changes."""
        found: dict[Path, str] = {}
        for path, entry in _files(self.references):
            with contextlib.suppress(FileNotFoundError):  # deleted since the folder was read
                found[path] = stamp_of(entry)
        return found

    def block_paths(self) -> Iterator[tuple[Kind, bytes, Path]]:
        """Yield all files of blocks and boundary states, with the address that their name says."""
        for kind, folder in ((Kind.BLOCK, self.blocks), (Kind.BOUNDARY, self.windows)):
            for path, _ in _files(folder):
                try:
                    yield kind, bytes.fromhex(path.stem), path
                except ValueError:
                    continue  # not ours

    # Writing -----------------------------------------------------------------------------------

    def write(self, data: Bytes) -> Path:
        """Make a temporary file with these bytes, durably. An error leaves no file.

        Raises:
            OSError: it cannot be written.
        """
        return self._write(data.data)

    def write_bytes(self, data: bytes) -> Path:
        """Make a temporary file with bytes of any kind, as ``write`` does."""
        return self._write(data)

    def mark_unproven(self, address: bytes) -> None:
        """Note durably that the rows of an address are what somebody else says they are.

        Raises:
            OSError: it cannot be written.
        """
        self.unproven.mkdir(mode=0o700, exist_ok=True)
        os.close(open_own(self.unproven / address.hex(), os.O_CREAT | os.O_RDWR))
        self.settle((self.path, self.unproven))

    def mark_proven(self, address: bytes) -> None:
        """Forget that note; a no-op where there is none."""
        with contextlib.suppress(OSError):  # a disk that takes nothing: proven again next time
            (self.unproven / address.hex()).unlink()

    def is_unproven(self, address: bytes) -> bool:
        """Return true if there is such a note."""
        return (self.unproven / address.hex()).exists()

    def keep_reserve(self) -> None:
        """Write the file whose room a deletion may have on a full disk, unless it is there.

        Raises:
            OSError: there is no such room.
        """
        if not self.journal_reserve.exists():
            noise = os.urandom(RESERVE_BYTES)  # zeros take no room on some systems
            self.publish(self._write(noise), self.journal_reserve)

    def spend_reserve(self) -> None:
        """Remove that file, so that its room is free.

        Raises:
            OSError: it cannot be removed.
        """
        self.journal_reserve.unlink(missing_ok=True)
        self.settle([self.path])  # some systems give the room back only then

    def _write(self, data: bytes | memoryview) -> Path:
        path = self.staging / f"{os.getpid()}-{time.time_ns()}-{next(self._numbers)}"
        fd = open_own(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        try:
            view = memoryview(data)
            while len(view):
                view = view[os.write(fd, view) :]
            os.fsync(fd)
        except BaseException:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        os.close(fd)
        return path

    @staticmethod
    def publish(staged: Path, path: Path) -> None:
        """Give a temporary file its name, in place of what had it before."""
        staged.replace(path)

    @staticmethod
    def settle(folders: Iterable[Path]) -> None:
        """Make renames in these folders durable, on systems where a folder can be synchronised."""
        if sys.platform == "win32":
            return
        for folder in folders:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def put_away(self, path: Path) -> bool:
        """Move a damaged file to the quarantine; false where it is gone or cannot be moved."""
        target = self.quarantined / f"{path.name}.{time.time_ns()}"
        try:
            path.replace(target)
        except OSError:
            return False
        return True

    def quarantine_files(self) -> list[tuple[Path, int]]:
        """Return the files in the quarantine and their bytes, oldest first."""
        found = [(path, entry.stat()) for path, entry in _files(self.quarantined, "")]
        found.sort(key=lambda item: item[1].st_mtime_ns)
        return [(path, stat.st_size) for path, stat in found]

    def clear_staging(self) -> int:
        """Remove half-written files; only who holds the lock may. Returns how many there were."""
        n = 0
        for entry in list(os.scandir(self.staging)):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                Path(entry.path).unlink(missing_ok=True)
            n += 1
        return n

    # One writer at a time ----------------------------------------------------------------------

    @contextmanager
    def locked(self, timeout_s: float) -> Iterator[None]:
        """Be the only one who changes the folder, of all threads and processes.

        The lock ends with its process, however that ends.

        Raises:
            StoreError: others held it all the time, or there can be no lock here; nothing was
                changed.
        """
        deadline = time.monotonic() + timeout_s
        if not self._thread_lock.acquire(timeout=timeout_s):
            raise self._busy(timeout_s)
        try:
            if self._depth:
                yield
                return
            try:
                fd = open_own(self._lock_path, os.O_CREAT | os.O_RDWR)
            except OSError as error:
                said = error.strerror or error
                raise StoreError(f"{self.path} cannot be written to ({said})") from error
            try:
                while not lock_descriptor(fd, blocking=False):
                    if time.monotonic() > deadline:
                        raise self._busy(timeout_s)
                    time.sleep(_POLL_S)
                self._depth = 1
                try:
                    yield
                finally:
                    self._depth = 0
            finally:
                os.close(fd)
        finally:
            self._thread_lock.release()

    def _busy(self, timeout_s: float) -> StoreError:
        return StoreError(
            f"{self.path} is being written by another process and was not free for "
            f"{timeout_s:g} s; try again, or end that process"
        )


def stamp_of(entry: os.DirEntry[str] | Path) -> str:
    """Return a text that changes whenever a file is replaced."""
    stat = entry.stat()
    return f"{stat.st_ino}.{stat.st_mtime_ns}.{stat.st_size}"


def _files(folder: Path, suffix: str = SUFFIX) -> Iterator[tuple[Path, os.DirEntry[str]]]:
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(suffix) and entry.is_file(follow_symlinks=False):
                yield Path(entry.path), entry
