"""Main memory of the store's pieces: what is freed is the system's again."""

from __future__ import annotations

import mmap
import subprocess
import sys
from pathlib import Path

import pytest

from kvcellar.backends.host_memory import give_back

PIECES = """
import random
import numpy as np
import psutil
from kvcellar.backends.host_memory import empty_bytes

def resident():
    return psutil.Process().memory_info().rss

rng = random.Random(0)
pieces = {}
most = 0
for i in range(2_000):
    pieces[i] = empty_bytes(rng.randrange(200_000, 1_500_000))
    pieces[i].fill(1)
    if i == 40:
        before = resident() - sum(one.nbytes for one in pieces.values())
    while len(pieces) > 100:
        del pieces[rng.choice([*pieces])]
while len(pieces) > 20:
    del pieces[rng.choice([*pieces])]
held = sum(one.nbytes for one in pieces.values())
print((resident() - before - held) / held)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems' allocators give back otherwise")
def test_what_is_freed_between_pieces_that_stay_goes_back_to_the_system():
    said = subprocess.run(
        [sys.executable, "-c", PIECES], capture_output=True, text=True, check=True
    )
    assert float(said.stdout) < 0.15


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_system_has_memory_back_that_lies_between_pieces_in_use():
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * mmap.PAGESIZE

    give_back()
    before = resident()
    pieces = [bytearray(b"x" * 60_000) for _ in range(2000)]
    assert resident() > before + 100_000_000
    pieces[:] = pieces[::100]
    give_back()
    assert resident() < before + 20_000_000
    assert all(piece == b"x" * 60_000 for piece in pieces)
