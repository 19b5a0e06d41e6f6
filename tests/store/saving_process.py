"""A process that saves, loads and collects in a folder that others use too: FOLDER SEED N."""

from __future__ import annotations

import sys

import numpy as np

from kvcellar.store import Store, StoreConfig
from tests.store.fakes import FULL, WINDOW, History, load_all, make_key, tokens_of

KEY = make_key(groups=[FULL, WINDOW], block_tokens=4)


def main(folder: str, seed: int, n: int, cold_bytes: int) -> None:
    rng = np.random.default_rng(seed)
    config = StoreConfig(warm_bytes=0, cold_bytes=cold_bytes)
    published = failed = 0
    last: dict[str, list[int]] = {}
    with Store(folder, config) as store:
        for _ in range(n):
            trunk = tokens_of(int(rng.integers(3)), int(rng.integers(1, 12)))
            history = History(KEY, [*trunk, *tokens_of(int(rng.integers(100)), 5)])
            name = f"{seed}-{int(rng.integers(4))}"
            ticket = store.save(name, KEY, history.tokens, history)
            if ticket.wait(60) == "published":
                published += 1
                last[name] = history.tokens
                if cold_bytes > 1 << 20:  # nobody may take away what a history needs
                    assert load_all(store, history) == len(history.tokens)
            else:
                failed += 1
                assert "removed while the save waited" in ticket.reason, ticket.reason
            load_all(store, History(KEY, [*tokens_of(int(rng.integers(3)), 10), 7]))
            if rng.random() < 0.3:
                store.gc()
            if rng.random() < 0.1 and last:
                gone, _ = last.popitem()
                store.delete(gone)
        for name, tokens in last.items():
            assert list(store.get(name).tokens) == tokens
        kinds = {event.kind for event in store.take_events()}
        assert kinds <= {"evicted", "write_failed"}, kinds
    print(published, failed, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
