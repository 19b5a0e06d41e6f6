"""The catalogue against dicts; and which errors of SQLite mean that it has to be made again."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvcellar.history import History
from kvcellar.store.disk import catalogue as catalogues
from kvcellar.store.disk.catalogue import Catalogue, RefRow, is_damage, is_not_writable
from kvcellar.store.values.blocks import Info, Kind
from kvcellar.store.values.references import Boundary, Reference

ADDRESSES = [bytes([n]) * 16 for n in range(6)]
PARENTS = [bytes([100 + n]) * 16 for n in range(3)]
NAMES = ["a", "b", "c"]
TIMES = st.integers(0, 4).map(float)
SOME = st.sets(st.sampled_from(ADDRESSES))


@st.composite
def infos(draw: st.DrawFn) -> Info:
    tokens = np.array(draw(st.lists(st.integers(0, 2**62 - 1), max_size=3)), np.int64)
    return Info(
        draw(st.sampled_from(list(Kind))),
        draw(st.sampled_from(ADDRESSES)),
        draw(st.sampled_from(PARENTS)),
        draw(st.sampled_from(PARENTS)),
        draw(st.integers(0, 2**62 - 8)),
        tokens,
        draw(st.integers(0, 9)),
        draw(st.booleans()),
        draw(st.integers(0, 9)),
        f"{draw(st.integers(0, 99)):032x}",
    )


@st.composite
def references(draw: st.DrawFn) -> Reference:
    n = draw(st.integers(0, 5))
    blocks = draw(st.lists(st.sampled_from(ADDRESSES), max_size=3, unique=True))
    at_end = draw(st.sampled_from([(), (Boundary(n, ADDRESSES[-1]),)]))
    parent = draw(st.sampled_from([None, "x"]))
    return Reference(
        draw(st.sampled_from(NAMES)),
        "model",
        "{}",
        History(range(n)),
        tuple(blocks),
        draw(st.integers(0, n)),
        at_end,
        parent,
        None if parent is None else draw(st.integers(0, n)),
        is_evicted=draw(st.booleans()),
        revision=draw(st.integers(1, 9)),
    )


def facts(info: Info) -> tuple[Any, ...]:
    assert info.tokens.dtype == np.int64
    numbers = info.start, info.first, info.is_exact, info.size_bytes, info.checksum
    return (info.kind, info.address, info.root, info.parent, info.tokens.tolist(), *numbers)


class CatalogueAgainstDicts(RuleBasedStateMachine):
    """The oracle: blocks by address and references by name, each with the time of its last use."""

    @initialize()
    def open(self) -> None:
        self.catalogue = Catalogue(None)
        self.blocks: dict[bytes, tuple[Info, float]] = {}
        self.refs: dict[str, tuple[Reference, int, str, float]] = {}

    @rule(some=st.lists(infos(), max_size=4), now=TIMES)
    def add_blocks(self, some: list[Info], now: float) -> None:
        self.catalogue.add_blocks(iter(some), now)
        self.blocks |= {info.address: (info, now) for info in some}

    @rule(some=SOME)
    def drop_blocks(self, some: set[bytes]) -> None:
        self.catalogue.drop_blocks(some)
        self.blocks = {a: held for a, held in self.blocks.items() if a not in some}

    @rule(some=SOME, now=TIMES)
    def touch(self, some: set[bytes], now: float) -> None:
        self.catalogue.touch(some, now)
        self.blocks |= {a: (self.blocks[a][0], now) for a in some & self.blocks.keys()}
        for name, (ref, size, stamp, _) in self.refs.items():
            if ref.blocks[-1:] and ref.blocks[-1] in some:
                self.refs[name] = ref, size, stamp, now

    @rule(ref=references(), size=st.integers(0, 9), stamp=st.text("xyz", max_size=2), now=TIMES)
    def put_reference(self, ref: Reference, size: int, stamp: str, now: float) -> None:
        self.catalogue.put_reference(ref, PARENTS[0], size, stamp, now)
        self.refs[ref.name] = ref, size, stamp, now

    @rule(name=st.sampled_from(NAMES))
    def drop_reference(self, name: str) -> None:
        self.catalogue.drop_reference(name)
        self.refs.pop(name, None)

    @rule()
    def fail(self) -> None:
        """Have a transaction of the catalogue raise in its middle: it changes nothing."""
        with pytest.raises(ZeroDivisionError), self.catalogue._writing() as db:
            db.execute("DELETE FROM blocks")
            raise ZeroDivisionError

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "catalogue"):
            return
        ask = self.catalogue
        held = {a for ref, *_ in self.refs.values() for a in ref.addresses}
        by_use = sorted((used, name) for name, (*_, used) in self.refs.items())
        for address in ADDRESSES:
            got, want = ask.info(address), self.blocks.get(address)
            assert (got and facts(got)) == (want and facts(want[0]))
            assert ask.is_held(address) is (address in held)
        assert ask.addresses() == {a: info.kind for a, (info, _) in self.blocks.items()}
        for kind in Kind:
            found = ask.children(PARENTS[:2], kind)
            chosen = [(i, t) for i, t in self.blocks.values() if i.parent in PARENTS[:2]]
            want_use = sorted((used for info, used in chosen if info.kind is kind), reverse=True)
            assert [self.blocks[info.address][1] for info in found] == want_use
            assert {i.address for i in found} == {i.address for i, _ in chosen if i.kind is kind}
        loose = {a: block for a, block in self.blocks.items() if a not in held}
        garbage = ask.garbage()
        assert {a: (k, n, t) for a, k, n, t in garbage} == {
            a: (info.kind, info.size_bytes, used) for a, (info, used) in loose.items()
        }
        order = [(used, -loose[a][0].stop) for a, _, _, used in garbage]
        assert order == sorted(order)
        rows = [self.refs[name] for _, name in by_use]
        assert ask.references() == [
            RefRow(
                ref.name,
                len(ref.tokens),
                ref.n_stored,
                ref.parent,
                ref.parent_position,
                ref.is_evicted,
                ref.revision,
                size,
            )
            for ref, size, _, _ in rows
        ]
        assert ask.reference_names() == [name for _, name in by_use]
        assert list(ask.revisions().items()) == [(ref.name, ref.revision) for ref, *_ in rows]
        for name in NAMES:
            ref = self.refs[name][0] if name in self.refs else None
            assert ask.revision(name) == (ref and ref.revision)
            assert ask.held_by(name) == (ref.addresses if ref else set())
        assert ask.stamps() == {name: stamp for name, (_, _, stamp, _) in self.refs.items()}
        size_of = {a: info.size_bytes for a, (info, _) in self.blocks.items()}
        assert ask.totals() == {
            "blocks": len(size_of),
            "block_bytes": sum(size_of.values()),
            "refs": len(self.refs),
            "ref_bytes": sum(size for _, size, _, _ in self.refs.values()),
            "held": sum(size for a, size in size_of.items() if a in held),
            "unshared": sum(
                size_of.get(a, 0) for ref, *_ in self.refs.values() for a in ref.addresses
            ),
        }
        ask.check()

    def teardown(self) -> None:
        if hasattr(self, "catalogue"):
            self.catalogue.close()
            self.catalogue.close()


TestCatalogueAgainstDicts = CatalogueAgainstDicts.TestCase
TestCatalogueAgainstDicts.settings = settings(max_examples=25, stateful_step_count=20)


def test_an_error_that_has_ended_the_change_already_is_told_as_it_is() -> None:
    """SQLite takes a change back by itself where a disk is full; another error would be damage."""
    catalogue = Catalogue(None)
    with pytest.raises(ZeroDivisionError), catalogue._writing() as db:
        db.execute("ROLLBACK")
        raise ZeroDivisionError
    catalogue.add_blocks([block(1, PARENTS[0])], 1.0)
    assert len(catalogue.addresses()) == 1
    catalogue.close()


def block(n: int, parent: bytes) -> Info:
    address = n.to_bytes(16, "big")
    return Info(Kind.BLOCK, address, parent, parent, 0, np.arange(1), 0, True, 1, "")


@pytest.mark.parametrize("n_parents", [1, 499, 500, 501, 1200])
def test_children_of_any_number_of_parents_are_found(n_parents: int) -> None:
    catalogue = Catalogue(None)
    parents = [n.to_bytes(16, "little") for n in range(n_parents)]
    catalogue.add_blocks((block(n, parent) for n, parent in enumerate(parents)), 1.0)
    found = catalogue.children(parents, Kind.BLOCK)
    assert sorted(info.parent for info in found) == sorted(parents)
    catalogue.close()


def test_of_very_many_children_the_latest_used_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogues, "MAX_CHILDREN", 3)
    catalogue = Catalogue(None)
    for n in range(5):
        catalogue.add_blocks([block(n, PARENTS[0])], float(n))
    found = catalogue.children([PARENTS[0]], Kind.BLOCK)
    assert [info.address[-1] for info in found] == [4, 3, 2]
    catalogue.close()


def modes(paths: Iterable[Path]) -> set[int]:
    return {path.stat().st_mode & 0o777 for path in paths}


def test_a_catalogue_on_disk_is_its_owners_and_the_same_when_it_is_opened_again(
    tmp_path: Path,
) -> None:
    path = tmp_path / "catalogue.sqlite"
    first = Catalogue(path)
    assert first.is_new and not first.is_replaced
    first.add_blocks([block(1, PARENTS[0])], 1.0)
    assert modes(tmp_path.iterdir()) == {0o600} and len(list(tmp_path.iterdir())) == 3
    assert first._write.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    with first._writing():  # whoever reads waits for no writer, of this process or another
        assert len(first.addresses()) == 1
        with contextlib.closing(sqlite3.connect(path)) as db:
            assert db.execute("SELECT COUNT(*) FROM blocks").fetchone() == (1,)
    first.close()
    again = Catalogue(path)
    assert not again.is_new and len(again.addresses()) == 1
    (tmp_path / "other").write_bytes(b"")
    (tmp_path / "other").replace(path)
    assert again.is_replaced
    path.unlink()
    assert again.is_replaced
    again.close()


def test_a_catalogue_in_memory_makes_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    memory = Catalogue(None)
    assert memory.is_new and not memory.is_replaced and not list(tmp_path.iterdir())
    memory.check()
    monkeypatch.setattr(memory, "_select", lambda sql: [("row 7 missing from index",)])
    with pytest.raises(sqlite3.DatabaseError, match=r"^row 7 missing from index$") as error:
        memory.check()
    assert is_damage(error.value)
    memory.close()


@pytest.mark.parametrize("version", [1, 3])
def test_a_catalogue_of_another_version_is_refused(tmp_path: Path, version: int) -> None:
    path = tmp_path / "catalogue.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA user_version = {version}")
    with pytest.raises(sqlite3.DatabaseError, match=f"schema version {version} is not known") as e:
        Catalogue(path)
    assert is_damage(e.value), "so another is made"


def test_a_link_in_place_of_a_catalogue_is_refused(tmp_path: Path) -> None:
    (tmp_path / "catalogue.sqlite").symlink_to(tmp_path / "letter")
    with pytest.raises(OSError, match="it is a link"):
        Catalogue(tmp_path / "catalogue.sqlite")
    assert not os.path.lexists(tmp_path / "letter")


def test_a_page_that_is_damaged_is_found_by_a_check(tmp_path: Path) -> None:
    path = tmp_path / "catalogue.sqlite"
    catalogue = Catalogue(path)
    catalogue.add_blocks((block(n, PARENTS[0]) for n in range(300)), 1.0)
    catalogue.check()
    catalogue.close()
    data = bytearray(path.read_bytes())
    for at in range(4096, len(data), 4096):
        data[at + 8 : at + 40] = b"\xff" * 32
    path.write_bytes(data)
    again = Catalogue(path)
    with pytest.raises(sqlite3.DatabaseError) as error:
        again.check()
    assert is_damage(error.value)
    again.close()


CODES = {
    "not writable": "READONLY FULL CANTOPEN IOERR PERM",
    "in use": "BUSY LOCKED NOMEM",
    "damage": "CORRUPT NOTADB ERROR INTERNAL FORMAT SCHEMA",
}


@pytest.mark.parametrize("extended", [0, 1, 5])
@pytest.mark.parametrize(("kind", "names"), CODES.items())
def test_only_what_says_that_a_database_is_bad_has_it_made_again(
    kind: str, names: str, extended: int
) -> None:
    for name in names.split():
        error = sqlite3.OperationalError(name)
        error.sqlite_errorcode = getattr(sqlite3, f"SQLITE_{name}") | extended << 8
        assert is_damage(error) is (kind == "damage"), name
        assert is_not_writable(error) is (kind == "not writable"), name
    pythons_own = sqlite3.ProgrammingError("Cannot operate on a closed database.")
    assert is_damage(pythons_own) and not is_not_writable(pythons_own)
