"""Saving, matching, forking, windows, tiers, limits: what users of a store rely on."""

from __future__ import annotations

import os
import sqlite3
import stat
import threading
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvcellar.errors import ConfigError, StoreError, UnknownReferenceError
from kvcellar.store import EventKind, SaveState, Store, StoreConfig
from kvcellar.store.disk.journal import Journal
from kvcellar.types import LayerGroup
from tests.store.fakes import (
    CHUNK,
    FULL,
    STATE,
    WINDOW,
    History,
    fork,
    load_all,
    make_key,
    save,
    tokens_of,
)

COLD = StoreConfig(warm_bytes=0)


def disk_bytes(store: Store) -> int:
    folders = ("blocks", "windows", "references")
    return sum(p.stat().st_size for f in folders for p in (store.path / f).iterdir())


# Sharing ------------------------------------------------------------------------------------------


def test_eight_forks_of_a_trunk_take_at_most_a_tenth_more_than_the_trunk(tmp_path: Path) -> None:
    key = make_key(groups=[LayerGroup((0, 1), 4, 16, 16)], block_tokens=256)  # 1 KiB a token
    trunk = History(key, tokens_of(0, 4096))
    with Store(tmp_path, COLD) as store:
        save(store, "trunk", trunk)
        before = disk_bytes(store)
        for n in range(4):
            fork(store, key, "trunk", f"fork {n}")
        for n in range(4, 8):
            save(store, f"fork {n}", trunk, parent="trunk", parent_position=4096)
        assert disk_bytes(store) <= 1.1 * before
        assert store.stats().unshared_bytes > 8 * store.stats().referenced_bytes
        for n in range(8):
            assert store.get(f"fork {n}").n_stored == 4096


def test_deleting_one_of_two_that_share_blocks_leaves_the_others(tmp_path: Path) -> None:
    key, tokens = make_key(groups=[FULL]), tokens_of(0, 40)
    with Store(tmp_path, COLD) as store:
        save(store, "a", History(key, tokens))
        shared = {path.name for path in (tmp_path / "blocks").iterdir()}
        save(store, "b", History(key, [*tokens, *tokens_of(1, 40)]))
        for name in ("b", "a"):
            store.delete(name)
            store.gc()
            left = {path.name for path in (tmp_path / "blocks").iterdir()}
            assert left == (shared if name == "b" else set())
            assert not (tmp_path / "references" / name).exists()
            assert load_all(store, History(key, tokens)) == (40 if name == "b" else 0)


def test_a_turn_writes_only_what_is_new(tmp_path: Path) -> None:
    key = make_key()
    tokens = tokens_of(0, 83)
    with Store(tmp_path, COLD) as store:
        for n, n_new in ((20, 20), (50, 34), (51, 3), (51, 0), (83, 35)):
            history = History(key, tokens[:n])
            ticket = store.save("a", key, tokens[:n], history)
            assert ticket.wait(60) == SaveState.PUBLISHED
            assert history.n_read == n_new  # whole blocks and a tail
            assert ticket.n_shared == n - n_new
            assert load_all(store, history) == n
        assert store.stats().cold.n_blocks == 11  # 10 full ones and the tail: old tails are gone


def test_a_match_is_exact_to_the_token_inside_blocks(tmp_path: Path) -> None:
    key = make_key()
    tokens = tokens_of(0, 43)
    with Store(tmp_path, COLD) as store:
        save(store, "a", History(key, tokens))
        for n in range(44):
            other = History(key, [*tokens[:n], 99_999, *tokens[n + 1 :]])
            assert load_all(store, other) == min(n, 43)
        save(store, "b", History(key, [*tokens[:30], *tokens_of(1, 30)]))
        assert load_all(store, History(key, tokens)) == 43
        assert load_all(store, History(key, [*tokens[:30], *tokens_of(1, 29)])) == 59


def test_nothing_is_shared_between_models_and_layouts(tmp_path: Path) -> None:
    tokens = tokens_of(0, 20)
    keys = [
        make_key("one"),
        make_key("two"),
        make_key("one", kv_dtype="float16"),
        make_key("one", block_tokens=4),
    ]
    with Store(tmp_path, COLD) as store:
        for n, key in enumerate(keys):
            assert store.match(key, tokens).n_tokens == 0
            save(store, f"{n}", History(key, tokens))
        for key in keys:
            assert load_all(store, History(key, tokens)) == 20


