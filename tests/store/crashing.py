"""Processes that save histories until they are killed.

Run as a script this is a server: for every line ``FOLDER SEED COUNTS`` it forks a child that saves
into the folder. The child prints ``pid N`` and ``open``, then ``begin NAME N`` before a save and
``done NAME N`` when its ticket says published; the server prints ``end`` when it is dead.
"""

from __future__ import annotations

import os
import sys

import numpy as np

from kvcellar.store import Store, StoreConfig
from tests.store.fakes import FULL, WINDOW, History, make_key, tokens_of

NAMES = ("a", "b", "c")
KEY = make_key(groups=[FULL, WINDOW], block_tokens=4)


def say(*words: object) -> None:
    """A line in one system call: whoever is killed has said all of it, or nothing."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def tokens_after(name: str, n: int) -> list[int]:
    """The history of a name after its n-th save: it grows, and is cut back at times."""
    tokens: list[int] = []
    for turn in range(n):
        if turn % 5 == 4:
            tokens = tokens[: len(tokens) // 2]
        tokens = [*tokens, *tokens_of(turn * 7 + ord(name), 3 + turn % 6)]
    return tokens


def save_until_killed(folder: str, seed: int, counts: dict[str, int]) -> None:
    rng = np.random.default_rng(seed)
    with Store(folder, StoreConfig(warm_bytes=4000)) as store:
        say("open")
        while True:
            name = NAMES[int(rng.integers(len(NAMES)))]
            counts[name] += 1
            tokens = tokens_after(name, counts[name])
            say("begin", name, counts[name])
            ticket = store.save(name, KEY, tokens, History(KEY, tokens))
            if ticket.wait() != "published":
                say("failed", ticket.reason)
                return
            say("done", name, counts[name])
            if rng.random() < 0.1:
                store.gc()


def serve() -> None:
    for line in sys.stdin:
        folder, seed, counts = line.split()
        pid = os.fork()
        if not pid:
            say("pid", os.getpid())
            numbers = dict(zip(NAMES, map(int, counts.split(",")), strict=True))
            save_until_killed(folder, int(seed), numbers)
            os._exit(0)
        os.waitpid(pid, 0)
        say("end")


if __name__ == "__main__":
    serve()
