"""Routing: a request goes to the replica that holds its agent, or most of its prompt.

Replicas report what they hold as a digest, once in a while; what was sent to one since then is
taken for held, too. Nothing here knows how requests travel.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvcellar.prefix import PrefixDigest, chunk_hashes
from kvcellar.prefix.digest import CHUNK
from kvcellar.prefix.nodes import Tokens

MOST_AGENTS = 1024
"""Agents of one report: those that were served last."""

SETTLE_S = 10.0
"""Seconds for which what was sent to a replica counts as held there without a report of it."""

MOST_SENT = 1 << 14
"""Hashes of prompts that were sent to a replica and are remembered until it reports them."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request, as far as it matters where it goes.

    Attributes:
        agent: whose turn it is, or what else keeps requests together; empty: nobody's.
        hashes: of its prompt, as ``prompt_hashes`` makes them.
        n_tokens: of its prompt; 0: not known.
        replica: that it names; empty: any.
    """

    agent: str = ""
    hashes: tuple[int, ...] = ()
    n_tokens: int = 0
    replica: str = ""


@dataclass(frozen=True, slots=True)
class RoutingPolicy:
    """Bounds of affinity.

    Attributes:
        busy_at: requests from which on a replica is busy: others are preferred to it, whatever it
            holds. As many as it answers at a time.
        request_tokens: how many tokens a prompt may have to compute more elsewhere, to have one
            request less before it.
        prefill_tokens: how many tokens of a prompt nobody may hold, for it to be read by a replica
            that only reads, where there are such.
    """

    busy_at: int = 8
    request_tokens: int = 64
    prefill_tokens: int = 1024


@dataclass(frozen=True, slots=True, eq=False)
class Report:
    """A replica's account of what it holds.

    Attributes:
        digest: of the prefix indexes of all of its models, in one.
        agents: ``[n, 2]`` uint64: the hash of an agent, and the second at which it was served last.
    """

    digest: PrefixDigest
    agents: NDArray[np.uint64]

    def to_stats(self) -> dict[str, Any]:
        """Return the report for sending."""
        agents = self.agents.astype("<u8", copy=False).tobytes()
        return {"digest": self.digest.to_bytes(), "agents": agents}

    @classmethod
    def from_stats(cls, stats: Mapping[str, Any]) -> Report:
        """Read a report.

        Raises:
            PrefixError: it is none, or another version of the program made it.
        """
        agents = np.frombuffer(stats["agents"], dtype="<u8").reshape(-1, 2)
        return cls(PrefixDigest.from_bytes(stats["digest"]), agents)


def prompt_hashes(tokens: Tokens, model: str) -> tuple[int, ...]:
    """Return the hashes by which a prompt is found, a chunk each.

    Args:
        tokens: as an index knows them: see ``key_of``.
        model: who reads it; another model's prompt of the same tokens has other hashes.
    """
    mark = _mark_of(model)
    return tuple(digest ^ mark for digest in chunk_hashes(tokens))


def digest_of_models(digests: Mapping[str, PrefixDigest], revision: int) -> PrefixDigest:
    """Return one digest of several models' indexes, to be matched by ``prompt_hashes``."""
    parts = [one.hashes ^ np.uint64(_mark_of(model)) for model, one in digests.items()]
    none = np.empty(0, dtype=np.uint64)
    return PrefixDigest(CHUNK, revision, np.unique(np.concatenate([none, *parts])))


def agent_hash(agent: str) -> int:
    """Return the hash by which an agent is reported."""
    return xxhash.xxh64_intdigest(agent.encode())


@lru_cache(maxsize=256)
def _mark_of(model: str) -> int:
    return xxhash.xxh64_intdigest(b"model " + model.encode())


@dataclass(slots=True)
class _Held:
    """Hashes that one replica holds: as it says, and as it was sent since."""

    revision: int = -1
    told: set[int] = field(default_factory=set)
    sent: dict[int, float] = field(default_factory=dict)


