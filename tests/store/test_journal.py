"""The journal: what was put is there, whatever comes, until something newer says it."""

from __future__ import annotations

import contextlib
import random
import re
import shutil
import sqlite3
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvcellar.errors import StoreError
from kvcellar.store.disk import journal as journals
from kvcellar.store.disk.folder import RESERVE_BYTES, Folder
from kvcellar.store.disk.journal import Journal
from kvcellar.store.values.reports import EventLog
from tests.store.fakes import QUICK

WHO = st.sampled_from([0, 1])
NAMES = st.sampled_from(["a", "b"])
IDS = st.sampled_from(["one", "two", "three", "four"])
SERIALS = st.integers(1, 5)
PAYLOADS = st.binary(max_size=30) | st.sampled_from([b"<cat>", b"<cat><dog>", bytes(70)])
MARKS = re.compile(rb"<(\w+)>")
MOST, MOST_BYTES = 2, 60


class JournalAgainstDicts(RuleBasedStateMachine):
    """Two journals of one folder; the oracle: entries by name, documents in the order they came."""

    @initialize()
    def open(self) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(journals, "MOST_DOCUMENTS", MOST)
        self.patch.setattr(journals, "MOST_DOCUMENT_BYTES", MOST_BYTES)
        self.folder = Folder(Path(tempfile.mkdtemp(dir=QUICK)))
        self.events = EventLog()
        self.journals = [Journal(self.folder, self.events) for _ in range(2)]
        self.superseded: list[dict[str, int]] = [{}, {}]
        self.entries: dict[str, dict[int, bytes]] = {}
        self.documents: dict[str, bytes] = {}

    def let_go(self, who: int) -> None:
        """Tell the journal that entries are superseded: they go with its next write."""
        for name, upto in self.superseded[who].items():
            left = {n: data for n, data in self.entries.get(name, {}).items() if n > upto}
            self.entries[name] = left
        self.superseded[who] = {}

    @rule(who=WHO, name=NAMES, serial=SERIALS, payload=PAYLOADS)
    def put(self, who: int, name: str, serial: int, payload: bytes) -> None:
        self.journals[who].put(name, serial, payload)
        self.let_go(who)
        self.entries.setdefault(name, {})[serial] = payload

    @rule(who=WHO, name=NAMES, serial=SERIALS)
    def supersede(self, who: int, name: str, serial: int) -> None:
        self.journals[who].supersede(name, serial)
        self.superseded[who][name] = max(serial, self.superseded[who].get(name, 0))

    @rule(who=WHO, name=NAMES)
    def forget(self, who: int, name: str) -> None:
        self.journals[who].forget(name)
        self.entries.pop(name, None)

    @rule(who=WHO, document_id=IDS, payload=PAYLOADS)
    def put_document(self, who: int, document_id: str, payload: bytes) -> None:
        self.journals[who].put_document(document_id, payload)
        self.documents.pop(document_id, None)
        self.documents[document_id] = payload
        while len(self.documents) > MOST or sum(map(len, self.documents.values())) > MOST_BYTES:
            del self.documents[next(iter(self.documents))]

    @rule(who=WHO, document_id=IDS)
    def drop_document(self, who: int, document_id: str) -> None:
        is_there = self.documents.pop(document_id, None) is not None
        assert self.journals[who].drop_document(document_id) is is_there

    @rule(who=WHO)
    def reopen(self, who: int) -> None:
        had_written = self.journals[who]._db is not None
        self.journals[who].close()
        if had_written:
            self.let_go(who)
        self.superseded[who] = {}
        self.journals[who] = Journal(self.folder, self.events)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "journals"):
            return
        want = {name: max(entries) for name, entries in self.entries.items() if entries}
        payloads = [data for part in self.entries.values() for data in part.values()]
        marks = MARKS.findall(b" ".join([*payloads, *self.documents.values()]))
        for journal in self.journals:
            assert journal.serials() == want
            assert journal.mentions(MARKS) == {mark.decode() for mark in marks}
            for name in ("a", "b"):
                entries = self.entries.get(name, {})
                for serial in range(6):
                    behind = [(n, entries[n]) for n in sorted(entries) if n > serial]
                    assert journal.after(name, serial) == behind
            for document_id in ("one", "two", "three", "four"):
                assert journal.document(document_id) == self.documents.get(document_id)
            assert journal.is_failing is False
        assert not self.events.counts()

    def teardown(self) -> None:
        if hasattr(self, "journals"):
            for journal in self.journals:
                journal.close()
            shutil.rmtree(self.folder.path)
            self.patch.undo()


TestJournalAgainstDicts = JournalAgainstDicts.TestCase
TestJournalAgainstDicts.settings = settings(max_examples=20, stateful_step_count=20)


@pytest.fixture
def folder(quick_path: Path) -> Folder:
    return Folder(quick_path / "store")


