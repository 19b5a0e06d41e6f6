"""States of recurrent layers: stored at boundaries, and restored there or nowhere."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvcellar.errors import ShapeError
from kvcellar.states import StateGroup, StateShape
from kvcellar.store import EventKind, RowLayout, States, Store, StoreConfig
from kvcellar.store.values.format import read_file
from tests.store.fakes import (
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
from tests.store.forging import forge

COLD = StoreConfig(warm_bytes=0)
KEY = make_key(groups=[FULL, WINDOW], state=STATE)
TOKENS = tokens_of(0, 60)


def boundary_path(store: Store, name: str, length: int) -> Path:
    (found,) = (b for b in store.get(name).boundaries if b.length == length)
    return store.path / "windows" / f"{found.address.hex()}.safetensors"


@pytest.mark.parametrize("groups", [[FULL], [FULL, WINDOW], [WINDOW], []])
def test_a_history_goes_on_from_the_lengths_whose_states_were_saved_and_from_no_other(
    tmp_path: Path, groups: list
) -> None:
    key = make_key(groups=groups, state=STATE)
    history = History(key, TOKENS, slack=3)  # windows alone would serve three lengths before
    with Store(tmp_path, COLD) as store:
        save(store, "a", history, boundaries=(5, 16, 37))
        for n in range(61):
            want = max(m for m in (0, 5, 16, 37, 60) if m <= n)
            assert store.match(key, TOKENS[:n]).n_resumable == want
            assert load_all(store, history, n) == want  # compares every byte
        assert not store.take_events()


def test_a_history_that_parts_between_two_states_goes_on_from_the_one_before(
    tmp_path: Path,
) -> None:
    with Store(tmp_path, COLD) as store:
        save(store, "a", History(KEY, TOKENS), boundaries=(20, 40))
        for n_same, want in ((45, 40), (40, 40), (39, 20), (19, 0)):
            other = History(KEY, [*TOKENS[:n_same], *tokens_of(1, 20)])
            assert load_all(store, other) == want


def test_states_are_written_where_they_are_asked_for_and_once(tmp_path: Path) -> None:
    history = History(KEY, TOKENS)
    with Store(tmp_path, COLD) as store:
        save(store, "a", History(KEY, TOKENS[:40]), boundaries=(30,))
        save(store, "a", history, boundaries=(40,))
        assert history.n_states_read == 1  # that at 40 was there
        assert [b.length for b in store.get("a").boundaries] == [30, 40, 60]
        assert len(list((tmp_path / "windows").iterdir())) == 3


def test_forks_share_states_and_the_last_to_go_takes_them_along(tmp_path: Path) -> None:
    with Store(tmp_path, COLD) as store:
        save(store, "a", History(KEY, TOKENS), boundaries=(30,))
        fork(store, KEY, "a", "b", 33)
        assert [b.length for b in store.get("b").boundaries] == [30]
        store.delete("a")
        store.gc()
        assert load_all(store, History(KEY, TOKENS)) == 30
        assert len(list((tmp_path / "windows").iterdir())) == 1
        store.delete("b")
        store.gc()
        assert list((tmp_path / "windows").iterdir()) == []


def test_an_export_has_the_states_and_they_are_verified(tmp_path: Path) -> None:
    file = tmp_path / "a.kv"
    with Store(tmp_path / "one", COLD) as store:
        save(store, "a", History(KEY, TOKENS), boundaries=(30,))
        store.export_reference("a", file)
    with Store(tmp_path / "two", COLD) as store:
        store.import_reference(file)
        assert load_all(store, History(KEY, TOKENS)) == 60
        assert load_all(store, History(KEY, TOKENS[:59])) == 30
        assert store.verify().is_good


@pytest.mark.parametrize("harm", ["flip", "cut", "missing"])
def test_a_damaged_state_costs_the_tokens_up_to_the_one_before(tmp_path: Path, harm: str) -> None:
    history = History(KEY, TOKENS)
    with Store(tmp_path, COLD) as store:
        save(store, "a", history, boundaries=(20, 40))
        path = boundary_path(store, "a", 60)
        data = bytearray(path.read_bytes())
        at = data.index(np.asarray(history.read_states(60)[0][1]).tobytes())
        if harm == "flip":
            data[at + 5] ^= 4
            path.write_bytes(data)
        elif harm == "cut":
            os.truncate(path, at)
        else:
            path.unlink()
        assert load_all(store, history) == 40
        kind = EventKind.MISSING if harm == "missing" else EventKind.DAMAGED
        assert [event.kind for event in store.take_events()] == [kind]
        save(store, "a", history)
        assert load_all(store, history) == 60


def test_a_state_whose_rows_are_gone_is_of_no_use(tmp_path: Path) -> None:
    history = History(KEY, TOKENS)
    with Store(tmp_path, COLD) as store:
        save(store, "a", history, boundaries=(20, 40))
        gone = store.get("a").blocks[5]  # of positions 40 to 47
        (tmp_path / "blocks" / f"{gone.hex()}.safetensors").unlink()
        assert store.match(KEY, TOKENS).n_resumable == 60  # nobody has looked yet
        assert load_all(store, history) == 40
        assert store.match(KEY, TOKENS).n_resumable == 40
        state = store.load_boundary(store.match(KEY, TOKENS))
        assert state is not None and state.n_tokens == 40


def without_a_state(metadata: dict, tensors: dict) -> None:
    del tensors["state.1.0"]


def of_another_shape(metadata: dict, tensors: dict) -> None:
    tensors["state.1.0"] = np.zeros(6, np.float32)


def of_another_type(metadata: dict, tensors: dict) -> None:
    tensors["state.1.0"] = tensors["state.1.0"].astype(np.float16)


def for_any_length(metadata: dict, tensors: dict) -> None:
    metadata["first"] = "0"


@pytest.mark.parametrize(
    "change", [without_a_state, of_another_shape, of_another_type, for_any_length]
)
def test_a_file_with_a_good_checksum_is_not_believed_either(tmp_path: Path, change) -> None:
    history = History(KEY, TOKENS)
    with Store(tmp_path, COLD) as store:
        save(store, "a", history, boundaries=(40,))
        forge(boundary_path(store, "a", 60), change)
    (tmp_path / "catalogue.sqlite").unlink()  # which would know better
    with Store(tmp_path, COLD) as store:
        for n in (60, 59):
            assert load_all(store, history, n) == 40
        assert EventKind.DAMAGED in {event.kind for event in store.take_events()}


def test_models_of_other_states_share_nothing(tmp_path: Path) -> None:
    wider = StateGroup((*STATE.layers, (StateShape("recurrent", (5,)),)))
    turned = StateGroup(
        tuple(tuple(s._replace(shape=s.shape[::-1]) for s in layer) for layer in STATE.layers)
    )
    keys = [make_key(groups=[FULL], state=state) for state in (None, STATE, wider, turned)]
    assert len({key.root for key in keys}) == 4
    with Store(tmp_path, COLD) as store:
        for i, key in enumerate(keys):
            assert store.match(key, TOKENS).n_tokens == 0
            save(store, f"{i}", History(key, TOKENS))
        for key in keys:
            assert load_all(store, History(key, TOKENS)) == 60


def test_the_layout_without_states_is_what_it_was() -> None:
    assert "states" not in RowLayout((FULL,), "float32").as_json


def test_eight_bits_are_for_rows_and_states_stay_as_they_are(tmp_path: Path) -> None:
    config = StoreConfig(warm_bytes=0, cold_precision="int8")
    for groups in ([FULL], [FULL, WINDOW]):
        key = make_key(groups=groups, state=STATE)
        history = History(key, TOKENS)
        with Store(tmp_path / f"{len(groups)}", config) as store:
            save(store, "a", history)
            state = store.load_boundary(store.match(key, TOKENS))
            assert state is not None
            assert state.is_exact == (len(groups) == 1)  # else its window is not
            history.check_boundary(replace(state, windows=history.read_window(60)))
            metadata = read_file(boundary_path(store, "a", 60)).metadata
            assert metadata["precision"] == ("exact" if len(groups) == 1 else "int8")


@pytest.mark.parametrize(
    "states",
    [
        (),
        lambda states: states[:1],
        lambda states: ((states[0][0],), states[1]),
        lambda states: (states[0], (states[1][0].astype(np.float64),)),
        lambda states: (states[0], (states[1][0][None],)),
        lambda states: (*states, states[1]),
    ],
)
def test_states_that_the_layout_does_not_have_are_refused(tmp_path: Path, states) -> None:
    class Wrong(History):
        def read_states(self, n: int) -> States:
            return states(super().read_states(n)) if callable(states) else states

    with Store(tmp_path, COLD) as store:
        with pytest.raises(ShapeError, match=r"states of recurrent layer \d come as"):
            store.save("a", KEY, TOKENS, Wrong(KEY, TOKENS))
        store.flush()
        assert store.references() == [] and store.stats().cold.n_blocks == 0


def test_bytes_of_states_count_in_ram_on_disk_and_in_the_queue(tmp_path: Path) -> None:
    large = StateGroup(((StateShape("recurrent", (64, 64)),),))
    key = make_key(groups=[FULL], state=large)
    history = History(key, TOKENS)
    with Store(tmp_path / "one", StoreConfig(warm_bytes=1 << 20)) as store:
        save(store, "a", history)
        stats = store.stats()
        assert stats.warm.size_bytes > 60 * 4 * 48 + large.slot_bytes
        assert stats.cold.size_bytes > 60 * 4 * 48 + large.slot_bytes
        match = store.match(key, TOKENS)
        assert match.boundary_bytes(60)["warm"] > large.slot_bytes
        assert match.boundary_bytes(59) == {}
    with Store(tmp_path / "two", StoreConfig(warm_bytes=large.slot_bytes)) as store:
        save(store, "a", history)  # its state alone fills what RAM may hold
        assert store.stats().warm.size_bytes <= large.slot_bytes
    with Store(tmp_path / "three", StoreConfig(queue_bytes=large.slot_bytes)) as store:
        ticket = store.save("a", key, TOKENS, history)
        assert ticket.wait(60) == "published"
        assert ticket.lacks_boundary and ticket.is_partial
        assert history.n_states_read == 2  # none was copied that has no room
        (event,) = store.take_events()
        assert event.kind is EventKind.SAVE_PARTIAL and "no boundary state" in event.detail


def test_lengths_that_are_asked_for_stay_and_then_the_latest_others(tmp_path: Path) -> None:
    config = StoreConfig(warm_bytes=0, max_boundaries=3)
    with Store(tmp_path, config) as store:
        save(store, "a", History(KEY, TOKENS[:30]), boundaries=(4, 12, 20))
        assert [b.length for b in store.get("a").boundaries] == [4, 12, 20, 30]
        save(store, "a", History(KEY, TOKENS[:40]), boundaries=(4,))
        assert [b.length for b in store.get("a").boundaries] == [4, 30, 40]
        assert len(list((tmp_path / "windows").iterdir())) == 3  # the others are gone
        save(store, "a", History(KEY, TOKENS[:50]))
        assert [b.length for b in store.get("a").boundaries] == [30, 40, 50]


def test_a_length_that_only_the_store_still_has_is_kept_and_one_that_nobody_has_is_left_out(
    tmp_path: Path,
) -> None:
    class Forgetful(History):
        def holds_boundary(self, n: int) -> bool:
            return n == len(self.tokens)

    with Store(tmp_path, COLD) as store:
        save(store, "a", History(KEY, TOKENS[:30]), boundaries=(12,))
        save(store, "a", Forgetful(KEY, TOKENS), boundaries=(12, 40))
        assert [b.length for b in store.get("a").boundaries] == [12, 30, 60]


def test_older_states_go_before_any_history_does(tmp_path: Path) -> None:
    large = StateGroup(((StateShape("recurrent", (32, 32)),),))
    key = make_key(groups=[FULL], state=large)
    first, second = tokens_of(1, 60), tokens_of(2, 60)
    with Store(tmp_path / "one", COLD) as store:
        save(store, "a", History(key, first), boundaries=(10, 20, 40))
        size = store.stats().cold.size_bytes
    config = StoreConfig(warm_bytes=0, cold_bytes=2 * size - large.slot_bytes)
    with Store(tmp_path / "two", config) as store:
        save(store, "a", History(key, first), boundaries=(10, 20, 40))
        save(store, "b", History(key, second), boundaries=(10, 20, 40))
        (event,) = store.take_events()
        assert event.kind is EventKind.EVICTED and event.subject == "a"
        assert "before 40 tokens" in event.detail
        assert [b.length for b in store.get("a").boundaries] == [40, 60]
        assert [b.length for b in store.get("b").boundaries] == [10, 20, 40, 60]
        for tokens in (first, second):
            assert load_all(store, History(key, tokens)) == 60
        save(store, "c", History(key, tokens_of(3, 60)), boundaries=(10, 20, 40))
        assert load_all(store, History(key, tokens_of(3, 60))) == 60
        assert store.verify().is_good
