"""A shared place is counted and freed, and no word is lost by it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvcellar.errors import StoreError
from kvcellar.store import Store
from kvcellar.store.shared.histories import Pulled
from kvcellar.store.shared.places import SharedPlace
from kvcellar.store.shared.upkeep import DOCUMENT_S, collect, count
from tests.store.fakes import History, load_all, make_key, save, tokens_of

KEY = make_key()


@pytest.fixture
def store(tmp_path: Path, place_url: str) -> Iterator[Store]:
    """Two agents, one of which has a block that nobody needs any more."""
    with Store(tmp_path / "a", shared=place_url) as opened:
        for serial, (name, seed) in enumerate([("one@1", 1), ("two@1", 2)], 1):
            save(opened, name, History(KEY, tokens_of(seed, 20)), metadata={"serial": serial})
            assert opened.shared is not None
            assert opened.shared.flush()
        save(opened, "two@1", History(KEY, tokens_of(2, 30)), metadata={"serial": 9})
        assert opened.shared is not None
        assert opened.shared.flush()
        yield opened


def place_of(store: Store) -> SharedPlace:
    assert store.shared is not None
    return store.shared.place


def test_what_no_agent_needs_goes_and_what_is_new_stays(store: Store) -> None:
    place = place_of(store)
    before = count(place)
    assert (before.n_agents, before.n_blocks) == (2, 3 + 3 + 2)
    assert collect(place, grace_s=3600).n_blocks == 0
    report = collect(place, grace_s=-60)
    assert (report.n_blocks, report.n_agents) == (1, 0)
    assert count(place).size_bytes == report.size_bytes == before.size_bytes - report.freed_bytes


def test_over_the_limit_the_kv_of_who_was_silent_longest_goes(
    store: Store, tmp_path: Path, place_url: str
) -> None:
    place = place_of(store)
    collect(place, grace_s=-60)
    size = count(place).size_bytes
    report = collect(place, limit_bytes=size - 1, grace_s=-60)
    assert report.n_agents == 1
    assert count(place).n_agents == 2
    with ExitStack() as stack:
        other = stack.enter_context(Store(tmp_path / "b", shared=place_url))
        assert other.shared is not None
        for name, seed, n in (("one@1", 1, 20), ("two@1", 2, 30)):
            assert other.shared.pull(name) is Pulled.TAKEN
            assert other.get(name).tokens.tokens.tolist() == tokens_of(seed, n)
        restored = [load_all(other, History(KEY, tokens_of(s, n))) for s, n in ((1, 20), (2, 30))]
    assert sorted(map(bool, restored)) == [False, True]


def test_kv_of_agents_that_were_silent_for_long_goes(store: Store) -> None:
    assert collect(place_of(store), keep_s=-60, grace_s=-60).size_bytes == 0
    assert count(place_of(store)).n_agents == 2


def test_documents_that_nobody_wrote_again_for_a_month_go(tmp_path: Path) -> None:
    share = tmp_path / "share"
    with Store(tmp_path / "a", shared=str(share)) as one:
        for name in ("old", "new"):
            one.put_document(name, name.encode())
        for path in (share / "documents").iterdir():
            if path.read_bytes() == b"old":
                os.utime(path, (time.time() - DOCUMENT_S - 60,) * 2)
        assert collect(place_of(one), grace_s=0).n_blocks == 0
        assert [path.read_bytes() for path in (share / "documents").iterdir()] == [b"new"]


@pytest.mark.parametrize("n_cut", [1, 2])
def test_what_a_state_before_one_that_was_cut_short_needs_stays(tmp_path: Path, n_cut: int) -> None:
    share = tmp_path / "share"
    with Store(tmp_path / "a", shared=str(share)) as one:
        for n in (20, 30):
            save(one, "one@1", History(KEY, tokens_of(1, n)), metadata={"serial": n})
            assert one.shared is not None and one.shared.flush(180)
        place = place_of(one)
        states = sorted(path for path in (share / "agents").rglob("0*") if path.is_file())
        for path in states[-n_cut:]:
            path.write_bytes(path.read_bytes()[:300])
        # Of the words of 30 tokens, which came before their blocks; or of 20 tokens with theirs.
        n_needed = 2 if n_cut == 1 else 3
        assert collect(place, grace_s=-60).n_blocks == 5 - n_needed
        assert count(place).n_blocks == n_needed
        for path in states:
            path.write_bytes(b"")
        with pytest.raises(StoreError, match="nothing was removed"):
            collect(place, grace_s=-60)


def test_a_state_that_cannot_be_read_here_stops_it(store: Store) -> None:
    place = place_of(store)
    assert place.advance(f"agents/{0:032x}/{1:032x}", 1, b"of another version")
    with pytest.raises(StoreError, match="nothing was removed"):
        collect(place, grace_s=-60)
    assert count(place).n_blocks == 8
