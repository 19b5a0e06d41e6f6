"""A thousand faults: no wrong byte is ever given, and every fault is reported.

``KVCELLAR_FAULTS`` sets how many are injected; 1,000 by default.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sqlite3
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvcellar.errors import StoreError
from kvcellar.store import EventKind, Store, StoreConfig, StoreEvent
from kvcellar.store.disk.folder import Folder
from kvcellar.store.disk.journal import Journal
from kvcellar.store.writer import Writer
from tests.store.fakes import FULL, STATE, WINDOW, History, load_all, make_key, save, tokens_of

N_FAULTS = int(os.environ.get("KVCELLAR_FAULTS", "1000"))
COLD = StoreConfig(warm_bytes=0)
KEY = make_key(groups=[FULL, WINDOW], block_tokens=4)
OTHER = make_key("other", groups=[FULL, WINDOW], block_tokens=4)
TRUNK = tokens_of(0, 10)
HYBRID = make_key("hybrid", groups=[FULL, WINDOW], block_tokens=4, state=STATE)
HISTORIES = {
    "a": History(KEY, [*TRUNK, *tokens_of(1, 8)]),
    "b": History(KEY, [*TRUNK, *tokens_of(2, 5)]),
    "c": History(OTHER, [*TRUNK, *tokens_of(3, 6)]),
    "d": History(HYBRID, [*TRUNK, *tokens_of(4, 7)]),
}


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with four histories, two of which share a trunk, each saved twice."""
    folder = tmp_path_factory.mktemp("healthy") / "store"
    with Store(folder, COLD) as store:
        for name, history in HISTORIES.items():
            save(store, name, History(history.key, history.tokens[:9]))
            save(store, name, history)
    return folder


def files(folder: Path, *names: str) -> list[Path]:
    return sorted(path for name in names for path in (folder / name).glob("*.safetensors"))