@pytest.fixture
def events() -> EventLog:
    return EventLog()


@pytest.fixture
def journal(folder: Folder, events: EventLog) -> Iterator[Journal]:
    opened = Journal(folder, events)
    yield opened
    opened.close()


def files_of(folder: Folder) -> list[Path]:
    return sorted(folder.path.glob("journal.sqlite*"))


def test_there_is_no_file_before_something_is_put_and_then_it_is_its_owners_alone(
    folder: Folder, journal: Journal
) -> None:
    journal.forget("a")
    journal.tidy()
    assert not journal.drop_document("x") and journal.document("x") is None
    assert (journal.serials(), journal.after("a", 0), journal.check()) == ({}, [], True)
    assert not files_of(folder)
    journal.put("a", 1, b"x")
    assert len(files_of(folder)) == 3
    assert {path.stat().st_mode & 0o777 for path in files_of(folder)} == {0o600}
    assert folder.journal_reserve.stat().st_size == RESERVE_BYTES


def test_each_commit_is_synchronised(journal: Journal) -> None:
    """Nothing but a power cut tells, so SQLite is asked: 2 is FULL."""
    journal.put("a", 1, b"x")
    assert journal._db is not None
    assert journal._db.execute("PRAGMA synchronous").fetchone() == (2,)
    assert journal._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_of_a_log_that_is_torn_at_any_byte_a_beginning_is_read_and_no_wrong_byte(
    folder: Folder, journal: Journal, events: EventLog, quick_path: Path
) -> None:
    payloads = [bytes([n]) * (40 * n) for n in range(1, 7)]
    for n, payload in enumerate(payloads, 1):
        journal.put("a", n, payload)
    log = folder.path / "journal.sqlite-wal"
    n_bytes = log.stat().st_size
    seen = set()
    for i in range(60):
        torn = Folder(quick_path / f"{i}")
        at = n_bytes * i // 60
        shutil.copyfile(folder.journal, torn.journal)
        data = bytearray(log.read_bytes())
        data[at:] = b"" if i % 2 else bytes(byte ^ 0x55 for byte in data[at:])
        (torn.path / log.name).write_bytes(data)
        read = Journal(torn, events)
        entries = read.after("a", 0)
        read.close()
        assert entries == list(enumerate(payloads[: len(entries)], 1))
        seen.add(len(entries))
    assert seen >= {0, 3, 5}
    assert not events.counts()


def damage(path: Path) -> None:
    """Put another file, which is no database, in the place of one, as a failing disk may."""
    for beside in path.parent.glob(f"{path.name}-*"):
        beside.unlink()
    path.unlink()
    path.write_bytes(b"no database" * 1000)


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize(
    "verb", ["put", "put_document", "drop_document", "forget", "after", "serials", "check"]
)
def test_a_damaged_journal_goes_to_the_quarantine_and_all_goes_on(
    folder: Folder, journal: Journal, events: EventLog, is_open: bool, verb: str
) -> None:
    journal.put("a", 1, b"x")
    if not is_open:
        journal.close()
        journal = Journal(folder, events)
    damage(folder.journal)
    given: dict[str, tuple[Any, ...]] = {
        "put": ("a", 2, b"y"),
        "put_document": ("x", b"y"),
        "drop_document": ("x",),
        "forget": ("a",),
        "after": ("a", 0),
    }
    said = getattr(journal, verb)(*given.get(verb, ()))
    assert verb != "check" or said is False
    assert events.counts() == {"journal_damaged": 1}
    (event,) = events.take()
    assert event.subject == str(folder.journal)
    assert "not a database; moved to quarantine; turns that no reference says yet" in event.detail
    (away,) = folder.quarantined.iterdir()
    assert away.read_bytes().startswith(b"no database")
    journal.put("a", 3, b"z")
    assert journal.after("a", 2) == [(3, b"z")]
    assert journal.check() and not journal.is_failing
    journal.close()


def test_a_page_that_is_damaged_is_found_by_a_check(
    folder: Folder, journal: Journal, events: EventLog
) -> None:
    journal.put("a", 1, bytes(20_000))
    assert journal.check()
    journal.close()
    data = bytearray(folder.journal.read_bytes())
    data[4096 + 8 : 4096 + 100] = b"\xff" * 92
    folder.journal.write_bytes(data)
    again = Journal(folder, events)
    assert not again.check()
    assert events.counts() == {"journal_damaged": 1}
    assert again.check() and again.serials() == {}
    again.close()


def test_who_has_it_open_goes_on_in_the_file_that_another_process_has_made(
    folder: Folder, journal: Journal, events: EventLog
) -> None:
    journal.put("a", 1, b"old")
    damage(folder.journal)
    theirs = Journal(folder, events)
    theirs.put("a", 2, b"theirs")
    journal.put("a", 3, b"ours")
    for one in (journal, theirs):
        assert one.after("a", 0) == [(2, b"theirs"), (3, b"ours")]
    theirs.close()