class ReplicaHoldings:
    """Knowledge of what each replica holds. For several threads."""

    def __init__(self) -> None:
        """Know no replica."""
        self._lock = threading.Lock()
        self._held: dict[str, _Held] = {}
        self._where: dict[int, set[str]] = {}
        """Replicas that hold a chunk, by its hash."""
        self._agents: dict[int, tuple[float, str]] = {}
        """When an agent was served last and where, by its hash."""

    @property
    def replicas(self) -> list[str]:
        """The replicas that are there."""
        with self._lock:
            return list(self._held)

    def keep(self, replicas: Collection[str]) -> None:
        """Know these replicas, and forget all others with what they held."""
        with self._lock:
            for gone in self._held.keys() - set(replicas):
                held = self._held.pop(gone)
                self._drop(gone, held.told | held.sent.keys())
                stale = [one for one, (_, where) in self._agents.items() if where == gone]
                for agent in stale:
                    del self._agents[agent]
            for replica in replicas:
                self._held.setdefault(replica, _Held())

    def learn(self, replica: str, report: Report, now_s: float | None = None) -> None:
        """Take in what a replica says that it holds; a report that is known, or older, is none."""
        now_s = time.time() if now_s is None else now_s
        with self._lock:
            held = self._held.setdefault(replica, _Held())
            if report.digest.revision <= held.revision:
                return
            before = held.told | held.sent.keys()
            held.revision = report.digest.revision
            held.told = set(report.digest.hashes.tolist())
            held.sent = {one: at for one, at in held.sent.items() if at > now_s - SETTLE_S}
            after = held.told | held.sent.keys()
            self._drop(replica, before - after)
            self._add(replica, after - before)
            for agent, served_s in report.agents.tolist():
                if served_s >= self._agents.get(agent, (0.0, ""))[0]:
                    self._agents[agent] = served_s, replica

    def sent(self, wanted: Wanted, replica: str, now_s: float | None = None) -> None:
        """Take note that a request goes to a replica, which will hold its prompt."""
        now_s = time.time() if now_s is None else now_s
        with self._lock:
            held = self._held.setdefault(replica, _Held())
            for one in wanted.hashes:
                held.sent.pop(one, None)
                held.sent[one] = now_s
            self._add(replica, wanted.hashes)
            old = list(held.sent)[: max(0, len(held.sent) - MOST_SENT)]
            for one in old:
                del held.sent[one]
            self._drop(replica, set(old) - held.told)
            if wanted.agent:
                self._agents[agent_hash(wanted.agent)] = now_s, replica

    def holder(self, agent: str) -> str:
        """Return the replica that served an agent last; empty: none that is known."""
        with self._lock:
            return self._agents.get(agent_hash(agent), (0.0, ""))[1] if agent else ""

    def matched(self, hashes: Sequence[int]) -> dict[str, int]:
        """Return how many of a prompt's tokens each replica holds, of those that hold any."""
        found: dict[str, int] = {}
        with self._lock:
            alive = set(self._held)
            for n, digest in enumerate(hashes):
                here = self._where.get(digest)
                staying = alive & here if here else set[str]()
                if n:
                    found.update(dict.fromkeys(alive - staying, n * CHUNK))
                alive = staying
                if not alive:
                    break
            else:
                if hashes:
                    found.update(dict.fromkeys(alive, len(hashes) * CHUNK))
        return found

    def _add(self, replica: str, hashes: Iterable[int]) -> None:
        for one in hashes:
            self._where.setdefault(one, set()).add(replica)

    def _drop(self, replica: str, hashes: Iterable[int]) -> None:
        for one in hashes:
            where = self._where.get(one)
            if where is not None:
                where.discard(replica)
                if not where:
                    del self._where[one]


@lru_cache(maxsize=64)
def holdings_of(deployment: str) -> ReplicaHoldings:
    """Return what is known in this process of the replicas of a deployment."""
    return ReplicaHoldings()


def rank(
    wanted: Wanted, holdings: ReplicaHoldings, loads: Mapping[str, int], policy: RoutingPolicy
) -> list[str]:
    """Return replicas, the one that a request should go to first, and where it spills over to next.

    Those that are not busy come before those that are; among them the agent's own; then where the
    least is to be computed and waited for. Where several are as good, whoever else decides for the
    same agent or prompt finds the same one.

    Args:
        wanted: the request.
        holdings: what replicas hold.
        loads: requests that each replica has, of all that may be chosen.
        policy: when a replica is busy.
    """
    if wanted.replica in loads:
        return [wanted.replica]
    matched = holdings.matched(wanted.hashes)
    own = holdings.holder(wanted.agent)
    key = wanted.agent or (str(wanted.hashes[0]) if wanted.hashes else "")

    def order(replica: str) -> tuple[bool, bool, int, int]:
        load = loads[replica]
        n_computed = max(0, wanted.n_tokens - matched.get(replica, 0))
        tie = xxhash.xxh64_intdigest(f"{key} {replica}".encode()) if key else 0
        cost = n_computed + load * policy.request_tokens
        return load >= policy.busy_at, replica != own, cost, tie

    return sorted(loads, key=order)
