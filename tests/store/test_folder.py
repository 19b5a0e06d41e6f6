"""The folder: files that are whole before they have a name, and one who changes it at a time."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from pathlib import Path

import pytest

from kvcellar.errors import StoreError
from kvcellar.store.disk import folder as folders
from kvcellar.store.disk.folder import RESERVE_BYTES, Folder
from kvcellar.store.values.blocks import Kind


@pytest.fixture
def folder(quick_path: Path) -> Folder:
    return Folder(quick_path / "store")


def test_bytes_that_the_system_takes_piece_by_piece_are_all_written(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, synced = os.write, []
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:7]))
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_size))
    first, second = folder.write_bytes(b"0123456789" * 9), folder.write_bytes(b"")
    assert (first.read_bytes(), second.read_bytes()) == (b"0123456789" * 9, b"")
    assert synced == [90, 0] and {first.parent, second.parent} == {folder.staging}
    folder.publish(first, folder.path / "name")
    assert (folder.path / "name").stat().st_size == 90 and not first.exists()


def open_in(folder: Path) -> list[str]:
    """Files of a folder that this process has open, where the system tells."""
    links = []
    for fd in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):
            links.append(str(fd.readlink()))
    return [link for link in links if link.startswith(str(folder))]


@pytest.mark.parametrize("verb", ["write", "fsync"])
def test_what_cannot_be_written_leaves_no_file_and_none_open(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(os, verb, full)
        for _ in range(3):
            with pytest.raises(OSError, match="full"):
                folder.write_bytes(b"x")
    assert not list(folder.staging.iterdir())
    folder.write_bytes(b"x")
    assert open_in(folder.path) == []


def test_what_is_put_away_keeps_its_name_and_bytes_and_the_oldest_is_listed_first(
    folder: Folder,
) -> None:
    assert folder.quarantine_files() == []
    for n in range(3):
        (folder.path / "bad").write_bytes(b"x" * n)
        os.utime(folder.path / "bad", ns=(5, 10 - n))
        assert folder.put_away(folder.path / "bad")
    assert not folder.put_away(folder.path / "bad"), "it is gone"
    found = folder.quarantine_files()
    assert [size for _, size in found] == [2, 1, 0]
    assert {path.name.partition(".")[0] for path, _ in found} == {"bad"}
    folder.quarantined.rename(folder.path / "elsewhere")
    (folder.path / "bad").write_bytes(b"x")
    assert not folder.put_away(folder.path / "bad") and (folder.path / "bad").exists()
    assert folder.quarantine_files() == []


def test_half_written_files_are_cleared_away_whatever_they_are(folder: Folder) -> None:
    folder.write_bytes(b"x")
    (folder.staging / "deep" / "er").mkdir(parents=True)
    (folder.staging / "link").symlink_to(folder.blocks)
    assert folder.clear_staging() == 3
    assert folder.clear_staging() == 0 and folder.blocks.is_dir()


def test_only_files_of_ours_are_listed(folder: Folder) -> None:
    name, address = "ab" * 16, bytes.fromhex("ab" * 16)
    for kind in Kind:
        folder.of(kind, address).write_bytes(b"x")
    for odd in ("notes.txt", "xy.safetensors", f"{name}.tmp", name):
        (folder.blocks / odd).write_bytes(b"x")
    (folder.windows / f"{'cd' * 16}.safetensors").mkdir()
    (folder.windows / f"{'ef' * 16}.safetensors").symlink_to(folder.of(Kind.BLOCK, address))
    assert list(folder.block_paths()) == [(k, address, folder.of(k, address)) for k in Kind]
    latest = folder.of_reference("poet")
    assert folder.reference_paths() == {} and latest.parent == folder.references
    stamps = set()
    for n in range(3):
        latest.with_name(f"{latest.name}.previous").write_bytes(b"x")
        folder.publish(folder.write_bytes(b"x" * (n % 2)), latest)
        (stamp,) = folder.reference_paths().values()
        stamps.add(stamp)
    assert len(stamps) == 3, "each publication has a stamp of its own"


def test_one_thread_or_process_at_a_time_may_change_a_folder(folder: Folder) -> None:
    theirs = Folder(folder.path)
    is_held, may_go, late = threading.Event(), threading.Event(), []

    def hold() -> None:
        with folder.locked(1), folder.locked(1):  # again by whoever has it
            is_held.set()
            assert may_go.wait(60)
        with folder.locked(60):
            pass

    def wait() -> None:
        with theirs.locked(60):
            late.append(may_go.is_set())

    holder = threading.Thread(target=hold)
    holder.start()
    assert is_held.wait(60)
    for other in (folder, theirs):  # a thread of ours, and as another process
        began = time.monotonic()
        with pytest.raises(StoreError, match=r"not free for 0.02 s; try again"), other.locked(0.02):
            raise AssertionError
        assert 0.02 <= time.monotonic() - began < 30
    waiter = threading.Thread(target=wait)
    waiter.start()
    time.sleep(0.02)
    may_go.set()
    for thread in (holder, waiter):
        thread.join()
    assert late == [True]
    with pytest.raises(ZeroDivisionError), folder.locked(0):
        raise ZeroDivisionError
    for other in (folder, theirs):
        with other.locked(0):
            pass


def test_a_note_that_rows_are_a_strangers_is_durable_and_goes_when_they_are_proven(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled: list[Path] = []
    monkeypatch.setattr(Folder, "settle", staticmethod(settled.extend))
    one, other = b"a" * 16, b"b" * 16
    assert not folder.is_unproven(one)
    folder.mark_proven(one)
    for _ in range(2):
        folder.mark_unproven(one)
    assert set(settled) == {folder.path, folder.unproven}
    assert folder.is_unproven(one) and not folder.is_unproven(other)
    folder.mark_proven(one)
    assert not folder.is_unproven(one)


def test_the_reserve_takes_room_until_it_is_spent(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.spend_reserve()
    folder.keep_reserve()
    first = folder.journal_reserve.read_bytes()
    assert len(first) == RESERVE_BYTES and len(set(first)) == 256, "not what takes no room"
    folder.keep_reserve()
    assert folder.journal_reserve.read_bytes() == first
    settled: list[Path] = []
    monkeypatch.setattr(Folder, "settle", staticmethod(settled.extend))
    folder.spend_reserve()
    assert settled == [folder.path] and not folder.journal_reserve.exists()


def test_a_folder_that_cannot_be_made_is_refused_in_words(quick_path: Path) -> None:
    (quick_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match=r"cannot hold a store \(.+\); give a folder"):
        Folder(quick_path / "file" / "store")


def test_a_folder_of_somebody_elses_is_left_as_it_is(quick_path: Path) -> None:
    theirs = quick_path / "theirs"
    theirs.mkdir(mode=0o755)
    (theirs / "thesis").write_bytes(b"mine")
    with pytest.raises(StoreError, match=r"is no store and not empty \(it holds thesis\)"):
        Folder(theirs)
    assert [path.name for path in theirs.iterdir()] == ["thesis"]
    assert theirs.stat().st_mode & 0o777 == 0o755
    (theirs / "thesis").rename(theirs / "blocks")
    (theirs / "blocks").unlink()
    Folder(theirs)
    assert theirs.stat().st_mode & 0o777 == 0o700, "an empty one is a store's from now on"


def test_a_folder_that_another_process_is_making_is_waited_for(
    quick_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "_MAKING_S", 0.02)
    whole = Folder(quick_path / "store")
    (whole.path / "format").unlink()
    with whole.locked(1), pytest.raises(StoreError, match="written by another process"):
        Folder(whole.path)
    Folder(whole.path)
    assert (whole.path / "format").read_text() == folders.FORMAT
