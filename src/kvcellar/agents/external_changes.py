"""Changes to agents that other processes made and this one has not read yet.

One of those may have been killed: at the start all agents of the store come in here, with what the
journal has beyond their last state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvcellar.agents.publishing import Publisher
from kvcellar.agents.records.agent import AgentRecord
from kvcellar.agents.records.durable import stored_state
from kvcellar.errors import StoreError, UnknownReferenceError
from kvcellar.store import DROPPED, Reference, Store


@dataclass(slots=True)
class News:
    """Differences between the store's agents and those that this process knows.

    Attributes:
        found: agents that were not known.
        changed: an agent, its revision as it was known, and its state now.
        gone: an agent that is stored no more, and its revision as it was known.
        damaged: what cannot be read or used, and why.
    """

    found: list[AgentRecord] = field(default_factory=list)
    changed: list[tuple[AgentRecord, int | None, Reference]] = field(default_factory=list)
    gone: list[tuple[AgentRecord, int]] = field(default_factory=list)
    damaged: dict[str, str] = field(default_factory=dict)


class NewsReader:
    """Reads a store's agents; of those that have not changed it reads nothing. For threads."""

    def __init__(self, store: Store, publisher: Publisher) -> None:
        """Create a reader that has read nothing yet."""
        self._store = store
        self._publisher = publisher
        self._no_agents: dict[str, int] = {}
        """Histories in the store that are no agents, by the revision that was looked at."""
        self._unusable: dict[str, tuple[int, str]] = {}
        """Agents in the store that cannot be used: the revision that was looked at, and why."""

    def read(self, agents: Sequence[AgentRecord]) -> News:
        """Read what the store has beyond these agents; costs two queries where that is nothing.

        Args:
            agents: all that are known; those that are in a turn, or not saved yet, are left alone.
        """
        known = {agent.name: self._publisher.revision_of(agent) for agent in agents}
        damaged = {
            name: why
            for name, why in self._store.damaged_references().items()
            if not name.startswith(DROPPED)
        }
        recorded = _of_agents(self._store.recorded_serials())  # first, as in ``stored_state``
        revisions = _of_agents(self._store.revisions())
        news = News()
        for agent in agents:
            if not agent.live.gate.is_taken and not agent.live.is_passing:
                self._compare(news, agent, known[agent.name], revisions, recorded)
        unusable: dict[str, tuple[int, str]] = {}
        for name, revision in (dict.fromkeys(recorded, 0) | revisions).items():
            if name not in known and self._no_agents.get(name) != revision:
                why = self._take_in(news, name, revision)
                if why is not None:
                    unusable[name] = revision, why
        self._unusable = unusable
        news.damaged = damaged | {name: why for name, (_, why) in unusable.items()}
        return news

    def _compare(
        self,
        news: News,
        agent: AgentRecord,
        mine: int | None,
        revisions: Mapping[str, int],
        recorded: Mapping[str, int],
    ) -> None:
        """Note whether an agent has changed in the store, or has gone from it."""
        latest = recorded.get(agent.name, 0)
        if agent.name not in revisions and not latest:
            if mine and not self._store.has_reference(agent.name):
                news.gone.append((agent, mine))
        elif revisions.get(agent.name, mine) != mine or latest > agent.serial:
            ref = self._publisher.news_of(agent)
            if ref is not None:
                news.changed.append((agent, mine, ref))

    def _take_in(self, news: News, name: str, revision: int) -> str | None:
        """Read a history that is not known here; return what is wrong with it, if anything."""
        before = self._unusable.get(name)
        if before is not None and before[0] == revision:
            return before[1]
        try:
            found = AgentRecord.from_reference(stored_state(self._store, name))
        except UnknownReferenceError:
            return None
        except StoreError as error:
            return str(error)
        if found is None:
            self._no_agents[name] = revision
        elif found.name != name:
            return f"it says that it is {found.name!r}"
        else:
            news.found.append(found)
        return None


def _of_agents(numbers: Mapping[str, int]) -> dict[str, int]:
    """Keep the histories that agents may have; none that were dropped."""
    return {name: n for name, n in numbers.items() if "@" in name and not name.startswith(DROPPED)}
