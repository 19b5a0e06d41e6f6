"""Room below the limit: what goes first, what never goes, and that nothing goes without need."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvcellar.errors import StoreError
from kvcellar.store import EventKind, Store, StoreConfig
from kvcellar.store.disk import cold as colds
from kvcellar.store.disk.catalogue import Catalogue
from kvcellar.store.disk.reference_files import previous_of
from tests.store.fakes import FULL, WINDOW, History, load_all, make_key, save, tokens_of

KEY = make_key(groups=[FULL, WINDOW], block_tokens=16)
OLD, NEW = (History(KEY, tokens_of(seed, 40)) for seed in (1, 2))


def made(folder: Path) -> Store:
    """A store with one of everything that can give way, some of it twice."""
    store = Store(folder, StoreConfig(warm_bytes=0))
    for name, history in (("old", OLD), ("new", NEW)):
        save(store, name, history, boundaries=(5, 10, 20, 30))
    for seed, name in enumerate(("gone", "dropped/2", "dropped/1", "damaged"), 3):
        save(store, name, History(KEY, tokens_of(seed, 80 if name == "gone" else 16)))
    bad = store.get("damaged").blocks[0]
    store._folder.of(colds.Kind.BLOCK, bad).write_bytes(b"x" * 100)
    assert store._cold.read(colds.Kind.BLOCK, bad) is None
    store.delete("damaged")
    store.delete("gone")
    load_all(store, NEW)
    store.flush()
    store.take_events()
    return store


def state(store: Store) -> dict[str, object]:
    names = [row.name for row in store.references()]
    refs = {name: store.get(name) for name in sorted(names)}
    n_held = len(set().union(*(ref.addresses for ref in refs.values())))
    return {
        "quarantined": len(store._folder.quarantine_files()),
        "garbage": store.stats().cold.n_blocks - n_held,
        **{name: (len(ref.blocks), len(ref.boundaries)) for name, ref in refs.items()},
    }


def step(store: Store, n_bytes: int = 0, keep: str | None = None) -> tuple[str, ...]:
    """Make room for one byte more than there is; return what has changed for it."""
    before, cold = state(store), store._cold
    cold.limit_bytes = cold.size_bytes() - 1 + n_bytes
    with cold.locked():
        cold.make_room(n_bytes, keep=keep)
    assert cold.size_bytes() + n_bytes <= cold.limit_bytes
    after = state(store)
    return tuple(name for name in before if before[name] != after.get(name))


@pytest.mark.parametrize("n_bytes", [0, 100])
def test_what_is_most_dispensable_goes_first_and_words_never_go(
    quick_path: Path, n_bytes: int
) -> None:
    with made(quick_path / "store") as store:
        assert state(store) == {
            "quarantined": 1,
            "garbage": 7,  # blocks and a boundary state, and a state whose block was damaged
            "old": (3, 5),
            "new": (3, 5),
            "dropped/1": (1, 1),
            "dropped/2": (1, 1),
        }
        went = [step(store, n_bytes) for _ in range(8)]
        assert went == [("quarantined",), *[("garbage",)] * 7]
        assert store.take_events() == [], "nobody lost anything"

        def lost(n: int) -> list[str]:
            found: list[str] = []
            while len(found) < n:  # what only they held is garbage now, and goes before the next
                found += [name for name in step(store, n_bytes) if name != "garbage"]
            return found

        assert lost(4) == ["dropped/1", "dropped/2", "old", "new"]
        assert (state(store)["old"], state(store)["new"]) == ((3, 2), (3, 2))
        assert [b.length for b in store.get("old").boundaries] == [30, 40]
        for history in (OLD, NEW):
            assert load_all(store, history) == 40
            store.flush()  # what is used in one breath is used at one time
        assert lost(2) == ["old", "new"]
        events = store.take_events()
        assert {event.kind for event in events} == {EventKind.EVICTED}
        subjects = ["dropped/1", "dropped/2", "old", "new", "old", "new"]
        assert [event.subject for event in events] == subjects
        assert "before 30 tokens were given up" in events[2].detail
        assert "KV of 40 tokens was given up" in events[-1].detail
        for name, history in (("old", OLD), ("new", NEW)):
            ref = store.get(name)
            assert (ref.is_evicted, ref.n_stored) == (True, 0)
            assert ref.tokens == history.tokens
            before = previous_of(store._folder.of_reference(name))
            assert not before.exists(), "it would name blocks that are gone"
        with pytest.raises(StoreError, match="1 more than may be made below its limit"):
            while True:
                step(store, n_bytes)
        store._cold.limit_bytes = 1 << 30
        assert store.verify().is_good


def test_room_is_made_at_the_cost_of_others_than_the_one_that_is_saved(quick_path: Path) -> None:
    with made(quick_path / "store") as store:
        cold = store._cold
        wanted = store.get("dropped/1").addresses | store.get("old").addresses
        cold.limit_bytes = 1
        with cold.locked(), pytest.raises(StoreError, match="what is left is being saved"):
            cold.make_room(1, wanted, "new")
        assert {row.name: row.is_evicted for row in store.references()} == {
            "new": False,
            "old": True,
        }
        assert len(store.get("new").boundaries) == 5, "it keeps all that it has"
        for address in wanted:
            assert any(store._folder.of(kind, address).exists() for kind in colds.Kind), "protected"
        assert load_all(store, NEW) == 40


@pytest.mark.parametrize("share", [0.1, 0.3, 0.6, 0.9])
def test_room_is_made_for_all_that_is_asked_for_and_for_little_more(
    quick_path: Path, share: float
) -> None:
    with made(quick_path / "store") as store:
        cold = store._cold
        cold.limit_bytes = size = cold.size_bytes()
        largest = max(path.stat().st_size for _, _, path in store._folder.block_paths())
        n_bytes = int(share * size)
        garbage, kind, _, _ = cold.ask(Catalogue.garbage)[0]
        store._folder.of(kind, garbage).unlink()  # as somebody else's upkeep may have done
        with cold.locked():
            cold.make_room(n_bytes)
        free = size - cold.size_bytes()
        assert n_bytes <= free < n_bytes + largest + 2000, "a block, or a reference and its words"


def test_of_the_quarantine_as_much_goes_as_is_needed_the_oldest_first(quick_path: Path) -> None:
    with Store(quick_path / "store", StoreConfig(warm_bytes=0)) as store:
        save(store, "a", OLD)
        for n in (3, 5, 7):
            (store.path / "bad").write_bytes(b"x" * n)
            os.utime(store.path / "bad", (n, n))
            assert store._folder.put_away(store.path / "bad")
        cold = store._cold
        for n_bytes, left in ((0, [3, 5, 7]), (1, [5, 7]), (6, [])):
            cold.limit_bytes = cold.size_bytes()
            with cold.locked():
                cold.make_room(n_bytes)
            assert [size for _, size in store._folder.quarantine_files()] == left
        assert not store.get("a").is_evicted and load_all(store, OLD) == 40


def test_a_history_that_is_saved_anew_is_no_longer_said_to_have_lost_its_kv(
    quick_path: Path,
) -> None:
    with made(quick_path / "store") as store:
        cold = store._cold
        cold.limit_bytes = 1
        with cold.locked(), pytest.raises(StoreError):
            cold.make_room(0)
        cold.limit_bytes = 1 << 30
        for name, source, is_evicted in (("old", None, True), ("new", NEW, False)):
            history = OLD if name == "old" else NEW
            store.save(name, KEY, history.tokens, source, metadata={"x": 1}).wait()
            assert (store.get(name).is_evicted, store.get(name).metadata) == (is_evicted, {"x": 1})
        assert (load_all(store, OLD), load_all(store, NEW)) == (0, 40)


def test_nothing_goes_where_there_is_room(quick_path: Path) -> None:
    with made(quick_path / "store") as store:
        before, cold = state(store), store._cold
        cold.limit_bytes = cold.size_bytes() + 7
        with cold.locked():
            cold.make_room(7)
        assert state(store) == before
        assert step(store, 1) == ("quarantined",)


def test_what_nobody_needs_goes_when_it_was_not_used_lately(
    quick_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with made(quick_path / "store") as store:
        n = 7
        assert store.gc(grace_s=100).n_blocks == 0
        size = store.stats().cold.size_bytes
        report = store.gc()
        assert (report.n_blocks, report.evicted, report.n_quarantined) == (n, [], 0)
        assert report.freed_bytes == size - report.size_bytes > 0
        assert store.stats().cold.size_bytes == report.size_bytes
        report = store.gc(is_emptying_quarantine=True)
        assert (report.n_quarantined, report.freed_bytes) == (1, 100)
        store._cold.limit_bytes = report.size_bytes - 101
        report = store.gc()
        assert "dropped/1" not in state(store) and report.evicted == ["dropped/1"]
        assert report.size_bytes == store.stats().cold.size_bytes <= store._cold.limit_bytes


def test_addresses_that_were_seen_are_remembered_up_to_a_number(
    quick_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(colds, "MAX_SEEN", 3)
    with Store(quick_path / "store") as store:
        cold = store._cold
        for n in range(3):
            cold.note_there(bytes([n]), n == 1)
        assert [cold.seen(bytes([n])) for n in range(4)] == [False, True, False, None]
        cold.note_there(bytes([3]), True)
        assert [cold.seen(bytes([n])) for n in range(4)] == [None, None, None, True]
        cold.note_gone(bytes([3]))
        cold.note_gone(bytes([3]))
        assert cold.seen(bytes([3])) is None
