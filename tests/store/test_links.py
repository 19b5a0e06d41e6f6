"""What somebody plants in a store's folder: links are never followed, a lost format is mended."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from kvcellar.errors import StoreError
from kvcellar.home import open_own
from kvcellar.server.commands.presence import held_store
from kvcellar.store import Store, StoreConfig
from kvcellar.store.values.blocks import Kind
from kvcellar.store.values.reports import EventKind
from tests.store.fakes import History, make_key

FOLDERS = ["blocks", "windows", "references", "tmp", "quarantine"]
FILES = ["format", "lock", "server.lock", "catalogue.sqlite", "catalogue.sqlite-wal"]


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def saved(path: Path) -> list[str]:
    """A store with one history in it, closed again; the names of its files of blocks."""
    history = History(make_key(), range(100))
    with Store(path) as store:
        store.save("a", make_key(), history.tokens, history).wait()
        store.flush()
    return names_in(path / "blocks")


@pytest.mark.parametrize("name", [*FOLDERS, *FILES])
@pytest.mark.parametrize("is_there", [True, False])
def test_a_link_in_a_store_is_refused_and_what_it_points_to_is_as_it_was(
    tmp_path: Path, name: str, is_there: bool
) -> None:
    store, target = tmp_path / "store", tmp_path / "target"
    saved(store)
    before = names_in(store / "blocks")
    if name in FOLDERS:
        target.mkdir(mode=0o755)
        (target / "precious").write_text("mine")
        shutil.rmtree(store / name)
    elif is_there:
        target.write_text("mine")
    (store / name).unlink(missing_ok=True)
    (store / name).symlink_to(target)
    with pytest.raises(StoreError, match=rf"{name} is a link .* remove it"):
        Store(store)
    if name in FOLDERS:
        assert [path.name for path in target.iterdir()] == ["precious"]
        assert target.stat().st_mode & 0o777 == 0o755
    elif is_there:
        assert target.read_text() == "mine"
    else:
        assert not target.exists()
    (store / name).unlink()
    with Store(store) as opened:
        assert name == "references" or [row.name for row in opened.references()] == ["a"]
        assert name == "blocks" or names_in(store / "blocks") == before


def test_a_link_in_place_of_the_servers_lock_is_not_written_through(tmp_path: Path) -> None:
    saved(tmp_path / "store")
    target = tmp_path / "target"
    target.write_text("mine")
    (tmp_path / "store" / "server.lock").symlink_to(target)
    with (
        pytest.raises(StoreError, match="it is a link"),
        held_store(tmp_path / "store", "http://127.0.0.1:1"),
    ):
        pass
    assert target.read_text() == "mine"


def test_a_store_may_lie_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "store").symlink_to(tmp_path / "disk")
    saved(tmp_path / "store")
    with Store(tmp_path / "store") as store:
        assert [row.name for row in store.references()] == ["a"]
    assert (tmp_path / "disk" / "blocks").is_dir() and (tmp_path / "store").is_symlink()


def test_a_link_in_place_of_a_block_is_a_damaged_block(tmp_path: Path) -> None:
    """Planted while the store is open: the file behind it is neither read nor moved."""
    first = saved(tmp_path / "store")[0]
    path, target = tmp_path / "store" / "blocks" / first, tmp_path / "target"
    with Store(tmp_path / "store", StoreConfig(warm_bytes=0)) as store:
        shutil.copy(path, target)
        path.unlink()
        path.symlink_to(target)
        assert store._cold.read(Kind.BLOCK, bytes.fromhex(path.stem)) is None
        (event,) = store.take_events()
    assert event.kind is EventKind.DAMAGED and "it is a link" in event.detail
    assert not path.is_symlink() and target.is_file(), "the link itself was put away"


def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="no regular file"):
        open_own(tmp_path / "pipe", os.O_RDONLY)
    os.mkfifo(tmp_path / "format")
    with pytest.raises(StoreError, match="something else where a store has a file"):
        Store(tmp_path)


@pytest.mark.parametrize("left", [b"", b"kvcell", b"kvcellar store 1", bytes(17), b"\xff\xfe"])
def test_a_damaged_format_is_mended_where_the_files_show_the_version(
    tmp_path: Path, left: bytes
) -> None:
    before = saved(tmp_path)
    (tmp_path / "format").write_bytes(left)
    with Store(tmp_path) as store:
        assert [row.name for row in store.references()] == ["a"]
    assert names_in(tmp_path / "blocks") == before
    assert (tmp_path / "format").read_text() == "kvcellar store 1\n"


def test_a_damaged_format_of_an_empty_store_is_mended(tmp_path: Path) -> None:
    Store(tmp_path).close()
    (tmp_path / "format").write_bytes(b"")
    Store(tmp_path).close()
    assert (tmp_path / "format").read_text() == "kvcellar store 1\n"


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_store_whose_version_nothing_shows_is_left_alone(tmp_path: Path, is_lost: bool) -> None:
    saved(tmp_path)
    for folder in ("blocks", "references"):
        for path in (tmp_path / folder).iterdir():
            path.write_bytes(path.read_bytes().replace(b'"version":"1"', b'"version":"7"'))
    (tmp_path / "format").write_bytes(b"")
    if is_lost:
        (tmp_path / "format").unlink()
    listed = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(StoreError, match="write the line 'kvcellar store 1' into that file"):
        Store(tmp_path)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == listed
    (tmp_path / "format").write_text("kvcellar store 1\n")
    Store(tmp_path).close()
