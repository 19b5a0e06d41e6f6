"""Several processes have one store open and do not harm each other."""

from __future__ import annotations

import fcntl
import os
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvcellar.errors import StoreError
from kvcellar.store import Store, StoreConfig
from kvcellar.store.disk import folder as folders
from kvcellar.store.disk.folder import Folder
from tests.processes import started
from tests.store.fakes import History, load_all, make_key, save, tokens_of

N_SAVES = 40
"""Times that each process saves."""


@pytest.mark.parametrize("cold_bytes", [1 << 30, 40_000])
@pytest.mark.slow
def test_processes_that_save_and_collect_in_one_store_lose_nothing(
    quick_path: Path, cold_bytes: int
) -> None:
    folder = quick_path / "store"
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                started("tests.store.saving_process", folder, seed, N_SAVES, cold_bytes)
            )
            for seed in range(3)
        ]
        outs = [process.communicate(timeout=600)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    counts = [[int(word) for word in out.split()] for out in outs]
    assert sum(published for published, _ in counts) > 2 * N_SAVES
    with Store(folder, StoreConfig(warm_bytes=0, cold_bytes=cold_bytes)) as store:
        assert store.verify().is_good
        assert store.stats().cold.size_bytes <= cold_bytes
        for row in store.references():
            ref = store.get(row.name)
            if not ref.is_evicted:
                key = make_key()
                assert ref.fingerprint == key.fingerprint
        assert store.take_events() == []


def test_what_one_process_saves_another_that_is_open_finds(tmp_path: Path) -> None:
    history = History(make_key(), tokens_of(0, 20))
    with Store(tmp_path) as one, Store(tmp_path) as two:
        assert two.match(history.key, history.tokens).n_tokens == 0
        save(one, "a", history)
        assert load_all(two, history) == 20
        ticket = two.save("b", history.key, history.tokens, history)
        assert ticket.wait(60) == "published"
        assert ticket.n_shared == 20
        two.delete("a")
        assert not one.has_reference("a")


def test_a_store_that_another_process_holds_is_read_and_a_write_gives_up_in_time(
    tmp_path: Path,
) -> None:
    history = History(make_key(), tokens_of(0, 20))
    with Store(tmp_path, StoreConfig(lock_timeout_s=0.05)) as store:
        save(store, "a", history)
        folder = Folder(tmp_path)
        is_held, may_go = threading.Event(), threading.Event()

        def hold() -> None:
            with folder.locked(1):
                is_held.set()
                may_go.wait(120)

        holder = threading.Thread(target=hold)
        holder.start()
        is_held.wait(120)
        try:
            assert load_all(store, history) == 20
            ticket = store.save("b", history.key, history.tokens, history)
            assert ticket.wait(60) == "failed"
            assert "written by another process" in ticket.reason
            with pytest.raises(StoreError, match=r"not free for 0.05 s"):
                store.gc()
            with Store(tmp_path, StoreConfig(lock_timeout_s=0.05)) as other:
                assert load_all(other, history) == 20
        finally:
            may_go.set()
            holder.join()
        save(store, "b", history)


def test_a_new_folder_is_marked_under_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who holds it clears away what is half-written, also the line that says the version."""
    held = []
    write = Folder._write

    def watched(folder: Folder, data: bytes | memoryview) -> Path:
        with (folder.path / "lock").open("rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                held.append(True)
        return write(folder, data)

    monkeypatch.setattr(Folder, "_write", watched)
    Folder(tmp_path / "store")
    assert held == [True]


def test_a_reference_that_is_deleted_while_the_folder_is_read_is_in_no_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stamp_of = folders.stamp_of

    def stamped_late(entry: os.DirEntry[str]) -> str:
        if Path(entry.path) == gone:
            gone.unlink()
        return stamp_of(entry)

    folder = Folder(tmp_path)
    kept, gone = folder.of_reference("kept"), folder.of_reference("gone")
    for path in (kept, gone):
        path.write_bytes(b"x")
    monkeypatch.setattr(folders, "stamp_of", stamped_late)
    assert list(folder.reference_paths()) == [kept]