def test_a_part_can_be_loaded(tmp_path: Path) -> None:
    history = History(make_key(), tokens_of(0, 43))
    with Store(tmp_path) as store:
        save(store, "a", history)
        match = store.match(history.key, history.tokens)
        pieces = list(store.load(match, 11, 30))
        assert [(p.start, p.stop) for p in pieces] == [(11, 16), (16, 24), (24, 30)]
        for piece in pieces:
            history.check(piece)


# Windows ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slack", [0, 3])
def test_a_chunk_is_resumed_where_a_boundary_holds_it_from_its_beginning(
    tmp_path: Path, slack: int
) -> None:
    """Boundaries at 16, 37 and 60 tokens; chunks of 6 begin at 12, 36 and 60."""
    key = make_key(groups=[FULL, CHUNK])
    tokens = tokens_of(0, 60)
    with Store(tmp_path, COLD) as store:
        for n in (16, 37, 60):
            save(store, "a", History(key, tokens[:n], slack))
        history = History(key, tokens, slack)
        held = {
            0: [*range(12, 17), 36, 37, 60],
            3: [*range(12, 17), *range(30, 38), *range(54, 61)],
        }
        for n in range(61):
            want = max([0, *(m for m in held[slack] if m <= n)])
            assert store.match(key, tokens[:n]).n_resumable == want
            assert load_all(store, history, n) == want


@pytest.mark.parametrize("groups", [[FULL, WINDOW], [WINDOW]])
@pytest.mark.parametrize("slack", [0, 3])
def test_a_window_is_resumed_at_the_nearest_boundary_and_never_in_between(
    tmp_path: Path, groups: list, slack: int
) -> None:
    key = make_key(groups=groups)
    tokens = tokens_of(0, 60)
    with Store(tmp_path, COLD) as store:
        for n in (4, 16, 37, 60):
            save(store, "a", History(key, tokens[:n], slack))
        history = History(key, tokens, slack)
        for n in range(61):
            lengths = [m for b in (16, 37, 60) for m in range(b - slack, b + 1)] + [0, 1, 2, 3, 4]
            if FULL not in groups:  # blocks say what follows them; without any, nothing does
                lengths = [m for m in lengths if not 13 <= m < 16]
            want = max(m for m in lengths if m <= n)
            assert store.match(key, tokens[:n]).n_resumable == want
            assert load_all(store, history, n) == want


def test_a_window_state_is_given_for_any_limit_that_it_allows_and_no_other(
    tmp_path: Path,
) -> None:
    key = make_key(groups=[FULL, WINDOW])
    history = History(key, tokens_of(0, 40), slack=3)
    with Store(tmp_path, COLD) as store:
        for n in (20, 40):
            save(store, "a", History(key, history.tokens[:n], slack=3))
        match = store.match(key, history.tokens)
        for limit in range(41):
            want = max((m for m in (17, 18, 19, 20, 37, 38, 39, 40) if m <= limit), default=None)
            state = store.load_boundary(match, limit)
            assert (None if state is None else state.n_tokens) == want
            assert match.resumable_at(limit) == (want or 0)
            if state is not None:
                history.check_boundary(state)


def test_a_catalogue_that_promises_more_of_a_window_than_there_is_is_not_believed(
    tmp_path: Path,
) -> None:
    key = make_key(groups=[FULL, WINDOW])
    history = History(key, tokens_of(0, 20))
    with Store(tmp_path, COLD) as store:
        save(store, "a", history)
    db = sqlite3.connect(tmp_path / "catalogue.sqlite")
    with db:
        db.execute("UPDATE blocks SET first = 0")
    db.close()
    with Store(tmp_path, COLD) as store:
        address = store.get("a").boundaries[0].address
        assert store.load_boundary(store.match(key, history.tokens), 18) is None
        (event,) = store.take_events()
        assert (event.kind, event.subject) == (EventKind.CATALOGUE_WRONG, address.hex())
        assert load_all(store, history) == 20 and not store.take_events(), "it was corrected"


def test_a_tail_that_two_histories_share_stays_when_one_of_them_grows(tmp_path: Path) -> None:
    key = make_key()
    tokens = tokens_of(0, 30)
    with Store(tmp_path, COLD) as store:
        save(store, "a", History(key, tokens[:12]))
        fork(store, key, "a", "b")
        save(store, "a", History(key, tokens))
        store.delete("a")
        store.gc()
        assert load_all(store, History(key, tokens)) == 12
        assert store.verify().is_good


