"""Places that several machines reach: named bytes, and registers that move on."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import SplitResult, parse_qs, urlsplit

from kvcellar.errors import ConfigError

OBJECT_SCHEMES = ("file", "s3", "s3a", "gs", "az", "abfs", "abfss")
VALKEY_SCHEMES = ("valkey", "valkeys", "redis", "rediss")

MOST_PENDING = 16
"""States of a register that stay behind its latest one, for those who are about to follow it."""


class PlaceError(Exception):
    """A place did not do what it was asked; not for callers of the store.

    The text says what it answered, and holds no secret.
    """


@dataclass(frozen=True, slots=True)
class Entry:
    """One name in a place.

    Attributes:
        key: its name.
        size_bytes: of what it holds.
        modified_s: when it was written or last used, seconds since 1970.
    """

    key: str
    size_bytes: int
    modified_s: float


@dataclass(frozen=True, slots=True)
class State:
    """The latest state of a register.

    Attributes:
        number: ascending; the next state has the next number.
        data: its bytes.
    """

    number: int
    data: bytes


class Place(Protocol):
    """Named bytes that several machines reach. For any thread.

    Every method raises :class:`PlaceError` where the place does not answer in time, refuses, or is
    full. What is written is there whole or not at all.
    """

    @property
    def title(self) -> str:
        """URL of the place, without what is secret in it."""

    def read(self, key: str) -> bytes | None:
        """Return what a name holds; None where there is none."""

    def size(self, key: str) -> int | None:
        """Return the bytes that a name holds; None where there is none."""

    def write(self, key: str, data: bytes | memoryview) -> None:
        """Give a name its bytes, in place of those before."""

    def create(self, key: str, data: bytes, ttl_s: float) -> bool:
        """Give a new name its bytes; false, with nothing changed, where it is there already.

        After ``ttl_s`` seconds it may be gone.
        """

    def drop(self, keys: Iterable[str]) -> None:
        """Forget names; those that are not there are none's trouble."""

    def entries(self, prefix: str) -> Iterator[Entry]:
        """Yield all names that begin so, registers' included."""

    def number(self, register: str) -> int:
        """Return the number of a register's latest state; 0 where it has none."""

    def latest(self, register: str) -> State | None:
        """Return a register's latest state; None where it has none."""

    def advance(self, register: str, number: int, data: bytes) -> bool:
        """Make these bytes a register's state ``number``, which follows the one that was read.

        False, with nothing changed, where somebody else has moved it on meanwhile. A register that
        is empty takes any number.
        """

    def numbers(self, prefix: str) -> dict[str, int]:
        """Return the number of the latest state of every register whose name begins so."""

    def forget(self, register: str) -> None:
        """Empty a register."""

    def close(self) -> None:
        """Let go of connections."""


def open_place(url: str, *, timeout_s: float) -> Place:
    """Open the place that a URL names; nothing is asked of it yet.

    Args:
        url: ``s3://bucket/prefix`` and the like, ``file:///mnt/share/kvcellar`` or a path, or
            ``valkey://host:6379/0``.
        timeout_s: how long one request may take.

    Raises:
        ConfigError: it names none, or the library that speaks with it is not installed.
    """
    scheme = _checked(url)
    try:
        if scheme in VALKEY_SCHEMES:
            from kvcellar.store.shared.valkeys import ValkeyPlace

            return ValkeyPlace(url, timeout_s=timeout_s)
        if scheme in OBJECT_SCHEMES or not scheme:
            from kvcellar.store.shared.objects import ObjectPlace

            return ObjectPlace(url, timeout_s=timeout_s)
    except ImportError as error:
        raise ConfigError(
            f"a shared tier of {scheme or 'file'}:// needs a library that is not installed "
            f"({error.name}); pip install 'kvcellar[shared]'"
        ) from error
    raise ConfigError(
        f"{shown_url(url)!r} is no place that can be shared; give s3://bucket/prefix, "
        f"gs://bucket/prefix, az://container/prefix, file:///folder or valkey://host:port/0"
    )


def _checked(url: str) -> str:
    """Return the scheme of a URL that can be read in one way only, with nothing to ignore in it.

    Raises:
        ConfigError: it cannot; what is said holds no secret.
    """
    if not url.strip():
        raise ConfigError("a shared place has an empty URL; give one, or leave it out")
    try:
        parts = urlsplit(url)
        scheme = parts.scheme.lower()
        is_valkey = scheme in VALKEY_SCHEMES
        if is_valkey and ("@" in parts.path + parts.query + parts.fragment or parts.port == 0):
            raise ValueError(url)
    except ValueError:
        raise ConfigError(
            f"{shown_url(url)!r} is no URL of a place: write / ? # @ [ ] in a user, a password or "
            f"a prefix as %2F %3F %23 %40 %5B %5D, and a port as a number up to 65535"
        ) from None
    wrong = _wrong_in_valkeys(parts) if is_valkey else ""
    if scheme in OBJECT_SCHEMES:
        wrong = _wrong_in_objects(scheme, parts)
    if wrong:
        raise ConfigError(f"{shown_url(url)!r} is no place that can be shared: {wrong}")
    return scheme


def _wrong_in_valkeys(parts: SplitResult) -> str:
    """Say what a server's URL has that would be ignored; nothing where that is nothing."""
    if not parts.hostname or not re.fullmatch(r"(/\d*)?", parts.path):
        return "a server is named as valkey://host:6379, its database by a number, as in /0"
    names = parse_qs(parts.query, keep_blank_values=True).keys() - {"prefix"}
    if names or parts.fragment:
        return f"there is no option {min(names, default='#')!r}; ?prefix=name is all there is"
    return ""


def _wrong_in_objects(scheme: str, parts: SplitResult) -> str:
    """Say what an object store's URL has that would be ignored; nothing where that is nothing."""
    if scheme == "file" and parts.netloc not in ("", "localhost"):
        return "a folder's URL has three slashes, such as file:///mnt/share/kvcellar"
    if parts.query or parts.fragment:
        return "it has no options; write ? and # in a path as %3F and %23"
    if not scheme.startswith("abfs") and "@" in parts.netloc:
        return "credentials come from the environment, see docs/shared-tier.md"
    return ""


def shown_url(url: str) -> str:
    """Return a URL without its user, password and query, however wrongly these are written."""
    scheme, mark, rest = url.partition("://")
    if not mark or scheme == "file":
        is_path = scheme == "file" or url.startswith(("/", "~", "."))
        return url if is_path else url.rpartition("@")[2]
    secret, _, after = rest.rpartition("@")
    is_container = scheme.startswith("abfs") and ":" not in secret
    if not is_container and (":" in secret or "/" not in secret or scheme in VALKEY_SCHEMES):
        rest = after
    return scheme + mark + re.split("[?#]", rest)[0]
