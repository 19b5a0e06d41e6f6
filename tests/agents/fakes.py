"""Agents on the model that hashes what the cache shows it: a wrong cell changes every later token.

The cache keeps a token per cell and layer group; its rows say that token in every number.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcellar.agents import AgentManager, ModelHost, ModelRegistry, Turn, TurnEnd, check_template
from kvcellar.backends.host_memory import Landing
from kvcellar.backends.host_rows import LeavingRows
from kvcellar.cache_config import make_config
from kvcellar.engine import Engine, EngineConfig, EngineService, GeneratedToken, SamplingParams
from kvcellar.hosting.costs import Costs, Estimate
from kvcellar.store import ModelKey, RowLayout, Store, StoreConfig
from tests.engine.fakes import (
    CHUNK_PARAMS,
    FULL_PARAMS,
    PARAMS,
    ByteTokenizer,
    HashRunner,
    SeqCells,
    logits_of,
)

VOCAB = 260
BLOCK_TOKENS = 16
LETTERS = dict.fromkeys(range(ord("a"), ord("z") + 1), 100.0)
"""Bias of the model, so that an answer is text, which comes back in the tokens it was said in."""

GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)
SMALL = StoreConfig(warm_bytes=1 << 24)


class Eager(Costs):
    """Loads whatever is stored: a hash is faster than any disk."""

    def estimate(self, match: Any, n_cached: int, n_rows: int, stop: int) -> Estimate:
        return Estimate(0.0, None)

    def patience_s(self, n_tokens: int, n_loaded: int) -> float | None:
        return None


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model loads whatever is stored: whether that is faster depends on the machine."""
    for name in ("estimate", "patience_s"):
        monkeypatch.setattr(Costs, name, getattr(Eager, name))


class RowCells(SeqCells):
    """Cells of tokens whose rows can be read and written."""

    def read_rows(self, tables: Sequence[Any]) -> Any:
        found = []
        for g, (group, table) in enumerate(zip(self.steps.groups, tables, strict=True)):
            tokens = self.stored[g][table].astype(np.float32)
            shape = (len(group.layers), group.n_kv_heads, len(table), group.head_dim)
            row = np.broadcast_to(tokens[None, None, :, None], shape)
            found.append(((row.copy(),), (-row,)))
        return found

    def begin_read(self, tables: Sequence[Any]) -> LeavingRows:
        return LeavingRows(self.read_rows(tables), Landing())

    def write_rows(self, tables: Sequence[Any], rows: Any) -> None:
        for g, (table, given) in enumerate(zip(tables, rows, strict=True)):
            if len(table):
                (k,), (v,) = given
                assert np.allclose(k, -v, atol=2) and k.shape[2] == len(table)
                self.stored[g][table] = k[0, 0, :, 0].astype(int)

    def read_states(self, slots: Any) -> Any:
        return self.tokens.read_states(slots)

    def write_states(self, slots: Any, states: Any) -> None:
        self.tokens.write_states(slots, states)


def make_host(
    name: str = "hash",
    *,
    capacity: int = 4096,
    params: Any = PARAMS,
    block_tokens: int = BLOCK_TOKENS,
    config: EngineConfig | None = None,
    tokenizer: Any = None,
    runner: Callable[[Any, int], Any] = HashRunner,
    size_bytes: int = 0,
    n_slots: int = 256,
    eos_token_ids: Sequence[int] = (ByteTokenizer.END,),
) -> ModelHost:
    cache = RowCells(make_config(params, capacity, min_chunk=16, n_slots=n_slots))
    tokenizer = tokenizer or ByteTokenizer()
    hashes = runner(cache, VOCAB)
    hashes.bias = dict(LETTERS)
    engine = Engine(
        hashes,
        cache,
        tokenizer,
        eos_token_ids=eos_token_ids,
        config=config or EngineConfig(max_num_batched_tokens=64),
    )
    layout = RowLayout.from_config(cache.config, block_tokens)
    return ModelHost(
        name=name,
        engine=engine,
        service=EngineService(engine),
        tokenizer=tokenizer,
        key=ModelKey(f"weights of {name}", layout),
        eos_token_ids=frozenset(eos_token_ids),
        size_bytes=size_bytes,
        costs=Eager(),
        template=check_template(tokenizer),
    )


@contextmanager
def manager(
    folder: Path,
    load: Callable[[str], ModelHost] = make_host,
    config: StoreConfig = SMALL,
    *,
    shared: str | None = None,
    **more: Any,
) -> Iterator[AgentManager]:
    """A manager as a process of its own would have it: everything is closed at the end."""
    with Store(folder, config, shared=shared) as store:
        models = ModelRegistry(load)
        try:
            yield AgentManager(store, models, default_model="hash", **more)
        finally:
            models.close()


async def turn(agents: AgentManager, agent_id: str, text: Any = None, **more: Any) -> TurnEnd:
    """One turn to its end."""
    more.setdefault("params", GREEDY)
    sampled = []
    async for event in agents.turns.generate(Turn(agent_id, text, **more)):
        if isinstance(event, GeneratedToken):
            sampled.append(event.token_id)
        else:
            assert tuple(sampled) == event.finish.token_ids, event.finish
            return event
    raise AssertionError("a turn ends with a TurnEnd")


def continued(agents: AgentManager, messages: Sequence[Any]) -> str | None:
    """The agent whose whole history a conversation continues."""
    place = agents.lookup.place_of(messages, model="hash")
    return place.agent_id if place is not None and place.is_end else None


def run(coroutine: Any) -> Any:
    return asyncio.run(coroutine)


def oracle(history: Sequence[int], n: int, params: Any = PARAMS) -> list[int]:
    """The greedy tokens after a history, from the tokens alone."""
    tokens = [int(t) for t in history]
    for _ in range(n):
        logits = logits_of(tokens, VOCAB, params)
        logits[list(LETTERS)] += 100.0
        tokens.append(int(np.argmax(logits)))
    return tokens[len(history) :]


def tokens_of(agents: AgentManager, agent_id: str) -> tuple[int, ...]:
    return tuple(agents.directory.agent(agent_id).tokens)


def engine_of(agents: AgentManager) -> Any:
    """Return the engine, once it has done all that it was asked for."""
    host = agents.models.host("hash")
    assert host is not None
    return host.service.run(lambda engine: engine).result()


def nothing_is_held(agents: AgentManager) -> None:
    """No cell is protected, no sequence is left: the index alone owns what is there."""
    engine = engine_of(agents)
    info, cache = engine.index.size_info(), engine.cache
    assert info.protected == 0 and cache.seq_ids() == []
    assert cache.capacity - cache.n_free == info.evictable


__all__ = ["CHUNK_PARAMS", "FULL_PARAMS", "PARAMS"]
