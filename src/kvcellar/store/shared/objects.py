"""A place of objects: S3 and what speaks like it, Google's and Azure's."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, NotFoundError
from obstore.store import ObjectStore, from_url

from kvcellar.errors import ConfigError
from kvcellar.store.shared.places import Entry, ForeignError, PlaceError
from kvcellar.store.shared.registers import NumberedRegisters
from kvcellar.store.shared.urls import shown_url

T = TypeVar("T")

CONNECT_S = 3
"""Seconds after which a server that does not answer a connection is taken to be away."""

_GONE = (FileNotFoundError, NotFoundError)


class ObjectPlace(NumberedRegisters):
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

    def read(self, key: str, most_bytes: int) -> bytes | None:
        """Return what a name holds; None where there is none."""
        return self._ask(lambda: self._bytes(key, obstore.get(self._store, key), most_bytes))

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

    def close(self) -> None:
        """Let go of nothing: connections end with their store."""

    def _bytes(self, key: str, got: Any, most_bytes: int) -> bytes:
        size = int(got.meta["size"])  # known before anything else is fetched
        if size > most_bytes:
            raise ForeignError(f"{self.title}: {key} has {size} bytes")
        return bytes(got.bytes())

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
    """Open the store of a URL."""
    parts = urlsplit(url)
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
