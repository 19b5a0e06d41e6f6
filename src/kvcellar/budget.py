"""A memory budget: the bytes that a process may hold, and who asked for them. Integers only.

What is there when the budget is made (Python, the runtime, the weights) is its base; what a forward
needs besides the cache, and gives back, is its reserve; the rest is for KV. Pools ask before they
grow.
"""

from __future__ import annotations

import contextlib
import re
import threading
from pathlib import Path

from kvcellar.errors import ConfigError

_UNITS = {"": 1, "B": 1} | {
    prefix + unit: base**power
    for power, prefix in enumerate("KMGT", 1)
    for unit, base in (("B", 1000), ("IB", 1024))
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
"""Files in which Linux says what a container may hold, version 2 and version 1."""


def parse_size(text: str) -> int:
    """Read ``24GB`` (24 * 10^9), ``24GiB`` (24 * 2^30), ``512MB``, or plain bytes.

    Raises:
        ConfigError: no such size, or less than a byte.
    """
    match = _SIZE.fullmatch(text.strip())
    factor = _UNITS.get(match[2].upper()) if match else None
    if match is None or factor is None:
        raise ConfigError(
            f"{text!r} is not a size; write bytes, or a number with KB, MB, GB, TB (powers of "
            f"1000) or KiB, MiB, GiB, TiB (of 1024), such as 24GB"
        )
    whole, _, decimals = match[1].partition(".")
    size_bytes: int = int(whole + decimals) * factor // int(10 ** len(decimals))
    if size_bytes < 1:
        raise ConfigError(f"{text!r} is no memory at all; give at least 1 byte, such as 24GB")
    return size_bytes


def format_size(size_bytes: int) -> str:
    """Write bytes for people, in powers of 1000 and four digits: ``24.00 GB``."""
    if abs(size_bytes) < 1000:
        return f"{size_bytes} B"
    size, power = float(size_bytes), 0
    while abs(size) >= 999.95 and power < 4:
        size, power = size / 1000, power + 1
    return f"{size:.{2 if abs(size) < 100 else 1}f} {('B', 'KB', 'MB', 'GB', 'TB')[power]}"


def round_up(size_bytes: int) -> str:
    """Write bytes as ``format_size`` does, and no fewer: what is advised has to be enough."""
    step = 10 ** max(0, len(str(size_bytes)) - 3)
    return format_size(-(-size_bytes // step) * step)


def resident_bytes() -> int:
    """Return the bytes of this process in RAM now."""
    import psutil  # here, since most who import this module ask for neither

    return int(psutil.Process().memory_info().rss)


def machine_bytes() -> int:
    """Return the bytes that this process could ever have: the machine's, or its container's."""
    import psutil

    total = int(psutil.virtual_memory().total)
    for path in _CGROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
            total = min(total, int(path.read_text()))
    return total


class MemoryBudget:
    """Bytes that may be held by any number of caches. Safe to call from any thread.

    Invariants:
      - ``base + reserve + held <= limit``: what is granted is inside;
      - whoever asked gives back as much, no more.
    """

    def __init__(self, limit_bytes: int, *, base_bytes: int = 0, reserve_bytes: int = 0) -> None:
        """Create a budget of which nothing is asked for yet.

        Args:
            limit_bytes: what the whole process may hold.
            base_bytes: what it holds already.
            reserve_bytes: what its forwards need besides, and give back.

        Raises:
            ConfigError: nothing would be left for KV.
        """
        if min(limit_bytes, base_bytes, reserve_bytes) < 0:
            raise ConfigError(
                f"a memory budget counts bytes from 0 on; got a limit of {limit_bytes}, a base of "
                f"{base_bytes} and a reserve of {reserve_bytes}"
            )
        if base_bytes + reserve_bytes >= limit_bytes:
            raise ConfigError(
                f"a memory budget of {format_size(limit_bytes)} leaves nothing for KV: "
                f"{format_size(base_bytes)} are held already (weights and process) and "
                f"{format_size(reserve_bytes)} are set aside for forwards; give more than "
                f"{format_size(base_bytes + reserve_bytes)}, or choose a smaller model"
            )
        self.limit_bytes = limit_bytes
        self.base_bytes = base_bytes
        self.reserve_bytes = reserve_bytes
        self._held = 0
        self._lock = threading.Lock()

    @property
    def kv_bytes(self) -> int:
        """Bytes that all caches together may hold."""
        return self.limit_bytes - self.base_bytes - self.reserve_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes that were asked for and not given back."""
        return self._held

    @property
    def available_bytes(self) -> int:
        """Bytes that could be asked for now."""
        return self.kv_bytes - self._held

    def can_ask(self, n_bytes: int) -> bool:
        """Return true if ``ask`` would grant so many now."""
        return n_bytes <= self.available_bytes

    def ask(self, n_bytes: int) -> bool:
        """Take so many bytes out of the budget. False: refused, nothing was taken."""
        assert n_bytes >= 0, "bytes are asked for, give_back returns them"
        with self._lock:
            if n_bytes > self.available_bytes:
                return False
            self._held += n_bytes
            return True

    def give_back(self, n_bytes: int) -> None:
        """Return bytes that were asked for."""
        with self._lock:
            assert 0 <= n_bytes <= self._held, "no more is given back than was asked for"
            self._held -= n_bytes

    def __repr__(self) -> str:
        """Show all figures, for logs and errors."""
        return (
            f"MemoryBudget({format_size(self.limit_bytes)}: base {format_size(self.base_bytes)}, "
            f"reserve {format_size(self.reserve_bytes)}, KV {format_size(self._held)} of "
            f"{format_size(self.kv_bytes)})"
        )
