"""Snapshot of the cache as JSON: every cell and its owners. To look changes nothing.

A cell map is runs of cells: ``[length, owners, state]``, in the order of the cells, where
``owners`` is the number of a set of agents and ``state`` one of ``STATES``. Slots of recurrent
layers' states are ``[length, tokens, owners, state]``, those that are taken: states after the first
``length`` tokens of its owners, and the tokens that would be computed again without them; both 0
where no agent has them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from kvcellar.agents import AgentInfo, ModelHost
from kvcellar.engine import CellMap, CellState, Engine, EngineStats
from kvcellar.errors import EngineClosedError, UnknownAgentError
from kvcellar.history import History
from kvcellar.pictures.tokens import is_placeholder
from kvcellar.server.answer.parsing import sampling_told
from kvcellar.server.state.service import Service
from kvcellar.space import Space
from kvcellar.types import IntArray

STATES = tuple(state.name.lower() for state in CellState)
"""Nobody's; only the prefix index holds it; somebody wants it kept; a request stands on it now."""

AROUND = 10
"""Tokens of text before and behind a place where histories part."""

_COUNTED = (
    "waiting",
    "running",
    "requests",
    "finished",
    "prompt_tokens",
    "reused_tokens",
    "computed_tokens",
    "sampled_tokens",
    "evicted_tokens",
    "preemptions",
    "n_steps",
    "live_cells",
    "evictable_cells",
    "free_cells",
    "protected_tokens",
    "snapshots",
    "live_slots",
    "free_slots",
    "taken_snapshots",
    "evicted_snapshots",
)

Owned = Sequence[tuple[str, History, int | None, Space]]
"""Agents: name, tokens, the request that runs for them, and their space."""

Seen = tuple[ModelHost, dict[str, Any], EngineStats]
"""A host, what its cells are, and its counts."""


async def take_snapshot(service: Service) -> dict[str, Any]:
    """Look at all models' caches, the agents and the store."""
    await service.agents.directory.refresh()
    infos = await asyncio.to_thread(service.agents.directory.parted)
    seen = []
    for host in service.models.hosts():
        owned = service.agents.directory.histories(host)
        try:
            call = host.service.run(partial(_look, owned))
            seen.append((host, *await asyncio.wrap_future(call)))
        except EngineClosedError:
            continue
    return await asyncio.to_thread(_described, service, infos, seen)


def _described(
    service: Service, infos: Sequence[AgentInfo], seen: Sequence[Seen]
) -> dict[str, Any]:
    """Describe what was seen. In a thread: there may be hundreds of agents, and the store."""
    models = []
    for host, cells, stats in seen:
        names = {one.name for one in (host, *host.adapters.values())}
        mine = [info.agent_id for info in infos if info.model in names]
        told = _model(service.models.public(host.name), host, cells, stats, mine)
        models.append({**told, "sampling": sampling_told(service, host)})
    return {
        "models": models,
        "states": service.models.as_json(),
        "agents": [_agent(service, info) for info in infos],
        "store": dataclasses.asdict(service.store.stats()),
        "active": service.n_active,
        "pins": {"n": len(service.pins), "tokens": service.pins.n_tokens},
    }


def _model(
    name: str, host: ModelHost, cells: dict[str, Any], stats: EngineStats, agents: list[str]
) -> dict[str, Any]:
    counted = {name: getattr(stats, name) for name in _COUNTED}
    return {
        "name": name,
        "kv_dtype": host.key.layout.kv_dtype,
        "block_size": host.engine.cache.block_size,
        "reads_pictures": host.reads_pictures,
        "pool_bytes": stats.cache.size_bytes,
        "weights_and_cache_bytes": host.size_bytes,
        "hit_rate": round(stats.hit_rate, 4),
        "step_median_ms": round(stats.step_median_s * 1e3, 3),
        "groups": [
            {**dataclasses.asdict(group), "free": group.free} for group in stats.cache.groups
        ],
        "agents": agents,
        **counted,
        **cells,
    }