class Faults:
    """Ways to harm a store that nobody has open; each returns the events that must be told."""

    def __init__(self, folder: Path, rng: np.random.Generator) -> None:
        self.folder = folder
        self.rng = rng

    def pick(self, *names: str) -> Path:
        found = files(self.folder, *names)
        return found[int(self.rng.integers(len(found)))]

    def truncated(self) -> set[EventKind]:
        path = self.pick("blocks", "windows")
        os.truncate(path, int(self.rng.integers(path.stat().st_size)))
        return {EventKind.DAMAGED}

    def flipped(self) -> set[EventKind]:
        path = self.pick("blocks", "windows")
        self.flip(path)
        return {EventKind.DAMAGED}

    def flip(self, path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[int(self.rng.integers(len(data)))] ^= 1 << int(self.rng.integers(8))
        path.write_bytes(data)

    def zeros(self) -> set[EventKind]:
        path = self.pick("blocks", "windows")
        data = bytearray(path.read_bytes())
        at = int(self.rng.integers(len(data)))
        data[at : at + 64] = bytes(b ^ 0xFF for b in data[at : at + 64])
        path.write_bytes(data)
        return {EventKind.DAMAGED}

    def missing(self) -> set[EventKind]:
        self.pick("blocks", "windows").unlink()
        return {EventKind.MISSING}

    def swapped(self) -> set[EventKind]:
        """Another block, perhaps another model's, under this address."""
        folder = ("blocks", "windows")[int(self.rng.integers(2))]
        one, two = self.pick(folder), self.pick(folder)
        if one == two:
            return self.flipped()
        shutil.copy(one, two)
        return {EventKind.DAMAGED}

    def reference(self) -> set[EventKind]:
        self.flip(self.pick("references"))
        return {EventKind.REFERENCE_DAMAGED}

    def catalogue(self) -> set[EventKind]:
        """A file that is no database any more, or half of one."""
        path = self.folder / "catalogue.sqlite"
        for suffix in ("-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        kind = int(self.rng.integers(3))
        if kind == 0:
            path.write_bytes(self.rng.bytes(5000))
        elif kind == 1:
            os.truncate(path, int(self.rng.integers(100, 8000)))
        else:
            path.unlink()
        return {EventKind.CATALOGUE_REBUILT}

    def lying_catalogue(self) -> set[EventKind]:
        """A row that says something else than the file: found when it is used."""
        db = sqlite3.connect(self.folder / "catalogue.sqlite")
        rows = db.execute("SELECT address, tokens FROM blocks").fetchall()
        address, tokens = rows[int(self.rng.integers(len(rows)))]
        change = int(self.rng.integers(4))
        bad = bytearray(tokens)
        if bad:
            bad[int(self.rng.integers(len(bad)))] ^= 1
        with db:
            if change == 0:
                db.execute("UPDATE blocks SET first = 0 WHERE address = ?", (address,))
            elif change == 1:
                db.execute("UPDATE blocks SET start = start + 4 WHERE address = ?", (address,))
            elif change == 2:
                db.execute("UPDATE blocks SET tokens = ? WHERE address = ?", (bytes(bad), address))
            else:
                db.execute("UPDATE blocks SET root = x'00' WHERE address = ?", (address,))
        db.close()
        return set()


FAULTS = (
    "truncated",
    "flipped",
    "zeros",
    "missing",
    "swapped",
    "reference",
    "catalogue",
    "lying_catalogue",
)


@pytest.mark.slow
def test_a_thousand_faults_give_no_wrong_byte_and_are_all_reported(
    healthy: Path, quick_path: Path
) -> None:
    rng = np.random.default_rng(0)
    counts: Counter[str] = Counter()
    lost = 0
    for n in range(N_FAULTS):
        folder = quick_path / "store"
        shutil.copytree(healthy, folder)
        fault = FAULTS[n % len(FAULTS)]
        want = getattr(Faults(folder, rng), fault)()
        events: list[StoreEvent] = []
        with Store(folder, COLD) as store:
            for name, history in HISTORIES.items():
                n_loaded = load_all(store, history)  # compares every byte
                lost += len(history.tokens) - n_loaded
                state = store.get(name) if store.has_reference(name) else None
                assert state is not None
                assert list(state.tokens) in (history.tokens, history.tokens[:9])
            events += store.take_events()
            if not want - {event.kind for event in events}:
                pass  # it was met while loading
            else:
                store.verify()  # it lies where nothing is loaded from
                events += store.take_events()
            kinds = {event.kind for event in events}
            assert want <= kinds, (fault, kinds)
            assert kinds <= want | {EventKind.CATALOGUE_WRONG, EventKind.MISSING}, (fault, kinds)
            if n % 10 == 0:
                for name, history in HISTORIES.items():  # and all can be saved again
                    save(store, name, history)
                    assert load_all(store, history) == len(history.tokens)
                store.gc()
                assert store.verify().is_good, fault
        counts[fault] += 1
        shutil.rmtree(folder)
    print(dict(counts), f"{lost} tokens lost of {N_FAULTS * sum(map(len_of, HISTORIES.values()))}")
    assert lost < N_FAULTS * 12


def len_of(history: History) -> int:
    return len(history.tokens)


def test_a_damaged_block_costs_its_suffix_and_is_moved_to_quarantine(
    healthy: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "store"
    key = make_key(block_tokens=4)
    history = History(key, tokens_of(9, 40))
    with Store(folder, COLD) as store:
        save(store, "a", history)
        blocks = store.get("a").blocks
        for n, address in enumerate(blocks):
            path = folder / "blocks" / f"{address.hex()}.safetensors"
            data = path.read_bytes()
            path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
            match = store.match(key, history.tokens)
            assert load_all(store, history) == 4 * n
            (event,) = store.take_events()
            assert (event.kind, event.subject) == (EventKind.DAMAGED, address.hex())
            assert "checksum" in event.detail
            assert "moved to quarantine" in event.detail
            assert not path.exists()
            assert list(store.load(match, 4 * n + 4)) != [] or n == len(blocks) - 1
            save(store, "a", history)
            assert load_all(store, history) == 40
        assert len(list((folder / "quarantine").iterdir())) == len(blocks)


# A disk that refuses ------------------------------------------------------------------------------


@contextlib.contextmanager
def writes_fail_after(
    monkeypatch: pytest.MonkeyPatch, n_bytes: int, code: int = errno.ENOSPC
) -> Iterator[None]:
    """Writing raises once so many bytes are written, as a full disk does: part is written."""
    left = n_bytes
    real = os.write

    def write(fd: int, data: memoryview) -> int:
        nonlocal left
        if left <= 0:
            raise OSError(code, os.strerror(code))
        done = real(fd, data[:left])
        left -= done
        return done

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        yield


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_write_that_fails_anywhere_leaves_the_state_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    history = HISTORIES["a"]
    with Store(tmp_path, COLD) as store:
        save(store, "a", History(KEY, history.tokens[:9]))
        n = 0
        while True:
            with writes_fail_after(monkeypatch, n, code):
                ticket = store.save("a", KEY, history.tokens, history)
                state = ticket.wait(60)
            if state == "published":
                break
            assert os.strerror(code) in ticket.reason
            (event,) = store.take_events()
            assert (event.kind, event.subject) == (EventKind.WRITE_FAILED, "a")
            assert list(store.get("a").tokens) == history.tokens[:9]
            assert list((tmp_path / "tmp").iterdir()) == []
            load_all(store, history)
            n += 331
        assert n > 1000
        assert load_all(store, history) == 18
        assert store.verify().is_good


@contextlib.contextmanager
def small_disk(path: Path, size: str, *, is_read_only: bool = False) -> Iterator[None]:
    """A file system of a few kilobytes; skips the test where none can be mounted."""
    path.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(path)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no file system can be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_disk_that_is_really_full_fails_saves_and_serves_what_is_there(tmp_path: Path) -> None:
    key = make_key(groups=[FULL, WINDOW], block_tokens=64)
    with small_disk(tmp_path / "disk", "600k"), Store(tmp_path / "disk" / "store", COLD) as store:
        published: list[int] = []
        failed = 0
        for seed in range(30):
            history = History(key, tokens_of(seed, 150))
            ticket = store.save(f"{seed}", key, history.tokens, history)
            if ticket.wait(60) == "published":
                published.append(seed)
            else:
                failed += 1
                assert "No space left" in ticket.reason
            for old in published:
                assert load_all(store, History(key, tokens_of(old, 150))) == 150
        assert published
        assert failed
        kinds = {event.kind for event in store.take_events()}
        assert EventKind.WRITE_FAILED in kinds
        assert kinds <= {EventKind.WRITE_FAILED, EventKind.CATALOGUE_REBUILT}
        for seed in published[:2]:
            store.delete(f"{seed}")
        store.gc()
        save(store, "again", History(key, tokens_of(99, 150)))


def test_a_read_only_folder_is_read_and_saves_fail(healthy: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk, "4m"):
        shutil.copytree(healthy, disk / "store")
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with Store(disk / "store", COLD) as store:
            for history in HISTORIES.values():
                assert load_all(store, history) == len(history.tokens)
            assert list(store.get("a").tokens) == HISTORIES["a"].tokens
            history = History(KEY, tokens_of(5, 10))
            ticket = store.save("new", KEY, history.tokens, history)
            assert ticket.wait(60) == "failed"
            assert "Read-only" in ticket.reason
            assert not store.has_reference("new")
            for work in (lambda: store.delete("a"), store.gc):
                with pytest.raises((StoreError, OSError), match="Read-only"):
                    work()
            kinds = {event.kind for event in store.take_events()}
            assert EventKind.WRITE_FAILED in kinds
            assert EventKind.CATALOGUE_REBUILT in kinds


# While the store is open --------------------------------------------------------------------------


def test_a_catalogue_that_is_damaged_while_it_is_open_is_made_again(
    healthy: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "store"
    shutil.copytree(healthy, folder)
    with Store(folder, COLD) as store:
        for harm in (b"\xff" * 20_000, b"", None):
            for suffix in ("-wal", "-shm", ""):
                path = folder / f"catalogue.sqlite{suffix}"
                if harm is None:
                    path.unlink(missing_ok=True)
                elif path.exists():
                    path.unlink()  # what is mapped to memory must not shrink
                    path.write_bytes(harm)
            for name, history in HISTORIES.items():
                assert load_all(store, history) == len(history.tokens)
                save(store, name, history)
                assert load_all(store, history) == len(history.tokens)
            kinds = [event.kind for event in store.take_events()]
            assert set(kinds) == {EventKind.CATALOGUE_REBUILT}
            store.gc()
            assert store.verify().is_good


def test_a_block_that_vanishes_between_match_and_load_ends_the_load(tmp_path: Path) -> None:
    history = History(make_key(block_tokens=4), tokens_of(0, 20))
    with Store(tmp_path, COLD) as store:
        save(store, "a", history)
        match = store.match(history.key, history.tokens)
        pieces = store.load(match)
        history.check(next(pieces))
        store.delete("a")
        store.gc()
        assert list(pieces) == []
        assert store.take_events() == []  # it was removed on purpose


def test_a_lost_reference_falls_back_to_the_state_before_and_is_repaired(
    healthy: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "store"
    shutil.copytree(healthy, folder)
    with Store(folder, COLD) as store:
        path = store._folder.of_reference("a")
        path.write_bytes(b"x")
        assert list(store.get("a").tokens) == HISTORIES["a"].tokens[:9]
        report = store.verify()
        assert report.damaged_references == [path.name]
        assert report.n_references == 4
        assert {event.kind for event in store.take_events()} == {EventKind.REFERENCE_DAMAGED}
        assert store.verify().is_good
        assert list(store.get("a").tokens) == HISTORIES["a"].tokens[:9]
        save(store, "a", HISTORIES["a"])
        path.write_bytes(b"x")
        path.with_name(path.name + ".previous").unlink()
        store.verify()
        assert not store.has_reference("a")
        assert load_all(store, HISTORIES["a"]) == 18  # its blocks are still there


def test_events_reach_a_callback_as_they_happen(healthy: Path, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    shutil.copytree(healthy, folder)
    Faults(folder, np.random.default_rng(0)).missing()
    told: list[StoreEvent] = []
    with Store(folder, COLD, on_event=told.append) as store:
        for history in HISTORIES.values():
            load_all(store, history)
        assert [event.kind for event in told] == [EventKind.MISSING]
        assert store.stats().events == {"missing": 1}


# The writer's thread -----------------------------------------------------------------------------


def test_the_writer_goes_on_whatever_a_job_and_who_is_told_of_it_raise():
    def torn(_: BaseException) -> None:
        raise RuntimeError("nobody listens")

    def job() -> None:
        raise MemoryError("too much")

    writer = Writer(1000, torn)
    assert writer.offer(job, 900)
    assert writer.call(lambda: 5, timeout_s=60) == 5
    assert writer.queued_bytes == 0
    with pytest.raises(MemoryError):
        writer.call(job, timeout_s=60)
    assert writer.call(lambda: 6, timeout_s=60) == 6
    assert writer.close(60)


def test_a_save_ends_for_who_waits_for_it_though_its_bookkeeping_raises(tmp_path, monkeypatch):
    with Store(tmp_path, COLD) as store:

        def torn(*_: object) -> None:
            raise RuntimeError("a book is torn")

        monkeypatch.setattr(store._saver, "_let_go", torn)
        history = HISTORIES["a"]
        ticket = store.save("a", KEY, history.tokens, history)
        assert ticket.wait(60) == "published" and ticket._is_over.is_set()
        monkeypatch.undo()
        assert store.get("a").name == "a"
        store.flush(60)
        assert "a book is torn" in str(store.take_events())


@pytest.mark.parametrize(
    "code", ["SQLITE_IOERR", "SQLITE_FULL", "SQLITE_CANTOPEN", "SQLITE_READONLY"]
)
def test_a_journal_beside_which_nothing_can_be_written_is_read_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    """Its last entries lie in its log alone, which SQLite reads only where it can write."""
    folder = tmp_path / "store"
    with Store(folder) as store:
        store._cold.journal.put("poet", 1, b"said")
        held = tmp_path / "held"
        shutil.copytree(folder, held)  # as a process that was killed leaves it
    assert (held / "journal.sqlite-wal").stat().st_size > 0
    before = {path: path.read_bytes() for path in held.rglob("journal*")}

    def refused(self: Journal) -> sqlite3.Connection:
        error = sqlite3.OperationalError("no")
        error.sqlite_errorcode = getattr(sqlite3, code) | 5 << 8
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "_opened", refused)
        with Store(held) as store:
            assert store._cold.journal.after("poet", 0) == [(1, b"said")]
            with pytest.raises(StoreError, match="cannot be written"):
                store._cold.journal.put("poet", 2, b"more")
            assert not [e for e in store.take_events() if e.kind is EventKind.JOURNAL_DAMAGED]
    assert {path: path.read_bytes() for path in before} == before


def test_a_folder_that_takes_no_lock_is_refused_in_words(tmp_path: Path) -> None:
    with Store(tmp_path / "store") as store:
        lock = tmp_path / "store" / "lock"
        lock.unlink()
        lock.mkdir()
        for change in (store.verify, store.gc):
            with pytest.raises(StoreError, match="cannot be written to"):
                change()


def test_a_reference_that_is_there_after_all_keeps_its_blocks(tmp_path: Path) -> None:
    """The disk failed when its name was there, and was to be made durable."""
    tokens = HISTORIES["a"].tokens
    settle = Folder.settle

    def failing(folders: Iterable[Path]) -> None:
        if any(folder.name == "references" for folder in folders):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        settle(folders)

    with Store(tmp_path, COLD) as store:
        save(store, "a", History(KEY, tokens[:10]))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Folder, "settle", staticmethod(failing))
            ticket = store.save("b", KEY, tokens[:10], History(KEY, tokens[:10]))
            assert ticket.wait(60) == "failed"
        save(store, "a", HISTORIES["a"])  # which needs its last block no more
        assert store.verify().is_good
        assert load_all(store, History(KEY, store.get("b").tokens)) == 10
