"""Items that a request names instead of sending them: those of stored responses.

Reasoning without its text is named, too: clients that leave storing to the server send it so.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvcellar.server.errors import ApiError
from kvcellar.server.routes.responses.value import PREFIX
from kvcellar.server.schemas.responses import Item, OtherItem, read_items
from kvcellar.server.state.service import Service
from kvcellar.server.state.stored import StoredResponse

_ID = re.compile(r"(?:msg|fc|rs)_([0-9a-f]{32})[0-9a-z]+")
"""Ids of items that this server has answered: the response's own is inside."""


async def sent_items(
    service: Service, items: Sequence[Item | OtherItem], salt: str
) -> list[Item | OtherItem]:
    """Return items with those that are named in the places of their names.

    Args:
        service: whose stored responses have them.
        items: as they were sent.
        salt: of those who may see the responses.

    Raises:
        ApiError: 404, nothing that is stored has an item of such an id.
    """
    known: dict[str, StoredResponse | None] = {}
    found: list[Item | OtherItem] = []
    for item in items:
        is_reasoning = (
            isinstance(item, Item)
            and item.type == "reasoning"
            and not (item.content or item.encrypted_content)
        )
        if item.type != "item_reference" and not is_reasoning:
            found.append(item)
            continue
        named = str(getattr(item, "id", None) or "")
        match = _ID.fullmatch(named)
        response_id = PREFIX + match[1] if match else ""
        if match and response_id not in known:
            known[response_id] = await service.responses.get(response_id)
        stored = known.get(response_id)
        output = stored.response["output"] if stored is not None and stored.salt == salt else ()
        wanted = [one for one in output if one.get("id") == named]
        if not wanted and is_reasoning:
            found.append(item)
        elif not wanted:
            raise ApiError(
                404,
                f"item {named[:80]!r} is not stored here; send the item itself",
                "item_not_found",
                param="input",
            )
        found += read_items(wanted)
    return found
