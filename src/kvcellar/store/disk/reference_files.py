"""Files of references: the latest state of each history, and the one before beside it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path

from kvcellar.errors import StoreError
from kvcellar.store.disk.folder import PREVIOUS, Folder
from kvcellar.store.values.facts import text
from kvcellar.store.values.format import DamagedError, FileBytes, read_file, read_header
from kvcellar.store.values.references import Reference, file_stem, unpack_reference
from kvcellar.store.values.reports import EventKind, EventLog


class ReferenceFiles:
    """Reads references for any thread; writes them for whoever holds the folder's lock."""

    def __init__(self, folder: Folder, events: EventLog) -> None:
        """Create a reader and writer of the references in a folder."""
        self._folder = folder
        self._events = events
        self._damaged: dict[tuple[Path, str], tuple[str, str]] = {}
        """By file and stamp what was found wrong with it, and the name that it says."""

    # Reading -----------------------------------------------------------------------------------

    def get(self, name: str) -> Reference | None:
        """Return the published state of a name; the one before it where the file is damaged."""
        return self.read(self._folder.of_reference(name))

    def read(self, path: Path) -> Reference | None:
        """Return the state that a file holds, or the one before; None where there is neither."""
        try:
            return _reference_from(path)
        except FileNotFoundError:
            return None
        except (DamagedError, OSError) as error:
            try:
                before = _reference_from(previous_of(path))
            except (DamagedError, OSError):
                before = None
            self._say_damaged(path, before, str(error))
            return before

    def damage_of(self, name: str) -> str | None:
        """Return what is wrong with the file of a name; None where it is good, or gone."""
        try:
            _reference_from(self._folder.of_reference(name))
        except FileNotFoundError:
            return None
        except (DamagedError, OSError) as error:
            return str(error)
        return None

    def damaged(self, stamps: Mapping[str, str]) -> dict[str, str]:
        """Find references without a state that can be read, and what is wrong with each.

        As far as the folder's names say: a file that went bad where it lies is found when it is
        read.

        Args:
            stamps: per name what its file looked like when it was listed as good.

        Returns:
            By name, or by the stem of its file where the name cannot be read either.
        """
        listed = set(stamps.values())
        names = {file_stem(name): name for name in stamps}
        found: dict[tuple[Path, str], tuple[str, str]] = {}
        for key in self._folder.reference_paths().items():
            path, stamp = key
            if stamp in listed:
                continue
            if key in self._damaged:
                found[key] = self._damaged[key]
                continue
            try:
                _reference_from(path)
            except FileNotFoundError:
                continue
            except (DamagedError, OSError) as error:
                name = names.get(path.stem) or _name_in(path) or path.stem
                found[key] = (name, str(error))
        self._damaged = found
        return dict(found.values())

    def size_bytes(self, path: Path) -> int:
        """Return the bytes of a reference's file and of the state before it."""
        size = path.stat().st_size
        with contextlib.suppress(FileNotFoundError):
            size += previous_of(path).stat().st_size
        return size

    # Changing ----------------------------------------------------------------------------------

    def publish(self, name: str, packed: FileBytes, *, keeps_before: bool = True) -> Path:
        """Write a state of a name, durably, and return its file; the one before is kept beside it.

        Raises:
            OSError: it could not be written; the state before is still the published one.
        """
        folder, path = self._folder, self._folder.of_reference(name)
        if keeps_before:
            with contextlib.suppress(FileNotFoundError, DamagedError):
                folder.publish(folder.write(read_file(path).data), previous_of(path))
        folder.publish(folder.write(packed.data), path)
        if not keeps_before:
            previous_of(path).unlink(missing_ok=True)
        folder.settle([folder.references])
        return path

    def remove(self, name: str) -> bool:
        """Remove the files of a name; false where there were none."""
        path = self._folder.of_reference(name)
        there = path.exists()
        previous_of(path).unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        self._folder.settle([self._folder.references])
        return there

    def repair(self, path: Path, check: Callable[[Reference], None]) -> str | None:
        """Read a reference's file; a damaged one goes to the quarantine, for the state before it.

        Args:
            path: the file.
            check: raises StoreError for a reference that its owner cannot use.

        Returns:
            Its name where the file is good.
        """
        try:
            ref = _reference_from(path)
            check(ref)
            return ref.name
        except FileNotFoundError:
            return None
        except (DamagedError, StoreError, OSError) as error:
            before = None
            with contextlib.suppress(DamagedError, StoreError, OSError):
                found = _reference_from(previous_of(path))
                check(found)
                before = found
            self._say_damaged(path, before, str(error))
            self._folder.put_away(path)
            if before is not None:
                self._folder.publish(previous_of(path), path)
                self._folder.settle([self._folder.references])
            else:
                self._folder.put_away(previous_of(path))
        return None

    def _say_damaged(self, path: Path, before: Reference | None, why: str) -> None:
        what = "there is no state before" if before is None else "the state before is used"
        subject = path.stem if before is None else before.name
        self._events.add(EventKind.REFERENCE_DAMAGED, subject, f"{why}; {what}")


def previous_of(path: Path) -> Path:
    """Return where the state before a reference's latest one is."""
    return path.with_name(path.name + PREVIOUS)


def _name_in(path: Path) -> str | None:
    """Return the name that a reference's file says, where the file is named after it."""
    with contextlib.suppress(
        DamagedError, OSError, ValueError, KeyError, TypeError, RecursionError
    ):
        name = text(json.loads(read_header(path)[0]["facts"])["name"], "name")
        if file_stem(name) == path.stem:
            return name
    return None


def _reference_from(path: Path) -> Reference:
    ref = unpack_reference(read_file(path))
    if file_stem(ref.name) != path.name.split(".")[0]:
        raise DamagedError(f"it is the reference of {ref.name!r}")
    return ref
