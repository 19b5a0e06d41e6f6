"""The pictures that are in conversations, by their names."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from kvcellar.errors import PictureError
from kvcellar.server.answer.pictures import may_see
from kvcellar.server.errors import ApiError
from kvcellar.server.state.isolation import salt_for
from kvcellar.server.state.service import service_of

router = APIRouter(prefix="/v1/pictures", tags=["Pictures"])

_HEADERS = {
    # a name is of what is in it, so what is there never changes
    "Cache-Control": "private, max-age=31536000, immutable",
    "Content-Security-Policy": "default-src 'none'; sandbox",
}
_TYPES = ("png", "jpeg", "webp", "gif")
_FILES: dict[str, Any] = {"content": {f"image/{kind}": {} for kind in _TYPES}}


@router.get("/{name}", response_class=Response, responses={200: _FILES})
async def get_picture(
    request: Request,
    name: str,
    seen: str = Query("", max_length=200, description="As a link has it that was given out."),
) -> Response:
    """Send a picture, to which messages and items have links: the file as it was sent.

    Whoever has a salt, or is a guest, is sent its pixels as PNG: the file may be another's.
    """
    service = service_of(request)
    salt = salt_for(request)
    if may_see(service, name, seen, salt):
        try:
            picture = await service.pictures.find(name, service.models.registry.shelf)
        except PictureError:
            pass
        else:
            if not salt:
                return Response(picture.data, media_type=picture.media_type, headers=_HEADERS)
            # of whose file it is, nobody else finds out what else is in it
            data = await service.pictures.alone(picture.as_png)
            return Response(data, media_type="image/png", headers=_HEADERS)
    raise ApiError(404, f"there is no picture {name[:80]!r} here", "picture_not_found")
