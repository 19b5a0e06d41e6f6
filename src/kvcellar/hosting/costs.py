"""Restore or recompute: what either would take here, learnt from what they took before."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from kvcellar.store import Match

START_S_PER_BYTE = {"warm": 1 / 1.0e9, "cold": 1 / 0.3e9, "shared": 1 / 0.1e9}
"""Seconds per byte that a tier is believed to take before anything was measured: a slow machine."""

FIXED_S = 0.002
"""Seconds of a restore that do not depend on its size."""

MARGIN = 0.8
"""A restore has to be believed this much faster than the prefill that it saves."""

MAX_LOSS = 0.03
"""Of the prefill that is saved: what a restore may take before it has to have proven itself."""

MIN_PATIENCE_S = 0.05
"""Or so long, where that is more: a single block of a good disk is there by then."""

TELLING_BYTES = 4 << 20
"""A restore of at least so much tells a tier's rate in full; less is mostly its fixed cost."""

_WORTH = 0.9
"""Doing both at once has to be believed this much faster than either alone."""

_WEIGHT = 0.3
_ALARM = 0.9
"""Weight of news that a tier is several times as slow as believed: the next turn must not pay."""

_FORGIVEN = 0.9


@dataclass(frozen=True, slots=True)
class Estimate:
    """Expected time of loading KV from the store, and of computing it instead.

    Attributes:
        load_s: seconds to load it.
        prefill_s: seconds to compute it; None where nothing was measured yet.
    """

    load_s: float
    prefill_s: float | None

    @property
    def gain_s(self) -> float:
        """Seconds that loading saves over computing; 0 where it saves nothing or is not known."""
        return max(0.0, (self.prefill_s or 0.0) - self.load_s)

    def n_to_compute(self, n_tokens: int, step: int) -> int:
        """Return how many tokens to compute while the others are loaded; 0: load them all.

        Computing goes from the beginning and loading covers the end, whole ``step`` tokens of it;
        what takes longer of the two counts.
        """
        prefill_s = self.prefill_s or 0.0
        if self.load_s < step / n_tokens * prefill_s:
            return 0  # almost free

        def takes_s(n: int) -> float:
            part = n / n_tokens
            return max(part * prefill_s, (1 - part) * self.load_s)

        best = min(range(0, n_tokens, step), key=takes_s, default=0)
        return best if takes_s(best) < _WORTH * min(prefill_s, self.load_s) else 0

    @property
    def is_restore_faster(self) -> bool:
        """True if loading is believed to be faster; a prefill never measured counts as slow."""
        return self.prefill_s is None or self.load_s < MARGIN * self.prefill_s


@dataclass(slots=True, eq=False)
class Costs:
    """Rates of one model on this machine. For any thread.

    Attributes:
        prefill_s_per_token: of long prefills; None before the first.
        s_per_byte: of each tier of the store, the copy into cells included.
    """

    prefill_s_per_token: float | None = None
    s_per_byte: dict[str, float] = field(default_factory=lambda: dict(START_S_PER_BYTE))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def estimate(self, match: Match, n_cached: int, n_rows: int, stop: int) -> Estimate:
        """Estimate what positions ``[n_cached, stop)`` of a match take.

        The rows of the first ``n_rows`` need not be loaded.
        """
        part = max(0, stop - n_rows) / max(1, match.n_tokens)
        with self._lock:
            load = FIXED_S + part * (
                match.warm_bytes * self.s_per_byte["warm"]
                + match.cold_bytes * self.s_per_byte["cold"]
                + match.shared_bytes * self.s_per_byte["shared"]
            )
            for tier, size_bytes in match.boundary_bytes(stop).items():
                load += size_bytes * self.s_per_byte[tier]
            prefill = self.prefill_s_per_token
        return Estimate(load, None if prefill is None else (stop - n_cached) * prefill)

    def learn_load(self, tier: str, size_bytes: int, seconds: float) -> None:
        """Learn from bytes of a tier that were loaded into cells; few bytes say little."""
        if size_bytes > 0:
            with self._lock:
                old, new = self.s_per_byte[tier], seconds / size_bytes
                weight = _ALARM if new > 3 * old else _WEIGHT
                weight *= min(1.0, size_bytes / TELLING_BYTES)
                self.s_per_byte[tier] = (1 - weight) * old + weight * new

    def declined(self) -> None:
        """Let the belief that a tier is slow fade a little, so that it is tried again some day."""
        with self._lock:
            for tier, start in START_S_PER_BYTE.items():
                if self.s_per_byte[tier] > start:
                    self.s_per_byte[tier] = max(start, _FORGIVEN * self.s_per_byte[tier])

    def learn_prefill(self, n_tokens: int, seconds: float) -> None:
        """Learn from prompt tokens that were computed; short prompts say little."""
        if n_tokens >= 16 and seconds > 0:
            with self._lock:
                old, new = self.prefill_s_per_token, seconds / n_tokens
                # The fastest counts: a prefill beside other work says nothing of one alone.
                self.prefill_s_per_token = new if old is None else min(new, old + 0.1 * (new - old))

    def patience_s(self, n_tokens: int, n_loaded: int) -> float | None:
        """Return the seconds after which a restore that has come so far is slower than computing.

        None where nobody knows what computing takes.
        """
        prefill = self.prefill_s_per_token
        if prefill is None:
            return None
        return max(MIN_PATIENCE_S, MAX_LOSS * n_tokens * prefill, n_loaded * prefill)

    def as_json(self) -> dict[str, float | None]:
        """Return the rates, to be remembered."""
        with self._lock:
            return {"prefill": self.prefill_s_per_token, **self.s_per_byte}

    def recall(self, rates: dict[str, float | None]) -> None:
        """Take over rates that an earlier process has measured; what is known better stays."""
        with self._lock:
            if self.prefill_s_per_token is None:
                self.prefill_s_per_token = rates.get("prefill")
