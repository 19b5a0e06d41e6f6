"""What others may ask of the engine about its cache, between steps."""

from __future__ import annotations

import numpy as np
import pytest

from kvcellar.engine import CellState, Engine, Request, SamplingParams
from kvcellar.space import SHARED
from tests.engine.fakes import FULL_PARAMS, make_cache
from tests.engine.test_engine import make_engine, nothing_is_left

GREEDY = SamplingParams(max_tokens=4, ignore_eos=True)


def said(engine: Engine, *prompt: int) -> np.ndarray:
    """A history that has ended in an engine, without the token that was sampled last."""
    end = engine.generate(Request(prompt, GREEDY))
    return np.array((*prompt, *end.token_ids[:-1]))


@pytest.fixture
def engine() -> Engine:
    return make_engine(params=FULL_PARAMS, cache=make_cache("seq", 64, FULL_PARAMS))


def test_a_history_is_matched_as_far_as_a_request_would_reuse_it(engine):
    history = said(engine, 1, 2, 3)
    assert engine.match(history) == len(history)
    assert engine.match(np.array([1, 2, 9])) == 2
    assert engine.match(np.array([9])) == 0


def test_what_is_held_is_not_evicted_until_it_is_released(engine):
    history = said(engine, *range(20))
    held = engine.hold(history)
    assert held.n_tokens == len(history)
    assert held.tables[0].tolist() == engine.index.peek_prefix(history)[0].tolist()
    assert engine.n_available == 64 - len(history)
    said(engine, *range(30, 66))  # it needs all that is left
    assert engine.match(history) == len(history)
    held.release()
    held.release()
    said(engine, *range(70, 125))
    assert engine.match(history) < len(history)
    nothing_is_left(engine)


def test_what_is_demoted_goes_before_what_is_older(engine):
    older, newer = said(engine, *range(20)), said(engine, *range(30, 50))
    engine.demote(newer)
    said(engine, *range(60, 80))  # 69 tokens in 64 cells
    assert engine.match(older) == len(older)
    assert engine.match(newer) < len(newer)


def test_what_is_dropped_is_free_at_once_but_for_what_others_share(engine):
    one, other = said(engine, 1, 2, 3, 4), said(engine, 1, 2, 8, 9)
    n_free = engine.cache.n_free
    assert engine.drop(one) == len(one) - 2
    assert engine.cache.n_free == n_free + len(one) - 2
    assert engine.match(other) == len(other)
    assert engine.drop(other, keep=3) == len(other) - 3
    nothing_is_left(engine)


def test_the_map_of_cells_says_whose_each_is_and_changes_nothing(engine):
    free, kept = said(engine, 1, 2, 3, 4), said(engine, 11, 12, 13)
    held = engine.hold(kept)
    request_id = engine.submit(Request((21, 22, 23, 24, 25), GREEDY))
    engine.step()
    assert engine.is_running
    seen = engine.cell_map(
        [(free, None, SHARED), (kept, None, SHARED), (np.array([21]), request_id, SHARED)]
    )
    counts = {state: int((seen.states == state).sum()) for state in CellState}
    assert counts == {
        CellState.FREE: 64 - len(free) - len(kept) - 5,
        CellState.EVICTABLE: len(free),
        CellState.LOCKED: len(kept),
        CellState.RUNNING: 5,
    }
    states = [set(seen.states[table].tolist()) for table in seen.tables]
    assert states == [{CellState.EVICTABLE}, {CellState.LOCKED}, {CellState.RUNNING}]
    assert [len(table) for table in seen.tables] == [len(free), len(kept), 5]
    held.release()
    for _ in engine.run():
        pass
    assert not engine.is_running
    nothing_is_left(engine)
