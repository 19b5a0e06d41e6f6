"""Killed at any moment, a store has every history at its last published state or the one before.

``KVCELLAR_KILLS`` sets how many processes are killed; 75 by default.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np
import pytest

from kvcellar.store import Store, StoreConfig
from kvcellar.store.disk.catalogue import Catalogue
from tests.processes import started
from tests.store.crashing import KEY, NAMES, tokens_after
from tests.store.fakes import History, load_all, save, tokens_of

N_KILLS = int(os.environ.get("KVCELLAR_KILLS", "75"))


@pytest.fixture
def server() -> Iterator[subprocess.Popen[str]]:
    with started("tests.store.crashing") as process:
        yield process


def lines_until(stream: IO[str], last: str) -> Iterator[list[str]]:
    for line in stream:
        words = line.split()
        yield words
        if words[:1] == [last]:
            return
        assert words[:1] != ["end"], "it ended by itself"


@pytest.mark.slow
def test_a_process_killed_at_any_moment_leaves_every_history_as_it_was_published(
    tmp_path: Path, server: subprocess.Popen[str]
) -> None:
    assert server.stdin is not None
    assert server.stdout is not None
    rng = np.random.default_rng(1)
    counts = dict.fromkeys(NAMES, 0)
    n_between = n_leftovers = n_saves = 0
    for n in range(N_KILLS):
        if n % 25 == 0:  # histories are short again
            folder = tmp_path / str(n)
            counts = dict.fromkeys(NAMES, 0)
        start = ",".join(str(counts[name]) for name in NAMES)
        server.stdin.write(f"{folder} {n} {start}\n")
        server.stdin.flush()
        begun, done = dict(counts), dict(counts)
        pid = 0
        for words in lines_until(server.stdout, "open"):
            pid = int(words[1]) if words[0] == "pid" else pid
        n_more = int(rng.integers(1, 4))  # however slow the machine is, so many have begun
        for words in lines_until(server.stdout, "end"):
            assert words[0] != "failed", words
            if words[0] in ("begin", "done"):
                (begun if words[0] == "begin" else done)[words[1]] = int(words[2])
            n_more -= words[0] == "begin"
            if n_more == 0:
                n_more = -1
                time.sleep(float(rng.uniform(0, 0.01)))
                os.kill(pid, signal.SIGKILL)
        n_saves += sum(done.values()) - sum(counts.values())
        n_leftovers += any((folder / "tmp").iterdir())
        with Store(folder, StoreConfig(warm_bytes=0)) as store:
            for name in NAMES:
                counts[name] = check_state(store, name, done[name], begun[name])
                n_between += counts[name] != done[name]
            assert store.take_events() == []
            if n % 10 == 0:
                assert store.verify().is_good
                assert list((folder / "tmp").iterdir()) == []
    # that the kills hit all kinds of moments
    print(f"{N_KILLS} kills, {n_saves} saves, {n_leftovers} half-written, {n_between} unannounced")
    assert n_leftovers + n_between > 0
    assert n_saves > N_KILLS // 2


def check_state(store: Store, name: str, done: int, begun: int) -> int:
    """Make sure that a name is at its last state that was published, or the one in the works."""
    if not begun:
        assert not store.has_reference(name)
        return 0
    if not store.has_reference(name):
        assert not done
        return 0
    tokens = list(store.get(name).tokens)
    states = [n for n in {done, begun} if n and tokens == tokens_after(name, n)]
    assert states, (name, done, begun)
    assert load_all(store, History(KEY, tokens)) == len(tokens)
    return states[0]


class Crash(BaseException):
    """Nothing happens any more."""


def test_a_crash_before_any_change_to_the_folder_leaves_every_history_as_it_was_published(
    quick_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (History(KEY, tokens_of(0, 22)[:n]) for n in (9, 22))
    n_changes = n_left = 0

    def change(real):  # type: ignore[no-untyped-def]
        def changed(*args, **options):  # type: ignore[no-untyped-def]
            nonlocal n_left
            if n_left <= 0:
                raise Crash
            n_left -= 1
            return real(*args, **options)

        return changed

    states = []
    while True:
        folder = quick_path / str(n_changes)
        n_left = 1 << 30
        store = Store(folder, StoreConfig(warm_bytes=0))
        save(store, "a", first)
        with monkeypatch.context() as patch:
            for where, name in (
                (os, "open"),
                (os, "write"),
                (os, "fsync"),
                (Path, "replace"),
                (Path, "unlink"),
                (Catalogue, "_writing"),
            ):
                patch.setattr(where, name, change(getattr(where, name)))
            n_left = n_changes
            ticket = store.save("a", KEY, second.tokens, second)
            is_over = ticket.wait(60) == "published"
            store._writer.close(60)
        store._cold.close()
        with Store(folder, StoreConfig(warm_bytes=0)) as again:
            tokens = list(again.get("a").tokens)
            states.append(len(tokens))
            assert tokens in (first.tokens, second.tokens)
            assert load_all(again, History(KEY, tokens)) == len(tokens)
            assert again.take_events() == []
            assert again.verify().is_good
        if is_over and n_left > 0:
            break
        n_changes += 1
    assert n_changes > 30
    assert states == sorted(states)
    assert {9, 22} == set(states)


def test_blocks_are_durable_before_a_reference_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = History(KEY, tokens_of(0, 22))
    log: list[tuple[str, Path]] = []
    fsync, replace = os.fsync, Path.replace

    def logged_fsync(fd: int) -> None:
        log.append(("fsync", Path(f"/proc/self/fd/{fd}").readlink()))
        fsync(fd)

    def logged_replace(path: Path, target: Path) -> Path:
        assert ("fsync", path) in log  # whole before it has a name
        log.append(("name", target))
        return replace(path, target)

    if not Path("/proc/self/fd").is_dir():
        pytest.skip("no /proc to tell files by")
    with Store(tmp_path, StoreConfig(warm_bytes=0)) as store:
        monkeypatch.setattr(os, "fsync", logged_fsync)
        monkeypatch.setattr(Path, "replace", logged_replace)
        save(store, "a", history)
        monkeypatch.undo()
        named = [path.parent.name for what, path in log if what == "name"]
        assert named == ["blocks"] * 6 + ["windows", "references"]
        at_reference = next(
            n for n, (what, path) in enumerate(log) if what == "name" and "references" in path.parts
        )
        at_last = max(n for n, (what, _) in enumerate(log[:at_reference]) if what == "name")
        between = [path.name for what, path in log[at_last:at_reference] if what == "fsync"]
        assert {"blocks", "windows"} <= set(between)
        assert log[-1] == ("fsync", tmp_path / "references")
