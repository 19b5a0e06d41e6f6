"""Upkeep: every byte is read, what is said is so, and the catalogue says what the files say."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvcellar.errors import StoreError
from kvcellar.store import EventKind, Reference, Store, StoreConfig
from kvcellar.store.disk import cold as colds
from kvcellar.store.disk import listing as listings
from kvcellar.store.disk.catalogue import Catalogue
from kvcellar.store.values.blocks import Info, Kind
from tests.store.fakes import FULL, WINDOW, History, fork, load_all, make_key, save, tokens_of

COLD = StoreConfig(warm_bytes=0)
KEY = make_key(groups=[FULL, WINDOW])
A, B = (History(KEY, tokens_of(seed, 40)) for seed in (1, 2))


@pytest.fixture
def store(quick_path: Path) -> Iterator[Store]:
    """Two histories, the second saved twice; eleven blocks and states."""
    with Store(quick_path / "store", COLD) as opened:
        save(opened, "a", A)
        save(opened, "b", History(KEY, B.tokens[:16]))
        save(opened, "b", B)
        yield opened


def files(store: Store, *folders: str) -> list[Path]:
    return sorted(path for name in folders for path in (store.path / name).iterdir())


def path_of(store: Store, address: bytes) -> Path:
    (found,) = (p for p in files(store, "blocks", "windows") if p.stem == address.hex())
    return found


def test_a_good_store_is_said_to_be_and_all_of_it_is_counted(store: Store) -> None:
    told: list[tuple[float, str]] = []
    report = store.verify(on_progress=lambda *said: told.append(said))
    blocks = files(store, "blocks", "windows")
    size = sum(path.stat().st_size for path in blocks)
    assert report.is_good and (report.n_blocks, report.size_bytes) == (len(blocks), size)
    assert (report.n_references, report.damaged_references, report.incomplete) == (2, [], {})
    assert 0 < report.seconds < 60
    parts = [part for part, _ in told]
    assert parts == sorted(parts) and (parts[0], parts[-1]) == (0.0, 1.0)
    assert len(set(parts)) == len(blocks) + 1
    assert told[0][1] == f"verifying 1 of {len(blocks)} blocks" and told[-1][1] == "verified"


@pytest.mark.parametrize("wrong", ["damaged", "damaged_references", "incomplete", None])
def test_a_report_is_good_where_nothing_was_wrong(store: Store, wrong: str | None) -> None:
    some = {"incomplete": {"a": 1}}.get(wrong or "", ["a"])
    report = replace(store.verify(), **({wrong: some} if wrong else {}))
    assert report.is_good is (wrong is None)


def test_what_the_numbers_of_a_store_say_is_what_its_files_are(store: Store) -> None:
    fork(store, KEY, "a", "twin")
    store.save("dropped/1", KEY, B.tokens[:8]).wait()
    store.delete("b")
    bad = store.get("a").blocks[4]
    path_of(store, bad).write_bytes(b"x" * 77)
    assert load_all(store, A) == 32
    stats = store.stats()
    size = {path.stem: path.stat().st_size for path in files(store, "blocks", "windows")}
    refs = sum(path.stat().st_size for path in files(store, "references"))
    held = {name: [a.hex() for a in store.get(name).addresses] for name in store.reference_names()}
    assert held.keys() == {"a", "twin", "dropped/1"}
    assert (stats.n_references, stats.quarantined_bytes) == (3, 77)
    assert (stats.cold.n_blocks, stats.cold.limit_bytes) == (len(size), COLD.cold_bytes)
    assert stats.cold.size_bytes == sum(size.values()) + refs + 77
    needed = set().union(*held.values())
    assert stats.referenced_bytes == sum(size.get(name, 0) for name in needed)
    assert stats.unshared_bytes == sum(size.get(n, 0) for names in held.values() for n in names)
    assert (stats.warm.n_blocks, stats.warm.size_bytes, stats.queued_bytes) == (0, 0, 0)
    assert stats.events == {"damaged": 1} and stats.shared is None
    assert stats.n_pictures == stats.picture_bytes == 0


@pytest.mark.parametrize("n", range(5))
def test_a_history_that_lacks_a_block_is_said_to_be_restored_up_to_there(
    store: Store, n: int
) -> None:
    path_of(store, store.get("a").blocks[n]).unlink()
    report = store.verify()
    assert report.incomplete == {"a": 8 * n} and not report.is_good
    assert (report.damaged, report.n_references) == ([], 2)
    assert {event.kind for event in store.take_events()} == {EventKind.MISSING}


def test_what_is_damaged_is_named_and_put_away(store: Store) -> None:
    block, end = store.get("a").blocks[1], store.get("b").boundaries[-1].address
    for address in (block, end):
        path_of(store, address).write_bytes(b"x")
    store.put_picture("0" * 20, b"x")
    (picture,) = files(store, "pictures")
    picture.write_bytes(b"y")
    store.record("a", 1, b"x" * 9000)
    journal = store.path / "journal.sqlite"
    store._cold.journal.close()
    journal.write_bytes(b"no database" * 99)
    store.close()
    with Store(store.path, COLD) as again:
        report = again.verify()
        assert sorted(report.damaged) == sorted(
            [block.hex(), end.hex(), "journal.sqlite", "0" * 20]
        )
        assert report.n_blocks == len(files(again, "blocks", "windows"))
        assert report.incomplete == {"a": 8} and len(files(again, "quarantine")) == 4
        assert again.verify().damaged == []


def test_what_cannot_be_read_now_is_not_called_damaged(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(path: Path, address: bytes) -> None:
        raise OSError(errno.EIO, "no answer")

    n = len(files(store, "blocks", "windows"))
    with monkeypatch.context() as patch:
        patch.setattr(colds, "read_sealed", failing)
        report = store.verify()
    assert (report.damaged, report.n_blocks, report.size_bytes) == ([], 0, 0)
    events = store.take_events()
    assert [event.kind for event in events] == [EventKind.UNREADABLE] * n
    assert "no answer; it is left where it is" in events[0].detail
    assert not files(store, "quarantine") and load_all(store, A) == load_all(store, B) == 40


def test_what_others_remove_meanwhile_is_not_called_damaged(store: Store) -> None:
    """A server that goes on removes the last block before with each turn, and pictures."""
    store.put_picture("0" * 20, b"x")
    os.utime(*files(store, "pictures"), (1, 1))
    with Store(store.path, COLD) as server:

        def go_on(part: float, what: str) -> None:
            if server.has_reference("b"):
                save(server, "a", History(KEY, [*A.tokens, 1, 2, 3]))
                server.delete("b")
                server.gc()

        report = store.verify(on_progress=go_on)
    assert report.is_good and not report.damaged, report
    assert (report.n_references, store.reference_names()) == (1, ["a"])
    assert not store.take_events() and not files(store, "quarantine", "pictures")


def test_a_history_that_its_owner_cannot_use_is_put_away_for_the_state_before(
    store: Store,
) -> None:
    def check(ref: Reference) -> None:
        if len(ref.tokens) == 40:
            raise StoreError("it is of no use")

    paths = {name: store._folder.of_reference(name) for name in "ab"}
    report = store.verify(check=check)
    assert report.damaged_references == sorted(path.name for path in paths.values())
    assert (report.n_references, store.reference_names()) == (1, ["b"])
    assert len(store.get("b").tokens) == 16 and not paths["a"].exists()
    details = {event.subject: event.detail for event in store.take_events()}
    assert details["b"] == "it is of no use; the state before is used"
    assert details[paths["a"].stem] == "it is of no use; there is no state before"
    assert len(files(store, "quarantine")) == 2
    assert store.verify(check=check).is_good


def test_a_state_before_is_cut_to_the_blocks_that_are_still_there(store: Store) -> None:
    key = make_key(block_tokens=8)
    save(store, "c", History(key, tokens_of(3, 20)))
    save(store, "c", History(key, tokens_of(3, 30)))  # the tail of 4 tokens goes with it
    store._folder.of_reference("c").write_bytes(b"x")
    report = store.verify()
    assert report.damaged_references and report.incomplete == {}
    ref = store.get("c")
    assert (ref.n_stored, len(ref.blocks), len(ref.tokens), ref.revision) == (16, 2, 20, 2)
    assert store.verify().is_good and load_all(store, History(key, tokens_of(3, 20))) == 20


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("is_open", [True, False])
def test_whatever_became_of_the_files_the_catalogue_says_what_is_there(
    store: Store, quick_path: Path, seed: int, is_open: bool
) -> None:
    """Another program, or a copy that was put back, may leave them so."""
    rng = np.random.default_rng(seed)
    with Store(quick_path / "other", COLD) as other:
        for name, n in (("a", 20), ("c", 30)):
            save(other, name, History(KEY, tokens_of(9 + n, n)))
    if not is_open:
        store.close()
    held = {p.stem for p in files(store, "blocks", "windows")}
    gone = {path for path in files(store, "blocks", "windows", "references") if rng.random() < 0.3}
    for path in gone:
        path.unlink()
    for path in files(other, "blocks", "windows", "references"):
        if rng.random() < 0.5:
            shutil.copyfile(path, store.path / path.parent.name / path.name)
    (store.path / "blocks" / f"{'0' * 32}.safetensors").write_bytes(b"none of ours")
    for kind, name in (("blocks", "1" * 32), ("windows", "2" * 32)):
        shutil.copyfile(files(other, "blocks")[0], store.path / kind / f"{name}.safetensors")
    again = store if is_open else Store(store.path, COLD)
    if is_open:
        again.gc(grace_s=3600)
    listed = again._cold.ask(Catalogue.addresses)
    there = {path.stem: path.parent.name for path in files(again, "blocks", "windows")}
    assert {address.hex(): f"{kind.value}s" for address, kind in listed.items()} == there
    names = {name for name in "abc" if again._folder.of_reference(name).exists()}
    assert set(again.reference_names()) == names
    needed: set[str] = set()
    for row in again.references():
        ref = again.get(row.name)
        assert (row.n_tokens, row.n_stored) == (len(ref.tokens), ref.n_stored)
        needed |= {address.hex() for address in ref.addresses}
    events = again.take_events()
    missing = {event.subject for event in events if event.kind is EventKind.MISSING}
    assert missing == ({path.stem for path in gone} & held & needed) - there.keys()
    damaged = {event.subject for event in events if event.kind is EventKind.DAMAGED}
    assert (
        damaged
        == {"0" * 32, "1" * 32, "2" * 32}
        == {path.name.partition(".")[0] for path in files(again, "quarantine")}
    )
    again.verify()
    for history in (A, B):
        load_all(again, history)
    if not is_open:
        again.close()


@pytest.mark.parametrize("kind", ["block", "window"])
@pytest.mark.parametrize(
    "lie",
    ["start = start + 8", "root = x'00'", "tokens = zeroblob(64)", "first = 0", "parent = root"],
)
def test_a_catalogue_that_says_something_else_than_a_file_costs_no_file(
    store: Store, kind: str, lie: str
) -> None:
    store.close()
    db = sqlite3.connect(store.path / "catalogue.sqlite")
    with contextlib.closing(db), db:
        assert db.execute(f"UPDATE blocks SET {lie} WHERE kind = ?", (kind,)).rowcount
    with Store(store.path, COLD) as again:
        for _ in range(2):
            for history in (A, B):
                for n in range(0, 41, 3):
                    load_all(again, history, n)  # compares every byte
        assert {event.kind for event in again.take_events()} <= {EventKind.CATALOGUE_WRONG}
        assert not files(again, "quarantine")
        for name, history in (("a", A), ("b", B)):
            save(again, name, history)
    for path in store.path.glob("catalogue*"):
        path.unlink()
    with Store(store.path, COLD) as again:
        assert again.verify().is_good and load_all(again, A) == load_all(again, B) == 40


def test_a_block_that_is_listed_at_anothers_place_gives_no_row_there(store: Store) -> None:
    """Its tokens are what was asked for; what came before them was something else."""
    key = make_key()
    save(store, "c", History(key, A.tokens))
    store.close()
    db = sqlite3.connect(store.path / "catalogue.sqlite")
    with contextlib.closing(db), db:
        change = "UPDATE blocks SET start = 0, stop = 8, parent = root WHERE start = 8 AND root = ?"
        assert db.execute(change, (key.root,)).rowcount == 1
    with Store(store.path, COLD) as again:
        history = History(key, A.tokens[8:16])
        assert again.match(key, history.tokens).n_tokens == 8, "so the catalogue says"
        assert load_all(again, history) == 0
        (event,) = again.take_events()
        assert event.kind is EventKind.DAMAGED
        assert "it says that it belongs to another place or model" in event.detail


def test_who_was_used_last_is_known_when_the_catalogue_is_lost(store: Store) -> None:
    store.close()
    for n, name in enumerate(("b", "a")):
        os.utime(store._folder.of_reference(name), (100 + n, 100 + n))
    for path in store.path.glob("catalogue*"):
        path.unlink()
    with Store(store.path, COLD) as again:
        assert again.reference_names() == ["b", "a"]
        (event,) = again.take_events()
        assert event.kind is EventKind.CATALOGUE_REBUILT
        assert event.detail == "it was missing; made again from the files, on disk"
        kinds = {kind for _, kind, _, _ in again._cold.ask(Catalogue.garbage)}
        assert kinds <= set(Kind) and load_all(again, A) == 40


def test_a_file_that_cannot_be_read_when_a_store_is_opened_stays_where_it_is(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.close()
    for path in store.path.glob("catalogue*"):
        path.unlink()
    bad, read = files(store, "blocks")[0], listings.read_info

    def failing(path: Path) -> Info:
        if path == bad:
            raise OSError(errno.EIO, "no answer")
        return read(path)

    with monkeypatch.context() as patch:
        patch.setattr(listings, "read_info", failing)
        with Store(store.path, COLD) as again:
            unreadable, rebuilt = again.take_events()
            assert (unreadable.kind, unreadable.subject) == (EventKind.UNREADABLE, bad.stem)
            assert "no answer" in unreadable.detail
            assert rebuilt.kind is EventKind.CATALOGUE_REBUILT
            assert not files(again, "quarantine") and bad.exists()
    with Store(store.path, COLD) as again:
        assert load_all(again, A) == load_all(again, B) == 40 and not again.take_events()


@pytest.mark.parametrize("warm_bytes", [0, 1 << 20])
def test_rows_that_their_owner_finds_wrong_are_put_away_in_every_tier(
    store: Store, warm_bytes: int
) -> None:
    with Store(store.path, StoreConfig(warm_bytes=warm_bytes)) as again:
        save(again, "c", History(KEY, tokens_of(5, 40)))
        bad = again.get("c").blocks[2]
        again.reject(bad, "a row is wrong")
        (event,) = again.take_events()
        assert (event.kind, event.subject) == (EventKind.DAMAGED, bad.hex())
        assert event.detail.startswith("a row is wrong; moved to quarantine")
        assert load_all(again, History(KEY, tokens_of(5, 40)[:30])) in (0, 16)
        assert again.match(KEY, tokens_of(5, 40)).n_tokens == 16
        again.reject(bad, "once more")
        (event,) = again.take_events()
        assert (event.kind, event.subject) == (EventKind.DAMAGED, bad.hex())
        assert event.detail == "once more; dropped from RAM"
        save(again, "c", History(KEY, tokens_of(5, 40)))
        assert load_all(again, History(KEY, tokens_of(5, 40))) == 40


def busy(catalogue: Catalogue) -> None:
    """Find a catalogue on disk in use."""
    if catalogue.path is not None:
        error = sqlite3.OperationalError("database is locked")
        error.sqlite_errorcode = sqlite3.SQLITE_BUSY
        raise error


def test_a_catalogue_in_use_is_left_and_one_in_memory_serves(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listings, "ROOM_BYTES", 1 << 62)
    file = store.path / "catalogue.sqlite"
    before = file.stat().st_ino
    store._cold.tell(busy)
    (event,) = store.take_events()
    assert event.detail == "database is locked; made again from the files, in memory"
    assert file.stat().st_ino == before and not files(store, "quarantine")
    assert load_all(store, A) == load_all(store, B) == 40
    save(store, "c", History(KEY, tokens_of(5, 9)))
    assert store.reference_names() == ["a", "b", "c"]
    store.close()
    with Store(store.path, COLD) as again:
        assert again.reference_names() == ["a", "b", "c"] and again.take_events() == []
        assert again.verify().is_good


def test_what_is_written_with_a_catalogue_in_memory_is_seen_by_others_and_theirs_is_seen(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listings, "ROOM_BYTES", 1 << 62)
    store._cold.tell(busy)
    store.take_events()
    with Store(store.path, COLD) as other:
        fork(other, KEY, "a", "twin")
        save(store, "c", History(KEY, tokens_of(5, 9)))
        assert "twin" in store.reference_names()
        store.delete("a")
        store.gc()
        assert load_all(other, A) == load_all(store, A) == 40, "the twin needs it"

        def meanwhile(part: float, what: str) -> None:
            if what.startswith("verifying 2 "):
                save(store, "d", History(KEY, tokens_of(6, 40)))
                store.delete("b")
                store.gc()

        report = other.verify(on_progress=meanwhile)
        assert report.is_good and other.take_events() == []
        assert report.n_references == len({"twin", "c", "d"})
        assert sorted(other.reference_names()) == ["c", "d", "twin"]
    assert store.take_events() == []


def test_a_catalogue_in_memory_goes_back_to_disk_where_there_is_room(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for room, is_back in ((1 << 62, False), (0, True)):
        monkeypatch.setattr(listings, "ROOM_BYTES", room)
        store._cold.tell(busy)
        save(store, "c", History(KEY, tokens_of(room % 7, 9)))
        assert (store._cold._listing.current().path is not None) is is_back
    with contextlib.closing(sqlite3.connect(store.path / "catalogue.sqlite")) as db:
        assert {name for (name,) in db.execute("SELECT name FROM refs")} == {"a", "b", "c"}
