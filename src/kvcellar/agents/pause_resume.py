"""Agents out of memory and back: paused on disk, brought back into cells, written to a file."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass, replace
from pathlib import Path

from kvcellar.agents.directory import Directory, name_taken
from kvcellar.agents.freeing import demote_cells, free_cells
from kvcellar.agents.kv.residence import BroughtBack, ProgressFn, bring_back
from kvcellar.agents.leasing import changing
from kvcellar.agents.publishing import Publisher
from kvcellar.agents.records.agent import AgentRecord
from kvcellar.agents.records.checking import checked_facts, is_agent, pictures_named
from kvcellar.agents.records.names import checked_id, salt_of
from kvcellar.agents.records.views import AgentInfo
from kvcellar.errors import AgentError, StoreError
from kvcellar.hosting.host import ModelHost
from kvcellar.hosting.models import ModelRegistry
from kvcellar.pictures.picture import Picture
from kvcellar.store import Reference, Store

log = logging.getLogger("kvcellar.agents")


@dataclass(frozen=True, slots=True, eq=False)
class Sleep:
    """Lets go of agents' memory and takes it again. Verbs wait for the turn of their agent.

    Attributes:
        store: where agents sleep.
        models: who runs them.
        directory: who there is.
        publisher: saves agents.
        is_verified: whether a few restored rows are computed again before they are used.
    """

    store: Store
    models: ModelRegistry
    directory: Directory
    publisher: Publisher
    is_verified: bool

    async def pause(self, agent_id: str, *, progress: ProgressFn | None = None) -> AgentInfo:
        """Write all of an agent to disk, then free the cells that only it needs.

        Raises:
            UnknownAgentError: there is none of that name.
            StoreError: it could not be written; its cells are still there.
        """
        agent = await self.directory.find(agent_id)
        async with changing(self.publisher, agent):
            agent.is_paused, agent.is_waiting = True, False
            if progress is not None:
                progress(0.1, f"saving {len(agent.tokens)} tokens")
            host = self.directory.host_of(agent)
            try:
                await self.publisher.publish(agent, host, is_whole=True)
            except BaseException:
                agent.is_paused = False
                raise
            await free_cells(self.directory, agent)
            if self.publisher.store.shared is not None:
                await asyncio.to_thread(self.publisher.store.shared.flush, name=agent.name)
            if progress is not None:
                progress(1.0, "saved")
        return agent.info(0)

    async def resume(self, agent_id: str, *, progress: ProgressFn | None = None) -> BroughtBack:
        """Bring an agent's KV back into cells now, before its next turn asks for it.

        Returns:
            What was there and what came.

        Raises:
            UnknownAgentError: there is none of that name.
            AgentError: it was saved with another version of its model; nothing was changed.
            ModelError: its model cannot be loaded.
        """
        agent = await self.directory.find(agent_id)
        async with changing(self.publisher, agent), self.models.use(agent.model) as own:
            host = own.isolated(agent.key.salt)
            if agent.key != host.key:
                raise AgentError(
                    f"agent {agent.agent_id!r} was saved with another version of model "
                    f"{agent.model!r}; its next turn reads the conversation anew, and what is "
                    f"stored is kept"
                )
            back = await bring_back(
                host.reading(len(agent.tokens)),
                self.store,
                agent.tokens,
                is_wanted=True,
                is_verified=self.is_verified,
                progress=progress,
            )
            released = back.release(host)
            if released is not None:
                await asyncio.wrap_future(released)
            agent.is_paused = agent.is_waiting = agent.is_finished = False
            await self.publisher.save(agent, host)
        return back

    async def wait(self, agent_id: str) -> AgentInfo:
        """Have an agent wait for a tool: its cells are the first to go where memory is short.

        Its next turn ends the wait and brings back what went.

        Raises:
            UnknownAgentError: there is none of that name.
            AgentError: it is generating.
        """
        agent = await self.directory.find(agent_id)
        if agent.live.request_id is not None:
            raise AgentError(
                f"agent {agent_id!r} is generating, so it cannot wait for a tool; end its turn"
            )
        agent.is_waiting = True
        await demote_cells(self.directory, agent)
        return agent.info()

    # Files -------------------------------------------------------------------------------------

    async def export(
        self,
        agent_id: str,
        file: str | Path,
        *,
        progress: ProgressFn | None = None,
    ) -> int:
        """Write an agent with its KV to one file; returns its bytes.

        Raises:
            UnknownAgentError: there is none of that name.
            StoreError: it cannot be saved, or the file cannot be written.
        """
        agent = await self.directory.find(agent_id)
        async with changing(self.publisher, agent):
            await self.publisher.publish(agent, self.directory.host_of(agent))
            await self.publisher.settled(agent)

            def write() -> int:
                names = pictures_named(agent.tokens, agent.messages)
                found = {name: self.store.picture(name) for name in sorted(names)}
                pictures = {name: data for name, data in found.items() if data is not None}
                if salt_of(agent_id):  # the file may be another's, who sent the same pixels
                    pictures = {
                        name: Picture.read(data).as_png() for name, data in pictures.items()
                    }
                return self.store.export_reference(
                    agent.name, file, pictures=pictures, on_progress=progress
                )

            return await asyncio.to_thread(write)

    async def import_file(
        self,
        file: str | Path,
        new_id: str | None = None,
        *,
        salt: str | None = None,
        progress: ProgressFn | None = None,
    ) -> AgentInfo:
        """Take in an agent that ``export`` wrote; all of it is verified first.

        Args:
            file: the file.
            new_id: its name here; None: the one that it had.
            salt: that it may have; None: any.
            progress: told how much is done.

        Raises:
            StoreError: the file is none, or damaged, or of no agent; nothing was changed.
            AgentError: the name is taken, or can be none; nothing was changed.
        """
        claims = contextlib.ExitStack()

        def adopt(ref: Reference) -> Reference:
            """Claim its name, before anything of it is published."""
            agent = AgentRecord.from_reference(ref)
            if agent is None:
                raise StoreError(f"{file} holds a history that is no agent's; nothing changed")
            agent.agent_id = checked_id(agent.agent_id if new_id is None else new_id)
            if salt_of(agent.agent_id) != agent.key.salt or salt not in (None, agent.key.salt):
                raise StoreError(f"{file} is of an agent with another salt; nothing changed")
            claims.enter_context(self.directory.claimed_name(agent))
            if self.store.has_reference(agent.name):
                raise name_taken(agent)
            return replace(ref, name=agent.name, metadata=agent.metadata())

        def read() -> AgentRecord:
            with claims:
                ref = self.store.import_reference(
                    file,
                    adopt=adopt,
                    pictures_of=_pictures_of,
                    brings_all=bool(salt),
                    on_progress=progress,
                )
                agent = AgentRecord.from_reference(ref)
                assert agent is not None
                self.directory.add(agent)
            return agent

        return (await asyncio.to_thread(read)).info()

    # A model that goes -------------------------------------------------------------------------

    def leave_model(self, host: ModelHost) -> None:
        """Wait until what the agents of a model have said is on disk. For threads."""
        for agent in self.directory.agents():
            if agent.key.salted("") != host.key.salted(""):
                continue
            try:
                self.publisher.complete(agent, host)
            except Exception as error:  # the others are saved all the same
                log.error("agent %r could not be saved whole", agent.name, exc_info=error)


def _pictures_of(ref: Reference) -> set[str]:
    """Return the names of the pictures of an agent that is read from a file.

    Raises:
        StoreError: what is known of it is damaged.
    """
    if not is_agent(ref):
        return set()
    return pictures_named(ref.tokens, checked_facts(ref)["messages"])
