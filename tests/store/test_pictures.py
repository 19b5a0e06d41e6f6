"""Pictures on disk: each once, whole or not at all, and gone only when nobody names it."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcellar.errors import StoreError
from kvcellar.store import Store, StoreConfig
from kvcellar.store import store as stores
from kvcellar.store.disk import pictures
from kvcellar.store.disk.folder import Folder
from kvcellar.store.disk.pictures import PictureFiles
from kvcellar.store.disk.upkeep import PICTURE_GRACE_S
from kvcellar.store.values.reports import EventLog
from tests.store.fakes import History, make_key, save, tokens_of

CAT, DOG, OWL = (f"{n:020x}" for n in (0xCA7, 0xD06, 0x0771))


@pytest.fixture
def folder(quick_path: Path) -> Folder:
    return Folder(quick_path / "store")


@pytest.fixture
def events() -> EventLog:
    return EventLog()


@pytest.fixture
def files(folder: Folder, events: EventLog) -> PictureFiles:
    return PictureFiles(folder, events)


@pytest.fixture
def store(quick_path: Path) -> Iterator[Store]:
    with Store(quick_path / "store", StoreConfig(warm_bytes=0)) as opened:
        yield opened


def names_in(folder: Folder) -> list[str]:
    return sorted(path.name.partition("-")[0] for path in folder.pictures.glob("*"))


def test_a_picture_is_given_as_it_was_put_also_by_another_process(
    folder: Folder, files: PictureFiles, events: EventLog
) -> None:
    theirs = PictureFiles(folder, events)
    assert files.get(CAT) is None and not files.keep(CAT) and files.size() == (0, 0)
    assert files.verify() == [] and files.remove(set(), 0) == (0, 0)
    files.put(CAT, b"meow")
    theirs.put(DOG, b"")
    for one in (files, theirs):
        assert (one.get(CAT), one.get(DOG), one.get(OWL)) == (b"meow", b"", None)
        assert one.keep(CAT) and one.size() == (2, 4) and one.verify() == []
    files.put(CAT, b"other bytes of the same pixels")
    assert files.get(CAT) == b"meow" and names_in(folder) == sorted([CAT, DOG])
    assert folder.pictures.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.pictures.iterdir()} == {0o600}
    assert not list(folder.staging.iterdir()) and not events.counts()


@pytest.mark.parametrize("name", ["", "x" * 20, CAT[:-1], f"{CAT}0", f"../{CAT[3:]}", CAT.upper()])
def test_what_names_no_picture_is_refused(files: PictureFiles, folder: Folder, name: str) -> None:
    with pytest.raises(StoreError, match="is no name of a picture"):
        files.put(name, b"x")
    assert not folder.pictures.exists() and files.get(name) is None


@pytest.mark.parametrize("harm", ["flip", "cut", "longer", "too long"])
def test_a_damaged_picture_is_put_away_and_can_be_put_again(
    folder: Folder,
    files: PictureFiles,
    events: EventLog,
    harm: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files.put(CAT, b"meow")
    files.put(DOG, b"wuf")
    (path,) = folder.pictures.glob(f"{CAT}-*")
    path.write_bytes({"flip": b"mEow", "cut": b"meo", "longer": b"meow "}.get(harm, b"meow"))
    if harm == "too long":
        monkeypatch.setattr(pictures, "MOST_BYTES", 3)
    assert files.verify() == [CAT]
    (event,) = events.take()
    assert (event.kind, event.subject) == ("damaged", CAT) and "quarantine" in event.detail
    assert names_in(folder) == [DOG] and len(list(folder.quarantined.iterdir())) == 1
    monkeypatch.undo()
    assert files.get(CAT) is None
    files.put(CAT, b"meow")
    assert files.get(CAT) == b"meow" and files.verify() == []


@pytest.mark.parametrize("is_removed", [True, False])
def test_a_picture_that_is_removed_meanwhile_or_cannot_be_read_is_not_called_damaged(
    folder: Folder,
    files: PictureFiles,
    events: EventLog,
    is_removed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in (CAT, DOG):
        files.put(name, b"x")

    def failing(path: Path, flags: int) -> int:
        if is_removed:
            for one in folder.pictures.iterdir():
                one.unlink()
        raise OSError(errno.EIO, "no answer")

    with monkeypatch.context() as patch:
        patch.setattr(pictures, "open_own", failing)
        assert files.verify() == [] and not events.counts()
    assert files.size()[0] == (0 if is_removed else 2)


def test_a_picture_as_long_as_one_may_be_is_read(
    files: PictureFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pictures, "MOST_BYTES", 4)
    files.put(CAT, b"meow")
    assert files.get(CAT) == b"meow"


def test_nobody_reads_or_removes_what_is_no_picture_of_ours(
    folder: Folder, files: PictureFiles, tmp_path: Path
) -> None:
    files.put(CAT, b"meow")
    (path,) = folder.pictures.iterdir()
    (tmp_path / "letter").write_bytes(b"mine")
    (folder.pictures / path.name.replace(CAT, DOG)).symlink_to(tmp_path / "letter")
    (folder.pictures / "Thumbs.db").write_bytes(b"x")
    (folder.pictures / f"{OWL}-{'0' * 15}").write_bytes(b"x")
    (folder.pictures / f"{OWL}-{'0' * 16}").mkdir()
    assert files.get(DOG) is None and files.get(OWL) is None
    assert files.size() == (1, 4) and files.verify() == []
    assert files.remove(set(), -9) == (1, 4)
    assert len(list(folder.pictures.iterdir())) == 4


def test_pictures_go_that_nobody_names_and_nobody_needed_lately(
    folder: Folder, files: PictureFiles
) -> None:
    for name in (CAT, DOG, OWL):
        files.put(name, name.encode())
    for path in folder.pictures.iterdir():
        os.utime(path, (time.time() - 100,) * 2)
    assert files.keep(OWL)
    assert files.remove({CAT, DOG, OWL}, 50) == (0, 0)
    assert files.remove({CAT}, 150) == (0, 0)
    assert files.remove({CAT}, 50) == (1, 20)
    assert names_in(folder) == sorted([CAT, OWL])
    assert files.get(DOG) is None and not files.keep(DOG)
    assert files.remove(set(), -9) == (2, 40)


def test_a_picture_that_cannot_be_written_changes_nothing(
    folder: Folder, files: PictureFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "write_bytes", full)
        with pytest.raises(StoreError, match=rf"picture {CAT} could not be written \(No space"):
            files.put(CAT, b"meow")
    assert files.get(CAT) is None and names_in(folder) == []
    files.put(CAT, b"meow")
    monkeypatch.setattr(os, "utime", full)
    assert files.keep(CAT), "a disk that takes nothing has it all the same"
    files.put(CAT, b"meow")

    def gone(path: Path) -> None:
        path.unlink()
        raise FileNotFoundError

    monkeypatch.setattr(os, "utime", gone)
    assert not files.keep(CAT)


def test_a_picture_is_durable_before_it_is_said_to_be(
    folder: Folder, files: PictureFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[object] = []
    monkeypatch.setattr(Folder, "settle", staticmethod(lambda paths: done.append(list(paths))))
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: done.append(fsync(fd)))
    files.put(CAT, b"meow")
    assert done == [None, [folder.path, folder.pictures]], "its bytes, then both its names"


def test_a_picture_stays_while_anything_in_the_store_names_it(store: Store) -> None:
    key = make_key()

    def left() -> list[str]:
        for path in (store.path / "pictures").iterdir():
            os.utime(path, (time.time() - PICTURE_GRACE_S - 9,) * 2)
        store.gc()
        return names_in(Folder(store.path))

    for name in (CAT, DOG, OWL):
        store.put_picture(name, name.encode())
    assert store.gc().n_pictures == 0, "what names them may not be written yet"
    save(store, "a", History(key, tokens_of(0, 9)), metadata={"shown": {"who": [CAT]}})
    store.record("b", 1, b"..." + DOG.encode() + b"...")
    store.put_document("resp_1", OWL.encode())
    assert left() == sorted([CAT, DOG, OWL])
    stats = store.stats()
    assert (stats.n_pictures, stats.picture_bytes) == (3, 60)
    assert store.delete_document("resp_1")
    assert left() == sorted([CAT, DOG])
    store.save("b", key, [1], metadata={"serial": 1}).wait()
    store.record("c", 1, b"0" + DOG.encode())  # a longer number is another
    assert left() == [CAT]
    store.delete("a")
    for path in (store.path / "pictures").iterdir():
        os.utime(path, (time.time() - PICTURE_GRACE_S - 9,) * 2)
    assert store.gc(grace_s=2 * PICTURE_GRACE_S).n_pictures == 0
    report = store.gc()
    assert report.n_pictures == 1 and left() == []


def test_now_and_then_pictures_of_days_before_go_that_nobody_names(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "PICTURES_BETWEEN", 3)
    store.put_picture(CAT, b"meow")
    store.put_picture(DOG, b"wuf")
    for path in (store.path / "pictures").iterdir():
        os.utime(path, (time.time() - stores.UNNAMED_S - 9,) * 2)
    assert store.keep_picture(DOG) and not store.keep_picture(OWL)
    store.flush()
    assert store.picture(CAT) == b"meow", "that is looked for with every third"
    store.put_picture(OWL, b"hoo")
    store.flush()
    assert store.picture(CAT) is None
    assert (store.picture(DOG), store.picture(OWL)) == (b"wuf", b"hoo")
