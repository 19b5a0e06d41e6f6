"""The routes of OpenAI's conversations: items that responses go on from and add to."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from kvcellar.agents import without_salt
from kvcellar.errors import UnknownAgentError
from kvcellar.server.answer.pictures import keep_pictures
from kvcellar.server.errors import ApiError
from kvcellar.server.front.bodies import BodyRoute
from kvcellar.server.routes.responses.pages import Limit, Order, page_of
from kvcellar.server.routes.responses.pictures import pictures_of_items
from kvcellar.server.routes.responses.value import sent_item
from kvcellar.server.schemas.conversations import (
    ConversationRequest,
    ConversationUpdate,
    ItemsRequest,
)
from kvcellar.server.schemas.responses import Item, OtherItem
from kvcellar.server.state.isolation import salt_for
from kvcellar.server.state.service import Service, new_id, service_of
from kvcellar.server.state.stored_conversations import PREFIX, StoredConversation

router = APIRouter(tags=["OpenAI"], route_class=BodyRoute)


async def stored_conversation(
    service: Service, conversation_id: str, salt: str
) -> StoredConversation:
    """Return a stored conversation.

    Raises:
        ApiError: 404, none of that id is, for those who share a salt.
    """
    found = await service.stored_conversations.get(conversation_id)
    if found is None or found.salt != salt:
        raise ApiError(
            404,
            f"conversation {conversation_id[:80]!r} is not stored here; it was deleted, or made by "
            f"another server",
            "conversation_not_found",
            param="conversation",
        )
    return found


@router.post("/v1/conversations")
async def create_conversation(request: Request, body: ConversationRequest) -> dict[str, Any]:
    """Make a conversation; its agent is made with the first response in it."""
    service = service_of(request)
    items = await _kept(request, body.items or ())
    now, salt = int(time.time()), salt_for(request)
    stored = StoredConversation(new_id(PREFIX), now, body.metadata or {}, items, salt)
    await service.stored_conversations.keep(stored)
    return stored.as_json()


@router.get("/v1/conversations/{conversation_id}")
async def get_conversation(request: Request, conversation_id: str) -> dict[str, Any]:
    """Return a conversation without its items."""
    salt = salt_for(request)
    return (await stored_conversation(service_of(request), conversation_id, salt)).as_json()


@router.post("/v1/conversations/{conversation_id}")
async def update_conversation(
    request: Request, conversation_id: str, body: ConversationUpdate
) -> dict[str, Any]:
    """Put other metadata in the place of a conversation's."""
    service = service_of(request)
    stored = await stored_conversation(service, conversation_id, salt_for(request))
    stored.metadata = body.metadata
    await service.stored_conversations.keep(stored)
    return stored.as_json()


@router.delete("/v1/conversations/{conversation_id}")
async def delete_conversation(request: Request, conversation_id: str) -> dict[str, Any]:
    """Forget a conversation and its agent."""
    service = service_of(request)
    await stored_conversation(service, conversation_id, salt_for(request))
    await service.stored_conversations.delete(conversation_id)
    await _forget_agents(service, conversation_id)
    return {"id": conversation_id, "object": "conversation.deleted", "deleted": True}


@router.get("/v1/conversations/{conversation_id}/items")
async def list_items(
    request: Request,
    conversation_id: str,
    limit: Limit = 20,
    order: Order = "desc",
    after: str | None = None,
) -> dict[str, Any]:
    """List the items of a conversation."""
    stored = await stored_conversation(service_of(request), conversation_id, salt_for(request))
    return page_of(stored.items, limit, order, after)


@router.post("/v1/conversations/{conversation_id}/items")
async def add_items(request: Request, conversation_id: str, body: ItemsRequest) -> dict[str, Any]:
    """Put items behind those of a conversation; return the new ones."""
    service = service_of(request)
    stored = await stored_conversation(service, conversation_id, salt_for(request))
    new = await _kept(request, body.items)
    stored.items += new
    await service.stored_conversations.keep(stored)
    return page_of(new, len(new), "asc", None)


@router.get("/v1/conversations/{conversation_id}/items/{item_id}")
async def get_item(request: Request, conversation_id: str, item_id: str) -> dict[str, Any]:
    """Return one item of a conversation."""
    stored = await stored_conversation(service_of(request), conversation_id, salt_for(request))
    return stored.items[_place_of(stored, item_id)]


@router.delete("/v1/conversations/{conversation_id}/items/{item_id}")
async def delete_item(request: Request, conversation_id: str, item_id: str) -> dict[str, Any]:
    """Take an item out of a conversation, and out of what its agent will ever read."""
    service = service_of(request)
    stored = await stored_conversation(service, conversation_id, salt_for(request))
    del stored.items[_place_of(stored, item_id)]
    await service.stored_conversations.keep(stored)
    await _forget_agents(service, conversation_id)
    return stored.as_json()


def _place_of(stored: StoredConversation, item_id: str) -> int:
    for i, item in enumerate(stored.items):
        if item["id"] == item_id:
            return i
    message = f"there is no item {item_id[:80]!r} in this conversation"
    raise ApiError(404, message, "item_not_found")


async def _kept(request: Request, given: Sequence[Item | OtherItem]) -> list[dict[str, Any]]:
    """Return items as they are kept: each with an id that no other has, and links to its pictures.

    Raises:
        ApiError: 400, one of the pictures cannot be read.
        StoreError: one could not be written.
    """
    sent = (replace(one, param="items") for one in pictures_of_items(given))
    await keep_pictures(request, sent, salt_for(request))
    made = [item.model_dump(exclude_none=True, exclude={"id"}) for item in given]
    return [sent_item(item, new_id("")) for item in made]


async def _forget_agents(service: Service, conversation_id: str) -> None:
    """Delete a conversation's agent and its branches, as what they have read is not wanted."""
    for info in await service.agents.directory.listed():
        if without_salt(info.agent_id).partition(".")[0] == conversation_id:
            with contextlib.suppress(UnknownAgentError):
                await service.agents.lifecycle.delete(info.agent_id, is_final=True)
