"""Conversations that clients keep here, item by item: documents of the store."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvcellar.store import Store
from kvcellar.store.values.facts import BadFactError, items, object_of, parse_json, text, whole

PREFIX = "conv_"


@dataclass(slots=True)
class StoredConversation:
    """A conversation, whose agent has its id.

    Attributes:
        conversation_id: what clients call it.
        created: seconds since 1970.
        metadata: what its client wants to know of it.
        items: as they were sent and answered, oldest first, each with an id.
        salt: of those who may see it.
    """

    conversation_id: str
    created: int
    metadata: dict[str, str] = field(default_factory=dict)
    items: list[dict[str, Any]] = field(default_factory=list)
    salt: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return it as clients see it."""
        return {
            "id": self.conversation_id,
            "object": "conversation",
            "created_at": self.created,
            "metadata": self.metadata,
        }


class StoredConversations:
    """Documents of the store, by the ids of their conversations. Never waits on the event loop."""

    def __init__(self, store: Store) -> None:
        """Use the documents of a store."""
        self._store = store

    async def keep(self, stored: StoredConversation) -> None:
        """Make a conversation durable as it is now.

        Raises:
            StoreError: it could not be written.
        """
        value = {
            "created": stored.created,
            "metadata": stored.metadata,
            "items": stored.items,
            "salt": stored.salt,
        }
        payload = json.dumps(value).encode()
        await asyncio.to_thread(self._store.put_document, stored.conversation_id, payload)

    async def get(self, conversation_id: str) -> StoredConversation | None:
        """Return a conversation; None where it is not stored, or what is stored cannot be read."""
        if not conversation_id.startswith(PREFIX):
            return None
        payload = await asyncio.to_thread(self._store.document, conversation_id)
        if payload is None:
            return None
        try:
            value = object_of(parse_json(payload.decode(), "a conversation"), "a conversation")
            said = object_of(value["metadata"], "metadata")
            return StoredConversation(
                conversation_id,
                whole(value["created"], "created"),
                {key: text(one, "metadata") for key, one in said.items()},
                [object_of(item, "an item") for item in items(value["items"], "items")],
                text(value.get("salt", ""), "salt"),
            )
        except (BadFactError, KeyError, UnicodeDecodeError):
            return None

    async def append(
        self, conversation_id: str, after: Sequence[str], new: Sequence[dict[str, Any]]
    ) -> bool:
        """Put items behind those of a conversation that has not changed; false where it has.

        Args:
            conversation_id: of the conversation.
            after: ids of the items that it is known to have.
            new: the items.

        Raises:
            StoreError: it could not be written.
        """
        stored = await self.get(conversation_id)
        if stored is None or [item["id"] for item in stored.items] != list(after):
            return False
        stored.items += new
        await self.keep(stored)
        return True

    async def delete(self, conversation_id: str) -> bool:
        """Forget a conversation, durably; false where none of that id is stored."""
        return await asyncio.to_thread(self._store.delete_document, conversation_id)
