"""Registers of a place that can do no more than make a name once: folders of numbered states.

That is enough for two writers to be safe: who makes a number first has moved the register on.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator

from kvcellar.store.shared.places import (
    MOST_NUMBER,
    MOST_PENDING,
    MOST_STATE_BYTES,
    Entry,
    ForeignError,
    PlaceError,
    PlaceState,
)

_NUMBER = re.compile("[0-9a-f]{16}")
"""Names of states; whatever else lies beside them is somebody's own."""


class NumberedRegisters(ABC):
    """The registers of a ``SharedPlace``, on its other methods.

    Attributes:
        title: URL of the place, without what is secret in it.
    """

    title: str

    @abstractmethod
    def read(self, key: str, most_bytes: int) -> bytes | None:
        """See ``SharedPlace``."""

    @abstractmethod
    def create(self, key: str, data: bytes, ttl_s: float) -> bool:
        """See ``SharedPlace``."""

    @abstractmethod
    def drop(self, keys: Iterable[str]) -> None:
        """See ``SharedPlace``."""

    @abstractmethod
    def entries(self, prefix: str) -> Iterator[Entry]:
        """See ``SharedPlace``."""

    def number(self, register: str) -> int:
        """Return the number of a register's latest state; 0 where it has none."""
        return max(self._numbers_of(register), default=0)

    def latest(self, register: str) -> PlaceState | None:
        """Return a register's latest state; None where it has none."""
        for _ in range(3):
            number = self.number(register)
            if not number:
                return None
            state = self._state(register, number)
            if state is not None:
                return state
        raise PlaceError(f"{self.title} lists what it does not give: {register}")

    def earlier(self, register: str, number: int) -> PlaceState | None:
        """Return the latest state before a number that is still there; None where none is."""
        for n in sorted((n for n in self._numbers_of(register) if n < number), reverse=True):
            state = self._state(register, n)
            if state is not None:
                return state
        return None

    def advance(self, register: str, number: int, data: bytes) -> bool:
        """Make these bytes a register's state ``number``; false where another is there.

        A number that was used may have been dropped since: then it lies far behind the latest.
        """
        if number > MOST_NUMBER or not self.create(_key(register, number), data, 0.0):
            return False
        numbers = self._numbers_of(register)
        if max(numbers, default=number) >= number + MOST_PENDING - 1:
            self.drop([_key(register, number)])
            return False
        self.drop(_key(register, n) for n in numbers if n <= number - MOST_PENDING)
        return True

    def numbers(self, prefix: str) -> dict[str, int]:
        """Return the number of the latest state of every register whose name begins so."""
        found: dict[str, int] = {}
        for entry in self.entries(prefix):
            register, number = _read_key(entry.key)
            if number:
                found[register] = max(found.get(register, 0), number)
        return found

    def forget(self, register: str) -> None:
        """Empty a register, its earlier states first."""
        self.drop(_key(register, n) for n in sorted(self._numbers_of(register)))

    def _state(self, register: str, number: int) -> PlaceState | None:
        """Return a state; without bytes where what has its name was written by nobody here."""
        try:
            data = self.read(_key(register, number), MOST_STATE_BYTES)
        except ForeignError:
            data = b""
        return None if data is None else PlaceState(number, data)

    def _numbers_of(self, register: str) -> list[int]:
        keys = (_read_key(entry.key) for entry in self.entries(f"{register}/"))
        return [number for of, number in keys if of == register and number]


def _key(register: str, number: int) -> str:
    return f"{register}/{number:016x}"


def _read_key(key: str) -> tuple[str, int]:
    """Return the register and number that a name says; 0 where it names no state."""
    register, _, text = key.rpartition("/")
    number = int(text, 16) if _NUMBER.fullmatch(text) else 0
    return register, number if number <= MOST_NUMBER else 0
