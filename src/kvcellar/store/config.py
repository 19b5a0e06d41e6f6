"""Limits and policy of a store."""

from __future__ import annotations

from dataclasses import dataclass

from kvcellar.errors import ConfigError
from kvcellar.store.values.precision import EXACT, PRECISIONS

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Limits and policy of a store. All of it may differ from one opening to the next.

    Attributes:
        warm_bytes: host RAM for blocks; 0: none.
        cold_bytes: disk for blocks, boundary states, references and the quarantine.
        queue_bytes: rows that may wait to be written; a save that does not fit is shortened or
            skipped, and its caller never waits.
        warm_precision: ``exact``, or ``int8``: float rows in RAM take 8 bits a number. States of
            recurrent layers always are as they were.
        cold_precision: the same for disk.
        max_boundaries: boundary states that a history keeps: those that its last save asked for,
            however many, and the latest ones before.
        lock_timeout_s: how long to wait for another process that is writing.
    """

    warm_bytes: int = GIB
    cold_bytes: int = 20 * GIB
    queue_bytes: int = GIB
    warm_precision: str = EXACT
    cold_precision: str = EXACT
    max_boundaries: int = 4
    lock_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        for name in ("warm_bytes", "cold_bytes", "queue_bytes", "lock_timeout_s"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be 0 or more, got {getattr(self, name)}")
        if self.max_boundaries < 1:
            raise ConfigError(f"max_boundaries must be at least 1, got {self.max_boundaries}")
        for precision in (self.warm_precision, self.cold_precision):
            if precision not in PRECISIONS:
                raise ConfigError(f"precision {precision!r} is not known; choose {PRECISIONS}")