def test_only_the_latest_boundaries_are_kept_and_those_of_another_history_are_not(
    tmp_path: Path,
) -> None:
    key = make_key(groups=[FULL, WINDOW])
    tokens = tokens_of(0, 60)
    with Store(tmp_path, StoreConfig(warm_bytes=0, max_boundaries=2)) as store:
        for n in (10, 20, 30, 40):
            save(store, "a", History(key, tokens[:n]))
        assert [b.length for b in store.get("a").boundaries] == [30, 40]
        assert len(list((tmp_path / "windows").iterdir())) == 2
        other = [*tokens[:35], *tokens_of(1, 10)]
        save(store, "a", History(key, other))
        assert [b.length for b in store.get("a").boundaries] == [30, 45]
        fork(store, key, "a", "b", 33)
        assert [b.length for b in store.get("b").boundaries] == [30]
        store.gc()
        assert load_all(store, History(key, other[:33])) == 30


def test_a_damaged_window_state_costs_one_boundary(tmp_path: Path) -> None:
    key = make_key(groups=[FULL, WINDOW])
    history = History(key, tokens_of(0, 40))
    with Store(tmp_path, COLD) as store:
        for n in (20, 40):
            save(store, "a", History(key, history.tokens[:n]))
        last = store.get("a").boundaries[-1]
        path = tmp_path / "windows" / f"{last.address.hex()}.safetensors"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        assert load_all(store, history) == 20
        assert [event.kind for event in store.take_events()] == [EventKind.DAMAGED]


# References ---------------------------------------------------------------------------------------


def test_a_reference_says_what_it_is(tmp_path: Path) -> None:
    key = make_key()
    tokens = tokens_of(0, 30)
    with Store(tmp_path, COLD) as store:
        metadata = {"title": "ü", "list": [1, 2.5, None]}
        save(store, "a/b ü", History(key, tokens), metadata=metadata, n_computed=30)
        store.save("a/b ü", key, [*tokens, 7], n_computed=30).wait()
        ref = store.get("a/b ü")
        assert (ref.name, ref.fingerprint, ref.revision) == ("a/b ü", "model", 2)
        assert abs(ref.saved_at - time.time()) < 600
        assert list(ref.tokens) == [*tokens, 7]
        assert (ref.n_stored, ref.metadata, ref.parent) == (30, metadata, None)
        child = fork(store, key, "a/b ü", "c", 12)
        assert (child.parent, child.parent_position, child.n_stored) == ("a/b ü", 12, 12)
        store.save("a/b ü", key, ref.tokens, metadata={"n": 1}).wait()
        said = store.get("a/b ü")
        assert (said.metadata, said.n_stored, said.blocks) == ({"n": 1}, 30, ref.blocks)
        assert sorted(row.name for row in store.references()) == ["a/b ü", "c"]
        store.delete("a/b ü")
        assert not store.has_reference("a/b ü")
        store.gc()
        assert load_all(store, History(key, tokens)) == 16  # what the child needs, in whole blocks
    with Store(tmp_path, COLD) as store:
        assert [row.name for row in store.references()] == ["c"]


