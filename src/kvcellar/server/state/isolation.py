"""Salts: who shares what. Requests with another salt, or of another guest, are strangers.

Strangers share no prefix, no stored block, no guess and no agent; whether one has asked something
before, another cannot tell by what is cached.
"""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import Annotated

from fastapi import Depends
from starlette.requests import Request

from kvcellar.agents import salt_of, salted_id, without_salt
from kvcellar.errors import UnknownAgentError
from kvcellar.server.errors import ApiError

MOST_CHARACTERS = 1024

GUEST = "kvcellar.guest"
"""Where the guard puts a digest of the key of a guest; nothing for the owner."""


def guest_of(key: str) -> str:
    """Return what a guest is known by who has brought a key."""
    return blake2b(key.encode(), digest_size=16, person=b"guest").hexdigest()


def salt_for(request: Request, given: str | None = None) -> str:
    """Return the salt of a request: 32 hexadecimal digits; empty: of the owner, without a salt.

    Args:
        request: may have the header ``X-Cache-Salt``.
        given: ``cache_salt`` in its body.

    Raises:
        ApiError: 400, header and body have two, or it is too long.
    """
    header = request.headers.get("x-cache-salt") or None
    if given and header and given != header:
        raise ApiError(
            400,
            "the request has two salts, one in its body and another as the header X-Cache-Salt",
            "two_salts",
            param="cache_salt",
        )
    text, guest = given or header or "", request.scope.get(GUEST, "")
    if len(text) > MOST_CHARACTERS:
        raise ApiError(400, f"a salt has at most {MOST_CHARACTERS} characters", param="cache_salt")
    if not text and not guest:
        return ""
    said = json.dumps([guest, text]).encode()
    return blake2b(said, digest_size=16, person=b"salt").hexdigest()


def own_id(name: str, salt: str) -> str:
    """Return the id of the agent that a client with a salt calls by a name.

    Raises:
        UnknownAgentError: the name is the id of a stranger's agent.
    """
    if salt_of(name):
        raise UnknownAgentError(f"no agent {without_salt(name)[:128]!r}")
    return salted_id(name, salt)


async def _own_agent(request: Request, agent_id: str) -> str:
    return own_id(agent_id, salt_for(request))


OwnAgent = Annotated[str, Depends(_own_agent)]
"""The id of the agent that a path names, for those who share the request's salt."""
