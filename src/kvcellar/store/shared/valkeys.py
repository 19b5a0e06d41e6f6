"""A place in Valkey, or what speaks its protocol: in memory, quick, and as lasting as it is set up.

A register is a hash of a number and bytes, moved on by a script that the server runs whole.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit

import valkey

from kvcellar.errors import ConfigError
from kvcellar.store.shared.places import (
    MOST_NUMBER,
    MOST_STATE_BYTES,
    Entry,
    ForeignError,
    PlaceError,
    PlaceState,
)
from kvcellar.store.shared.urls import shown_url

T = TypeVar("T")

CONNECT_S = 3.0
_SCAN = 1000
_INDEX = "registers"

_ADVANCE = """
local last = tonumber(redis.call('HGET', KEYS[1], 'n') or '0')
if last ~= 0 and last ~= tonumber(ARGV[1]) - 1 then return 0 end
redis.call('HSET', KEYS[1], 'n', ARGV[1], 'data', ARGV[2])
redis.call('ZADD', KEYS[2], ARGV[1], ARGV[3])
return 1
"""


class ValkeyPlace:
    """Keys of one prefix in one database.

    Attributes:
        title: URL of the place, without what is secret in it; no other place has the same.
    """

    def __init__(self, url: str, *, timeout_s: float) -> None:
        """Open a place; user and password come from the URL.

        Raises:
            ConfigError: the URL cannot be used.
        """
        prefix = parse_qs(urlsplit(url).query).get("prefix", ["kvcellar"])[0]
        self.title = shown_url(url) + (f"?prefix={prefix}" if "?" in url else "")
        self._prefix = f"{prefix}:"
        try:
            self._db: Any = valkey.Valkey.from_url(
                url.partition("?")[0],
                socket_timeout=timeout_s,
                socket_connect_timeout=CONNECT_S,
            )
        except (ValueError, valkey.ValkeyError) as error:
            raise ConfigError(f"{self.title} cannot be opened: {error}") from None
        self._advance = self._db.register_script(_ADVANCE)

    def read(self, key: str, most_bytes: int) -> bytes | None:
        """Return what a name holds; None where there is none."""
        size = self._ask(lambda: self._db.strlen(self._key(key)))
        if size > most_bytes:
            raise ForeignError(f"{self.title}: {key} has {size} bytes")
        got: bytes | None = self._ask(lambda: self._db.get(self._key(key)))
        return got

    def size(self, key: str) -> int | None:
        """Return the bytes that a name holds; None where there is none."""
        return self._ask(lambda: self._db.strlen(self._key(key))) or None

    def write(self, key: str, data: bytes | memoryview) -> None:
        """Give a name its bytes, in place of those before."""
        self._ask(lambda: self._db.set(self._key(key), data))

    def create(self, key: str, data: bytes, ttl_s: float) -> bool:
        """Give a new name its bytes; false where it is there."""
        ttl_ms = max(1, int(ttl_s * 1000))
        return bool(self._ask(lambda: self._db.set(self._key(key), data, nx=True, px=ttl_ms)))

    def drop(self, keys: Iterable[str]) -> None:
        """Forget names; those that are not there are none's trouble."""
        some = [self._key(key) for key in keys]
        if some:
            self._ask(lambda: self._db.unlink(*some))

    def entries(self, prefix: str) -> Iterator[Entry]:
        """Yield all names that begin so, registers' included."""
        now = time.time()
        pattern = f"{self._key(prefix)}*"
        found = self._ask(lambda: list(self._db.scan_iter(match=pattern, count=_SCAN)))
        for key in found:
            size = self._ask(lambda key=key: self._db.memory_usage(key))  # type: ignore[misc]
            yield Entry(key.decode()[len(self._prefix) :], size or 0, now - self._idle_s(key))

    def _idle_s(self, key: bytes) -> float:
        """Return for how long a key was not used; a server that evicts by frequency says 0."""
        with contextlib.suppress(PlaceError):
            return float(self._ask(lambda: self._db.object("idletime", key)) or 0)
        return 0.0

    def number(self, register: str) -> int:
        """Return the number of a register's latest state; 0 where it has none."""
        try:
            return _number(self._ask(lambda: self._db.hget(self._key(register), "n")))
        except ForeignError:
            return 0

    def latest(self, register: str) -> PlaceState | None:
        """Return a register's latest state; None where it has none."""
        key = self._key(register)
        try:
            size = self._ask(lambda: self._db.hstrlen(key, "data"))
            if size > MOST_STATE_BYTES:
                return PlaceState(self.number(register), b"")
            number, data = self._ask(lambda: self._db.hmget(key, "n", "data"))
        except ForeignError:
            return None
        return None if data is None else PlaceState(_number(number), data)

    def earlier(self, register: str, number: int) -> PlaceState | None:
        """Return None: a register is changed whole, and holds nothing but its latest state."""
        return None

    def advance(self, register: str, number: int, data: bytes) -> bool:
        """Make these bytes a register's state ``number``; false where another moved it on."""
        keys = [self._key(register), self._key(_INDEX)]
        return bool(self._ask(lambda: self._advance(keys=keys, args=[number, data, register])))

    def numbers(self, prefix: str) -> dict[str, int]:
        """Return the number of the latest state of every register whose name begins so."""
        found = self._ask(lambda: self._db.zrange(self._key(_INDEX), 0, -1, withscores=True))
        named = {key.decode(): _number(number) for key, number in found}
        return {key: number for key, number in named.items() if key.startswith(prefix)}

    def forget(self, register: str) -> None:
        """Empty a register."""
        self.drop([register])
        self._ask(lambda: self._db.zrem(self._key(_INDEX), register))

    def close(self) -> None:
        """Let go of connections."""
        self._db.close()

    def _key(self, key: str) -> str:
        return self._prefix + key

    def _ask(self, request: Callable[[], T]) -> T:
        try:
            return request()
        except valkey.ResponseError as error:
            if "WRONGTYPE" in str(error):
                raise ForeignError(f"{self.title}: {error}") from None
            raise PlaceError(f"{self.title}: {type(error).__name__}: {error}") from None
        except (valkey.ValkeyError, OSError) as error:
            raise PlaceError(f"{self.title}: {type(error).__name__}: {error}") from None


def _number(said: Any) -> int:
    """Return the number of a state; 0 where what is said can be none."""
    try:
        number = float(said or 0)
    except ValueError:
        return 0
    return int(number) if 0 < number <= MOST_NUMBER else 0
