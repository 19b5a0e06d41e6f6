"""Prompts that are read for another replica: computed here, and handed over through the store."""

from __future__ import annotations

import asyncio
import itertools

from kvcellar.agents import ModelHost
from kvcellar.agents.kv.kv_transfer import CellRows
from kvcellar.agents.kv.residence import bring_back
from kvcellar.engine import Engine, FinishEvent, Request, RowCache, SamplingParams
from kvcellar.history import History
from kvcellar.server.state.service import Service
from kvcellar.store import SaveTicket

N_KEPT = 16
"""Prompts of one replica that the store refers to; of older ones it may take the room back."""


class Prefiller:
    """Reads prompts, so that whoever answers them finds their K and V in the store."""

    def __init__(self, service: Service, place: str) -> None:
        """Read with the models of a service.

        Args:
            service: of a replica.
            place: of the replica; its prompts have names by it in the store.
        """
        self._service = service
        self._names = itertools.cycle(f"{place}-{i}" for i in range(N_KEPT))

    async def read(self, host: ModelHost, prompt: History) -> None:
        """Compute a prompt, all but its last token, and wait until that is where others reach it.

        Raises:
            EngineClosedError: the engine has stopped.
            StoreError: the store is closed.
        """
        store, tickets = self._service.store, list[SaveTicket]()
        tokens, name = prompt.prefix(len(prompt) - 1), next(self._names)
        host = host.reading(len(prompt))
        back = await bring_back(host, store, tokens)
        request = Request(
            prompt,
            SamplingParams(max_tokens=0),
            deadline_s=self._service.config.wait_s,
            snapshots_at=(len(tokens),),
            space=host.space,
        )

        def keep(_: FinishEvent) -> None:
            tickets.append(self._save(host, host.engine, name, tokens))

        try:
            async with await host.service.submit(request, keep) as events:
                async for _ in events:
                    pass
        finally:
            back.release(host)
        await asyncio.to_thread(tickets[0].wait)
        if store.shared is not None:
            await asyncio.to_thread(store.shared.flush, name=name)

    def _save(self, host: ModelHost, engine: Engine, name: str, tokens: History) -> SaveTicket:
        """Save what the cache has of a prompt; in the engine's thread."""
        held = engine.hold(tokens.tokens, host.space)
        try:
            assert isinstance(engine.cache, RowCache)
            source = CellRows(engine.cache, host.key.layout, held)
            store = self._service.store
            return store.save(
                name, host.key, tokens, source, n_computed=held.n_tokens, may_read=False
            )
        finally:
            held.release()
