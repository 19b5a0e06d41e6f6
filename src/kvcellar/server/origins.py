"""Places elsewhere: web pages that may call the server (CORS), and hosts that it may go to."""

from __future__ import annotations

import re
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders

from kvcellar.errors import ConfigError

_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://(\[[0-9a-f:.]+\]|[a-z0-9.*_-]+)(?::(\d{1,5}|\*))?/?")
LOCALHOST = "localhost"
"""Stands for every page that this machine serves, at any port."""
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::(\d{1,5}))?")
_DEFAULT_PORTS = {"http": "80", "https": "443"}
_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+(?: *, *[A-Za-z0-9!#$%&'*+.^_`|~-]+)*")
_METHODS = "GET, HEAD, POST, DELETE, OPTIONS"
_REMEMBERED_S = 600


def checked_origin(text: str) -> str:
    """Return an origin as browsers send it: lower case, without a port that its scheme implies.

    ``*`` in place of a port is any; in a host it is any letters, digits, dots and dashes, or in
    that of a program's own scheme all of it. ``localhost`` is every page of this machine.

    Raises:
        ConfigError: it is no origin, such as a URL with a path, ``*`` or ``null``.
    """
    found = _ORIGIN.fullmatch(text.lower())
    if text.lower() == LOCALHOST:
        return LOCALHOST
    if found is None or _is_too_wide(*found.groups()):
        raise ConfigError(
            f"{text[:80]!r} is no origin of a web page; give scheme, host and port alone, such as "
            f"https://app.example, http://localhost:* or vscode-webview://*, each page's by "
            f"itself, or {LOCALHOST} for all pages of this machine"
        )
    scheme, host, port = found.groups()
    is_implied = port is None or port == _DEFAULT_PORTS.get(scheme)
    return f"{scheme}://{host}" if is_implied else f"{scheme}://{host}:{port}"


def _is_too_wide(scheme: str, host: str, port: str | None) -> bool:
    """Return true for an origin that would let in pages of strangers, or that is none."""
    if scheme in _DEFAULT_PORTS:  # a name of the web: of two parts at least that it is below
        is_below = re.fullmatch(r"\*\.[a-z0-9-]+(\.[a-z0-9-]+)+", host)
        return "*" in host and is_below is None
    return "*" in host and host != "*"


def _pattern(origin: str) -> re.Pattern[str]:
    """Return what the origins look like that an allowed one stands for."""
    if origin == LOCALHOST:
        return re.compile(
            r"(https?|tauri|app)://(([a-z0-9-]+\.)*localhost|127\.0\.0\.1|\[::1\])(:\d{1,5})?"
        )
    scheme, _, rest = origin.partition("://")
    port = r"(:\d{1,5})?" if rest.endswith(":*") else ""
    host = rest.removesuffix(":*")
    return re.compile(
        re.escape(f"{scheme}://") + re.escape(host).replace(r"\*", "[a-z0-9._-]+") + port
    )


class Origins:
    """The pages elsewhere that may call, as their origins."""

    def __init__(self, allowed: Iterable[str]) -> None:
        """Allow the pages of these origins.

        Raises:
            ConfigError: one of them is no origin.
        """
        origins = [checked_origin(origin) for origin in allowed]
        self._allowed = frozenset(one for one in origins if "*" not in one and one != LOCALHOST)
        self._patterns = [_pattern(one) for one in origins if one not in self._allowed]

    def allow(self, headers: Headers) -> bool:
        """Return whether a request may come from where its browser says that it comes from.

        That is so without an origin, for the server's own page, and for pages that are allowed.
        """
        origin = headers.get("origin")
        if origin is None:
            return headers.get("sec-fetch-site", "none") in ("none", "same-origin")
        if self._of(headers) is not None:
            return True
        parts = urlsplit(origin)
        return parts.scheme in ("http", "https") and parts.netloc == headers.get("host")

    def is_preflight(self, method: str, headers: Headers) -> bool:
        """Return whether a browser asks if a page that is allowed may send what it wants to."""
        return (
            method == "OPTIONS"
            and self._of(headers) is not None
            and "access-control-request-method" in headers
        )

    def preflight(self, headers: Headers) -> dict[str, str]:
        """Return the headers, besides those of every answer, that let the page's request through.

        The page may send any header: what the server does not know it does not read.
        """
        said = {
            "access-control-allow-methods": _METHODS,
            "access-control-max-age": str(_REMEMBERED_S),
        }
        wanted = headers.get("access-control-request-headers", "")
        if _NAMES.fullmatch(wanted):
            said["access-control-allow-headers"] = wanted
        if headers.get("access-control-request-private-network") == "true":
            said["access-control-allow-private-network"] = "true"
        return said

    def mark(self, answer: MutableHeaders, headers: Headers) -> None:
        """Add to an answer what lets the page that asked read it, with all of its headers."""
        if not self._allowed and not self._patterns:
            return
        answer.add_vary_header("Origin")
        origin = self._of(headers)
        if origin is not None:
            answer["access-control-allow-origin"] = origin
            answer["access-control-expose-headers"] = "*"

    def _of(self, headers: Headers) -> str | None:
        """Return the origin as it was sent, where it is one that is allowed."""
        origin = headers.get("origin")
        if origin is None:
            return None
        known = origin.lower()
        is_allowed = known in self._allowed or any(one.fullmatch(known) for one in self._patterns)
        return origin if is_allowed else None


def checked_host(text: str) -> tuple[str, int | None]:
    """Return a host that may be fetched from, and the port where one is named.

    Raises:
        ConfigError: it is no host.
    """
    found = _HOST.fullmatch(text.strip().lower().rstrip("."))
    port = None if found is None or found[2] is None else int(found[2])
    if found is None or port == 0 or (port or 0) > 65535:
        raise ConfigError(
            f"{text[:80]!r} is no host to fetch from; name it as HOST or HOST:PORT, without http://"
        )
    return found[1].strip("[]"), port
