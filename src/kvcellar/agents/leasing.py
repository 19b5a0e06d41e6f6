"""One at a time who changes an agent, of all tasks here and of all processes elsewhere."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from kvcellar.agents.publishing import Publisher
from kvcellar.agents.records.agent import AgentRecord
from kvcellar.errors import AgentHeldError, LeaseHeldError, LeaseLostError, StoreError
from kvcellar.store import Lease, Leases

if TYPE_CHECKING:
    from kvcellar.agents.kv.residence import ProgressFn

PATIENCE_S = 10.0
"""How long somebody waits for another process to be done with an agent."""

_POLL_S = 0.02
_RENEWALS = 3
"""How often a lease that expires is renewed in the time that it lasts."""


class Hold:
    """Right to change an agent for as long as a block lasts, kept up where it expires.

    Attributes:
        has_news: whether another process has talked with the agent since this one knew it.
    """

    def __init__(self, leases: Leases, lease: Lease | None) -> None:
        """Hold a lease; None: of an agent that no other process can know."""
        self._leases = leases
        self._lease = lease
        self._has_lost = False
        self.has_news = False

    @property
    def expires(self) -> bool:
        """True if the lease has to be renewed."""
        return self._lease is not None and self._lease.expires_s is not None

    @property
    def is_lost(self) -> bool:
        """True if another process may have changed the agent meanwhile."""
        return self._has_lost or (self._lease is not None and self._lease.is_expired)

    async def keep_up(self) -> None:
        """Renew the lease again and again, until it is lost or this is cancelled."""
        while self._lease is not None and self._lease.expires_s is not None:
            await asyncio.sleep(max(0.0, self._lease.expires_s - time.monotonic()) / _RENEWALS)
            try:
                self._lease = await asyncio.to_thread(self._leases.renew, self._lease)
            except LeaseLostError:
                self._has_lost = True
                return
            except StoreError:  # nobody could be asked; there is time to ask again
                await asyncio.sleep(_POLL_S)
                if self._lease.is_expired:
                    return

    def release(self) -> None:
        """Let others change the agent. For threads."""
        if self._lease is not None:
            self._leases.release(self._lease)


@asynccontextmanager
async def changing(
    publisher: Publisher,
    agent: AgentRecord,
    *,
    is_read: bool = True,
    progress: ProgressFn | None = None,
) -> AsyncIterator[Hold]:
    """Be the only one who changes an agent, of all processes, for as long as the block lasts.

    Its state is what the last one who changed it left, wherever that was.

    Args:
        publisher: of the store that it is in.
        agent: the agent.
        is_read: whether to take over what other processes have published of it.
        progress: told for whom it is waited.

    Raises:
        AgentHeldError: another process was changing it for ``PATIENCE_S``; nothing was changed.
        StoreError: there can be no lease of it; nothing was changed.
    """
    async with agent.live.gate:
        hold = await _taken(publisher, agent, progress)
        keeping = asyncio.ensure_future(hold.keep_up()) if hold.expires else None
        try:
            if is_read:
                before = agent.turns
                await publisher.refresh(agent)
                hold.has_news = agent.turns != before
            yield hold
        finally:
            if keeping is not None:
                keeping.cancel()
            loop = asyncio.get_running_loop()  # which has the release on its way before it waits
            await asyncio.shield(loop.run_in_executor(None, hold.release))


async def _taken(publisher: Publisher, agent: AgentRecord, progress: ProgressFn | None) -> Hold:
    leases = publisher.store.leases
    if agent.live.is_passing:
        return Hold(leases, None)
    deadline = time.monotonic() + PATIENCE_S
    while True:
        loop = asyncio.get_running_loop()
        taking = loop.run_in_executor(None, leases.take, agent.name)
        try:
            return Hold(leases, await asyncio.shield(taking))
        except LeaseHeldError as error:
            if time.monotonic() >= deadline:
                raise AgentHeldError(
                    f"{agent.label} is in use by {error.owner}, which was not done with it for "
                    f"{PATIENCE_S:g} s; try again when it is"
                ) from error
            if progress is not None:
                progress(0.0, f"waiting for {error.owner}, which talks with {agent.agent_id}")
            await asyncio.sleep(_POLL_S)
        except asyncio.CancelledError:
            taking.add_done_callback(lambda taken: _give_back(leases, taken))
            raise


def _give_back(leases: Leases, taking: asyncio.Future[Lease]) -> None:
    """Release a lease that comes when nobody waits for it any more; no loop waits for that."""
    if not taking.cancelled() and taking.exception() is None:
        lease = taking.result()
        threading.Thread(target=leases.release, args=(lease,), name="kvcellar-release").start()
