"""A place of objects: S3 and what speaks like it, Google's and Azure's, or a folder of a share.

A register is a folder of numbered objects, each of which can be made only once: that is all that
such a place has to do for two writers to be safe.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, NotFoundError
from obstore.store import LocalStore, ObjectStore, from_url

from kvcellar.errors import ConfigError
from kvcellar.store.shared.places import MOST_PENDING, Entry, PlaceError, PlaceState
from kvcellar.store.shared.urls import shown_url

T = TypeVar("T")

CONNECT_S = 3
"""Seconds after which a server that does not answer a connection is taken to be away."""

_NUMBER = re.compile("[0-9a-f]{16}")
"""Names of states; whatever else lies beside them is somebody's own."""

_GONE = (FileNotFoundError, NotFoundError)


class ObjectPlace:
    """Objects of one prefix.

    Attributes:
        title: URL of the place, without what is secret in it.
    """

    def __init__(self, url: str, *, timeout_s: float) -> None:
        """Open a place; credentials are found where obstore looks for them.

        Raises:
            ConfigError: the URL cannot be used.
        """
        self.title = shown_url(url)
        try:
            self._store = _opened(url, timeout_s)
        except (BaseError, ValueError, OSError) as error:
            raise ConfigError(f"{self.title} cannot be opened: {_said(error)}") from None

    def read(self, key: str) -> bytes | None:
        """Return what a name holds; None where there is none."""
        return self._ask(lambda: _bytes(obstore.get(self._store, key)))

    def size(self, key: str) -> int | None:
        """Return the bytes that a name holds; None where there is none."""
        return self._ask(lambda: int(obstore.head(self._store, key)["size"]))

    def write(self, key: str, data: bytes | memoryview) -> None:
        """Give a name its bytes, in place of those before."""
        self._ask(lambda: obstore.put(self._store, key, data))

    def create(self, key: str, data: bytes, ttl_s: float) -> bool:
        """Give a new name its bytes; false where it is there. It stays until it is dropped."""
        try:
            self._ask(lambda: obstore.put(self._store, key, data, mode="create"))
        except AlreadyExistsError:
            return False
        return True

    def drop(self, keys: Iterable[str]) -> None:
        """Forget names; those that are not there are none's trouble."""
        for key in keys:
            self._ask(lambda key=key: obstore.delete(self._store, key))  # type: ignore[misc]

    def entries(self, prefix: str) -> Iterator[Entry]:
        """Yield all names that begin so, registers' included."""
        for part in self._ask(lambda: list(obstore.list(self._store, prefix=prefix))) or ():
            for meta in part:
                yield Entry(meta["path"], meta["size"], meta["last_modified"].timestamp())

    def number(self, register: str) -> int:
        """Return the number of a register's latest state; 0 where it has none."""
        return max(self._numbers_of(register), default=0)

    def latest(self, register: str) -> PlaceState | None:
        """Return a register's latest state; None where it has none."""
        for _ in range(3):
            number = self.number(register)
            if not number:
                return None
            data = self.read(_state(register, number))
            if data is not None:
                return PlaceState(number, data)
        raise PlaceError(f"{self.title} lists what it does not give: {register}")

    def advance(self, register: str, number: int, data: bytes) -> bool:
        """Make these bytes a register's state ``number``; false where another is there.

        A number that was used may have been dropped since: then it lies far behind the latest.
        """
        if not self.create(_state(register, number), data, 0.0):
            return False
        numbers = self._numbers_of(register)
        if max(numbers, default=number) >= number + MOST_PENDING - 1:
            self.drop([_state(register, number)])
            return False
        self.drop(_state(register, n) for n in numbers if n <= number - MOST_PENDING)
        return True

    def numbers(self, prefix: str) -> dict[str, int]:
        """Return the number of the latest state of every register whose name begins so."""
        found: dict[str, int] = {}
        for entry in self.entries(prefix):
            register, _, number = entry.key.rpartition("/")
            if _NUMBER.fullmatch(number):
                found[register] = max(found.get(register, 0), int(number, 16))
        return found

    def forget(self, register: str) -> None:
        """Empty a register, its earlier states first."""
        self.drop(_state(register, n) for n in sorted(self._numbers_of(register)))

    def close(self) -> None:
        """Let go of nothing: connections end with their store."""

    def _numbers_of(self, register: str) -> list[int]:
        keys = (entry.key.rpartition("/") for entry in self.entries(f"{register}/"))
        return [int(n, 16) for of, _, n in keys if of == register and _NUMBER.fullmatch(n)]

    def _ask(self, request: Callable[[], T]) -> T | None:
        """Return an answer; None where there is nothing of that name.

        Raises:
            AlreadyExistsError: a name that was to be new is there.
            PlaceError: everything else that goes wrong.
        """
        try:
            return request()
        except _GONE:
            return None
        except AlreadyExistsError:
            raise
        except (BaseError, ValueError, OSError) as error:
            raise PlaceError(f"{self.title}: {_said(error)}") from None


def _opened(url: str, timeout_s: float) -> ObjectStore:
    """Open the store of a URL; a folder is made where there is none."""
    parts = urlsplit(url)
    if parts.scheme in ("", "file"):
        folder = Path(unquote(parts.path) if parts.scheme else url).expanduser()
        if not folder.is_absolute():
            raise ValueError("a folder needs its whole path, such as file:///mnt/share/kvcellar")
        return LocalStore(folder, mkdir=True, automatic_cleanup=False)
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    client: Any = {
        "timeout": f"{timeout_s:g}s",
        "connect_timeout": f"{CONNECT_S}s",
        "allow_http": parts.scheme.startswith("s3") and endpoint.startswith("http://"),
    }
    retry: Any = {"max_retries": 1, "retry_timeout": timedelta(seconds=timeout_s)}
    return from_url(url, client_options=client, retry_config=retry)


_ROLES = ("/latest/api/token", "169.254.", "metadata.google.internal")
"""Where libraries ask for the role of a cloud's machine when they have found no credentials."""

_NO_CREDENTIALS = (
    "no credentials were found, and this machine has no role of a cloud's; docs/shared-tier.md "
    "lists where they are looked for, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
)


def _state(register: str, number: int) -> str:
    return f"{register}/{number:016x}"


def _bytes(got: Any) -> bytes:
    return bytes(got.bytes())


def _said(error: BaseException) -> str:
    """Return what went wrong in one line, without what a server wrote beside it."""
    kind = type(error).__name__.removesuffix("Error")
    said, _, answer = str(error).partition("\n")[0].partition(" - Server returned")
    code = answer.partition(": ")[2].partition(":")[0]
    plain = re.sub(r"\?\S+", "", said)  # a query may hold a signature
    why = f"{kind}: {plain[:200]}{f' ({code})' if code else ''}"
    if any(service in said for service in _ROLES):
        return f"{_NO_CREDENTIALS} ({why})"
    return why