def _look(owned: Owned, engine: Engine) -> tuple[dict[str, Any], EngineStats]:
    """Find whose every cell of the first layer group is. In the engine's thread."""
    seen = engine.cell_map((tokens.tokens, run, space) for _, tokens, run, space in owned)
    sets = OwnerSets()
    numbers = sets.numbers_of(len(seen.states), seen.tables)
    names = [name for name, *_ in owned]
    params = engine.cache.config.params
    cells = {
        "capacity": len(seen.states),
        "cell_runs": _runs(numbers, seen.states),
        "picture_runs": _picture_runs(owned, seen) if params.groups[0].is_full else [],
        "slot_bytes": 0 if params.state is None else params.state.slot_bytes,
        "n_slots": len(seen.slots),
        "slots": _slots(seen, sets),
        "snapshots_of": {
            name: lengths[:, 0].tolist()
            for name, lengths in zip(names, seen.snapshots, strict=True)
            if len(lengths)
        },
        "owner_sets": [[names[i] for i in members] for members in sets.members],
        "cached": {name: int(t.size) for name, t in zip(names, seen.tables, strict=True) if t.size},
    }
    return cells, engine.stats()


def _picture_runs(owned: Owned, seen: CellMap) -> list[list[int]]:
    """Return where rows of pictures lie: the first cell and the length of each run, ascending."""
    has_row = np.zeros(len(seen.states) + 2, np.int8)
    for (_, history, _, _), table in zip(owned, seen.tables, strict=True):
        rows = is_placeholder(history[: len(table)])
        has_row[1 + table[: len(rows)][rows]] = 1
    borders = np.flatnonzero(np.diff(has_row))
    return [[int(start), int(stop - start)] for start, stop in borders.reshape(-1, 2)]


@dataclass(slots=True)
class OwnerSets:
    """Sets of agents that own something together, by number; set 0 is nobody."""

    members: list[tuple[int, ...]] = field(default_factory=lambda: [()])
    known: dict[tuple[int, ...], int] = field(default_factory=lambda: {(): 0})

    def numbers_of(self, size: int, tables: Sequence[IntArray]) -> IntArray:
        """Return per cell or slot the number of the set of its owners."""
        numbers = np.zeros(size, dtype=np.int64)
        for owner, table in enumerate(tables):
            before = numbers[table]
            renamed = np.zeros(len(self.members), dtype=np.int64)
            for number in np.unique(before):
                members = (*self.members[number], owner)
                if members not in self.known:
                    self.known[members] = len(self.members)
                    self.members.append(members)
                renamed[number] = self.known[members]
            numbers[table] = renamed[before]
        return numbers


def _slots(seen: CellMap, sets: OwnerSets) -> list[list[int]]:
    """Return the slots that are taken: see the module."""
    numbers = sets.numbers_of(len(seen.slots), [held[:, 1] for held in seen.snapshots])
    lengths, costs = np.zeros_like(numbers), np.zeros_like(numbers)
    for held in seen.snapshots:
        at, slots = held.T
        lengths[slots] = at
        costs[slots] = np.diff(at, prepend=0)
    taken = np.flatnonzero(seen.slots)
    found = np.stack((lengths, costs, numbers, seen.slots), axis=1)[taken]
    rows: list[list[int]] = found.tolist()
    return rows


def _runs(numbers: IntArray, state: IntArray) -> list[list[int]]:
    """``[length, owners, state]`` for cells that are alike, one after the other."""
    edges = np.flatnonzero((np.diff(numbers) != 0) | (np.diff(state) != 0)) + 1
    bounds = [0, *edges.tolist(), len(numbers)]
    return [
        [stop - start, int(numbers[start]), int(state[start])]
        for start, stop in itertools.pairwise(bounds)
    ]


def _agent(service: Service, info: AgentInfo) -> dict[str, Any]:
    """Return an agent, with the text at which it parts from its family, or was forked."""
    value = agent_as_json(service, info)
    at = info.parent_position if info.parted_at is None else info.parted_at
    if info.parent is not None and at is not None:
        try:
            before, behind = service.agents.directory.text_around(
                info.agent_id, at, AROUND, info.model
            )
        except UnknownAgentError:
            before = behind = ""
        value["fork_text"] = {"before": before, "behind": behind}
    return value


def agent_as_json(service: Service, info: AgentInfo) -> dict[str, Any]:
    """Return an agent as routes say it."""
    value = dataclasses.asdict(info)
    value["model"] = service.models.public(info.model)
    value["id"] = value.pop("agent_id")
    if info.miss is not None:
        value["miss"] = {**info.miss.as_json(), "advice": info.miss.advice}
    return value