def test_a_journal_that_another_uses_for_too_long_is_left_as_it_is(
    folder: Folder, journal: Journal, events: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal.put("a", 1, b"x")
    monkeypatch.setattr(journals, "BUSY_TIMEOUT_S", 0.01)
    late = Journal(folder, events)
    with contextlib.closing(sqlite3.connect(folder.journal, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        for write in (lambda: late.put("a", 2, b"y"), lambda: late.put_document("x", b"y")):
            with pytest.raises(StoreError, match="journal of the store cannot be written"):
                write()
        assert late.is_failing
        with pytest.raises(StoreError, match="cannot be written"):
            late.forget("a")
        with pytest.raises(StoreError, match=r"journal.sqlite cannot be read \(.*locked"):
            late.after("a", 0)
        assert journal.after("a", 0) == [(1, b"x")], "who has it open reads on"
    late.put("a", 2, b"y")
    assert not late.is_failing
    assert journal.after("a", 0) == [(1, b"x"), (2, b"y")]
    assert not events.counts() and not list(folder.quarantined.iterdir())
    late.close()


def test_what_fails_in_the_middle_changes_nothing(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal.put("a", 1, b"x")
    journal.put_document("d", b"x")

    def torn(*_: object) -> None:
        raise sqlite3.OperationalError("torn")

    monkeypatch.setattr(journals, "MOST_DOCUMENTS", 0)
    monkeypatch.setattr(Journal, "_drop_oldest", staticmethod(torn))
    with pytest.raises(StoreError, match="torn"):
        journal.put_document("e", b"y")
    with pytest.raises(StoreError, match="cannot be written"):
        journal.put("b", 1, None)  # type: ignore[arg-type]  # a payload that no column takes
    assert journal.is_failing
    monkeypatch.undo()
    assert (journal.document("d"), journal.document("e")) == (b"x", None)
    journal.put("b", 2, b"y")
    assert journal.serials() == {"a": 1, "b": 2} and not journal.is_failing


@pytest.mark.parametrize(("most", "most_bytes"), [(3, 1000), (1000, 10), (3, 10), (1, 3), (0, 9)])
def test_as_many_of_the_oldest_documents_go_as_are_too_many_or_too_large(
    journal: Journal, monkeypatch: pytest.MonkeyPatch, most: int, most_bytes: int
) -> None:
    monkeypatch.setattr(journals, "MOST_DOCUMENTS", most)
    monkeypatch.setattr(journals, "MOST_DOCUMENT_BYTES", most_bytes)
    rng, want, names = random.Random(0), dict[str, bytes](), "abcdefg"
    for n in range(200):
        name, data = rng.choice(names), bytes([n]) * rng.choice([0, 1, 2, 3, 4, 10, 11])
        journal.put_document(name, data)
        want.pop(name, None)
        want[name] = data
        while len(want) > most or sum(map(len, want.values())) > most_bytes:
            del want[next(iter(want))]
        assert {x: journal.document(x) for x in names} == {x: want.get(x) for x in names}


def test_an_error_that_has_ended_the_change_already_is_told_as_it_is(journal: Journal) -> None:
    """SQLite takes a change back by itself where a disk is full."""
    journal.put("a", 1, b"x")
    with pytest.raises(ZeroDivisionError), journal._use, journal._changing() as db:
        db.execute("ROLLBACK")
        raise ZeroDivisionError
    journal.put("a", 2, b"y")
    assert journal.after("a", 0) == [(1, b"x"), (2, b"y")]


def test_entries_that_wait_for_one_write_are_in_it_and_fail_with_it(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    write = Journal._write

    def counted(self: Journal, entries: Any) -> None:
        written.append(len(entries))
        write(self, entries)

    monkeypatch.setattr(Journal, "_write", counted)
    failed: list[int] = []

    def put(n: int, payload: Any) -> None:
        try:
            journal.put("a", n, payload)
        except StoreError:
            failed.append(n)

    for payload in (b"x", None):
        threads = [threading.Thread(target=put, args=(n, payload)) for n in range(1, 9)]
        with journal._use:
            for thread in threads:
                thread.start()
            while len(journal._waiting) < len(threads):
                pass
        for thread in threads:
            thread.join()
    assert written == [8, 8] and sorted(failed) == [*range(1, 9)]
    assert journal.after("a", 0) == [(n, b"x") for n in range(1, 9)]


def test_nobody_waits_for_ever_for_a_write_that_is_interrupted(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Journal, entries: Any) -> None:
        raise KeyboardInterrupt

    ended: list[type] = []

    def put(n: int) -> None:
        try:
            journal.put("a", n, b"x")
        except BaseException as error:
            ended.append(type(error))

    threads = [threading.Thread(target=put, args=(n,), daemon=True) for n in (1, 2)]
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "_write", interrupted)
        with journal._use:
            for thread in threads:
                thread.start()
            while len(journal._waiting) < len(threads):
                pass
        for thread in threads:
            thread.join(10)
    assert sorted(one.__name__ for one in ended) == ["KeyboardInterrupt", "StoreError"]
    journal.put("a", 3, b"x")
    assert journal.serials() == {"a": 3} and not journal.is_failing


def test_a_name_is_forgotten_on_a_full_disk_in_the_room_of_the_reserve(
    folder: Folder, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal.put("a", 1, b"x")
    drop = Journal._drop_name

    def full(self: Journal, name: str) -> None:
        if folder.journal_reserve.exists():
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error
        drop(self, name)

    monkeypatch.setattr(Journal, "_drop_name", full)
    journal.forget("a")
    assert journal.serials() == {} and not folder.journal_reserve.exists()
    journal.tidy()
    assert folder.journal_reserve.stat().st_size == RESERVE_BYTES

    def busy(self: Journal, name: str) -> None:
        error = sqlite3.OperationalError("database is locked")
        error.sqlite_errorcode = sqlite3.SQLITE_BUSY
        raise error

    monkeypatch.setattr(Journal, "_drop_name", busy)
    with pytest.raises(StoreError, match="is locked"):
        journal.forget("a")
    assert folder.journal_reserve.exists(), "it is spent where a disk is full, and else kept"


def test_a_long_log_is_copied_into_the_database_and_a_short_one_is_not(
    folder: Folder, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = folder.path / "journal.sqlite-wal"
    for n in range(1, 2000):
        journal.put("a", n, b"x" * 600)
        if log.stat().st_size > 1 << 20:
            break
    before = folder.journal.read_bytes()
    journal.tidy()
    assert folder.journal.read_bytes() == before, "by no commit, and not by this"
    monkeypatch.setattr(journals, "_CHECKPOINT_BYTES", log.stat().st_size)
    journal.tidy()
    alone = Folder(folder.path.parent / "alone")
    shutil.copyfile(folder.journal, alone.journal)
    copied = Journal(alone, EventLog())
    assert copied.serials() == {"a": n}
    copied.close()
    journal.put("a", n + 1, b"y")
    assert journal.after("a", n) == [(n + 1, b"y")]


def test_a_journal_of_a_later_version_is_refused_by_name_and_left_as_it_is(
    folder: Folder, journal: Journal, events: EventLog
) -> None:
    journal.put("a", 1, b"x")
    journal.close()
    with contextlib.closing(sqlite3.connect(folder.journal)) as db:
        db.execute("PRAGMA user_version = 3")
    before = folder.journal.read_bytes()
    later = Journal(folder, events)
    for ask in (later.serials, lambda: later.put("a", 2, b"y"), lambda: later.forget("a")):
        with pytest.raises(StoreError, match=r"of version 3, this one knows 2; use the version"):
            ask()
    later.close()
    assert folder.journal.read_bytes() == before and not events.counts()


def test_a_journal_without_documents_gets_them_and_keeps_its_entries(
    folder: Folder, events: EventLog
) -> None:
    with contextlib.closing(sqlite3.connect(folder.journal)) as db, db:
        db.execute(journals._SCHEMA[0])
        db.execute("INSERT INTO entries VALUES ('a', 7, x'00ff')")
        db.execute("PRAGMA user_version = 1")
    first = Journal(folder, events)
    assert first.after("a", 0) == [(7, b"\x00\xff")]
    first.put_document("d", b"x")
    assert first.document("d") == b"x" and first.mentions(re.compile(b"x")) == {"x"}
    first.close()


def test_a_closed_journal_takes_nothing_and_has_let_go_of_what_was_superseded(
    folder: Folder, journal: Journal, events: EventLog
) -> None:
    for n in (1, 2, 3):
        journal.put("a", n, b"x")
    journal.supersede("a", 2)
    journal.supersede("a", 1)
    journal.close()
    journal.close()
    for ask in (journal.serials, lambda: journal.put("a", 4, b"y"), lambda: journal.forget("a")):
        with pytest.raises(StoreError, match="the store is closed; open it again"):
            ask()
    again = Journal(folder, events)
    assert again.after("a", 0) == [(3, b"x")]
    again.close()


def test_a_link_in_place_of_a_journal_is_not_written_through(
    folder: Folder, journal: Journal, tmp_path: Path
) -> None:
    target = tmp_path / "letter"
    folder.journal.symlink_to(target)
    with pytest.raises(StoreError, match="cannot be written"):
        journal.put("a", 1, b"x")
    assert not target.exists()
