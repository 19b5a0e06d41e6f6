"""Places that several machines reach: named bytes, and registers that move on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

MOST_PENDING = 16
"""States of a register that stay behind its latest one, for those who are about to follow it."""

MOST_NUMBER = (1 << 53) - 1
"""The greatest number of a state that is believed: Valkey's scripts count by doubles."""

MOST_STATE_BYTES = 1 << 26
"""Of a register's state: more than the words of any agent take."""


class ForeignError(Exception):
    """A name has what no store writes there: a link, a pipe, or far too many bytes.

    It concerns whoever asked for this name, and nobody else; not for callers of the store.
    """


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
class PlaceState:
    """The latest state of a register.

    Attributes:
        number: ascending; the next state has the next number.
        data: its bytes.
    """

    number: int
    data: bytes


class SharedPlace(Protocol):
    """Named bytes that several machines reach. For any thread.

    Every method raises :class:`PlaceError` where the place does not answer in time, refuses, or is
    full. What is written is there whole or not at all. What lies there may be a stranger's: where
    a name has what no store writes, whoever asks for it gets :class:`ForeignError`.
    """

    @property
    def title(self) -> str:
        """URL of the place, without what is secret in it."""

    def read(self, key: str, most_bytes: int) -> bytes | None:
        """Return what a name holds, if that is at most so long; None where there is none."""

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

    def latest(self, register: str) -> PlaceState | None:
        """Return a register's latest state; None where it has none."""

    def earlier(self, register: str, number: int) -> PlaceState | None:
        """Return the latest state before a number that is still there; None where none is."""

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
