"""Answers that are stored: as they were given, and what they answered, durably and whole."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

from kvcellar.store import Store
from kvcellar.store.values.facts import BadFactError, items, object_of, parse_json, text, whole


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response of OpenAI's, or a message of Anthropic's, and where to go on from it.

    Attributes:
        response: as it was answered.
        items: the conversation that it answered, as it was sent, oldest first; without its
            instructions, which hold for it alone.
        agent_id: whose turn it was.
        n_tokens: of that agent's history at its end.
        added: messages of that agent's that were read behind the leading system messages of the
            items, which do not have them.
        salt: of those who may see it.
        settings: fields of the request that hold for what goes on from it, too.
    """

    response: dict[str, Any]
    items: list[dict[str, Any]]
    agent_id: str
    n_tokens: int
    added: list[dict[str, Any]] = field(default_factory=list)
    salt: str = ""
    settings: dict[str, Any] = field(default_factory=dict)


class StoredResponses:
    """Documents of the store, by the ids of their responses. Never waits on the event loop."""

    def __init__(self, store: Store) -> None:
        """Use the documents of a store."""
        self._store = store

    async def keep(self, response_id: str, stored: StoredResponse) -> None:
        """Make a response durable.

        Raises:
            StoreError: it could not be written.
        """
        value = {
            "response": stored.response,
            "items": stored.items,
            "agent_id": stored.agent_id,
            "n_tokens": stored.n_tokens,
            "added": stored.added,
            "salt": stored.salt,
            "settings": stored.settings,
        }
        payload = json.dumps(value).encode()
        await asyncio.to_thread(self._store.put_document, response_id, payload)

    async def get(self, response_id: str) -> StoredResponse | None:
        """Return a response; None where it is not stored, or what is stored cannot be read."""
        payload = await asyncio.to_thread(self._store.document, response_id)
        if payload is None:
            return None
        try:
            value = object_of(parse_json(payload.decode(), "a response"), "a response")
            return StoredResponse(
                object_of(value["response"], "response"),
                [object_of(item, "an item") for item in items(value["items"], "items")],
                text(value["agent_id"], "agent_id"),
                whole(value["n_tokens"], "n_tokens"),
                [object_of(one, "a message") for one in items(value.get("added", []), "added")],
                text(value.get("salt", ""), "salt"),
                object_of(value.get("settings", {}), "settings"),
            )
        except (BadFactError, KeyError, UnicodeDecodeError):
            return None

    async def delete(self, response_id: str) -> bool:
        """Forget a response, durably; false where none of that id is stored."""
        return await asyncio.to_thread(self._store.delete_document, response_id)
