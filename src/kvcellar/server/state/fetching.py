"""Fetches pictures that requests name by address, from hosts that whoever serves has named.

A server is inside of a network that its clients may be outside of. So it goes to named hosts alone,
never to this machine or into a private network, and connects to the very address that it has looked
at, whatever a name stands for a moment later.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import itertools
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from urllib.parse import SplitResult, urljoin, urlsplit

import h11
import psutil

from kvcellar.pictures.picture import FORMATS, MOST_BYTES
from kvcellar.server.errors import ApiError
from kvcellar.server.origins import checked_host
from kvcellar.version import __version__

FETCH_S = 10.0
"""Seconds that a picture may take from when it is asked for, with all that it is redirected to."""

TURN_S = 20.0
"""Seconds that a picture may wait until others have been fetched."""

MOST_REDIRECTS = 3
MOST_URL = 8192
_PORTS = {"http": 80, "https": 443}
_PIECE = 64 << 10
_MOST_AT_A_TIME = 4
_NAT64 = ipaddress.ip_network("64:ff9b::/96")

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Called with a name and a port; returns the addresses that the name has now."""

Connect = Callable[
    [str, int, str | None], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]
]
"""Called with an address, a port, and the name whose certificate is wanted (None: without TLS)."""


class Fetcher:
    """Fetches what a few hosts have, a few at a time."""

    def __init__(
        self,
        allowed: Sequence[str] = (),
        *,
        resolve: Resolve | None = None,
        connect: Connect | None = None,
        within_s: float = FETCH_S,
        turn_s: float = TURN_S,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        """Fetch from hosts alone that are allowed.

        Args:
            allowed: ``HOST``, with the ports of http and https, or ``HOST:PORT``.
            resolve: finds addresses of names; None: as the system does.
            connect: connects to an address; None: by a socket.
            within_s: seconds that one picture may take from when it is asked for.
            turn_s: seconds that it may wait until others have been fetched.
            most_bytes: of one picture.

        Raises:
            ConfigError: one of them is no host.
        """
        self._allowed = [checked_host(one) for one in allowed]
        self._resolve = resolve or _resolved
        self._connect = connect or _connected
        self._within_s, self._turn_s, self._most_bytes = within_s, turn_s, most_bytes
        self._turns = asyncio.Semaphore(_MOST_AT_A_TIME)

    async def fetch(self, url: str) -> bytes:
        """Return what is at an address.

        Raises:
            ApiError: 400, nobody has allowed it, or it cannot be had; 429, others had to be first.
        """
        self._checked(_parts_of(url))  # who is refused waits for nobody
        try:
            async with asyncio.timeout(self._turn_s):
                await self._turns.acquire()
        except TimeoutError:
            raise ApiError(
                429,
                f"a picture was to be fetched, and {_MOST_AT_A_TIME} others were being fetched for "
                f"{self._turn_s:g} s; ask again in a moment, or send the picture itself",
                "fetch_busy",
                retry_after_s=self._within_s,
            ) from None
        try:
            async with asyncio.timeout(self._within_s):
                for _ in range(MOST_REDIRECTS + 1):
                    found = await self._once(_parts_of(url))
                    if isinstance(found, bytes):
                        return found
                    is_secret = url.lower().startswith("https:")
                    try:
                        url = urljoin(url, found)
                    except ValueError:
                        raise _failed("it is redirected to what is no address") from None
                    if is_secret and not url.lower().startswith("https:"):
                        raise _failed("it is redirected from https to http")
                raise _failed(f"it is redirected more than {MOST_REDIRECTS} times")
        except TimeoutError:
            raise _failed(f"it did not come within {self._within_s:g} s") from None
        finally:
            self._turns.release()

    async def _once(self, parts: SplitResult) -> bytes | str:
        """Ask once: return what came, or where else it is.

        Raises:
            ApiError: as ``fetch``.
        """
        host, port = self._checked(parts)
        address = await self._public_address(host, port)
        server = host if parts.scheme == "https" else None
        try:
            reader, writer = await self._connect(address, port, server)
        except (OSError, ssl.SSLError) as error:
            raise _failed(f"{host} cannot be reached ({_why(error)})") from error
        try:
            return await self._asked(parts, reader, writer)
        except (OSError, ssl.SSLError, h11.RemoteProtocolError) as error:
            raise _failed(f"{host} did not answer as HTTP has it ({_why(error)})") from error
        finally:
            writer.close()
            with contextlib.suppress(OSError, ssl.SSLError, TimeoutError):
                async with asyncio.timeout(1):
                    await writer.wait_closed()

    def _checked(self, parts: SplitResult) -> tuple[str, int]:
        """Return the host and port of an address that is allowed.

        Raises:
            ApiError: 400, it is not.
        """
        host, port = parts.hostname or "", parts.port
        port = _PORTS[parts.scheme] if port is None else port
        named = host.rstrip(".")
        usual = port == _PORTS[parts.scheme]
        if any(
            name == named and (usual if own is None else own == port) for name, own in self._allowed
        ):
            return named, port
        if named == "localhost" or (_is_address(named) and not is_public(named)):
            raise _not_public(named)
        shown = f"[{named}]" if ":" in named else named
        shown += "" if usual else f":{port}"
        raise ApiError(
            400,
            f"a picture is to be fetched from {shown[:200]}, and this server fetches from "
            + (f"{self._shown()} alone" if self._allowed else "nowhere")
            + f"; send the picture itself, as data:image/png;base64,..., or have the server "
            f"started with --allow-fetch {shown[:200]}",
            "fetch_not_allowed",
        )

    def _shown(self) -> str:
        return ", ".join(name + (f":{port}" if port else "") for name, port in self._allowed)

    async def _public_address(self, host: str, port: int) -> str:
        """Return the address of a host, which is neither this machine's nor a private one.

        Raises:
            ApiError: 400, it is, or there is none.
        """
        try:
            found = await self._resolve(host, port)
        except (OSError, UnicodeError) as error:
            raise _failed(f"{host} has no address ({_why(error)})") from error
        if not found:
            raise _failed(f"{host} has no address")
        if not all(map(is_public, found)):  # one that is not is no accident
            raise _not_public(host)
        return found[0]

    async def _asked(
        self, parts: SplitResult, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bytes | str:
        """Send the request, and read the answer up to the bound.

        Raises:
            ApiError: 400, it is an error, is too large, or ends too early.
        """
        connection = h11.Connection(h11.CLIENT)
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        head = h11.Request(
            method="GET",
            target=path.encode("ascii"),
            headers=[
                ("Host", parts.netloc),
                ("Accept", ", ".join(FORMATS.values())),
                ("Accept-Encoding", "identity"),
                ("User-Agent", f"kvcellar/{__version__}"),
                ("Connection", "close"),
            ],
        )
        writer.write((connection.send(head) or b"") + (connection.send(h11.EndOfMessage()) or b""))
        await writer.drain()
        data = bytearray()
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                connection.receive_data(await reader.read(_PIECE))
            elif isinstance(event, h11.Response):
                headers = dict(event.headers)
                if event.status_code in (301, 302, 303, 307, 308) and b"location" in headers:
                    return headers[b"location"].decode("latin-1")
                if headers.get(b"content-encoding", b"identity") != b"identity":
                    raise _failed(f"{parts.hostname} sends it in another encoding than was asked")
                if event.status_code != 200:
                    raise _failed(f"{parts.hostname} answers {event.status_code}")
                self._check_size(int(headers.get(b"content-length", b"0")))
            elif isinstance(event, h11.Data):
                data += event.data
                self._check_size(len(data))
            elif isinstance(event, h11.EndOfMessage | h11.ConnectionClosed):
                return bytes(data)

    def _check_size(self, n_bytes: int) -> None:
        if n_bytes > self._most_bytes:
            raise _failed(f"it has more than {self._most_bytes:,} bytes")


def is_public(address: str) -> bool:
    """Return true if an address is one of the internet's, and not one of this machine's."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        inside = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if ip in _NAT64:
            inside = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inside is not None:
            return is_public(str(inside))
    is_local = getattr(ip, "is_site_local", False)
    if not ip.is_global or ip.is_multicast or ip.is_reserved or ip.is_unspecified or is_local:
        return False
    return str(ip) not in _own_addresses()


def _own_addresses() -> set[str]:
    """Return the addresses of this machine's own devices."""
    found = itertools.chain.from_iterable(psutil.net_if_addrs().values())
    return {str(one.address).partition("%")[0] for one in found}


def _parts_of(url: str) -> SplitResult:
    """Return the parts of an address.

    Raises:
        ApiError: 400, it is none of http or https, or has what no picture's address needs.
    """
    try:
        parts = urlsplit(url)
        ascii_url = parts._replace(netloc=parts.netloc.encode("idna").decode(), fragment="")
        _ = ascii_url.port, ascii_url.geturl().encode("ascii")
    except (ValueError, UnicodeError) as error:
        raise _failed("its address is none: percent-encode what is not ASCII") from error
    if parts.scheme not in _PORTS or not parts.hostname or len(url) > MOST_URL:
        raise _failed("its address is no http:// or https:// of a host")
    if "@" in parts.netloc:
        raise _failed("its address has a name and password, which are not sent")
    if re.search(r"[\x00-\x20\x7f]", url):
        raise _failed("its address has a space or a control character; percent-encode it")
    return ascii_url


async def _resolved(host: str, port: int) -> Sequence[str]:
    """Ask the system for the addresses of a name."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


async def _connected(
    address: str, port: int, server: str | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to an address, by TLS where a server's certificate is wanted."""
    if server is None:
        return await asyncio.open_connection(address, port)
    context = await asyncio.to_thread(ssl.create_default_context)
    return await asyncio.open_connection(address, port, ssl=context, server_hostname=server)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _not_public(host: str) -> ApiError:
    return ApiError(
        400,
        f"a picture is to be fetched from {host}, which is this machine or in a private network; "
        f"nothing is fetched from there, whatever --allow-fetch names: send the picture itself",
        "fetch_not_allowed",
    )


def _failed(why: str) -> ApiError:
    return ApiError(
        400, f"a picture cannot be fetched: {why}; send the picture itself", "fetch_failed"
    )


def _why(error: BaseException) -> str:
    return str(getattr(error, "strerror", None) or error)[:120] or type(error).__name__