def test_what_cannot_be_is_refused_by_name(tmp_path: Path) -> None:
    key = make_key()
    history = History(key, tokens_of(0, 9))
    with Store(tmp_path, COLD) as store:
        save(store, "a", history)
        save(store, "b", history)
        with pytest.raises(UnknownReferenceError, match=r"no history 'x' is in .*it holds a, b"):
            store.get("x")
        with pytest.raises(UnknownReferenceError):
            store.delete("x")
        for name in ("", "a\nb", "x" * 600):
            with pytest.raises(StoreError, match="cannot name a history"):
                store.save(name, key, history.tokens, history)
        with pytest.raises(StoreError, match="has to be JSON"):
            store.save("a", key, history.tokens, history, metadata={"x": float("nan")})
        revision = store.get("a").revision
        late = store.save("a", key, history.tokens, history, metadata=lambda: {"x": float("nan")})
        assert late.wait() == "failed" and "has to be JSON" in late.reason
        assert store.get("a").revision == revision
        with pytest.raises(ConfigError, match="precision 'int9'"):
            StoreConfig(cold_precision="int9")
    with pytest.raises(StoreError, match="closed"):
        store.flush()
    with pytest.raises(StoreError, match="closed"):
        store.save("a", key, history.tokens, history)
    with pytest.raises(StoreError, match="closed"):
        store.match(key, history.tokens)
    (tmp_path / "format").write_text("kvcellar store 9\n")
    with pytest.raises(StoreError, match="store 9"):
        Store(tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("")
    with pytest.raises(StoreError, match="no store and not empty"):
        Store(tmp_path / "other")


def test_files_and_folders_are_for_their_owner_alone(tmp_path: Path) -> None:
    """All that a store ever makes, whatever the system would let others do."""
    history = History(make_key(groups=[FULL, WINDOW]), tokens_of(0, 30))
    file, before = tmp_path / "a.kvcellar", os.umask(0)
    try:
        with Store(tmp_path / "store", shared=str(tmp_path / "share")) as store:
            save(store, "a", History(history.key, history.tokens[:20]))
            save(store, "a", history)
            store.export_reference("a", file)
            store.delete("a")
            store.gc()
            store.import_reference(file)
            store.record("a", 1, b"x")
            store.put_picture("0" * 20, b"x")
            store.leases.take("a")
            block = next((store.path / "blocks").iterdir())
            block.write_bytes(b"x")
            assert not store.verify().is_good
            paths = [file, store.path, *store.path.rglob("*")]
            made = {path.relative_to(store.path).parts[0] for path in paths[2:]}
            for path in paths:
                want = 0o700 if path.is_dir() else 0o600
                assert stat.S_IMODE(path.stat().st_mode) == want, path
    finally:
        os.umask(before)
    folders = "blocks leases pictures quarantine references tmp unproven windows"
    files = "format lock journal.reserve"
    assert {name for name in made if "sqlite" not in name} == {*folders.split(), *files.split()}
    assert {name.partition(".")[0] for name in made if "sqlite" in name} == {
        "catalogue",
        "journal",
        "shared",
    }


def test_an_export_is_one_file_that_restores_elsewhere(tmp_path: Path) -> None:
    key = make_key(groups=[FULL, WINDOW])
    history = History(key, tokens_of(0, 43))
    file = tmp_path / "a.kvcellar"
    with Store(tmp_path / "one", COLD) as store:
        save(store, "a", history, metadata={"x": 1})
        size = store.export_reference("a", file)
        assert size == file.stat().st_size
    with Store(tmp_path / "two", COLD) as store:
        ref = store.import_reference(file, adopt=lambda ref: replace(ref, name="b"))
        assert (ref.name, ref.n_stored, ref.metadata) == ("b", 43, {"x": 1})
        assert load_all(store, history) == 43
        with pytest.raises(StoreError, match="there is a history 'b' already"):
            store.import_reference(file, adopt=lambda ref: replace(ref, name="b"))
        assert store.verify().is_good


def test_a_damaged_export_is_refused_and_nothing_is_published(tmp_path: Path) -> None:
    key = make_key(groups=[FULL, WINDOW])
    file = tmp_path / "a.kvcellar"
    with Store(tmp_path / "one", COLD) as store:
        save(store, "a", History(key, tokens_of(0, 20)))
        store.export_reference("a", file)
    good = file.read_bytes()
    rng = np.random.default_rng(0)
    names = zipfile.ZipFile(file).namelist()
    with Store(tmp_path / "two", COLD) as store:
        for at in rng.integers(0, len(good), 150):
            bad = bytearray(good)
            bad[at] ^= 1 << int(rng.integers(8))
            file.write_bytes(bad)
            try:
                store.import_reference(file)
            except StoreError:
                continue
            assert load_all(store, History(key, tokens_of(0, 20))) == 20  # a date, an attribute
            store.delete("a")
            store.gc()
        for n in range(0, len(good), len(good) // 40):
            file.write_bytes(good[:n])
            with pytest.raises(StoreError, match=r"not a whole export"):
                store.import_reference(file)
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr(names[0], b"")
        with pytest.raises(StoreError, match="not a whole export"):
            store.import_reference(file)
        with pytest.raises(StoreError, match="cannot be imported"):
            store.import_reference(tmp_path / "none")
        assert store.references() == []
        assert store.verify().is_good


# Background writes --------------------------------------------------------------------------------


class Gate:
    """Stops the writer's thread until it is opened."""

    def __init__(self, store: Store) -> None:
        self._event = threading.Event()
        self.reached = threading.Event()
        writer = store._writer

        def wait() -> None:
            self.reached.set()
            self._event.wait(120)

        assert writer.offer(wait, 0)
        self.reached.wait(120)

    def open(self) -> None:
        self._event.set()

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, *_: object) -> None:
        self.open()


def test_a_full_queue_skips_the_save_and_says_so(tmp_path: Path) -> None:
    key = make_key()
    one, two = (History(key, tokens_of(seed, 64)) for seed in (1, 2))
    size = key.layout.rows_bytes(64) + 64 * 16  # with the tokens, of blocks and reference
    with Store(tmp_path, StoreConfig(queue_bytes=size)) as store:
        gate = Gate(store)
        first = store.save("one", key, one.tokens, one)
        second = store.save("two", key, two.tokens, two)
        assert (first.state, first.is_partial) == (SaveState.QUEUED, False)
        assert second.state == SaveState.SKIPPED
        assert "bytes wait to be written" in second.reason
        assert two.n_read == 0
        assert load_all(store, one) == 64  # what waits to be written can be loaded already
        gate.open()
        assert first.wait(60) == SaveState.PUBLISHED
        assert not store.has_reference("two")
        assert [event.kind for event in store.take_events()] == [EventKind.SAVE_SKIPPED]
        assert store.stats().queued_bytes == 0
        save(store, "two", two)


def test_what_waits_to_be_written_is_not_taken_again(tmp_path: Path) -> None:
    key = make_key(groups=[FULL, WINDOW], state=STATE)
    history = History(key, tokens_of(0, 30))
    with Store(tmp_path) as store:
        gate = Gate(store)
        first = store.save("a", key, history.tokens, history)
        n_read, n_states = history.n_read, history.n_states_read
        second = store.save("b", key, history.tokens, history, may_read=False)
        assert (history.n_read, history.n_states_read) == (n_read, n_states) == (30, 1)
        assert (first.n_shared, second.n_shared, second.n_stored) == (0, 30, 30)
        gate.open()
        assert first.wait(60) == second.wait(60) == SaveState.PUBLISHED
        store.delete("a")
        store.gc()
        assert load_all(store, history) == 30 and store.verify().is_good


def test_a_save_whose_block_goes_while_it_waits_says_which(tmp_path: Path) -> None:
    history = History(make_key(), tokens_of(0, 30))
    with Store(tmp_path, COLD) as store:
        save(store, "a", history)
        gone = store.get("a").blocks[1].hex()
        gate = Gate(store)
        ticket = store.save("b", history.key, history.tokens, history)
        (tmp_path / "blocks" / f"{gone}.safetensors").unlink()
        gate.open()
        assert ticket.wait(60) == SaveState.FAILED and ticket.n_stored == 0
        assert ticket.reason == f"block {gone} was removed while the save waited; save again"
        lost, event = store.take_events()
        assert (lost.kind, lost.subject) == (EventKind.MISSING, gone)
        assert (event.kind, event.subject) == (EventKind.WRITE_FAILED, "b")
        assert event.detail == f"{ticket.reason}; the state before is the published one"
        assert not store.has_reference("b")
        save(store, "b", history)
        assert load_all(store, history) == 30


def test_a_store_says_that_it_is_failing_while_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store(tmp_path, COLD) as store:
        assert store.is_failing is False
        with monkeypatch.context() as patch, Gate(store):
            assert not store.is_failing
            patch.setattr("kvcellar.store.writer.STUCK_S", 0.0)
            assert store.is_failing, "a job gets no further"
        store.flush()
        with monkeypatch.context() as patch:
            patch.setattr(Journal, "_changing", lambda self: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                store.record("a", 1, b"x")
        assert store.is_failing
        store.record("a", 1, b"x")
        assert not store.is_failing


def test_a_history_larger_than_the_queue_is_saved_in_several_turns(tmp_path: Path) -> None:
    key = make_key(groups=[FULL, WINDOW])
    history = History(key, tokens_of(0, 100))
    with Store(tmp_path, StoreConfig(warm_bytes=0, queue_bytes=8000)) as store:
        stored = []
        for _ in range(50):
            ticket = store.save("a", key, history.tokens, history)
            assert ticket.wait(60) == SaveState.PUBLISHED
            stored.append(ticket.n_stored)
            assert list(store.get("a").tokens) == history.tokens
            if not ticket.is_partial:
                break
        assert stored == sorted(stored)
        assert stored[-1] == 100
        assert load_all(store, history) == 100
        events = [event.kind for event in store.take_events()]
        assert events == [EventKind.SAVE_PARTIAL] * (len(stored) - 1)


def test_saving_does_not_wait_for_a_disk_that_does_not_answer(tmp_path: Path) -> None:
    history = History(make_key(), tokens_of(0, 30))
    store = Store(tmp_path)
    gate = Gate(store)
    ticket = store.save("a", history.key, history.tokens, history)
    assert ticket.state == SaveState.QUEUED
    assert store.match(history.key, history.tokens).n_tokens == 30
    with pytest.raises(StoreError, match="still writing"):
        store.flush(0.01)
    with pytest.raises(StoreError, match="close it again"):
        store.close(0.01)
    gate.open()
    store.close(30)
    assert ticket.state == SaveState.PUBLISHED
    with Store(tmp_path) as store:
        assert load_all(store, history) == 30


def test_what_a_queued_save_relies_on_is_not_collected(tmp_path: Path) -> None:
    history = History(make_key(), tokens_of(0, 30))
    with Store(tmp_path, COLD) as store:
        save(store, "a", history)
        gate = Gate(store)
        forget = threading.Thread(target=store.delete, args=("a",))
        forget.start()
        collect = threading.Thread(target=store.gc)
        while store._writer._jobs.qsize() < 1:
            pass
        collect.start()
        while store._writer._jobs.qsize() < 2:
            pass
        ticket = store.save("b", history.key, history.tokens, history)
        gate.open()
        assert ticket.wait(60) == SaveState.PUBLISHED, ticket.reason
        forget.join()
        collect.join()
        assert load_all(store, history) == 30


# Tiers and limits ---------------------------------------------------------------------------------


def test_ram_serves_what_was_saved_and_keeps_no_copy_of_what_was_read(tmp_path: Path) -> None:
    history = History(make_key(), tokens_of(0, 30))
    with Store(tmp_path) as store:
        save(store, "a", history)
        match = store.match(history.key, history.tokens)
        assert match.warm_bytes > 0 == match.cold_bytes
    with Store(tmp_path) as store:
        match = store.match(history.key, history.tokens)
        assert match.warm_bytes == 0
        assert match.cold_bytes > 0
        load_all(store, history)
        assert store.stats().warm.size_bytes == 0  # the cache has it now


@pytest.mark.parametrize("warm_bytes", [0, 5000, 1 << 20])
def test_a_match_says_how_many_bytes_lie_where_and_a_load_what_it_has_read(
    tmp_path: Path, warm_bytes: int
) -> None:
    history = History(make_key(), tokens_of(0, 43))
    with Store(tmp_path, StoreConfig(warm_bytes=warm_bytes)) as store:
        save(store, "a", history)
        match = store.match(history.key, history.tokens)
        size = {path.stem: path.stat().st_size for path in (tmp_path / "blocks").iterdir()}
        by_tier = dict.fromkeys(("warm", "cold", "shared"), 0)
        for step in match.steps:
            by_tier[step.tier] += size[step.info.address.hex()]
        assert (match.warm_bytes, match.cold_bytes, match.shared_bytes) == tuple(by_tier.values())
        assert sum(by_tier.values()) == sum(size.values())
        assert [bool(by_tier["warm"]), bool(by_tier["cold"])] == [
            warm_bytes > 0,
            warm_bytes <= 5000,
        ]
        assert store.stats().warm.size_bytes == match.warm_bytes
        pieces = list(store.load(match))
        assert [piece.tier for piece in pieces] == [step.tier for step in match.steps]
        assert sum(piece.size_bytes for piece in pieces) == sum(size.values())
        assert sum(piece.rows_bytes for piece in pieces) == history.key.layout.rows_bytes(43)
        assert [piece.address.hex() in size for piece in pieces] == [True] * 6


def test_a_match_is_exact_where_all_of_it_is(tmp_path: Path) -> None:
    history = History(make_key(), tokens_of(0, 40))
    with Store(tmp_path, StoreConfig(warm_bytes=0, cold_precision="int8")) as store:
        save(store, "a", History(history.key, history.tokens[:16]))
    with Store(tmp_path, COLD) as store:
        address = store.get("a").blocks[0]
        (tmp_path / "blocks" / f"{address.hex()}.safetensors").unlink()
        save(store, "a", History(history.key, history.tokens[:8]))
        assert store.match(history.key, history.tokens[:8]).is_exact
        match = store.match(history.key, history.tokens[:16])
        assert (match.n_tokens, match.is_exact) == (16, False)
        assert [piece.is_exact for piece in store.load(match)] == [True, False]


def test_what_was_seen_lately_is_known_without_asking_anybody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, tokens = make_key(), tokens_of(0, 43)
    window = make_key(groups=[FULL, WINDOW])
    with Store(tmp_path, COLD) as store:
        save(store, "a", History(key, tokens))
        save(store, "b", History(window, tokens))
    with Store(tmp_path, COLD) as store:
        assert store.seen(key, tokens) == 0
        store.match(key, tokens[:20])
        monkeypatch.setattr(store._cold, "ask", None)
        assert [store.seen(key, tokens[:n]) for n in (0, 7, 8, 17, 43)] == [0, 0, 8, 16, 24]
        assert store.seen(window, tokens) == 0, "of what needs boundary states nothing is said"
        monkeypatch.undo()
        history = History(key, tokens)
        ticket = store.save("c", key, tokens, history, may_read=False)
        assert ticket.wait(60) == SaveState.PUBLISHED
        assert (ticket.n_shared, history.n_read) == (24, 19), "what was not seen is taken again"
        assert load_all(store, history) == 43


def test_the_disk_limit_holds_and_the_least_recently_used_history_gives_way(tmp_path: Path) -> None:
    key = make_key()
    limit = 40_000
    with Store(tmp_path, StoreConfig(warm_bytes=0, cold_bytes=limit)) as store:
        names = []
        for seed in range(12):
            save(store, f"{seed}", History(key, tokens_of(seed, 40)))
            names.append(f"{seed}")
            assert disk_bytes(store) <= limit
            assert store.stats().cold.size_bytes <= limit
        evicted = [e.subject for e in store.take_events() if e.kind == EventKind.EVICTED]
        assert evicted == names[: len(evicted)]
        assert evicted
        for seed in range(12):
            ref = store.get(f"{seed}")
            assert list(ref.tokens) == tokens_of(seed, 40)  # a history is never lost
            assert ref.is_evicted is (f"{seed}" in evicted)
            want = 0 if ref.is_evicted else 40
            assert load_all(store, History(key, tokens_of(seed, 40))) == want


def test_a_history_that_was_loaded_stays_longer(tmp_path: Path) -> None:
    key = make_key()
    with Store(tmp_path, COLD) as store:
        for seed in range(3):
            save(store, f"{seed}", History(key, tokens_of(seed, 40)))
        load_all(store, History(key, tokens_of(0, 40)))
        store.flush()
        assert [row.name for row in store.references()] == ["1", "2", "0"]


def test_blocks_of_no_history_give_way_first(tmp_path: Path) -> None:
    key = make_key()
    with Store(tmp_path, StoreConfig(warm_bytes=0, cold_bytes=40_000)) as store:
        save(store, "old", History(key, tokens_of(0, 40)))
        for seed in range(1, 9):
            save(store, "new", History(key, tokens_of(seed, 40)))
            store.delete("new")
        assert load_all(store, History(key, tokens_of(0, 40))) == 40
        assert load_all(store, History(key, tokens_of(8, 40))) == 40
        assert load_all(store, History(key, tokens_of(1, 40))) == 0
        assert store.take_events() == []


def test_a_save_without_room_fails_with_numbers(tmp_path: Path) -> None:
    key = make_key()
    with Store(tmp_path, StoreConfig(warm_bytes=0, cold_bytes=32_000)) as store:
        save(store, "a", History(key, tokens_of(0, 80)))
        other = History(key, tokens_of(1, 160))
        ticket = store.save("b", key, other.tokens, other)
        assert ticket.wait(60) == SaveState.FAILED
        assert "its limit of 32000" in ticket.reason and ticket.n_stored == 0
        assert not store.has_reference("b")
        assert disk_bytes(store) <= 32_000
        save(store, "b", History(key, tokens_of(2, 80)))
        assert store.get("a").is_evicted


def test_a_history_that_finds_no_room_to_grow_keeps_what_it_has(tmp_path: Path) -> None:
    key, tokens = make_key(), tokens_of(0, 160)
    with Store(tmp_path, StoreConfig(warm_bytes=0, cold_bytes=32_000)) as store:
        save(store, "a", History(key, tokens[:80]))
        ticket = store.save("a", key, tokens, History(key, tokens))
        assert (
            ticket.wait(60) == SaveState.FAILED and "what is left is being saved" in ticket.reason
        )
        assert (store.get("a").revision, store.get("a").is_evicted) == (1, False)
        assert load_all(store, History(key, tokens)) >= 80
        assert [event.kind for event in store.take_events()] == [EventKind.WRITE_FAILED]


def test_all_that_a_save_makes_needless_goes_but_for_what_another_history_needs(
    tmp_path: Path,
) -> None:
    key, tokens = make_key(groups=[FULL, WINDOW]), tokens_of(0, 90)
    with Store(tmp_path, StoreConfig(warm_bytes=0, max_boundaries=1)) as store:
        save(store, "a", History(key, tokens[:80]), boundaries=range(5, 80, 5))
        fork(store, key, "a", "b", 41)
        save(store, "a", History(key, tokens))
        held = {name: [b.length for b in store.get(name).boundaries] for name in "ab"}
        assert held == {"a": [90], "b": [40]}
        assert len(list((tmp_path / "windows").iterdir())) == 2
        assert store.stats().cold.n_blocks == 12 + 2, "its tail before is the end of a block now"
        assert store.gc().n_blocks == 0


def test_collecting_respects_a_grace_time_and_empties_the_quarantine_on_demand(
    tmp_path: Path,
) -> None:
    key = make_key()
    history = History(key, tokens_of(0, 20))
    with Store(tmp_path, COLD) as store:
        save(store, "a", history)
        path = next((tmp_path / "blocks").iterdir())
        path.write_bytes(path.read_bytes()[:-1])
        assert not store.verify().is_good
        (tmp_path / "tmp" / "leftover").write_bytes(b"x")
        store.delete("a")
        report = store.gc(grace_s=3600)
        assert (report.n_blocks, report.n_leftovers, report.n_quarantined) == (0, 1, 0)
        report = store.gc(is_emptying_quarantine=True)
        assert (report.n_blocks, report.n_quarantined) == (2, 1)
        assert store.stats().cold.size_bytes == 0


def test_a_state_without_rows_is_saved_on_whatever_is_stored_of_it(tmp_path: Path) -> None:
    """New words about it, its beginning, another's beginning, or a history that nobody knows."""
    key = make_key(block_tokens=8)
    tokens = tokens_of(0, 30)
    with Store(tmp_path, COLD) as store:
        save(store, "a", History(key, tokens))
        blocks = store.get("a").blocks
        for name, n, parent, n_blocks in (
            ("a", 30, None, 4),  # the tail, too
            ("b", 21, "a", 3),  # which ends inside of a block of its parent's
            ("a", 13, None, 2),
            ("c", 24, None, 3),  # found by its tokens alone
        ):
            ticket = store.save(name, key, tokens[:n], parent=parent, metadata={"n": n})
            assert ticket.wait(60) == SaveState.PUBLISHED and not ticket.is_partial
            ref = store.get(name)
            assert (ref.n_stored, ref.blocks, ref.metadata) == (n, blocks[:n_blocks], {"n": n})
        other = tokens_of(1, 9)
        assert store.save("d", key, other).wait(60) == SaveState.PUBLISHED
        assert store.save("d", key, other).wait(60) == SaveState.PUBLISHED
        assert (store.get("d").n_stored, list(store.get("d").tokens)) == (0, other)
        assert not store.get("d").is_evicted, "it never had any KV"
        store.gc()
        assert load_all(store, History(key, tokens)) == 24
        assert store.verify().is_good


def test_a_history_that_is_cut_keeps_the_blocks_and_boundaries_that_cover_it(
    tmp_path: Path,
) -> None:
    key = make_key(groups=[FULL, WINDOW], block_tokens=4)
    tokens = tokens_of(3, 30)
    with Store(tmp_path) as store:
        for n in (11, 19, 30):
            save(store, "a", History(key, tokens[:n]))
        store.save("a", key, tokens[:21], metadata={"x": 1}).wait()
        cut = store.get("a")
        assert (cut.n_stored, cut.revision, dict(cut.metadata)) == (21, 4, {"x": 1})
        assert [b.length for b in cut.boundaries] == [11, 19]
        store.gc()
        assert store.match(key, tokens[:21]).n_tokens == 21
        assert store.match(key, tokens[:21]).n_resumable == 19
