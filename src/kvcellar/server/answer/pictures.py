"""Pictures of requests: read, or fetched and read, before anything else is done.

A model that reads pictures has each of them by name from then on; the request has a link in place
of its bytes, which is what is stored and shown of it. A model that reads text alone gets a line in
each one's place (``media``).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Protocol

from starlette.requests import Request

from kvcellar.agents import ModelHost
from kvcellar.errors import PictureError, PictureLostError
from kvcellar.pictures.picture import Picture
from kvcellar.pictures.placed_text import PICTURES
from kvcellar.pictures.shelf import PictureShelf
from kvcellar.pictures.tokens import NAME_DIGITS
from kvcellar.server.answer.media import LeftOut
from kvcellar.server.errors import ApiError
from kvcellar.server.state.picture_desk import is_address
from kvcellar.server.state.service import Service, service_of
from kvcellar.server.stream.streams import until_gone

MOST_PICTURES = 256
"""Pictures in one request."""

ROUTE = "/v1/pictures/"
_NAME = re.compile(rf"[0-9a-f]{{{NAME_DIGITS}}}")
_LINK = re.compile(rf"{ROUTE}({_NAME.pattern})(?:\?seen=([^&#]*))?")

ALL_S = 60.0
"""Seconds that all pictures of one request may take, fetching included."""


def shelf_of(host: ModelHost) -> PictureShelf | None:
    """Return where pictures for a model are put; None: it reads text alone."""
    return host.shelf if host.reads_pictures else None


@dataclass(frozen=True, slots=True)
class SentPicture:
    """A picture in a request.

    Attributes:
        source: a data URL, base64, an address or a link of ours; None: there is none of these.
        param: the field of the request that it is in.
        put: takes the link that the request has in its place.
        what_for: how it is wished to be read, in a field that nobody here honours.
        is_known: whether its link is of what is stored here: where the picture was lost, an agent
            may go on by what was computed of it.
    """

    source: str | None
    param: str
    put: Callable[[str], None]
    what_for: str | None = None
    is_known: bool = False


class CanIgnore(Protocol):
    """A request that says which of its fields were ignored."""

    def ignore(self, name: str) -> None:
        """Say that a field is not honoured."""
        ...


async def take_pictures(
    request: Request,
    model: str | None,
    sent: Iterable[SentPicture],
    salt: str,
    body: CanIgnore | None = None,
    *,
    is_kept: bool = False,
) -> LeftOut:
    """Read the pictures of a request, which has links in their places then.

    Args:
        request: that has them.
        model: a name that is offered; None: the default.
        sent: all pictures of the request.
        salt: of whoever has sent it.
        body: says that wishes are not honoured.
        is_kept: whether what was asked is done although its client leaves.

    Returns:
        What was left out of the request, nothing yet, with the pictures by their links; without
        any where the model reads text alone.

    Raises:
        ApiError: 400, one of them cannot be read or fetched; 429, there is too much to fetch;
            nothing was changed.
        ClientGone: nobody waits for them any more; what was being fetched is not.
    """
    service, listed, left_out = service_of(request), list(sent), LeftOut()
    if not listed:
        return left_out
    work = _read_all(service, model, listed, salt)
    pictures = await (work if is_kept else until_gone(request, work))
    for one, picture in zip(listed, pictures, strict=False):
        name = picture if isinstance(picture, str) else picture.name
        link = link_of(service, name, salt)
        left_out.pictures[link] = name
        left_out.held += [picture] if isinstance(picture, Picture) else []
        one.put(link)
        if body is not None and one.what_for is not None:
            body.ignore(one.what_for)
    return left_out


async def keep_pictures(request: Request, sent: Iterable[SentPicture], salt: str) -> None:
    """Store the pictures of what is kept for a client, whoever will read it; it has links then.

    Those by address stay that: they are fetched when they are read.

    Raises:
        ApiError: 400, one of them cannot be read; nothing was changed.
        StoreError: one could not be written.
    """
    service = service_of(request)
    listed = [one for one in sent if one.source and not is_address(one.source)]
    if not listed or find_spec("PIL") is None:  # then no model here reads any
        return
    shelf = service.models.registry.shelf
    pictures = await until_gone(request, _taken_in(service, listed, salt, shelf))
    for one, picture in zip(listed, pictures, strict=True):
        assert isinstance(picture, Picture), "nothing was known of it before"
        await asyncio.to_thread(service.store.put_picture, picture.name, picture.data)
        one.put(link_of(service, picture.name, salt))


async def _read_all(
    service: Service, model: str | None, listed: Sequence[SentPicture], salt: str
) -> list[Picture | str]:
    """Read the pictures of a request; none where the model reads text alone."""
    async with service.models.registry.use(service.models.resolve(model)) as host:
        shelf = shelf_of(host)
        if shelf is None:
            return []
        return await _taken_in(service, listed, salt, shelf)


async def _taken_in(
    service: Service, sent: Sequence[SentPicture], salt: str, shelf: PictureShelf
) -> list[Picture | str]:
    """Read pictures one after the other, until they have taken too long.

    Returns:
        Each; its name where it is known and was lost.
    """
    if len(sent) > MOST_PICTURES:
        raise ApiError(
            400,
            f"the request has {len(sent)} pictures and the limit is {MOST_PICTURES}; leave the "
            f"oldest out",
            "too_many_images",
            param=sent[0].param,
        )
    try:
        with service.admitted():
            async with asyncio.timeout(ALL_S):
                return [await _taken(service, one, salt, shelf) for one in sent]
    except TimeoutError:
        raise ApiError(
            400,
            f"the {len(sent)} pictures of the request took longer than {ALL_S:g} s, with the wait "
            f"for others; send fewer, or smaller ones, or ask again when the server has less to do",
            "too_many_images",
            param=sent[0].param,
        ) from None


async def _taken(
    service: Service, one: SentPicture, salt: str, shelf: PictureShelf
) -> Picture | str:
    if one.source is None:
        raise ApiError(
            400,
            "a picture came without its file, or as a file_id, which is kept nowhere here; send it "
            "in base64, as data:image/png;base64,...",
            "invalid_image",
            param=one.param,
        )
    try:
        if one.source.startswith(ROUTE):
            name = name_in(service, one.source, salt)
            if name is None:
                raise PictureError(f"there is no picture {one.source[:80]!r}; send its file")
            return await service.pictures.find(name, shelf)
        return await service.pictures.read(one.source, salt, shelf)
    except PictureError as error:
        if one.is_known and isinstance(error, PictureLostError):
            return error.name
        raise ApiError(400, str(error), "invalid_image", param=one.param) from error
    except ApiError as error:
        error.param = one.param
        raise


# Links --------------------------------------------------------------------------------------------


def link_of(service: Service, name: str, salt: str) -> str:
    """Return where those who share a salt find a picture.

    A name says what is in a picture to whoever has it, too. So strangers' links are signed: nobody
    finds out by a name whether somebody else has sent such a picture.
    """
    if not salt:
        return ROUTE + name
    return f"{ROUTE}{name}?seen={service.signer.sign(_signed(name, salt))}"


def name_in(service: Service, link: str, salt: str) -> str | None:
    """Return the name of the picture that a link shows to those who share a salt; None: to none."""
    found = _LINK.fullmatch(link)
    if found is None or not may_see(service, found[1], found[2] or "", salt):
        return None
    return found[1]


def may_see(service: Service, name: str, seen: str, salt: str) -> bool:
    """Return true if those who share a salt were shown a picture, as its link says."""
    if _NAME.fullmatch(name) is None:
        return False
    return not salt or service.signer.has_signed(_signed(name, salt), seen)


def _signed(name: str, salt: str) -> str:
    return f"picture {name} {salt}"


def with_links(service: Service, message: Mapping[str, Any], salt: str) -> dict[str, Any]:
    """Return a message as routes tell it: each picture with a link to it."""
    if not message.get(PICTURES):
        return dict(message)
    listed = [
        {**picture, "url": link_of(service, str(picture["name"]), salt)}
        for picture in message[PICTURES]
    ]
    return {**message, PICTURES: listed}
