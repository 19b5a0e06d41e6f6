"""Entrance of the server: who may call it, under which name, and from which pages.

A server on this machine is within reach of every web page that is open in a browser here. So a
request has to name this server as its host, and must not come from a page of another origin.
"""

from __future__ import annotations

import ipaddress
import re
import secrets
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

from kvcellar.server.config import ServerConfig
from kvcellar.server.errors import AMBIGUOUS_LENGTH, ApiError
from kvcellar.server.origins import Origins
from kvcellar.server.state.isolation import GUEST, guest_of

MOST_HEADER_BYTES = 32 << 10

OPEN = ("/health", "/ready")
"""Paths that need no key: they say nothing of what is computed."""

PAGE = "/viewer/"
"""The page itself; what it shows needs the key."""

_OWNERS = ("/metrics", "/v1/cache", "/events", "/slots")
"""Paths that show what everybody does."""

FOLDER_OWNER = "kvcellar.folder_owner"
"""Where the scope of a request has that it came with the token of the store's folder."""

_LOCAL_NAMES = {"localhost", "127.0.0.1", "::1"}


class Entrance:
    """Checks of a request's first line and headers, before anything of its body is read.

    Attributes:
        origins: the pages elsewhere that may call.
    """

    def __init__(self, config: ServerConfig) -> None:
        """Let in whom a configuration allows."""
        self._config = config
        self._hosts = _LOCAL_NAMES | {name.lower() for name in config.allowed_hosts}
        self._takes_addresses = config.host.lower() not in _LOCAL_NAMES
        self.origins = Origins(config.allowed_origins)

    def check(self, scope: Scope, headers: Headers) -> None:
        """Refuse who must not call; note in the scope which guest does.

        Raises:
            ApiError: 400 where the length of the body is said in two ways, 403 for a host or
                origin, 401 for a key.
        """
        path = scope["path"]
        _check_length(scope, headers)
        n_bytes = sum(len(name) + len(value) for name, value in headers.raw)
        if n_bytes > MOST_HEADER_BYTES:
            raise ApiError(
                431,
                f"the headers have {n_bytes} bytes and the limit is {MOST_HEADER_BYTES}; send less",
                "headers_too_large",
            )
        self._check_host(headers)
        self._check_origin(scope["method"], headers)
        if self._is_folders(scope, headers):
            scope[FOLDER_OWNER] = True
            return
        if self._config.api_key is None or path in (*OPEN, "/") or path.startswith(PAGE):
            return
        if self.origins.is_preflight(scope["method"], headers):  # browsers send no key with it
            return
        bearer = headers.get("authorization", "")
        bearer = bearer[7:] if bearer.lower().startswith("bearer ") else ""
        given = [one.strip().encode() for one in (bearer, headers.get("x-api-key", "")) if one]
        keys = [self._config.api_key, *self._config.guest_keys]
        matching = [
            key for key in keys if any(secrets.compare_digest(one, key.encode()) for one in given)
        ]
        if not matching:
            raise ApiError(
                401,
                "this server wants its API key"
                + (", and the one that came is another" if given else "")
                + "; send it as `Authorization: Bearer KEY` or `x-api-key: KEY`",
                "invalid_api_key",
            )
        if matching[0] != keys[0]:
            scope[GUEST] = guest_of(matching[0])
            if path in _OWNERS:
                raise ApiError(
                    403, f"{path} shows what all do, and only the owner's key does", "owner_only"
                )

    def _is_folders(self, scope: Scope, headers: Headers) -> bool:
        """Return true for a command of this machine that brings the token of the store's folder."""
        token, client = self._config.folder_token, scope.get("client")
        brought = headers.get("authorization", "").removeprefix("Bearer ").encode()
        if not token or not secrets.compare_digest(brought, token.encode()) or client is None:
            return False
        own = (scope.get("server") or ("",))[0]
        return client[0] == own or (
            _is_ip(client[0]) and ipaddress.ip_address(client[0]).is_loopback
        )

    def _check_host(self, headers: Headers) -> None:
        host = headers.get("host", "")
        name = urlsplit(f"//{host}").hostname if _is_host(host) else None
        if name is not None and (name in self._hosts or (self._takes_addresses and _is_ip(name))):
            return
        raise ApiError(
            403,
            f"this server is not called {host[:80]!r}; use one of "
            f"{', '.join(sorted(self._hosts))}, or start it with --allow-host",
            "host_not_allowed",
        )

    def _check_origin(self, method: str, headers: Headers) -> None:
        is_followed = headers.get("sec-fetch-mode") == "navigate" and "origin" not in headers
        if is_followed and method in ("GET", "HEAD"):
            return  # somebody followed a link to the page; nothing is driven by that
        if self.origins.allow(headers) and not (is_followed and "sec-fetch-site" not in headers):
            return  # a form whose browser does not say of which site may be of any
        origin = headers.get("origin") or "another site"
        raise ApiError(
            403,
            f"a page of {origin[:80]!r} must not call this server; start it with --allow-origin "
            f"if it should",
            "origin_not_allowed",
        )


def _check_length(scope: Scope, headers: Headers) -> None:
    """Refuse a request whose end a proxy may see elsewhere than the parser does (RFC 9112, 6.1).

    h11 refuses other such requests itself: lengths that differ, codings other than ``chunked``.
    """
    if "transfer-encoding" not in headers:
        return
    if "content-length" in headers:
        why = "Content-Length beside Transfer-Encoding"
    elif scope["http_version"] != "1.1":
        why = f"Transfer-Encoding with HTTP/{scope['http_version']}"
    else:
        return
    raise ApiError(
        400,
        f"the request has {why}, so its end cannot be told; send one length, and the connection is "
        f"closed",
        AMBIGUOUS_LENGTH,
    )


def _is_host(text: str) -> bool:
    return bool(re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:\d{1,5})?", text))


def _is_ip(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
