"""Lists of items, a page at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import Query

from kvcellar.server.errors import ApiError

MOST_ITEMS = 100
"""Items that one page can have."""

Limit = Annotated[int, Query(ge=1, le=MOST_ITEMS)]
Order = Literal["asc", "desc"]


def page_of(
    items: Sequence[dict[str, Any]], limit: int, order: Order, after: str | None
) -> dict[str, Any]:
    """Return a page of items that come oldest first.

    Args:
        items: all of them.
        limit: how many at most.
        order: oldest first, or newest first.
        after: id of the item before the page; None: from the beginning.

    Raises:
        ApiError: 400, there is no such item.
    """
    found = list(items) if order == "asc" else list(reversed(items))
    if after is not None:
        places = [i for i, item in enumerate(found) if item["id"] == after]
        if not places:
            raise ApiError(
                400, f"there is no item {after[:80]!r} in this conversation", param="after"
            )
        found = found[places[0] + 1 :]
    page = found[:limit]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {}
    return {"object": "list", "data": page, "has_more": len(found) > limit, **ends}
