"""Two stores of two machines on one place: nothing is lost, whatever the place does."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvcellar.errors import ConfigError
from kvcellar.store import EventKind, ModelKey, Store, StoreConfig
from kvcellar.store.shared import guarded_calls, histories, pusher
from kvcellar.store.shared.blocks import SharedBlocks
from kvcellar.store.shared.folders import FolderPlace
from kvcellar.store.shared.histories import Pulled
from kvcellar.store.shared.places import PlaceError
from kvcellar.store.shared.tier import SharedTier
from tests.store.fakes import (
    CHUNK,
    FULL,
    STATE,
    WINDOW,
    History,
    load_all,
    make_key,
    save,
    tokens_of,
)

NAME = "poet@0011"
Opener = Callable[..., Store]


@pytest.fixture
def machine(tmp_path: Path, place_url: str) -> Iterator[Opener]:
    """Opens the store of a machine, by its name."""
    opened = []

    def open_store(name: str, shared: str = place_url, **options: int) -> Store:
        store = Store(tmp_path / name, StoreConfig(**options), shared=shared)
        opened.append(store)
        return store

    yield open_store
    for store in opened:
        store.close()


def tier(store: Store) -> SharedTier:
    assert store.shared is not None
    return store.shared


def saved(store: Store, key: ModelKey, tokens: list[int], serial: int, name: str = NAME) -> History:
    history = History(key, tokens)
    save(store, name, history, metadata={"serial": serial})
    assert tier(store).flush(180)
    return history


KEYS = {
    "full": make_key(),
    "windows": make_key(groups=(FULL, WINDOW)),
    "windows alone": make_key(groups=(WINDOW, CHUNK)),
    "states": make_key(groups=(FULL,), state=STATE),
}


@pytest.mark.parametrize("kind", KEYS)
def test_what_one_machine_saved_another_loads_bit_for_bit(machine: Opener, kind: str) -> None:
    ours, theirs = machine("a"), machine("b")
    history = saved(ours, KEYS[kind], tokens_of(1, 43), 1)
    assert tier(theirs).pull(NAME) is Pulled.TAKEN
    ref = theirs.get(NAME)
    assert ref.tokens.tokens.tolist() == history.tokens
    assert (ref.n_stored, ref.blocks, ref.boundaries) == (0, (), ()), "nothing of it is here yet"
    assert load_all(theirs, history) == 43
    theirs.flush(180)
    tier(theirs).flush(180)
    assert load_all(theirs, history) == 43  # now from its own disk
    steps = theirs.match(history.key, history.tokens).steps
    assert {step.tier for step in steps} <= {"cold"}


def test_tokens_that_no_agent_names_here_are_found_by_their_content(machine: Opener) -> None:
    ours, theirs = machine("a"), machine("b")
    history = saved(ours, KEYS["full"], tokens_of(1, 43), 1)
    assert load_all(theirs, history) == 40  # whole blocks


@pytest.mark.parametrize("kind", KEYS)
def test_what_is_nobodys_is_found_by_its_content(tmp_path: Path, kind: str) -> None:
    share = str(tmp_path / "share")
    history = History(KEYS[kind], tokens_of(1, 40))
    with Store(tmp_path / "a", shared=share) as ours:
        save(ours, "read for another", history)
        assert tier(ours).flush(180)
    with Store(tmp_path / "b", shared=share) as theirs:
        assert load_all(theirs, history) == 40
        assert not theirs.references()


def test_what_was_not_there_is_asked_for_again_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, asked = FolderPlace.size, []

    def noted(place: FolderPlace, key: str) -> int | None:
        asked.append(key)
        return size(place, key)

    monkeypatch.setattr(FolderPlace, "size", noted)
    with Store(tmp_path / "a", shared=str(tmp_path / "share")) as store:
        for n_asked in (1, 1):
            assert store.match(KEYS["full"], tokens_of(1, 40)).n_tokens == 0
            assert len(asked) == n_asked
        monkeypatch.setattr("kvcellar.store.shared.blocks.MISSED_S", 0.0)
        assert store.match(KEYS["full"], tokens_of(1, 40)).n_tokens == 0
        assert len(asked) == 2


def test_documents_are_the_same_on_every_machine(machine: Opener) -> None:
    one, other = machine("a"), machine("b")
    one.put_document("resp_1", b"first")
    assert other.document("resp_1") == b"first"
    other.put_document("resp_1", b"second")
    assert one.document("resp_1") == b"second"
    assert other.delete_document("resp_1")
    assert one.document("resp_1") is None
    assert not one.delete_document("resp_1")


def test_documents_are_here_while_the_place_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> object:
        raise PlaceError("no answer")

    with Store(tmp_path / "a", shared=str(tmp_path / "share")) as store:
        monkeypatch.setattr(FolderPlace, "_ask", broken)
        store.put_document("resp_1", b"first")
        assert store.document("resp_1") == b"first"
        assert store.delete_document("resp_1")


def test_each_goes_on_where_the_other_stopped(machine: Opener) -> None:
    one, other = machine("a"), machine("b")
    key, tokens = KEYS["full"], tokens_of(1, 60)
    for serial in range(1, 5):
        assert tier(one).pull(NAME) in (Pulled.TAKEN, Pulled.SAME)
        history = saved(one, key, tokens[: 15 * serial], serial)
        one, other = other, one
    assert tier(one).pull(NAME) is Pulled.TAKEN
    assert load_all(one, history) == 60
    assert not one.take_events()
    assert not other.take_events()


def test_of_two_who_went_on_at_once_neither_is_lost(machine: Opener) -> None:
    one, other = machine("a"), machine("b")
    key, tokens = KEYS["full"], tokens_of(1, 30)
    saved(one, key, tokens[:20], 1)
    assert tier(other).pull(NAME) is Pulled.TAKEN
    saved(one, key, tokens, 2)
    mine = History(key, tokens[:20] + tokens_of(2, 10))
    save(other, NAME, mine, metadata={"serial": 3})
    tier(other).flush(180)
    assert tier(other).is_diverged(NAME)
    assert tier(other).pull(NAME) is Pulled.DIVERGED
    assert other.get(NAME).tokens.tokens.tolist() == mine.tokens
    assert tier(machine("c")).pull(NAME) is Pulled.TAKEN


def test_what_another_process_of_the_folder_handed_in_has_not_diverged(tmp_path: Path) -> None:
    share, key = str(tmp_path / "share"), KEYS["full"]
    with (
        Store(tmp_path / "a", shared=share) as one,
        Store(tmp_path / "a", shared=share) as other,
    ):
        saved(one, key, tokens_of(1, 20), 1)
        tier(other)._pusher.diverged.add(NAME)  # it lost a race for the very state
        assert tier(other).pull(NAME) is Pulled.SAME
        assert not tier(other).is_diverged(NAME)


def test_what_is_deleted_on_one_machine_goes_on_the_other(machine: Opener) -> None:
    one, other = machine("a"), machine("b")
    saved(one, KEYS["full"], tokens_of(1, 20), 1)
    tier(other).pull_all()
    assert other.has_reference(NAME)
    one.delete(NAME)
    assert tier(one).flush(180)
    tier(other).pull_all("poet")
    assert not other.has_reference(NAME)
    saved(other, KEYS["full"], tokens_of(2, 20), 9)  # the name is free again
    assert tier(one).pull(NAME) is Pulled.TAKEN


def test_what_is_deleted_while_it_is_on_its_way_there_stays_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share, key = tmp_path / "share", KEYS["full"]
    is_there, go = threading.Event(), threading.Event()
    advance = FolderPlace.advance

    def slowly(self: FolderPlace, register: str, number: int, data: bytes) -> bool:
        is_done = advance(self, register, number, data)
        is_there.set()
        assert go.wait(60)
        return is_done

    monkeypatch.setattr("kvcellar.store.shared.histories.ASK_S", 60)
    with Store(tmp_path / "a", shared=str(share)) as one:
        monkeypatch.setattr(FolderPlace, "advance", slowly)
        save(one, NAME, History(key, tokens_of(1, 20)), metadata={"serial": 1})
        assert is_there.wait(60)
        one.delete(NAME)
        assert tier(one).pull(NAME) is Pulled.SAME
        assert not one.has_reference(NAME)
        go.set()
        assert tier(one).flush(180)
        tier(one).pull_all()
        assert not one.has_reference(NAME)
        with Store(tmp_path / "b", shared=str(share)) as other:
            tier(other).pull_all()
            assert not other.has_reference(NAME)
        saved(one, key, tokens_of(2, 20), 9)  # the name is free again
        with Store(tmp_path / "c", shared=str(share)) as other:
            assert tier(other).pull(NAME) is Pulled.TAKEN


def test_what_is_damaged_in_the_tier_costs_its_suffix_and_is_put_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share, key = tmp_path / "share", KEYS["full"]
    with (
        Store(tmp_path / "a", shared=str(share)) as ours,
        Store(tmp_path / "b", shared=str(share)) as theirs,
    ):
        history = saved(ours, key, tokens_of(1, 43), 1)
        address = ours.get(NAME).blocks[2].hex()
        file = share / "blocks" / address[:2] / address
        file.write_bytes(file.read_bytes()[:-5])  # a copy that was cut short
        assert load_all(theirs, history) == 16
        assert [event.kind for event in theirs.take_events()] == ["damaged"]
        wait_for(lambda: not file.exists())
        monkeypatch.setattr("kvcellar.store.shared.blocks.TRUSTED_S", 0.0)
        assert tier(theirs).pull(NAME) is Pulled.TAKEN
        saved(theirs, key, [*history.tokens, 1], 2)
        assert file.exists()


def test_a_place_that_is_gone_delays_nothing_and_gets_all_of_it_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share, key = tmp_path / "share", KEYS["full"]
    is_gone = threading.Event()
    ask = FolderPlace._ask

    def broken(self: FolderPlace, request: Callable[[], object]) -> object:
        if is_gone.is_set():
            raise PlaceError("no answer")
        return ask(self, request)

    monkeypatch.setattr(FolderPlace, "_ask", broken)
    monkeypatch.setattr(guarded_calls, "FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(guarded_calls, "LONGEST_PAUSE_S", 0.05)
    monkeypatch.setattr(pusher, "_TRY_AGAIN_S", 0.05)
    with Store(tmp_path / "a", StoreConfig(warm_bytes=0), shared=str(share)) as store:
        is_gone.set()
        history = History(key, tokens_of(1, 43))
        save(store, NAME, history, metadata={"serial": 1})
        assert not tier(store).wait(NAME, 1)
        assert load_all(store, history) == 43
        assert store.stats().shared.trouble == "no answer"  # type: ignore[union-attr]
        is_gone.clear()
        wait_for(lambda: tier(store).flush(0.1))
        kinds = {event.kind for event in store.take_events()}
        assert kinds == {"shared_away", "shared_back"}
    with Store(tmp_path / "b", shared=str(share)) as other:
        assert load_all(other, history) == 40


def test_a_history_waits_until_its_blocks_are_there_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, put = threading.Event(), SharedBlocks.put

    def late(*args: object) -> None:
        assert go.wait(180)
        put(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(SharedBlocks, "put", late)
    with Store(tmp_path / "a", shared=str(tmp_path / "share")) as store:
        assert tier(store).stats().n_waiting == 0
        save(store, NAME, History(KEYS["full"], tokens_of(1, 43)), metadata={"serial": 1})
        assert tier(store).wait(NAME, 1), "its words are there at once"
        assert tier(store).stats().n_waiting == 1
        assert not tier(store).flush(0.05) and tier(store).stats().n_waiting == 1
        go.set()
        assert tier(store).flush(180) and tier(store).stats().n_waiting == 0


def test_whatever_goes_wrong_with_a_place_is_said_and_ends_no_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def torn(*_: object, **__: object) -> object:
        raise ZeroDivisionError("what nobody thought of")

    with Store(tmp_path / "a", shared=str(tmp_path / "share")) as store:
        for verb in ("pull", "pull_all", "delete"):
            monkeypatch.setattr(histories.SharedHistories, verb, torn)
        assert tier(store).pull(NAME) is Pulled.SAME
        tier(store).pull_all("poet")
        tier(store).delete(NAME)
        for event, subject in zip(
            store.take_events(), (NAME, tier(store).title, NAME), strict=True
        ):
            assert (event.kind, event.subject) == (EventKind.WRITE_FAILED, subject)
            assert event.detail == "not taken over: what nobody thought of"


def test_a_place_that_is_full_is_still_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share, key = tmp_path / "share", KEYS["full"]
    with Store(tmp_path / "a", shared=str(share)) as store:
        history = saved(store, key, tokens_of(1, 40), 1)
    write, create = FolderPlace.write, FolderPlace.create

    def full(self: FolderPlace, *_: object) -> None:
        raise PlaceError("no space left")

    monkeypatch.setattr(FolderPlace, "write", full)
    monkeypatch.setattr(FolderPlace, "create", full)
    with Store(tmp_path / "b", shared=str(share)) as store:
        save(store, "new@1", History(key, tokens_of(2, 40)), metadata={"serial": 2})
        assert not tier(store).flush(0.5)
        assert load_all(store, history) == 40
        assert tier(store).pull(NAME) is Pulled.TAKEN
        assert "no space left" in str(store.take_events())
    monkeypatch.setattr(FolderPlace, "write", write)
    monkeypatch.setattr(FolderPlace, "create", create)
    with Store(tmp_path / "b", shared=str(share)) as store:
        assert tier(store).flush(180)
    with Store(tmp_path / "c", shared=str(share)) as store:
        assert tier(store).pull("new@1") is Pulled.TAKEN


def test_who_asks_a_slow_place_waits_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    share, key = tmp_path / "share", KEYS["full"]
    ask, asked, answers = FolderPlace._ask, [], threading.Event()

    def slow(self: FolderPlace, request: Callable[[], object]) -> object:
        asked.append(request)
        assert answers.wait(180)
        return ask(self, request)

    monkeypatch.setattr(FolderPlace, "_ask", slow)
    monkeypatch.setattr(histories, "ASK_S", 0.05)
    monkeypatch.setattr(guarded_calls, "FIRST_PAUSE_S", 600.0)
    monkeypatch.setattr(guarded_calls, "LONGEST_PAUSE_S", 600.0)
    with Store(tmp_path / "a", shared=str(share)) as store:
        assert tier(store).pull(NAME) is Pulled.SAME
        before = len(asked)
        for _ in range(100):
            assert tier(store).pull(NAME) is Pulled.SAME
        load_all(store, History(key, tokens_of(1, 40)))
        assert len(asked) == before, "it was asked again"
        answers.set()


def test_what_is_damaged_here_is_not_deleted_there(tmp_path: Path) -> None:
    share, key = tmp_path / "share", KEYS["full"]
    with Store(tmp_path / "a", shared=str(share)) as store:
        saved(store, key, tokens_of(1, 20), 1)
    for path in (tmp_path / "a" / "references").iterdir():
        path.write_bytes(b"damaged")
    with Store(tmp_path / "a", shared=str(share)) as store:
        tier(store).flush(180)
    with Store(tmp_path / "b", shared=str(share)) as store:
        assert tier(store).pull(NAME) is Pulled.TAKEN


def test_a_deletion_that_could_not_be_told_is_told_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share, key = tmp_path / "share", KEYS["full"]
    with Store(tmp_path / "a", shared=str(share)) as store:
        saved(store, key, tokens_of(1, 20), 1)
        with monkeypatch.context() as patch:
            patch.setattr(FolderPlace, "_ask", lambda *_: 1 / 0)
            patch.setattr("kvcellar.store.shared.tier.CLOSE_S", 0.1)
            store.delete(NAME)
            store.close()
    with Store(tmp_path / "a", shared=str(share)) as store:
        assert tier(store).flush(180)
        tier(store).pull_all()
        assert not store.has_reference(NAME)
    with Store(tmp_path / "b", shared=str(share)) as store:
        tier(store).pull_all()
        assert not store.has_reference(NAME)


def test_what_a_process_did_not_hand_in_the_next_one_does(tmp_path: Path) -> None:
    share, key = tmp_path / "share", KEYS["full"]
    with Store(tmp_path / "a") as alone:
        save(alone, NAME, History(key, tokens_of(1, 20)), metadata={"serial": 1})
        save(alone, "nobody's", History(key, tokens_of(2, 20)))
    with Store(tmp_path / "a", shared=str(share)) as store:
        assert tier(store).flush(180)
    with Store(tmp_path / "b", shared=str(share)) as other:
        assert tier(other).pull(NAME) is Pulled.TAKEN
        assert not other.match(key, tokens_of(2, 20)).n_tokens


def test_a_place_that_was_put_back_takes_nobody_back(tmp_path: Path) -> None:
    share, key = tmp_path / "share", KEYS["full"]
    with Store(tmp_path / "a", shared=str(share)) as store:
        saved(store, key, tokens_of(1, 20), 1)
        shutil.copytree(share, tmp_path / "backup")
        saved(store, key, tokens_of(1, 30), 2)
        shutil.rmtree(share)
        (tmp_path / "backup").rename(share)
        assert tier(store).pull(NAME) is Pulled.SAME
        history = saved(store, key, tokens_of(1, 40), 3)
        assert not tier(store).is_diverged(NAME)
    with Store(tmp_path / "b", shared=str(share)) as other:
        assert tier(other).pull(NAME) is Pulled.TAKEN
        assert other.get(NAME).tokens.tokens.tolist() == history.tokens


def test_a_lost_ledger_loses_no_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    share, key = tmp_path / "share", KEYS["full"]
    with Store(tmp_path / "a", shared=str(share)) as store:
        saved(store, key, tokens_of(1, 20), 1)
    ledger = tmp_path / "a" / "shared.sqlite"
    assert ledger.stat().st_mode & 0o777 == 0o600
    ledger.write_bytes(b"no database" * 100)
    monkeypatch.setattr("kvcellar.store.shared.blocks.TRUSTED_S", 0.0)  # so it is asked
    there = {path: path.stat().st_mtime_ns for path in (share / "blocks").rglob("*/*")}
    with Store(tmp_path / "a", shared=str(share)) as store:
        assert tier(store).pull(NAME) is Pulled.SAME  # as before each turn
        saved(store, key, tokens_of(1, 30), 2)
        assert not tier(store).is_diverged(NAME)
    assert {path: path.stat().st_mtime_ns for path in there} == there, (
        "what is there is not put again"
    )


def test_dropped_states_stay_at_home(tmp_path: Path) -> None:
    share = tmp_path / "share"
    with Store(tmp_path / "a", shared=str(share)) as store:
        saved(store, KEYS["full"], tokens_of(1, 20), 1, "dropped/1")
    assert not (share / "agents").exists()


def test_a_url_that_names_no_place_leaves_the_store_free(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no place"):
        Store(tmp_path / "a", shared="ftp://host/x")
    Store(tmp_path / "a").close()


def wait_for(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 180
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_place_that_was_emptied_gets_all_of_it_again(machine: Opener, place_url: str) -> None:
    key = KEYS["full"]
    one = machine("a")
    history = saved(one, key, tokens_of(1, 43), 1)
    place = tier(one).place
    for register in place.numbers(""):
        place.forget(register)
    place.drop([entry.key for entry in place.entries("blocks/")])
    assert tier(one).flush(180)
    tier(one).pull_all()
    assert tier(one).flush(180)
    other = machine("b")
    assert tier(other).pull(NAME) is Pulled.TAKEN
    assert load_all(other, history) == 43


def test_a_state_without_bytes_deletes_nothing(tmp_path: Path) -> None:
    """So a file share that lost power may leave it."""
    share, key = tmp_path / "share", KEYS["full"]
    with (
        Store(tmp_path / "a", shared=str(share)) as one,
        Store(tmp_path / "b", shared=str(share)) as other,
    ):
        saved(one, key, tokens_of(1, 20), 1)
        assert tier(other).pull(NAME) is Pulled.TAKEN
        before = len(states_in(share))
        saved(one, key, tokens_of(1, 30), 2)
        for path in states_in(share)[before:]:
            path.write_bytes(b"")
        assert tier(other).pull(NAME) is Pulled.SAME
        assert tier(other).pull(NAME) is Pulled.SAME
        assert other.get(NAME).tokens.tokens.tolist() == tokens_of(1, 20)
        assert [event.kind for event in other.take_events()] == ["damaged"]


def states_in(share: Path) -> list[Path]:
    """The states of all histories of a place, the latest last."""
    return sorted(path for path in (share / "agents").rglob("0*") if path.is_file())


@pytest.mark.parametrize("n_damaged", [1, 2])
def test_behind_a_state_that_was_cut_short_lies_the_newest_that_is_whole(
    tmp_path: Path, n_damaged: int
) -> None:
    share, key = tmp_path / "share", KEYS["full"]
    with Store(tmp_path / "a", shared=str(share)) as one:
        saved(one, key, tokens_of(1, 20), 1)
        last = saved(one, key, tokens_of(1, 30), 2)
        states = states_in(share)
        assert len(states) == 4, "words, and then all of it, of either turn"
        for path in states[-n_damaged:]:
            path.write_bytes(path.read_bytes()[:300])
        with Store(tmp_path / "b", shared=str(share)) as fresh:
            tier(fresh).pull_all()
            (said,) = (event.detail for event in fresh.take_events())
            assert f"gone back to {4 - n_damaged}" in said
            tokens = fresh.get(NAME).tokens.tokens.tolist()
            assert tokens == (last.tokens if n_damaged == 1 else tokens_of(1, 20))
            mine = saved(fresh, key, [*tokens, 7, 8], 3)
        pulled = tier(one).pull(NAME)
        if n_damaged == 1:
            assert pulled is Pulled.TAKEN
            assert one.get(NAME).tokens.tokens.tolist() == mine.tokens
        else:  # its own turn is in nothing that the place has
            assert pulled is Pulled.DIVERGED
            assert one.get(NAME).tokens.tokens.tolist() == last.tokens


def test_a_place_that_was_moved_is_handed_nothing_that_it_has(tmp_path: Path) -> None:
    share, moved, key = tmp_path / "share", tmp_path / "moved", KEYS["full"]
    with Store(tmp_path / "a", shared=str(share)) as one:
        saved(one, key, tokens_of(1, 30), 1)
    share.rename(moved)
    there = {path: path.stat().st_mtime_ns for path in moved.rglob("*") if path.is_file()}
    with Store(tmp_path / "a", shared=str(moved)) as one:
        assert tier(one).flush(180)
        after = {path: path.stat().st_mtime_ns for path in moved.rglob("*") if path.is_file()}
        assert after == there
        history = saved(one, key, tokens_of(1, 40), 2)
    with Store(tmp_path / "b", shared=str(moved)) as other:
        assert tier(other).pull(NAME) is Pulled.TAKEN
        assert other.get(NAME).tokens.tokens.tolist() == history.tokens


def test_what_else_lies_in_a_place_is_nobodys_state(tmp_path: Path) -> None:
    share, key = tmp_path / "share", KEYS["full"]
    with (
        Store(tmp_path / "a", shared=str(share)) as one,
        Store(tmp_path / "b", shared=str(share)) as other,
    ):
        saved(one, key, tokens_of(1, 20), 1)
        for folder in [path for path in share.rglob("*") if path.is_dir()]:
            for name in ("Thumbs.db", "0000", "cafe"):
                (folder / name).write_bytes(b"x")
        history = saved(one, key, tokens_of(1, 30), 2)
        tier(other).pull_all()
        assert other.get(NAME).tokens.tokens.tolist() == history.tokens
        assert not other.take_events()


def put_back(share: Path, backup: Path) -> None:
    shutil.rmtree(share)
    shutil.copytree(backup, share)


@pytest.mark.parametrize("n_ours", [1, 2])
@pytest.mark.parametrize("is_ours_first", [True, False])
def test_a_place_that_was_put_back_loses_no_machines_turn(
    tmp_path: Path, n_ours: int, is_ours_first: bool
) -> None:
    share, key = tmp_path / "share", KEYS["full"]
    with (
        Store(tmp_path / "a", shared=str(share)) as ours,
        Store(tmp_path / "b", shared=str(share)) as theirs,
    ):
        saved(ours, key, tokens_of(1, 20), 1)
        assert tier(theirs).pull(NAME) is Pulled.TAKEN
        shutil.copytree(share, tmp_path / "backup")
        for i in range(n_ours):  # which the place forgets
            saved(ours, key, tokens_of(1, 30 + i), 20 + i)
        put_back(share, tmp_path / "backup")
        told = {"a": tokens_of(1, 29 + n_ours), "b": [*tokens_of(1, 20), 7, 8]}
        saved(theirs, key, told["b"], 30)
        stores = {"a": ours, "b": theirs}
        for name in stores if is_ours_first else reversed(stores):
            pulled = tier(stores[name]).pull(NAME)
            assert pulled in (Pulled.SAME, Pulled.DIVERGED)
            if pulled is Pulled.SAME:
                told[name] = [*told[name], 9]
                saved(stores[name], key, told[name], 40)
        assert {n: s.get(NAME).tokens.tokens.tolist() for n, s in stores.items()} == told


def test_a_state_that_nobody_can_read_is_followed_and_its_writer_finds_out(tmp_path: Path) -> None:
    share, key = tmp_path / "share", KEYS["full"]
    with (
        Store(tmp_path / "a", shared=str(share)) as ours,
        Store(tmp_path / "b", shared=str(share)) as theirs,
    ):
        saved(ours, key, tokens_of(1, 20), 1)
        assert tier(theirs).pull(NAME) is Pulled.TAKEN
        before = len(states_in(share))
        saved(theirs, key, tokens_of(1, 25), 2)
        for path in states_in(share)[before:]:
            path.write_bytes(path.read_bytes()[:300])
        assert tier(ours).pull(NAME) is Pulled.SAME
        history = saved(ours, key, tokens_of(1, 30), 3)
        assert tier(theirs).pull(NAME) is Pulled.DIVERGED
        assert theirs.get(NAME).tokens.tokens.tolist() == tokens_of(1, 25)
    with Store(tmp_path / "c", shared=str(share)) as third:
        assert tier(third).pull(NAME) is Pulled.TAKEN
        assert third.get(NAME).tokens.tokens.tolist() == history.tokens
